"""What a reset of some or all GPUs would end, over a fake /proc and readings made by hand."""
from __future__ import annotations

from pathlib import Path

import pytest
from gpu_host.deadline import Deadline
from gpu_host.processes import Patterns
from gpu_host.procfs import Proc
from gpu_host.readings import Gpu, GpuProcess, Readings, UnknownGpu
from gpu_host.scope import Scope
from gpu_host.survey import Survey
from gpu_host.verdict import Policy

from tests.unit.fake_proc import FakeProc

MINORS = [3, 2, 1, 0, 7, 6, 5, 4]
EVERY_NODE = [f"/dev/nvidia{number}" for number in range(8)]


class FixedReader:
    """Answers every read with the same readings."""

    child_pid = None

    def __init__(self, used: dict[int, dict[int, int]] | None = None, mib: dict[int, int] | None = None) -> None:
        self.used = used or {}
        self.mib = mib or {}

    def read(self, deadline: Deadline) -> Readings:
        gpus = []
        for index, minor in enumerate(MINORS):
            used = self.used.get(index, {})
            processes = tuple(GpuProcess(pid, mib, "compute") for pid, mib in used.items())
            total = self.mib.get(index, sum(used.values()))
            gpus.append(
                Gpu(index, f"GPU-{index}", minor, "GPU", f"0000:0{index}:00.0", "12.0", 97887, total, 97887 - total, 6,
                    0, 30.0, False, processes)
            )  # fmt: skip
        return Readings("nvml", "580", "13", tuple(gpus), None)


def server(fake: FakeProc, main: int, maps: list[str] | None = None) -> None:
    """A main and one worker that hold every device node, as on hardware."""
    fake.add(main, argv=["/usr/bin/python3", "-m", "sglang.launch_server"], files=EVERY_NODE)
    fake.add(main + 1, ppid=main, argv=["sglang::scheduler"], exe="/usr/bin/python3", files=EVERY_NODE, maps=maps)


def survey(tmp_path: Path, reader: FixedReader, wanted: list[str], **options: object) -> Survey:
    made = Survey(Proc(str(tmp_path)), Patterns(), Scope(), reader, wanted, **options)
    made.read(Deadline(1))
    return made


def test_all_gpus_means_every_server_also_one_that_uses_none(tmp_path: Path) -> None:
    fake = FakeProc(tmp_path)
    server(fake, 100)
    server(fake, 200)
    look = survey(tmp_path, FixedReader({0: {101: 76000}}), []).look()
    assert set(look.chosen) == {100, 101, 200, 201}


def test_gpus_choose_by_the_drivers_list_and_not_by_open_nodes(tmp_path: Path) -> None:
    fake = FakeProc(tmp_path)
    server(fake, 100)
    server(fake, 200)
    look = survey(tmp_path, FixedReader({0: {101: 76000}, 4: {201: 76000}}), ["4", "5", "6", "7"]).look()
    assert set(look.chosen) == {200, 201}
    assert set(look.elsewhere) == {100, 101}


def test_a_server_that_the_driver_lists_nowhere_is_not_ended_but_told_when_only_some_gpus_are_asked_for(
    tmp_path: Path,
) -> None:
    server(FakeProc(tmp_path), 100)
    look = survey(tmp_path, FixedReader(), ["4"]).look()
    assert not look.chosen
    assert set(look.undecided) == {100, 101}


@pytest.mark.parametrize(("mapped", "undecided"), [(MINORS[0], False), (MINORS[4], True)])
def test_what_is_mapped_excludes_a_gpu_by_its_minor_number_and_never_selects_one(
    mapped: int, undecided: bool, tmp_path: Path
) -> None:
    server(FakeProc(tmp_path), 100, maps=[f"/dev/nvidia{mapped}", "/dev/nvidiactl"])
    look = survey(tmp_path, FixedReader(), ["4"]).look()
    assert not look.chosen
    assert bool(look.undecided) is undecided


