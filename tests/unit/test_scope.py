"""What a narrowed call may see."""
from __future__ import annotations

from pathlib import Path

import pytest
from gpu_host.procfs import Proc
from gpu_host.scope import Scope

from tests.unit.fake_proc import FakeProc


@pytest.mark.parametrize(
    ("scope", "seen"),
    [
        (Scope(), True),
        (Scope(folder="/srv/a"), True),
        (Scope(folder="/srv/a/"), True),
        (Scope(folder="/srv"), True),
        (Scope(folder="/srv/a/b"), False),
        (Scope(folder="/srv/aa"), False),
        (Scope(cgroup="/lxc/101"), True),
        (Scope(cgroup="/lxc/1"), False),
        (Scope(cgroup="/lxc/101", folder="/other"), False),
        (Scope(uid=7), True),
        (Scope(uid=8), False),
    ],
)
def test_a_process_is_seen_when_every_part_of_the_scope_shows_it(scope: Scope, seen: bool, tmp_path: Path) -> None:
    FakeProc(tmp_path).add(100, argv=["/usr/bin/python3"], cwd="/srv/a", cgroup="/lxc/101/x.service", uid=7)
    proc = Proc(str(tmp_path))
    process = proc.process(100)
    assert process is not None
    assert scope.sees(proc, process) is seen


def test_a_process_whose_folder_cannot_be_read_is_not_seen(tmp_path: Path) -> None:
    FakeProc(tmp_path).add(100, argv=["/usr/bin/python3"])
    (tmp_path / "100" / "cwd").unlink()
    proc = Proc(str(tmp_path))
    process = proc.process(100)
    assert process is not None
    assert not Scope(folder="/srv").sees(proc, process)
