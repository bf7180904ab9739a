"""Schedules on a control node with a real systemd, which reaches a GPU host over ssh."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timedelta

import pytest
from gpu_control import lean

from tests.lab.control_node import USER, ControlNode, mounts
from tests.lab.lab import Lab
from tests.lab.resets import JOBS, pids, until
from tests.lab.server import STANDIN

NEVER = "*-02-29 03:00"
BASE = {"name": "nightly", "calendar": NEVER, "inventory": "/srv/inventory/hosts.json", "policy": "force"}


@pytest.fixture(scope="module")
def node(lab: Lab) -> Iterator[ControlNode]:
    """A control node and one GPU host, for the whole file."""
    gpu = lab.start_host("gpu", wait=False)
    control = lab.start_host("control", gpus=0, mounts=mounts())
    gpu.wait_until_up()
    yield ControlNode(lab, control, [gpu])
    lab.stop_hosts(["gpu", "control"])


@pytest.fixture(scope="module", autouse=True)
def cron_node(lab: Lab) -> Iterator[ControlNode]:
    """A control node whose first process is another than systemd, with a schedule that fires each minute.

    Here for the whole file: its minute passes while the other tests run. Somebody has copied the schedule's line, so
    that cron begins two runs at once.
    """
    gpu = lab.start_host("cron-gpu", wait=False)
    control = lab.start_host("cron-control", gpus=0, mounts=mounts(), systemd=False)
    gpu.wait_until_up()
    node = ControlNode(lab, control, [gpu])
    gpu.start_server(tp=2, settings={"SPEED": 5, "IGNORE_TERM": 1})
    node.write_inventory(gpu_reset_grace=4)
    done = node.schedule([{**BASE, "calendar": "minutely"}, {**BASE, "name": "never"}])
    control.exec("grep -v '^#' /etc/cron.d/gpu-reset-nightly > /etc/cron.d/copy")
    assert done.returncode == 0, done.stdout
    assert "nightly: force on 1 host, by cron; next" in words(done.stdout)
    yield node
    lab.stop_hosts(["cron-gpu", "cron-control"])


def changed(output: str, host: str = "control") -> int:
    found = re.search(rf"^{host} +: .*\bchanged=(\d+)", output, re.MULTILINE)
    assert found, output
    return int(found.group(1))


def words(text: str) -> str:
    return " ".join(text.split())


def test_what_is_wrong_is_told_in_sentences_before_anything_is_written(node: ControlNode) -> None:
    done = node.schedule(
        [
            {**BASE, "name": "a", "calendar": "whenever"},
            {**BASE, "name": "b", "calendar": "2020-01-01"},
            {**BASE, "name": "c", "calendar": "07:00", "window": "06:00"},
        ]
    )
    assert done.returncode != 0
    assert "Schedule 'a', calendar: 'whenever' is no calendar expression" in words(done.stdout)
    assert "Schedule 'b', calendar: '2020-01-01' never comes" in words(done.stdout)
    assert "Schedule 'c': the window '06:00' is impossible: it fires at 07:00" in words(done.stdout)
    done = node.schedule(
        [
            {**BASE, "name": "d", "limit": "gpu:nobody"},
            {**BASE, "name": "e", "held_out": ["gpu"]},
            {**BASE, "name": "f", "inventory": "/srv/none"},
            {**BASE, "name": "g", "ssh_key": "/root/key"},
        ]
    )
    assert "Schedule 'd': limit: 'nobody' is no host or group of /srv/inventory/hosts.json" in words(done.stdout)
    assert "Schedule 'e': no host of the group gpu_hosts" in words(done.stdout)
    assert "Schedule 'f': inventory: /srv/none is not there" in words(done.stdout)
    assert "Schedule 'g': ssh_key: /root/key is no file that the user of the schedules can read" in words(done.stdout)
    assert node.files() == {}


def test_check_mode_shows_the_next_firings_and_writes_nothing(node: ControlNode) -> None:
    done = node.schedule([{**BASE, "calendar": "Mon 03:00"}], "--check", "--diff")
    assert done.returncode == 0, done.stdout
    assert re.search(
        r"nightly: force on 1 host, by systemd; next Mon 20\d\d-\d\d-\d\d 03:00:00, then Mon", words(done.stdout)
    )
    assert "+OnCalendar=Mon 03:00" in done.stdout
    assert node.files() == {}


def test_a_second_run_changes_nothing_a_new_time_changes_the_timer_alone_and_what_is_not_declared_goes(
    node: ControlNode,
) -> None:
    two = [BASE, {**BASE, "name": "weekly", "afterwards": "restore", "window": "2h", "timeout": "1h"}]
    assert changed(node.schedule(two).stdout) == 1
    files = node.files()
    assert len(files) == 6
    assert changed(node.schedule(two).stdout) == 0
    assert node.files() == files
    again = node.schedule([two[0], {**two[1], "calendar": "03:00"}])
    assert changed(again.stdout) == 1
    rewritten = {path for path, moment in node.files().items() if files[path] != moment}
    assert {path.rsplit("/", 1)[1] for path in rewritten} == {"gpu-reset-weekly.timer", "weekly.json"}
    assert node.property("gpu-reset-weekly.timer", "NextElapseUSecRealtime").split()[2] == "03:00:00"
    node.host.write("/etc/systemd/system/gpu-reset-other.timer", "[Timer]\nOnCalendar=daily\n")
    taken = node.schedule([{**BASE, "name": "other"}])
    assert "gpu-reset-other.timer is there and was not written by this role" in words(taken.stdout)
    assert changed(node.schedule([BASE]).stdout) == 1
    assert [path for path in node.files() if "weekly" in path] == []
    assert node.property("gpu-reset-weekly.timer", "LoadState") == "not-found"
    assert node.property("gpu-reset-nightly.timer", "ActiveState") == "active"
    assert "/etc/systemd/system/gpu-reset-other.timer" in node.files()  # somebody else's
    node.host.exec(["rm", "/etc/systemd/system/gpu-reset-other.timer"])


def test_a_timer_fires_and_resets_the_host_but_ends_no_stranger_whatever_the_inventory_says(node: ControlNode) -> None:
    (gpu,) = node.gpu_hosts
    server = gpu.start_server(tp=2, settings={"SPEED": 5})
    stranger = gpu.start(f"env PYTHONPATH={STANDIN} nohup python3 {JOBS}/train_draft.py --gpu 5 --mib 20000")
    until(lambda: gpu.state.used_mib(5) >= 20000, "the stranger's memory")
    node.write_inventory(gpu_reset_kill_strangers=True, gpu_reset_grace=5)
    assert node.schedule([{**BASE, "calendar": "*:*:0/3", "window": "10min"}]).returncode == 0
    ended = node.wait_for_run("nightly")
    assert node.schedule([BASE]).returncode == 0  # not again
    assert ended["last_line"] == "Verdicts - dirty: gpu (SIMULATED)", node.journal("nightly")
    assert ended["exit_status"] == 2
    assert not gpu.alive(server.pid) and gpu.alive(stranger.pid)
    first = node.records()[0]
    assert (first["schedule"], first["policy"]) == ("nightly", "force")
    assert server.pid in pids(first) and stranger.pid not in pids(first)
    assert str(stranger.pid) in first["reason"]
    assert "Exit status 2. Verdicts - dirty: gpu (SIMULATED)" in node.journal("nightly")
    # The same by hand obeys the inventory: it is the schedule that doesn't.
    by_hand = node.by_hand("playbooks/reset.yml", "-i", "/srv/inventory")
    assert by_hand.returncode == 0, by_hand.stdout
    assert not gpu.alive(stranger.pid)


def test_twice_at_once_is_one_run_and_the_second_says_so(node: ControlNode) -> None:
    (gpu,) = node.gpu_hosts
    gpu.start_server(tp=2, settings={"SPEED": 5, "IGNORE_TERM": 1})
    node.write_inventory(gpu_reset_grace=4)
    before = len(node.records())
    service = "gpu-reset-nightly.service"
    node.host.exec(["systemctl", "start", "--no-block", service])
    until(lambda: gpu.find(lean.BOOTSTRAP[:40]), "the reset on the host")
    second = node.run_now("nightly")
    assert second.returncode == 3
    assert re.fullmatch(
        r"Nothing was done: the run of this schedule that began 20\S+Z \(pid \d+\) is still going on\.\n", second.stdout
    )
    assert node.host.exec(["systemctl", "start", service]).returncode == 0  # waits for the one that runs
    assert len(node.records()) == before + 1
    assert node.property(service, "StatusText") == "Exit status 0. Verdicts - clean: gpu (SIMULATED)"


def test_a_time_that_passes_while_the_machine_is_off_fires_at_boot_only_where_that_was_asked_for(
    node: ControlNode,
) -> None:
    missed = {**BASE, "name": "missed"}
    made_up = {**BASE, "name": "made-up", "persistent": True}
    began = datetime.now()
    assert node.schedule([missed, made_up]).returncode == 0
    due = datetime.now() + max(timedelta(seconds=4), datetime.now() - began)  # a slow machine needs longer
    for name in ("missed", "made-up"):
        soon = f"[Timer]\nOnCalendar=\nOnCalendar={due:*-%m-%d %H:%M:%S}\n"
        node.host.write(f"/etc/systemd/system/gpu-reset-{name}.timer.d/soon.conf", soon)
    node.host.exec(["systemctl", "daemon-reload"])
    node.host.exec(["systemctl", "restart", "gpu-reset-missed.timer", "gpu-reset-made-up.timer"])
    node.host.power_off()
    assert datetime.now() < due
    until(lambda: datetime.now() > due + timedelta(seconds=1), "the time to pass")
    node.host.boot(seconds=120)  # the run that is made up for belongs to the boot
    node.wait_for_run("made-up")
    assert node.property("gpu-reset-missed.timer", "ActiveState") == "active"
    assert node.property("gpu-reset-missed.service", "ExecMainStartTimestamp") == ""
    assert node.last_run("missed") == {}


def test_without_systemd_a_crontab_runs_the_same_and_replaces_the_units(node: ControlNode) -> None:
    done = node.schedule([{**BASE, "calendar": "Mon..Fri 03:00"}], cron=True)
    assert done.returncode == 0, done.stdout
    assert sorted(node.files()) == ["/etc/cron.d/gpu-reset-nightly", "/etc/gpu-resets/nightly.json"]
    line = node.host.read("/etc/cron.d/gpu-reset-nightly").splitlines()[-1]
    minute, hour, day, month, weekday, user, command = line.split(maxsplit=6)
    assert (minute, hour, day, month, weekday, user) == ("0", "3", "*", "*", "1,2,3,4,5", USER)
    before = len(node.records())
    node.host.exec(["sh", "-c", command.replace("| logger", "> /tmp/said #")], user=USER)
    assert "Exit status 0." in node.host.read("/tmp/said")
    assert len(node.records()) == before + 1
    assert node.schedule([]).returncode == 0
    assert node.files() == {}
    assert node.last_run("nightly")["exit_status"] == 0  # what it kept stays


def test_where_there_is_no_systemd_a_real_cron_fires_the_schedule_one_run_at_a_time_until_it_is_no_longer_declared(
    cron_node: ControlNode,
) -> None:
    def log() -> str:
        return cron_node.host.read("/var/log/syslog")

    files = ["/etc/cron.d/gpu-reset-never", "/etc/cron.d/gpu-reset-nightly"]
    settings = ["/etc/gpu-resets/never.json", "/etc/gpu-resets/nightly.json"]
    assert sorted(cron_node.files()) == files + settings
    until(lambda: "is still going on" in log(), "cron to begin two runs", 130)
    assert re.search(r"gpu-reset-nightly: Nothing was done: the run of this schedule that began 20\S+Z \(pid", log())
    until(cron_node.records, "the end of the first run", 120)
    first = cron_node.records()[0]
    assert (first["host"], first["verdict"], first["schedule"]) == ("cron-gpu", "clean", "nightly")
    assert "KILL" in {row["signal"] for row in first["killed"]}
    until(lambda: "gpu-reset-nightly: Exit status 0. Verdicts - clean: cron-gpu (SIMULATED)" in log(), "its last line")
    minutes = [one["started"][:16] for one in cron_node.records()]
    assert len(set(minutes)) == len(minutes)  # cron begins two runs in each
    kept = cron_node.schedule([{**BASE, "name": "never"}])
    assert changed(kept.stdout, "cron-control") == 1
    assert sorted(cron_node.files()) == [files[0], settings[0]]
    assert cron_node.schedule([]).returncode == 0
    assert cron_node.files() == {}
    assert cron_node.last_run("nightly")["exit_status"] == 0