def test_a_server_stays_chosen_when_the_worker_on_the_gpu_dies_first(tmp_path: Path) -> None:
    fake = FakeProc(tmp_path)
    server(fake, 100)
    fake.add(102, ppid=100, argv=["sglang::detokenizer"], exe="/usr/bin/python3", environ={"SGLANG_RUN_ID": "r1"})
    reader = FixedReader({4: {101: 76000}})
    made = survey(tmp_path, reader, ["4"])
    assert set(made.look().chosen) == {100, 101, 102}
    for pid in (100, 101):
        (tmp_path / str(pid) / "stat").unlink()
    reader.used = {}
    made.read(Deadline(1))
    assert set(made.look().chosen) == {102}


def test_every_gpu_is_judged_and_the_last_one_makes_the_host_dirty(tmp_path: Path) -> None:
    FakeProc(tmp_path)
    made = survey(tmp_path, FixedReader(mib={7: 5000}), [])
    verdicts, _ = made.judge(made.look(), Policy())
    assert [one.clean for _, one in verdicts] == [True] * 7 + [False]


def test_a_stranger_on_a_gpu_is_ended_only_when_asked_and_only_on_the_gpus_asked_for(tmp_path: Path) -> None:
    fake = FakeProc(tmp_path)
    fake.add(100, argv=["/usr/bin/python3", "train.py"])
    fake.add(101, argv=["/usr/bin/python3", "train.py"])
    fake.add(102, argv=["/usr/bin/dcgm-exporter"])
    reader = FixedReader({5: {100: 20000, 102: 10}, 6: {101: 20000}})
    assert not survey(tmp_path, reader, ["5"]).look().chosen
    assert set(survey(tmp_path, reader, ["5"], kill_strangers=True).look().chosen) == {100}
    assert set(survey(tmp_path, reader, [], kill_strangers=True).look().chosen) == {100, 101}


def test_a_process_in_doubt_is_never_ended_even_when_strangers_are(tmp_path: Path) -> None:
    fake = FakeProc(tmp_path)
    spawn = ["/usr/bin/python3", "-c", "from multiprocessing.spawn import spawn_main; spawn_main()"]
    fake.add(100, argv=spawn, blanked=True, files=EVERY_NODE)
    look = survey(tmp_path, FixedReader({0: {100: 500}}), [], kill_strangers=True).look()
    assert look.findings[100].doubtful
    assert not look.chosen


def test_an_unknown_gpu_is_refused_by_name(tmp_path: Path) -> None:
    FakeProc(tmp_path)
    with pytest.raises(UnknownGpu, match="GPU 9 is not on this host"):
        survey(tmp_path, FixedReader(), ["9"])


def test_a_listed_pid_that_is_not_there_is_dead_on_the_machine_itself_and_unseen_in_a_guest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeProc(tmp_path)
    fake.add(100, argv=["/usr/bin/python3", "train.py"])
    fake.add(101, argv=["x"], state="Z")
    made = survey(tmp_path, FixedReader({0: {100: 1, 101: 1, 555: 1}}), [])
    look = made.look()
    for guest, missing in ((False, "dead"), (True, "unseen")):
        monkeypatch.setattr(Proc, "in_guest", lambda self, guest=guest: guest)
        sight = made.sight(look)
        assert sight.states == {100: "live", 101: "dead", 555: missing}
        assert sight.guest is guest


def test_a_scope_keeps_strangers_outside_of_it_alive(tmp_path: Path) -> None:
    fake = FakeProc(tmp_path)
    fake.add(100, argv=["/usr/bin/python3", "train.py"], cwd="/srv/b")
    made = Survey(Proc(str(tmp_path)), Patterns(), Scope(folder="/srv/a"), FixedReader({0: {100: 9}}), [], True)
    made.read(Deadline(1))
    look = made.look()
    assert not look.chosen
    assert "outside the given scope" in look.findings[100].why
