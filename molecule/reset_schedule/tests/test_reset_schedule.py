"""After converge: timers that wait for their time, services that systemd understands, and none that is not declared."""

from __future__ import annotations

import json
from typing import Any

import pytest

NAMES = ("nightly", "zombies")


@pytest.mark.parametrize("name", NAMES)
def test_a_timer_waits_and_its_service_is_understood_and_did_not_run(host: Any, name: str) -> None:
    timer, service = f"gpu-reset-{name}.timer", f"gpu-reset-{name}.service"
    assert host.service(timer).is_enabled and host.service(timer).is_running
    assert host.run(f"systemd-analyze verify {service} {timer}").stderr == ""
    assert host.check_output(f"systemctl show --property=ExecMainStartTimestamp --value {service}") == ""


def test_the_next_firing_is_the_declared_one(host: Any) -> None:
    shown = host.check_output("systemctl show --property=TimersCalendar --value gpu-reset-nightly.timer")
    assert "OnCalendar=Mon..Fri *-*-* 03:00:00" in shown


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_for_the_user_of_the_schedule_and_its_folder_is_private(host: Any, name: str) -> None:
    settings = host.file(f"/etc/gpu-resets/{name}.json")
    assert (settings.user, settings.mode) == ("root", 0o640)
    assert json.loads(settings.content_string)["schedule"]["name"] == name
    assert host.file(f"/var/lib/gpu-resets/{name}").mode == 0o700


def test_what_is_no_longer_declared_is_gone(host: Any) -> None:
    units = host.check_output("ls /etc/systemd/system")
    assert "gpu-reset-earlier" not in units
    assert sorted(name for name in units.split() if name.startswith("gpu-reset")) == [
        f"gpu-reset-{name}.{kind}" for name in NAMES for kind in ("service", "timer")
    ]
