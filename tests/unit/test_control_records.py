"""Run records on the control node: written once, never lost, found again."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import stat
from pathlib import Path

import pytest
from gpu_control import records

RECORD_KEYS = ["schema", "run_id", "host", "play", "schedule", "servers", "policy", "router", "started"]
RECORD_KEYS += ["verdict", "reason", "simulated", "gpus", "killed", "spared", "cleaned", "kept"]
RECORD_KEYS += ["evidence", "kernel_events", "respawners", "ports", "shm_free_mib", "source", "seconds", "earlier"]


def write_many(file: Path, writer: int, count: int) -> None:
    for number in range(count):
        one = records.record(
            {"run_id": f"{writer}-{number}", "verdict": "clean", "reason": "x" * 20000}, f"host-{writer}"
        )
        records.append(file, [one])


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_processes_that_write_at_once_lose_no_line(tmp_path):
    file = tmp_path / "artifacts/resets.jsonl"
    writers = [multiprocessing.Process(target=write_many, args=(file, writer, 25)) for writer in range(6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    written = [(one["host"], one["run_id"]) for one in lines(file)]
    assert sorted(written) == sorted((f"host-{w}", f"{w}-{n}") for w in range(6) for n in range(25))


def test_a_record_has_every_key_whatever_the_host_returned():
    one = records.record({"verdict": "dirty", "changed": True, "invocation": {"secret": 1}}, "a")
    assert list(one) == RECORD_KEYS
    assert (one["host"], one["verdict"], one["schema"]) == ("a", "dirty", 1)


def test_the_inventory_name_of_a_host_replaces_its_own():
    assert records.record({"host": "ip-10-0-0-1", "verdict": "clean"}, "gpu01")["host"] == "gpu01"


def test_a_run_is_written_once(tmp_path):
    file = tmp_path / "r.jsonl"
    one = records.record({"run_id": "r1", "verdict": "clean"}, "a")
    other = records.record({"run_id": "r1", "verdict": "clean"}, "b")
    assert records.append(file, [one]) == [one]
    assert records.append(file, [one, other, other]) == [other]
    assert [(x["run_id"], x["host"]) for x in lines(file)] == [("r1", "a"), ("r1", "b")]


def test_what_was_written_before_a_run_began_is_searched_again_only_where_the_file_is_another_one(tmp_path):
    file = tmp_path / "r.jsonl"
    one, other = (records.record({"run_id": run_id, "verdict": "clean"}, "a") for run_id in ("r1", "r2"))
    at_first = records.Place.at_the_end_of(file)
    assert records.append(file, [one], at_first) == [one]
    later = records.Place.at_the_end_of(file)
    assert records.append(file, [one], at_first) == []
    assert records.append(file, [other], later) == [other]
    assert records.append(file, [other], later) == []
    file.rename(tmp_path / "r.jsonl.1")
    (tmp_path / "r.jsonl").write_bytes(records.line(other))
    assert records.append(file, [other], later) == [], "the file was rotated: all of the new one is searched"


def test_a_line_that_was_cut_short_stays_as_it_is_and_swallows_nothing(tmp_path):
    file = tmp_path / "r.jsonl"
    file.write_bytes(b'{"schema": 1, "run_id": "r0", "ho')
    records.append(file, [records.record({"run_id": "r1", "verdict": "clean"}, "a")])
    first, second = file.read_bytes().splitlines()
    assert first == b'{"schema": 1, "run_id": "r0", "ho'
    assert json.loads(second)["run_id"] == "r1"


def test_a_full_disk_leaves_no_half_line(tmp_path):
    file = tmp_path / "r.jsonl"
    records.append(file, [records.record({"run_id": "r1", "verdict": "clean"}, "a")])
    before = file.read_bytes()
    child = os.fork()
    if child == 0:
        # A file-size limit ends a write half-way as a full disk does.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, len(before) + 100))
        try:
            records.append(file, [records.record({"run_id": "r2", "verdict": "clean"}, "a")])
        except OSError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert file.read_bytes() == before


def test_the_newest_run_of_a_host_is_found_past_broken_lines_and_other_hosts(tmp_path):
    file = tmp_path / "r.jsonl"
    records.append(
        file, [records.record({"run_id": f"r{n}", "verdict": "clean"}, "a" if n % 2 else "b") for n in range(9)]
    )
    quoting = records.record({"run_id": "q", "verdict": "dirty", "reason": 'it said "host": "a", once'}, "c")
    nested = records.record({"run_id": "n", "verdict": "dirty", "killed": [{"host": "a", "pid": 1}]}, "c")
    records.append(file, [quoting, nested])
    with file.open("a") as opened:
        opened.write('{"schema": 1, "run_id": "broken", "host": "a", \n')
    assert records.last_recorded_run(file, "a") == "r7"
    assert records.last_recorded_run(file, "b") == "r8"
    assert records.last_recorded_run(file, "a.example") == ""


@pytest.mark.parametrize("content", [None, b""])
def test_without_records_there_is_no_newest_run(tmp_path, content):
    file = tmp_path / "r.jsonl"
    if content is not None:
        file.write_bytes(content)
    assert records.last_recorded_run(file, "a") == ""


def test_run_ids_sort_by_time_and_are_never_the_same():
    ids = [records.new_run_id(now=1_800_000_000.0 + n / 100) for n in range(200)]
    assert ids == sorted(ids)
    assert len({records.new_run_id(now=1_800_000_000.0) for _ in range(200)}) == 200
    assert ids[0].startswith("20270115T080000.000Z-")


def test_records_can_be_read_by_others_and_written_by_their_owner_alone(tmp_path):
    file = tmp_path / "r.jsonl"
    old = os.umask(0)
    try:
        records.append(file, [records.record({"run_id": "r", "verdict": "clean"}, "a")])
    finally:
        os.umask(old)
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


def test_gpu_artifacts_chooses_another_folder():
    assert records.artifacts_folder({"GPU_ARTIFACTS": "/srv/records"}) == Path("/srv/records")
    assert records.artifacts_folder({}) == records.REPOSITORY / "artifacts"
