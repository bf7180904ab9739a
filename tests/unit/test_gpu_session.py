"""The real-GPU session's own machinery, played here without a GPU: its processes are real, GPU and reset are not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import run
from tests.gpu.driver import play, procs, raw, scenarios, servers, session, wheels

TORCH = """
import os, pathlib, types
class Tensor:
    def fill_(self, value): pass
def empty(count, dtype=None, device=None):
    pathlib.Path(os.environ["FAKE_GPU"], str(os.getpid())).write_text(str(count >> 20))
    return Tensor()
def randn(*shape, device=None): return Tensor()
def matmul(left, right): return Tensor()
uint8 = None
cuda = types.SimpleNamespace(set_device=lambda gpu: None, synchronize=lambda: None)
"""
# Ends what the session marked, by TERM then KILL, and leaves the record of a clean reset.
PLAYBOOK = """
import json, os, pathlib, signal, sys, time
sys.path.insert(0, {repository!r})
from tests.gpu.driver import procs
spare = {spare!r}
found = [one for one in procs.all_facts() if procs.mark_of(one.pid).startswith("torch-") and one.alive]
mains = [one for one in found if "sglang.launch_server" in one.argv]
for one in mains:
    os.kill(one.pid, signal.SIGTERM)
procs.wait_until(lambda: not any(procs.is_alive(one.key) for one in mains), 2)
killed = []
for one in found:
    alive = procs.is_alive(one.key)
    if alive and one.title not in spare:
        os.kill(one.pid, signal.SIGKILL)
    killed.append(dict(pid=one.pid, signal="KILL" if alive else "TERM"))
with open({records!r}, "a") as file:
    file.write(json.dumps(dict(verdict="clean", simulated=False, killed=killed, seconds=dict(probe=1),
                               gpus=[dict(index=0, verdict="protected_only")])) + chr(10))
print("real-gpu : ok=1 changed=%d unreachable=0 failed=0" % bool(killed))
"""


class Host:
    """A machine with a pretended GPU: memory is a file a process, gone with the process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.gpu = folder / "gpu"
        self.records = folder / "resets.jsonl"
        library = folder / "library"
        for one in (self.gpu, library, folder / "bundle" / "bin"):
            one.mkdir(parents=True)
        (library / "torch.py").write_text(TORCH)
        holder = folder / "bundle" / "bin" / "dcgm-exporter"
        holder.write_text(
            '#!/bin/sh\necho $1 >$FAKE_GPU/$$; n=0; while sleep 0.1; do n=$((n+1)); echo $n >"$2"; done\n'
        )
        holder.chmod(0o755)
        monkeypatch.setenv("FAKE_GPU", str(self.gpu))
        monkeypatch.setenv("PYTHONPATH", str(library))
        monkeypatch.setattr(raw, "nvml", self.nvml)
        monkeypatch.setattr(session, "RECORDS", self.records)

    def nvml(self) -> dict[str, Any]:
        listed = {
            int(file.name): int(file.read_text() or 0)
            for file in self.gpu.iterdir()
            if (facts := procs.read_facts(int(file.name))) is not None and facts.alive
        }
        return {
            "gpus": [
                {
                    "memory_v2": {"used": sum(listed.values()) << 20},
                    "compute_processes": [{"pid": pid, "usedGpuMemory": mib << 20} for pid, mib in listed.items()],
                }
            ]
        }

    def play(self, name: str, spare: tuple[str, ...] = ()) -> tuple[int, list[dict[str, Any]]]:
        playbook = self.folder / "playbook.py"
        playbook.write_text(PLAYBOOK.format(repository=str(session.REPOSITORY), records=str(self.records), spare=spare))
        out = self.folder / "out"
        words = ["--out", str(out), "--scenarios", name, "--bundle", str(self.folder / "bundle"), "--commit", "abc"]
        status = run.main([*words, "--playbook-command", f"{sys.executable} {playbook}"])
        return status, [json.loads(line) for line in (out / "session.jsonl").read_text().splitlines()]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def failed(events: list[dict[str, Any]]) -> list[str]:
    return [event["sentence"] for event in events if event["kind"] == "check" and not event["ok"]]


def test_a_reset_that_does_its_job_passes_every_check_and_leaves_nothing(host: Host) -> None:
    status, events = host.play("torch-processes")
    assert (status, failed(events)) == (0, [])
    assert {event["moment"] for event in events if event["kind"] == "reading"} == {"before", "after"}
    before = next(event for event in events if event["kind"] == "reading" and event["moment"] == "before")
    listed = {one["pid"] for one in before["reading"]["nvml"]["gpus"][0]["compute_processes"]}
    assert set(before["truth"]["0"]) == listed
    assert len(listed) == 5
    assert (host.folder / "out" / "raw.tar.xz").exists()
    assert not [one for one in procs.all_facts() if procs.mark_of(one.pid) in before["trees"]]


def test_a_reset_that_leaves_a_process_and_says_clean_is_caught_and_the_process_is_ended(host: Host) -> None:
    status, events = host.play("torch-processes", spare=("sglang::detokenizer",))
    assert status == 1
    assert "no process of the server is left" in failed(events)
    swept = next(event for event in events if event["kind"] == "swept")
    assert not [one for one in swept["processes"] if procs.is_alive((one["pid"], one["start_ticks"]))]


def test_a_scenario_that_does_not_fit_the_time_or_the_gpus_is_skipped_and_told(host: Host) -> None:
    _, events = host.play("two-gpus-torch")
    assert [event["why"] for event in events if event["kind"] == "skipped"] == ["needs 2 GPUs"]


def test_what_the_tasks_of_a_playbook_returned_is_kept_also_of_one_that_fails(host: Host) -> None:
    playbook = host.folder / "two-tasks.yml"
    tasks = [{"ansible.builtin.debug": {"msg": "seen"}}, {"ansible.builtin.fail": {"msg": "on purpose"}}]
    playbook.write_text(json.dumps([{"hosts": "gpu_hosts", "gather_facts": False, "tasks": tasks}]))
    bundle = servers.Bundle(host.folder / "bundle")
    command = [str(Path(sys.executable).with_name("ansible-playbook"))]
    opened = session.Session(host.folder / "out", host.folder / "work", command, bundle, "abc", {}, float("inf"))
    done = play.play(opened, str(playbook), "two tasks", {}, 60)
    opened.tracker.close()
    assert (done.rc, done.failed_action, done.last("debug")["msg"]) == (2, "fail", "seen"), done.output
    assert done.last("fail")["msg"] == "on purpose"


def test_wheels_made_from_what_is_installed_can_be_installed_without_a_network(tmp_path: Path) -> None:
    assert wheels.repack(sys.executable, ["packaging"], tmp_path / "wheels") == ""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(tmp_path / "wheels")]
    subprocess.run([*pip, "--target", str(tmp_path / "site"), "packaging"], check=True)
    assert (tmp_path / "site" / "packaging" / "version.py").exists()


def test_every_named_set_consists_of_known_scenarios() -> None:
    for name in run.NAMED_SETS:
        assert run.chosen(name)
    assert {one for names in run.NAMED_SETS.values() for one in names} == set(scenarios.ALL)
