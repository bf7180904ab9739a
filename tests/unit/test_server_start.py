"""Starting a server again by its record: on real processes, and over a double of systemd."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_host import server_launcher, server_record, server_start
from gpu_host.procfs import Proc
from gpu_host.server_record import ServerRecord

# Listens on the port that it is given, and writes down how it was started.
PROGRAM = textwrap.dedent(
    """
    import json, os, socket, subprocess, sys, time
    port = int(sys.argv[sys.argv.index("--port") + 1])
    how = {"cwd": os.getcwd(), "environment": dict(os.environ), "argv": sys.argv, "uid": os.getuid(),
           "groups": os.getgroups(), "session": os.getsid(0), "pid": os.getpid(),
           "stdin": os.readlink("/proc/self/fd/0"), "open": len(os.listdir("/proc/self/fd"))}
    print("started " + json.dumps(how), flush=True)
    if "--die" in sys.argv:
        print("loading with api_key='sk-1234567890abcdef'", flush=True)
        print("RuntimeError: CUDA out of memory", file=sys.stderr, flush=True)
        sys.exit(3)
    os.environ["SGLANG_RUN_ID"] = "run-7"
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if "--silent" in sys.argv:
        time.sleep(600)
    listening = socket.create_server(("127.0.0.1", port))
    time.sleep(600)
    """
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class Place:
    """A folder with a program, a state folder and records; `start` calls the module."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.program = folder / "serve.py"
        self.program.write_text(PROGRAM)
        self.log = folder / "server.log"
        self.log.write_text("from the run before\n")
        self.work = folder / "work"
        self.work.mkdir()
        self.pids: set[int] = set()

    def record(self, *more: str, name: str = "kimi", port: int = 0, **changes: Any) -> ServerRecord:
        port = port or free_port()
        facts: dict[str, Any] = {
            "name": name,
            "argv": (sys.executable, str(self.program), "--port", str(port), *more),
            "exe": os.path.realpath(sys.executable),
            "cwd": str(self.work),
            "environment": {"PATH": os.environ["PATH"], "NCCL_PROTO": "LL", "TWO_LINES": 'a\nb $HOME %h "q"'},
            "port": port,
            "log": str(self.log),
            "uid": os.geteuid(),
        }
        made = ServerRecord(**(facts | changes))
        server_record.save(made, str(self.state))
        return made

    def start(self, check_mode: bool = False, diff: bool = False, **params: Any) -> dict[str, Any]:
        given = {"name": "kimi", "wait": True, "timeout": 15, "grace": 5, "state_folder": str(self.state)}
        result = server_start.run(given | params, check_mode, diff)
        if result["pid"]:
            self.pids.add(result["pid"])
        return result

    def how(self) -> dict[str, Any]:
        """What the last started program wrote down."""
        lines = [line for line in self.log.read_text().splitlines() if line.startswith("started ")]
        return dict(json.loads(lines[-1][len("started ") :]))

    def end(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.end()


def test_a_server_starts_with_its_recorded_command_folder_environment_and_log(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_CALLER", "1")
    record = place.record("--model-path", "/m")
    result = place.start()
    assert (result["changed"], result.get("failed"), result["port"], result["log"]) == (
        True,
        None,
        record.port,
        str(place.log),
    ), result["msg"]
    how = place.how()
    assert how["pid"] == result["pid"]
    assert how["argv"][1:] == ["--port", str(record.port), "--model-path", "/m"]
    assert how["cwd"] == str(place.work)
    assert {name: value for name, value in how["environment"].items() if name != "LC_CTYPE"} == record.environment
    assert place.log.read_text().startswith("from the run before\n")


def test_a_started_server_outlives_us_and_holds_nothing_of_ours(place: Place) -> None:
    place.record()
    result = place.start()
    how = place.how()
    assert how["session"] == how["pid"] == result["pid"]
    main = Proc().process(result["pid"])
    assert main is not None and main.ppid != os.getpid()
    assert how["stdin"] == os.devnull
    assert how["open"] <= 4  # standard streams, and the listing itself


def test_the_private_start_file_is_gone_and_nothing_secret_stood_on_a_command_line(place: Place) -> None:
    place.record("--api-key", "s3cret", environment={"PATH": os.environ["PATH"], "HF_TOKEN": "hf_abcdefghijkl"})
    result = place.start()
    names = {path.name for path in (place.state / "servers").iterdir()}
    assert names == {"kimi.json", ".kimi.lock", ".kimi.pid", ".kimi.error"}
    for path in (place.state / "servers").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert "s3cret" not in json.dumps(result) and "hf_abc" not in json.dumps(result)
    assert "s3cret" not in server_launcher.SOURCE


def test_a_server_that_runs_already_is_left_as_it_is(place: Place) -> None:
    place.record()
    first = place.start()
    second = place.start(diff=True)
    assert (second["changed"], second["pid"], second["how"]) == (False, first["pid"], "running")
    assert second["diff"]["before"] == second["diff"]["after"]


def test_a_server_that_somebody_else_started_by_the_same_command_is_left_as_it_is(place: Place) -> None:
    record = place.record()
    other = subprocess.Popen(record.argv, cwd=record.cwd, stdout=subprocess.DEVNULL, start_new_session=True)
    place.pids.add(other.pid)
    result = place.start()
    assert (result["changed"], result["pid"]) == (False, other.pid)


def test_two_calls_at_once_start_one_server(place: Place) -> None:
    place.record()
    results: list[dict[str, Any]] = []
    calls = [threading.Thread(target=lambda: results.append(place.start())) for _ in range(3)]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert sorted(result["changed"] for result in results) == [False, False, True], results
    assert len({result["pid"] for result in results}) == 1


def test_the_record_points_at_the_new_process_afterwards(place: Place) -> None:
    place.record(main_pid=1, main_start_ticks=5, run_id="old", who="alice")
    result = place.start()
    record = server_record.load(str(place.state), "kimi")
    assert record is not None and record.main_alive(Proc())
    assert (record.main_pid, record.run_id, record.who) == (result["pid"], "run-7", "alice")


def test_a_port_that_somebody_else_holds_is_refused_by_name(place: Place) -> None:
    record = place.record()
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import socket, time; s = socket.create_server(('127.0.0.1', {record.port}))\n"
            "print(1, flush=True)\ntime.sleep(60)",
        ],
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    try:
        result = place.start()
    finally:
        holder.kill()
        holder.wait()
    assert result["failed"] and not result["changed"]
    assert f"Port {record.port} of kimi is taken by" in result["msg"] and str(holder.pid) in result["msg"]


def test_a_server_that_dies_is_told_with_the_end_of_its_own_log_masked(place: Place) -> None:
    place.record("--die")
    result = place.start()
    assert result["failed"]
    assert "kimi died" in result["msg"] and "CUDA out of memory" in result["msg"]
    assert "sk-1234567890abcdef" not in result["msg"]
    assert "from the run before" not in result["msg"]


def test_a_server_that_does_not_listen_in_time_is_told_as_loading(place: Place) -> None:
    record = place.record("--silent")
    result = place.start(timeout=1.5)
    assert result["failed"] and result["seconds"] < 4
    assert f"does not listen on port {record.port} after 1.5 s" in result["msg"]
    assert Proc().process(result["pid"]) is not None, "it goes on loading"


def test_without_waiting_the_call_returns_at_once(place: Place) -> None:
    place.record("--silent")
    result = place.start(wait=False)
    assert result["changed"] and result["pid"] and result["seconds"] < 2


def test_check_mode_says_what_it_would_start_and_starts_nothing(place: Place) -> None:
    place.record("--api-key", "s3cret")
    before = sorted(place.state.rglob("*"))
    result = place.start(check_mode=True, diff=True)
    assert result["changed"] and "would be started" in result["msg"]
    assert "s3cret" not in json.dumps(result) and str(place.program) in result["diff"]["after"]
    assert place.log.read_text() == "from the run before\n"
    assert sorted(place.state.rglob("*")) == before


def test_without_a_record_the_sentence_says_which_there_are(place: Place) -> None:
    place.record(name="other")
    result = place.start()
    assert result["failed"] and "no record of a server kimi" in result["msg"] and "other" in result["msg"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"argv": ()}, "names neither a unit nor a command line"),
        ({"environment": None}, "environment of kimi could not be read"),
        ({"environment_file": "/nonexistent/env"}, "The environment file /nonexistent/env of kimi can't be read"),
        ({"cwd": "/nonexistent/folder"}, "The folder /nonexistent/folder in which kimi ran is not there"),
        ({"argv": ("/nonexistent/python", "x"), "exe": "/nonexistent/exe"}, "The program /nonexistent/python"),
        ({"uid": 4242424}, "4242424"),
        ({"log": "/nonexistent/folder/log"}, "/nonexistent/folder/log"),
    ],
)
def test_what_can_not_be_started_is_refused_in_one_sentence(place: Place, changes: dict[str, Any], says: str) -> None:
    place.record(**changes)
    result = place.start()
    assert result["failed"] and not result["changed"]
    assert says in result["msg"]


