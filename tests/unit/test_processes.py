"""Which processes a reset would end: recorded cases, random trees, and what it refuses to be told."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpu_host.processes import HOST_COMPILER, Patterns, classify, servers_on_gpus
from gpu_host.procfs import Proc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.fake_proc import FakeProc

CASES = yaml.safe_load((Path(__file__).parent / "cases" / "processes.yml").read_text())
OWN_PID = 9999


def label(finding: Any) -> str:
    if finding is None:
        return "nobody"
    return "doubtful" if finding.doubtful else finding.kind


@pytest.mark.parametrize("case", CASES, ids=[case["case"].replace(" ", "-") for case in CASES])
def test_each_process_is_named_as_it_was_started(case: dict[str, Any], tmp_path: Path) -> None:
    FakeProc(tmp_path).load(case["processes"])
    proc = Proc(str(tmp_path))
    findings = classify(proc.snapshot(), proc, Patterns(), OWN_PID)
    named = {fields["pid"]: label(findings.get(fields["pid"])) for fields in case["processes"]}
    assert named == {fields["pid"]: fields["is"] for fields in case["processes"]}
    for fields in case["processes"]:
        if "group_of" in fields:
            assert findings[fields["pid"]].group == findings[fields["group_of"]].group
        if "main" in fields:
            assert findings[fields["pid"]].main == fields["main"]


def test_a_name_that_looks_like_a_line_of_the_status_gives_nobody_another_user() -> None:
    words = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'x\\rUid:\\t7', 0, 0, 0); print(); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", words], stdout=subprocess.PIPE) as liar:
        assert liar.stdout is not None
        liar.stdout.readline()
        seen = Proc().process(liar.pid)
        liar.kill()
    assert seen is not None
    assert (seen.comm, seen.uid, seen.namespaced_pid) == ("x\rUid:\t7", os.getuid(), liar.pid)


def test_ourselves_and_our_ancestors_are_never_chosen_even_under_a_server(tmp_path: Path) -> None:
    fake = FakeProc(tmp_path)
    fake.add(100, argv=["/usr/bin/python3", "-m", "sglang.launch_server"])
    fake.add(101, ppid=100, argv=["/bin/sh"])
    fake.add(102, ppid=101, argv=["/usr/bin/python3", "-"])
    fake.add(103, ppid=100, argv=["sglang::scheduler"], exe="/usr/bin/python3")
    proc = Proc(str(tmp_path))
    findings = classify(proc.snapshot(), proc, Patterns(), own_pid=102)
    assert not {100, 101, 102} & set(findings)


def test_a_process_that_nvml_lists_and_nobody_knows_is_a_stranger(tmp_path: Path) -> None:
    fake = FakeProc(tmp_path)
    fake.add(100, argv=["/usr/bin/python3", "train.py"])
    fake.add(101, argv=["/usr/bin/dcgm-exporter"])
    proc = Proc(str(tmp_path))
    findings = classify(proc.snapshot(), proc, Patterns(), OWN_PID, gpu_holders=[100, 101, 555])
    assert {pid: finding.kind for pid, finding in findings.items()} == {100: "stranger", 101: "protected"}


def test_what_the_scope_does_not_show_is_neither_chosen_nor_taken_for_a_parent_of_ours(tmp_path: Path) -> None:
    fake = FakeProc(tmp_path)
    fake.add(100, argv=["/usr/bin/python3", "-m", "sglang.launch_server"], cwd="/srv/a")
    fake.add(101, argv=["/usr/bin/python3", "-m", "sglang.launch_server"], cwd="/srv/b")
    proc = Proc(str(tmp_path))
    findings = classify(
        proc.snapshot(), proc, Patterns(), OWN_PID, visible=lambda process: proc.cwd(process.pid) == "/srv/a"
    )
    assert set(findings) == {100}


def test_a_server_is_chosen_by_the_gpu_that_nvml_lists_it_on_and_one_that_is_listed_nowhere_is_told(
    tmp_path: Path,
) -> None:
    fake = FakeProc(tmp_path)
    every_node = ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"]
    for main in (100, 200, 300):
        fake.add(main, argv=["/usr/bin/python3", "-m", "sglang.launch_server"], files=every_node)
        fake.add(main + 1, ppid=main, argv=["sglang::scheduler"], exe="/usr/bin/python3", files=every_node)
    proc = Proc(str(tmp_path))
    findings = classify(proc.snapshot(), proc, Patterns(), OWN_PID)
    chosen, nowhere = servers_on_gpus(findings, {101: frozenset({"A"}), 201: frozenset({"B"})}, frozenset({"B"}))
    assert chosen == {findings[200].group}
    assert nowhere == {findings[300].group}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("modules", "python3"), ("modules", ".*"), ("modules", "sglang"), ("modules", "-m sglang.launch_server"),
        ("commands", "python3 serve"), ("commands", "sglang"), ("commands", ".* serve"), ("commands", "python run.py"),
        ("titles", "*"), ("titles", ".*"), ("titles", "python*"), ("titles", "s::*"), ("titles", "sglang"),
    ],
)  # fmt: skip
def test_a_pattern_that_would_match_unrelated_processes_is_refused_in_one_sentence(field: str, value: str) -> None:
    problems = Patterns(**{field: (value,)}).problems()
    assert len(problems) == 1
    assert repr(value) in problems[0]
    assert f"server_{field}" in problems[0]


def test_the_patterns_as_shipped_are_accepted() -> None:
    assert Patterns().problems() == []


@pytest.mark.parametrize(
    ("name", "compiles"),
    [
        ("x86_64-linux-gnu-g++-12", True), ("gcc", True), ("c++", True), ("cc1plus", True), ("clang-18", True),
        ("aarch64-linux-gnu-gcc-13.2", True), ("ccache", False), ("gcc-monitor", False), ("vim", False),
    ],
)  # fmt: skip
def test_a_host_compiler_is_known_by_its_whole_name(name: str, compiles: bool) -> None:
    """torch's inductor and triton have them run on GPU hosts too."""
    assert bool(HOST_COMPILER.fullmatch(name)) is compiles


