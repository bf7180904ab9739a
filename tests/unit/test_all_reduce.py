"""The deadline over a functional all-reduce, with a program that plays the ranks' phases."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from gpu_host import all_reduce
from gpu_host.procfs import Proc

# What a rank says and does, by environment: RANK=1 hangs in HANG_IN, gives a wrong sum or dies.
PLAYED = """
import os, sys, time
me = os.environ['RANK'] == os.environ.get('BAD_RANK', 'none')
for phase in ('import', 'rendezvous', 'first', 'sizes'):
    print(phase, flush=True)
    cured = os.environ.get('NCCL_P2P_DISABLE') == os.environ.get('CURED_BY', 'nothing')
    if me and os.environ.get('HANG_IN') == phase and not cured:
        time.sleep(60)
    if me and os.environ.get('DIE_IN') == phase:
        print('RuntimeError: CUDA error: out of memory', file=sys.stderr)
        sys.exit(1)
if me and os.environ.get('WRONG'):
    print('wrong 16 3', flush=True)
    sys.exit(3)
print('took 16 0.00%d' % (int(os.environ['RANK']) + 1), flush=True)
print('done', flush=True)
"""


@pytest.fixture(autouse=True)
def played(monkeypatch):
    monkeypatch.setattr(all_reduce, "PROGRAM", PLAYED)


def run(seconds: float = 20, **environment: str) -> dict:
    return all_reduce.run(sys.executable, ["GPU-a", "GPU-b", "GPU-c"], environment, seconds)


def test_ranks_that_finish_are_ok_and_the_slowest_counts():
    answer = run()
    assert (answer["verdict"], answer["phases"]) == ("ok", ["done"] * 3)
    assert answer["milliseconds"] == {"16": 3.0}


def test_a_rank_that_hangs_in_the_first_collective_is_named_within_the_deadline_and_ended():
    started = time.monotonic()
    answer = run(seconds=2, BAD_RANK="1", HANG_IN="first")
    assert time.monotonic() - started < 6
    assert answer["verdict"] == "hangs"
    assert answer["detail"] == "After 2 s rank 1 of 3 had not finished (phase first)."
    left = [p.pid for p in Proc().snapshot().values() if "BAD_RANK" in str(p.argv) or PLAYED in p.argv]
    assert left == []


def test_ranks_that_never_meet_are_no_hang_of_the_links():
    answer = run(seconds=2, BAD_RANK="2", HANG_IN="rendezvous")
    assert (answer["verdict"], answer["phases"][2]) == ("impossible", "rendezvous")


def test_a_rank_that_dies_is_impossible_with_its_last_words():
    answer = run(BAD_RANK="0", DIE_IN="first")
    assert answer["verdict"] == "impossible"
    assert "Rank 0 ended with status 1 in its phase first: RuntimeError: CUDA error: out of memory." in answer["detail"]


def test_a_wrong_sum_is_no_success():
    answer = run(BAD_RANK="2", WRONG="1")
    assert (answer["verdict"], answer["detail"]) == (
        "wrong",
        "Rank 2 got a wrong sum: 3 of the values of a 16 MiB message.",
    )


def test_an_interpreter_that_is_not_there_is_said_so():
    answer = all_reduce.run("/nonexistent/python", ["GPU-a"], {}, 5)
    assert (answer["verdict"], answer["detail"]) == (
        "impossible",
        "/nonexistent/python can't be started: No such file or directory.",
    )


def test_a_hang_is_tried_again_without_peer_to_peer():
    environment = {"BAD_RANK": "1", "HANG_IN": "first", "CURED_BY": "1"}
    answer = all_reduce.diagnose(sys.executable, ["a", "b"], environment, 2)
    assert (answer["verdict"], answer["without_p2p"]) == ("hangs", "ok")


def test_what_works_is_not_tried_again():
    answer = all_reduce.diagnose(sys.executable, ["a", "b"], {}, 20)
    assert (answer["verdict"], answer["without_p2p"]) == ("ok", "")


def test_the_environment_reaches_the_ranks_and_each_sees_all_gpus(monkeypatch):
    text = """
import os
assert os.environ['CUDA_VISIBLE_DEVICES'] == 'a,b' and os.environ['WORLD_SIZE'] == '2'
assert os.environ['NCCL_ALGO'] == 'Ring'
print('done')
"""
    monkeypatch.setattr(all_reduce, "PROGRAM", text)
    assert all_reduce.run(sys.executable, ["a", "b"], {"NCCL_ALGO": "Ring"}, 20)["verdict"] == "ok"


def test_the_real_program_is_valid_python():
    assert subprocess.run([sys.executable, "-c", f"import ast; ast.parse({all_reduce.PROGRAM!r})"]).returncode == 0
