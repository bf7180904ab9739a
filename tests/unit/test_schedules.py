"""Schedules of resets: what is refused and in which words, when they fire, what they become."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from itertools import islice
from pathlib import Path

import pytest
from gpu_host import cron, reset_schedule, schedule_units, schedules
from gpu_host.schedule_units import Place
from gpu_host.schedules import Schedule, parse, window_end, window_problem

from .control_project import Project

GOOD = {"name": "nightly", "calendar": "Mon..Fri 03:00", "inventory": "inventory/fleet"}
PLACE = Place("/opt/gpu hosts", "/opt/gpu hosts/.venv/bin/python", "ops", "/home/ops", "/var/lib/r", "/etc/r", "/srv/a")


def problems(*entries: object) -> list[str]:
    return parse(list(entries))[1]


def test_three_keys_are_enough_and_mean_to_drain_once_a_missed_time_is_over():
    (one,), found = parse([GOOD])
    assert found == []
    assert (one.policy, one.persistent, one.afterwards, one.random_delay) == ("drain", False, "clean", 0)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"name": "Nightly"}, "has the name 'Nightly'"),
        ({"name": "../x"}, "has the name '../x'"),
        ({"name": "a\n"}, "has the name 'a\\n'"),
        ({"name": None}, "has the name None"),
        ({"name": "a" * 41}, "give 1 to 40 lower-case letters"),
        ({"calender": "daily"}, "has no key calender; it knows name, calendar"),
        ({"calendar": None}, "lacks calendar; give when it fires"),
        ({"inventory": ""}, "lacks inventory"),
        ({"calendar": 750}, "calendar: 750 is no text; put it in quotes"),
        ({"calendar": "daily\nExecStart=x"}, "more than one line"),
        ({"calendar": "daily; reboot"}, "is no calendar expression"),
        ({"policy": "gentle"}, "policy: 'gentle' is unknown; give drain, idle_only, zombies_only or force"),
        ({"afterwards": "reboot"}, "afterwards: 'reboot' is unknown; give clean or restore"),
        ({"window": 1380}, "window: 1380 is no text; put it in quotes (YAML reads 23:00"),
        ({"window": "25:00"}, "window: '25:00' is no window"),
        ({"window": "0h"}, "window: '0h' is no window"),
        ({"window": "-1h"}, "window: '-1h' is no window"),
        ({"window": "25h"}, "window: '25h' is no window"),
        ({"random_delay": -1}, "random_delay: -1 is none; give seconds"),
        ({"random_delay": "soon"}, "random_delay: 'soon' is none"),
        ({"random_delay": True}, "random_delay: True is none"),
        ({"timeout": 5}, "timeout: 5 is none; give seconds from 60"),
        ({"keep": 0}, "keep: 0 is none"),
        ({"persistent": "maybe"}, "persistent: 'maybe' is neither true nor false"),
        ({"serial": 0}, "serial: 0 is no size of a batch"),
        ({"serial": "many"}, "serial: 'many' is no size of a batch"),
        ({"serial": []}, "serial: [] is no size of a batch"),
        ({"breaker_share": 20}, "breaker_share: 20 is no share of the hosts"),
        ({"held_out": "gpu01"}, "held_out: 'gpu01' is no list"),
        ({"ssh_key": "~/.ssh/id"}, "ssh_key: '~/.ssh/id' is no absolute path"),
        ({"vault_password_file": "hunter2"}, "vault_password_file: 'hunter2' is no absolute path"),
        ({"environment": {"HF_TOKEN": "x"}}, "HF_TOKEN looks like a secret"),
        ({"environment": {"ANSIBLE_CONFIG": "/x"}}, "ANSIBLE_CONFIG is set by what runs the schedule"),
        ({"environment": {"a-b": "x"}}, "'a-b' is no name of an environment variable"),
        ({"environment": {"A": [1]}}, "the value of A is [1]"),
        ({"variables": {"gpu_reset_kill_strangers": True}}, "a schedule never ends strangers"),
        ({"variables": {"gpu_reset_kill_strangers": False}}, "a schedule never ends strangers"),
        ({"variables": {"gpu_reset_policy": "force"}}, "set by the schedule's own key policy"),
        ({"variables": {"reset_not_after": "x"}}, "set by the schedule's own key window"),
        ({"variables": {"sglang_api_key": "x"}}, "sglang_api_key looks like a secret"),
        ({"variables": ["x"]}, "is no dictionary"),
        ({"variables": {"reset_breaker_clear": True}}, "the breaker is for a person to clear"),
        ({"hook": "page-me"}, "hook: 'page-me' is neither a list of words (a command) nor an address"),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else "",
)
def test_what_a_schedule_may_not_say_is_refused_in_one_sentence_that_names_it(wrong, sentence):
    (found,) = problems({**GOOD, **wrong})
    assert sentence in found
    assert "name" in wrong or found.startswith("Schedule 'nightly'")


def test_every_wrong_schedule_gets_its_sentence_and_two_of_one_name_are_refused():
    assert len(problems({**GOOD, "policy": "x"}, {**GOOD, "name": "b", "window": "x"}, "daily")) == 3
    several = problems({**GOOD, "policy": "x", "window": "x", "calender": "daily", "inventory": None})
    assert [one.split(":")[0] for one in several[2:]] == ["Schedule 'nightly', policy", "Schedule 'nightly', window"]
    assert "no key calender" in several[0] and "lacks inventory" in several[1]
    assert problems(GOOD, GOOD) == ["Two schedules are named 'nightly'; give each a name of its own."]
    assert "is no list" in parse("nightly")[1][0] and "is no list" in parse(None)[1][0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2h", 7200),
        ("90m", 5400),
        ("90min", 5400),
        ("1h30m", 5400),
        ("45s", 45),
        ("1h 5s", 3605),
        ("", None),
        ("3", None),
    ],
)
def test_lengths_of_time(text, expected):
    assert schedules.seconds(text) == expected


@pytest.mark.parametrize(
    ("window", "begin", "end"),
    [
        ("06:00", "2026-01-05 03:00", "2026-01-05 06:00"),
        ("06:00", "2026-01-05 23:30", "2026-01-06 06:00"),
        ("06:00", "2026-01-05 06:00", None),  # just over, the next one is a day away
        ("06:00", "2026-01-05 12:00", None),
        ("6:00", "2026-01-05 03:00", "2026-01-05 06:00"),
        ("2h", "2026-01-05 23:30", "2026-01-06 01:30"),
    ],
)
def test_a_window_ends_by_the_clock_or_after_its_length(window, begin, end):
    found = window_end(window, datetime.fromisoformat(begin))
    assert found == (datetime.fromisoformat(end) if end else None)


@pytest.mark.parametrize(
    ("window", "delay", "firing", "sentence"),
    [
        ("06:00", 0, "2026-01-05 03:00", ""),
        ("06:00", 0, "2026-01-05 07:00", "it fires at 07:00, when that window is over"),
        ("06:00", 1800, "2026-01-05 05:45", "with random_delay (1800 s) the window may be over"),
        ("10min", 1800, "2026-01-05 05:45", ""),  # its length counts from the run's own beginning
        ("", 1800, "2026-01-05 05:45", ""),
    ],
)
def test_a_window_that_can_not_be_met_is_impossible(window, delay, firing, sentence):
    (one,), _ = parse([{**GOOD, "window": window, "random_delay": delay}])
    found = window_problem(one, [datetime.fromisoformat(firing)])
    assert sentence in found and bool(found) == bool(sentence)


@pytest.mark.parametrize(
    ("calendar", "line"),
    [
        ("Mon..Fri 03:00", "0 3 * * 1,2,3,4,5"),
        ("Sat,Sun *-*-* 04:30:00", "30 4 * * 0,6"),
        ("Fri..Mon 1:00", "0 1 * * 0,1,5,6"),
        ("*-*-* *:0/15", "0,15,30,45 * * * *"),
        ("*:00/20:00", "0,20,40 * * * *"),
        ("*-*-01,15 02:00", "0 2 1,15 * *"),
        ("12-24 8..10:00", "0 8,9,10 24 12 *"),
        ("hourly", "0 * * * *"),
        ("daily", "0 0 * * *"),
        ("weekly", "0 0 * * 1"),
        ("Monday", "0 0 * * 1"),
        ("mon,THURSDAY..Sat", "0 0 * * 1,4,5,6"),
        ("*-*-*", "0 0 * * *"),
    ],
)
def test_a_calendar_in_the_words_of_cron(calendar, line):
    assert cron.times(calendar).line == line


@pytest.mark.parametrize(
    "calendar",
    [
        "Mon *-*-01 03:00",
        "2026-01-01 03:00",
        "03:00:30",
        "03:00 Europe/Berlin",
        "*-*~01 03:00",
        "25:00",
        "03",
        "*:0/0",
        "Monn 03:00",
        "Mon..Thurs 03:00",
        "Tues,Fri 03:00",
    ],
)
def test_what_cron_can_not_say_is_refused(calendar):
    with pytest.raises(cron.NotInCron):
        cron.times(calendar)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
@pytest.mark.parametrize("calendar", ["Mon..Fri 03:00", "*:0/15", "*-*-01,15 02:00", "Sat,Sun 23:59", "02-29 01:00"])
def test_cron_fires_when_systemd_would(calendar):
    now = datetime.now()
    words = ["systemd-analyze", "calendar", "--iterations=3", calendar]
    shown = subprocess.run(words, capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"]})
    expected = [datetime.strptime(text, "%Y-%m-%d %H:%M:%S") for text in reset_schedule._FIRING.findall(shown.stdout)]
    found = list(islice(cron.times(calendar).after(now), 3))  # not further than some four years
    assert found == expected[: len(found)] and found


def schedule(**given: object) -> Schedule:
    (one,), found = parse([{**GOOD, **given}])
    assert found == []
    return one


def test_the_units_say_when_and_what_and_quote_paths():
    one = schedule(random_delay="10min", timeout="1h", writable=["/srv/hook data"])
    timer = schedule_units.timer(one).splitlines()
    assert {"OnCalendar=Mon..Fri 03:00", "RandomizedDelaySec=600", "Persistent=false"} <= set(timer)
    service = schedule_units.service(one, PLACE).splitlines()
    program = '"/opt/gpu hosts/plugin_utils/gpu_control/scheduled.py"'
    assert f'ExecStart="/opt/gpu hosts/.venv/bin/python" -I {program} run /etc/r/nightly.json' in service
    assert {"User=ops", "TimeoutStartSec=3660", 'ReadWritePaths="/srv/hook data"', "ReadWritePaths=/srv/a"} <= set(
        service
    )


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_systemd_finds_no_fault_with_the_units(tmp_path):
    place = replace(PLACE, repository=str(tmp_path), python="/usr/bin/env", user="root")
    (tmp_path / "gpu-reset-nightly.service").write_text(schedule_units.service(schedule(), place))
    (tmp_path / "gpu-reset-nightly.timer").write_text(schedule_units.timer(schedule()))
    words = [
        "systemd-analyze",
        "verify",
        "--man=no",
        "--recursive-errors=no",
        str(tmp_path / "gpu-reset-nightly.timer"),
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    assert "gpu-reset" not in done.stderr, done.stderr


def test_the_settings_come_back_as_the_schedule_that_they_were_written_from():
    one = schedule(held_out=["gpu02"], serial="10%", window="2h", environment={"A": 1}, variables={"x": [1]})
    again, found = parse([json.loads(schedule_units.settings(one, PLACE))["schedule"]])
    assert (again, found) == ([one], [])


def test_a_crontab_has_one_line_that_a_percent_sign_does_not_cut():
    one = schedule(random_delay=60)
    place = replace(PLACE, repository="/opt/100%")
    *_, line = schedule_units.crontab(one, place, "0 3 * * 1").splitlines()
    assert line.startswith("0 3 * * 1 ops '/opt/gpu hosts/.venv/bin/python' -I /opt/100\\%/plugin_utils")
    assert line.endswith("run /etc/r/nightly.json --random-delay 60 2>&1 | logger -t gpu-reset-nightly")


def test_the_readme_of_the_role_lists_every_key_of_a_schedule():
    readme = (Path(__file__).parents[2] / "roles/reset_schedule/README.md").read_text()
    listed = [line.split("`")[1] for line in readme.splitlines() if line.startswith("| `")]
    assert listed == list(schedules.KEYS)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"reset_shedule_schedules": []},
            "Nothing was done: no schedules are named: say -e @schedules.yml; reset_schedule_schedules: [] removes all",
        ),
        (
            {
                "reset_schedule_schedules": [],
                "reset_schedule_schedule": [GOOD],
                "reset_schedule_name": "of another play",
            },
            "Nothing was done: there is no variable reset_schedule_schedule. The role reset_schedule knows reset_sch",
        ),
        (
            {"reset_schedule_schedules": [], "reset_schedule_scheduler": "atd"},
            "Nothing was done. reset_schedule_scheduler: 'atd' is unknown; give auto, systemd or cron.",
        ),
    ],
    ids=["none named", "misspelt", "unknown scheduler"],
)
def test_installed_schedules_stay_where_the_variables_make_no_sense(tmp_path, given, sentence):
    installed = tmp_path / "cron/gpu-reset-nightly"
    installed.parent.mkdir()
    installed.write_text(schedule_units.MARK + "\n")
    folders = {name: str(tmp_path / name) for name in ("folder", "config_folder", "unit_folder", "artifacts")}
    values: dict[str, object] = {f"reset_schedule_{name}": path for name, path in folders.items()}
    values |= {"reset_schedule_cron_folder": str(installed.parent), "reset_schedule_scheduler": "cron", **given}
    values |= {"ansible_become": False, "ansible_python_interpreter": sys.executable}
    play = Project(tmp_path / "project").play("-e", json.dumps(values), playbook="playbooks/schedule-resets.yml")
    assert (play.status, installed.exists()) == (2, True)
    said = " ".join(play.output.split())
    assert sentence in said and "validate_args" not in said