SPAWN = ["/usr/bin/python3", "-c", "from multiprocessing.spawn import spawn_main; spawn_main()"]
# (how it is started, argv, exe, environment, may it be ended when its parent is gone)
STARTS: list[tuple[str, list[str], str, dict[str, str], bool]] = [
    ("server", ["/usr/bin/python3", "-m", "sglang.launch_server"], "/usr/bin/python3", {}, True),
    ("worker", ["sglang::scheduler_TP0"], "/usr/bin/python3", {"SGLANG_RUN_ID": "r1"}, True),
    ("spawned", SPAWN, "/usr/bin/python3", {"SGLANG_RUN_ID": "r1"}, True),
    ("compiler", ["nvcc", "x.cu"], "/usr/local/cuda/bin/nvcc", {"SGLANG_RUN_ID": "r1"}, True),
    ("compiler", ["g++", "x.cpp"], "/usr/bin/x86_64-linux-gnu-g++-12", {"SGLANG_RUN_ID": "r1"}, True),
    ("build", ["gcc", "x.c"], "/usr/bin/x86_64-linux-gnu-gcc-12", {"A": "b"}, False),
    ("data-job-child", SPAWN, "/usr/bin/python3", {"A": "b"}, False),
    ("data-job", ["/usr/bin/python3", "prep.py", "sglang"], "/usr/bin/python3", {"A": "b"}, False),
    ("training", ["/usr/bin/python3", "train.py"], "/usr/bin/python3", {"A": "b"}, False),
    ("shell", ["-bash"], "/usr/bin/bash", {"A": "b"}, False),
    ("editor", ["vim", "sglang::x"], "/usr/bin/vim", {"A": "b"}, False),
    ("protected", ["dcgm-exporter"], "/usr/bin/dcgm-exporter", {"A": "b"}, False),
    ("sshd", ["sshd: root"], "/usr/sbin/sshd", {"A": "b"}, False),
]


@st.composite
def trees(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Processes as (start, parent's place or -1 for pid 1, session's place or -1 for an own one)."""
    size = draw(st.integers(2, 14))
    rows = []
    for place in range(size):
        start = draw(st.integers(0, len(STARTS) - 1))
        parent = draw(st.integers(-1, place - 1))
        session = draw(st.integers(-1, place - 1))
        rows.append((start, parent, session))
    return rows


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=trees())
def test_in_any_tree_no_bystander_is_chosen_and_every_server_process_is(
    rows: list[tuple[int, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("proc")
    fake = FakeProc(root)
    pid_of = [100 + place for place in range(len(rows))]

    def under_a_server(place: int) -> bool:
        """Whether one of its ancestors was started as a server, or as a worker that lost its own parent."""
        while place >= 0:
            start, parent, _ = rows[place]
            kind = STARTS[start][0]
            if kind in ("protected", "sshd"):
                return False
            if kind == "server" or (kind in ("worker", "spawned", "compiler") and parent == -1):
                return True
            place = parent
        return False

    def in_a_servers_session(place: int) -> bool:
        """Whether it, or an ancestor, is an orphan in a session that a server leads: the rules give it to that one."""
        while place >= 0:
            start, parent, session = rows[place]
            alike = STARTS[start][0] in ("data-job-child", "build")
            if alike and session >= 0 and STARTS[rows[session][0]][0] == "server":
                return True
            place = parent
        return False

    for place, (start, parent, session) in enumerate(rows):
        _, argv, exe, environ, _ = STARTS[start]
        fake.add(
            pid_of[place],
            ppid=1 if parent < 0 else pid_of[parent],
            argv=argv,
            exe=exe,
            environ=environ,
            session=pid_of[place] if session < 0 else pid_of[session],
            group=pid_of[place] if session < 0 else pid_of[session],
            files=["/dev/nvidia0"],
        )
    proc = Proc(str(root))
    findings = classify(proc.snapshot(), proc, Patterns(), OWN_PID)
    for place, (start, parent, _session) in enumerate(rows):
        kind = STARTS[start][0]
        chosen = pid_of[place] in findings and findings[pid_of[place]].ours
        if kind in ("protected", "sshd"):
            assert not chosen
        elif kind == "server" or under_a_server(place):
            assert chosen, (kind, rows)
        elif in_a_servers_session(place):
            continue
        elif kind in ("data-job", "training", "shell", "editor"):
            assert not chosen, (kind, rows)
        elif kind != "data-job-child" and parent >= 0 and not STARTS[rows[parent][0]][4]:
            assert not chosen, ("its parent lives and is no server", kind, rows)
        elif kind == "data-job-child":
            assert not chosen, (kind, rows)