def test_a_record_that_another_user_could_have_written_is_not_run(place: Place) -> None:
    place.record()
    path = place.state / "servers" / "kimi.json"
    path.chmod(0o666)
    result = place.start()
    assert result["failed"] and "another user could have written it" in result["msg"]


def test_the_environment_file_goes_over_the_recorded_environment(place: Place) -> None:
    (place.folder / "env").write_text("# profile\nNCCL_PROTO=Simple\nexport X=1\nNAME='with blanks'\n\n")
    record = place.record(environment_file=str(place.folder / "env"))
    assert server_start.environment(record) | {"PATH": ""} == {
        **(record.environment or {}),
        "PATH": "",
        "NCCL_PROTO": "Simple",
        "NAME": "with blanks",
    }


def test_a_program_named_without_a_folder_is_found_in_the_recorded_path(place: Place) -> None:
    tool = place.folder / "bin"
    tool.mkdir()
    (tool / "serve").write_text(f'#!/bin/sh\nexec {sys.executable} {place.program} "$@"\n')
    (tool / "serve").chmod(0o755)
    port = free_port()
    place.record(argv=("serve", "--port", str(port)), port=port, environment={"PATH": f"{tool}:/usr/bin:/bin"})
    result = place.start()
    assert result["changed"] and not result.get("failed"), result["msg"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a server as another user")
def test_a_server_of_another_user_starts_as_that_user_and_writes_its_own_log(place: Place) -> None:
    for path in [place.folder, *place.folder.parents[:3]]:
        path.chmod(path.stat().st_mode | 0o055)
    place.work.chmod(0o777)
    log = place.work / "user.log"
    port = free_port()
    python = "/usr/bin/python3"  # one that everybody may run
    argv = (python, str(place.program), "--port", str(port))
    place.record(argv=argv, exe=python, uid=65534, log=str(log), port=port)
    result = place.start()
    assert not result.get("failed"), result["msg"]
    assert log.stat().st_uid == 65534
    how = json.loads(log.read_text().splitlines()[0][len("started ") :])
    assert (how["uid"], 0 in how["groups"]) == (65534, False)


# ---- over a double of systemd ----

SYSTEMCTL = """#!/bin/sh
# Answers of a systemd whose units are files in {folder}: facts of each unit, as `systemctl show` prints them.
echo "systemctl $*" >> {folder}/calls
case "$1" in
show) cat "{folder}/$2" 2>/dev/null || printf 'LoadState=not-found\\nActiveState=inactive\\nMainPID=0\\nJob=\\n' ;;
start) {start} ;;
esac
"""
SYSTEMD_RUN = """#!/bin/sh
echo "systemd-run $*" | tr '\\n' ' ' >> {folder}/calls
for word; do case $word in --unit=*) unit=${{word#--unit=}} ;; esac; done
while [ "$1" != -- ]; do shift; done; shift
setsid "$@" </dev/null >/dev/null 2>&1 &
printf 'LoadState=loaded\\nActiveState=active\\nSubState=running\\nTransient=yes\\nMainPID=%s\\n' $! > "{folder}/$unit"
"""


class Systemd:
    """Doubles of systemctl and systemd-run, first on the PATH."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        folder.mkdir()
        self.tool("systemctl", SYSTEMCTL.format(folder=folder, start="true"))
        self.tool("systemd-run", SYSTEMD_RUN.format(folder=folder))
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.setattr(server_start, "SYSTEMD", str(folder))

    def tool(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def unit(self, name: str, **facts: object) -> None:
        lines = {"LoadState": "loaded", "ActiveState": "inactive", "SubState": "dead", "MainPID": 0} | facts
        (self.folder / name).write_text("".join(f"{key}={value}\n" for key, value in lines.items()))

    @property
    def calls(self) -> str:
        return (self.folder / "calls").read_text()


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Systemd:
    return Systemd(tmp_path / "systemd", monkeypatch)


@pytest.mark.skipif(os.geteuid() != 0, reason="transient units are for root")
def test_under_systemd_a_command_becomes_a_transient_unit_of_the_servers_name(place: Place, systemd: Systemd) -> None:
    record = place.record("--api-key", "s3cret")
    result = place.start()
    assert (result["how"], result["unit"]) == ("transient unit", "kimi.service"), result["msg"]
    assert place.how()["pid"] == result["pid"]
    assert place.how()["environment"]["TWO_LINES"] == (record.environment or {})["TWO_LINES"]
    assert "KillMode=mixed" in systemd.calls and "TimeoutStopSec=5" in systemd.calls
    assert "s3cret" not in systemd.calls and "NCCL_PROTO" not in systemd.calls


@pytest.mark.skipif(os.geteuid() != 0, reason="transient units are for root")
def test_a_transient_unit_never_takes_the_name_of_a_unit_that_exists(place: Place, systemd: Systemd) -> None:
    systemd.unit("kimi.service", ActiveState="active", MainPID=1)
    place.record()
    assert place.start()["unit"] == "gpu-server-kimi.service"


def unit_that_starts(systemd: Systemd, place: Place, record: ServerRecord) -> None:
    """`systemctl start` runs the recorded command and shows its pid."""
    command = " ".join(record.argv)
    facts = r"LoadState=loaded\nActiveState=active\nSubState=running\nMainPID=%s\n"
    start = f'(cd {place.work}; setsid {command} >> {place.log} 2>&1 & printf "{facts}" $! > {systemd.folder}/$3)'
    systemd.tool("systemctl", SYSTEMCTL.format(folder=systemd.folder, start=start))


def test_a_recorded_unit_is_started_by_systemctl_and_waited_for(place: Place, systemd: Systemd) -> None:
    record = place.record(unit="kimi.service")
    systemd.unit("kimi.service", ActiveState="failed")
    unit_that_starts(systemd, place, record)
    result = place.start()
    assert (result["changed"], result["how"], result["unit"]) == (True, "unit", "kimi.service"), result["msg"]
    assert result["pid"] == place.how()["pid"]
    assert result["command"] == ["systemctl", "start", "kimi.service"]
    assert "reset-failed kimi.service" in systemd.calls and "start --no-block kimi.service" in systemd.calls
    assert place.start()["changed"] is False


def test_a_unit_that_dies_is_told_with_the_end_of_its_log(place: Place, systemd: Systemd) -> None:
    record = place.record("--die", unit="kimi.service")
    systemd.unit("kimi.service")
    unit_that_starts(systemd, place, record)
    result = place.start()
    assert result["failed"] and "CUDA out of memory" in result["msg"]


def test_a_unit_that_waits_in_the_queue_is_not_taken_for_dead(place: Place, systemd: Systemd) -> None:
    place.record(unit="kimi.service")
    systemd.unit("kimi.service", Job="/org/freedesktop/systemd1/job/12")
    result = place.start(timeout=1)
    assert "does not listen" in result["msg"]


def test_a_unit_that_systemd_restarts_by_itself_is_told_as_dead(place: Place, systemd: Systemd) -> None:
    place.record(unit="kimi.service", log="")
    systemd.unit("kimi.service", ActiveState="activating", SubState="auto-restart")
    systemd.tool("journalctl", "#!/bin/sh\necho RuntimeError: out of memory\n")
    result = place.start()
    assert result["failed"] and "out of memory" in result["msg"]


def test_a_unit_that_is_gone_is_started_by_the_recorded_command_where_there_is_one(
    place: Place, systemd: Systemd
) -> None:
    """A transient unit that a reset has stopped exists no more."""
    place.record(unit="kimi.service")
    result = place.start()
    assert result["changed"] and result["how"] != "unit", result["msg"]
    record = server_record.load(str(place.state), "kimi")
    assert record is not None and record.unit == ""


def test_a_unit_that_is_gone_without_a_command_is_refused(place: Place, systemd: Systemd) -> None:
    place.record(unit="kimi.service", argv=())
    result = place.start()
    assert result["failed"] and "does not know the unit kimi.service" in result["msg"]


def test_a_systemd_that_hangs_does_not_outlast_the_deadline(place: Place, systemd: Systemd) -> None:
    systemd.tool("systemctl", "#!/bin/sh\nexec sleep 60\n")
    place.record(unit="kimi.service")
    began = time.monotonic()
    result = place.start(timeout=1)
    assert result["failed"] and "systemd does not answer" in result["msg"]
    assert time.monotonic() - began < 3
