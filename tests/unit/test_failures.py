"""The failure catalogue and what reads it: data/failures.yml, gpu_control.failures, gpu_control.score."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest
import yaml
from gpu_control import failures, score
from gpu_host import startup_phases

from . import sglang_wheel

ROOT = Path(__file__).resolve().parent.parent.parent
RECORDED = ROOT / "tests/recorded"
ENTRIES = failures.load().entries
BY_ID = {entry.id: entry for entry in ENTRIES}
LABELS = {
    file.parent / name: label
    for file in sorted(RECORDED.glob("*/labels.yml"))
    for name, label in yaml.safe_load(file.read_text()).items()
}
OUTCOMES = ("stopped-on-request", "killed-from-outside")
# A log that tells of no failure up to the moment when somebody stopped or killed its server.
ENDED_FROM_OUTSIDE = [log for log, label in LABELS.items() if label["is"] in OUTCOMES]
# Healthy logs that hold what looks like a failure (of second-start-is-healthy the first start did fail).
TEMPTING = [log for log, label in LABELS.items() if label["is"] == failures.HEALTHY and "second" not in log.stem]
FAILED = [
    log
    for log, label in LABELS.items()
    if label["is"] not in (*OUTCOMES, failures.HEALTHY) and log.parent.name in ("cpu", "gpu")
]


def name(log: Path) -> str:
    return f"{log.parent.name}/{log.stem}"


def diagnosed(text: str, label: dict) -> failures.Diagnosis:
    return failures.diagnose(text, label.get("exit_status"), stuck=label.get("stuck", False))


# ---------------------------------------------------------------- the catalogue as data


def test_the_catalogue_has_at_least_forty_entries_each_with_its_own_id():
    assert len(ENTRIES) >= 40
    assert len(BY_ID) == len(ENTRIES)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)
def test_the_example_of_an_entry_is_diagnosed_as_that_entry(entry):
    assert entry.examples
    for example in entry.examples:
        found = diagnosed(example["log"], example)
        assert found.id == entry.id, found


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)
def test_cause_and_cure_of_an_entry_are_one_sentence_each_with_every_name_filled_in(entry):
    found = diagnosed(entry.examples[0]["log"], entry.examples[0])
    for sentence in (found.cause, found.cure):
        assert sentence.endswith(".") and not re.search(r"\. [A-Z]", sentence), sentence
        assert sentence[0].isupper() or sentence.startswith(("torch", "flashinfer", "/dev/shm")), sentence
        assert not re.search(r"\{\w+\}", sentence), sentence


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)
def test_an_entry_names_where_it_comes_from(entry):
    source = entry.source
    assert set(source) <= {"recorded", "sglang", "message", "thread"} and set(source) - {"message"}
    if "recorded" in source:
        log = RECORDED / source["recorded"]
        found = diagnosed(log.read_text(), LABELS[log])
        assert entry.id in (found.id, *found.also)
    if "thread" in source:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", source["thread"])
    if "sglang" in source:
        assert "message" in source


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if "sglang" in entry.source], ids=lambda entry: entry.id)
def test_a_message_said_to_be_sglangs_stands_on_that_line_of_the_pinned_wheel(entry):
    wheel = sglang_wheel.wheel()
    if isinstance(wheel, str):
        pytest.skip(wheel)
    version, _, place = entry.source["sglang"].partition(" ")
    file, _, line = place.rpartition(":")
    assert version == sglang_wheel.PINNED
    with zipfile.ZipFile(wheel) as archive:
        there = [text for first, last, text in sglang_wheel.texts(archive, file) if first <= int(line) <= last]
    assert any(entry.source["message"] in text for text in there), there


def test_messages_of_sglang_are_matched_by_the_patterns_that_stand_for_them():
    """The message with something filled in is what the pattern must find (but for what torch or NCCL adds)."""
    for entry in ENTRIES:
        if message := entry.source.get("message"):
            line = re.sub(r"\{\w*\}", "7", message).split("\n")[0]
            line = {
                "capture-out-of-memory": f"{line} CUDA out of memory",
                "context-length-too-long": line.replace("Warning: 7", "User-specified"),
                "gpu-memory-unbalanced": f"RuntimeError: {line}",
                "kernel-package-too-old": f"sglang-kernel {line[2:]} ",
                "flashinfer-too-old": f"flashinfer_python {line[2:]} ",
                "kernel-package-not-installed": f"sglang-kernel {line[2:]}",
                "architecture-unknown": line.replace("7", "['A']", 1),
                "scheduler-killed-in-start": line.replace("code: 7", "code: -9"),
                "tensor-parallel-size": f"AssertionError: {line}",
            }.get(entry.id, line)
            assert entry.pattern is not None and entry.pattern.search(line), (entry.id, line)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"pattern": "("}, "is no pattern"),
        ({"cure": ""}, "cure is missing"),
        ({"level": "guess"}, "level is 'guess', must be one of cause, symptom, outcome"),
        ({"phase": "lunch"}, "phase 'lunch' is none of a start"),
        ({"patern": "x"}, "unknown field patern"),
        ({"pattern": None}, "neither a pattern nor an exit_status"),
        ({"id": "healthy"}, "taken twice or reserved: healthy"),
    ],
)
def test_a_faulty_catalogue_is_refused_with_the_entry_named(tmp_path, change, complaint):
    entry = {"id": "a", "phase": "any", "pattern": "x", "cause": "C.", "cure": "D.", "source": {"thread": "a/b#1"}}
    entry.update(change)
    file = tmp_path / "failures.yml"
    file.write_text(yaml.safe_dump({"ignored": [], "failures": [entry]}))
    with pytest.raises(failures.CatalogueError, match=re.escape(complaint)):
        failures.load(file)


# ---------------------------------------------------------------- recorded and quoted logs


@pytest.mark.parametrize("log", LABELS, ids=name)
def test_a_recorded_log_is_called_what_it_is(log):
    found = diagnosed(log.read_text(), LABELS[log])
    assert found.id == LABELS[log]["is"], found


def test_every_recorded_log_has_a_label():
    assert sorted(RECORDED.glob("*/*.log")) == sorted(LABELS)


@pytest.mark.parametrize("log", ENDED_FROM_OUTSIDE, ids=name)
def test_a_healthy_start_is_healthy_wherever_its_log_ends(log):
    lines = log.read_text().splitlines()
    end = next((number for number, line in enumerate(lines) if "SIGTERM received" in line), len(lines))
    wrong = {
        found.id
        for cut in range(0, end + 1, 3)
        if (found := failures.diagnose("\n".join(lines[:cut]))).id != failures.HEALTHY
    }
    assert not wrong


@pytest.mark.parametrize("log", TEMPTING, ids=name)
def test_what_looks_like_a_failure_and_is_none_is_called_healthy_wherever_the_log_ends(log):
    lines = log.read_text().splitlines()
    # A traceback of a request is told from one of the server by what comes after it.
    asgi = next((number for number, line in enumerate(lines) if "Exception in ASGI" in line), len(lines))
    for cut in range(asgi):
        found = failures.diagnose("\n".join(lines[:cut]))
        assert found.id == failures.HEALTHY, (cut, found)


@pytest.mark.parametrize("log", FAILED, ids=name)
@pytest.mark.parametrize(
    "frame",
    [
        "Nov 29 16:46:32 gpu01 sglang[4242]: {}",
        "2026-11-29T16:46:32.123456Z {}",
        "2026-11-29T16:46:32+0000 gpu01 python3[77]: {}",
        "sglang-1  | {}",
        "\x1b[33m{}\x1b[0m",
        "{}\r",
    ],
    ids=["journal", "docker", "journal-iso", "compose", "colour", "cr"],
)
def test_what_a_supervisor_writes_before_each_line_changes_nothing(log, frame):
    framed = "\n".join(frame.format(line) for line in log.read_text().splitlines())
    assert diagnosed(framed, LABELS[log]).id == LABELS[log]["is"]


@pytest.mark.parametrize("log", FAILED, ids=name)
def test_the_tail_of_a_failed_log_is_never_called_something_else(log):
    """Collected is a tail; it may hold too little for a name, never enough for a wrong one."""
    lines, truth = log.read_text().splitlines(), diagnosed(log.read_text(), LABELS[log])
    for count in (1, 2, 5, 10, 20, 40, 80):
        found = diagnosed("\n".join(lines[-count:]), LABELS[log])
        assert found.id in (truth.id, *truth.also, failures.UNKNOWN, failures.HEALTHY), (count, found)


def test_an_earlier_start_in_the_same_log_explains_nothing():
    ready = (RECORDED / "gpu/baseline-cold-jit-ready.log").read_text()
    ready = ready[: ready.index("SIGTERM received")].rpartition("\n")[0]
    for log in FAILED:
        failed = log.read_text()
        assert failures.diagnose(failed + "\n" + ready).id == failures.HEALTHY, log
        assert diagnosed(ready + "\n" + failed, LABELS[log]).id == LABELS[log]["is"], log


# ---------------------------------------------------------------- the answer


def test_an_unknown_failure_names_the_line_to_read_first_its_rank_and_phase():
    found = failures.diagnose((RECORDED / "made/unknown-exception.log").read_text())
    assert found.id == failures.UNKNOWN and not found.confidence and not found.cure
    assert found.evidence_line == "RuntimeError: The frobnication table of layer 17 is not monotonic"
    assert (found.rank, found.phase) == ("TP2", "capture")
    assert found.sentence.endswith(found.evidence_line)


def test_an_end_without_a_word_of_failure_names_the_last_line_said():
    found = failures.diagnose("[2026-01-01 00:00:00] Load weight begin. avail mem=1 GB\nno such flag\n\n", 1)
    assert (found.id, found.evidence_line, found.phase) == (failures.UNKNOWN, "no such flag", "weights")


def test_a_headline_alone_is_no_cause():
    found = failures.diagnose((RECORDED / "made/unknown-inside-common-ops.log").read_text())
    assert found.id == failures.UNKNOWN
    assert found.evidence_line == "[sgl_kernel] CRITICAL: Could not load any common_ops library!"


def test_the_rank_that_failed_first_decides_not_those_that_lost_it():
    found = failures.diagnose((RECORDED / "made/one-rank-out-of-memory-others-disconnected.log").read_text())
    assert (found.id, found.rank, found.confidence) == ("capture-out-of-memory", "TP3", "certain")
    assert "peer-rank-died" in found.also


def test_line_number_and_evidence_point_into_the_whole_log():
    log = RECORDED / "made/second-start-failed.log"
    found = failures.diagnose(log.read_text())
    assert log.read_text().splitlines()[found.line_number - 1] == found.evidence_line
    assert found.line_number > 300


def test_an_api_key_is_not_shown_as_evidence():
    log = "[2026-11-29 17:01:25] server_args={'api_key': 'hunter2', 'speculative_algorithm': 'EAGLE'}\n"
    log += "[2026-11-29 17:01:41] Load weight end. elapsed=0.01 s, type=LlamaForCausalLMEagle3, avail mem=21.52 GB\n"
    found = failures.diagnose(log)
    assert found.id == "eagle-flag-with-eagle3-drafter"
    assert "hunter2" not in found.evidence_line and "'api_key': '***'" in found.evidence_line


def test_a_kill_explains_a_death_only_where_the_log_shows_no_failure_of_its_own():
    text = (RECORDED / "made/unknown-exception.log").read_text()
    assert failures.diagnose(text, -9).id == failures.UNKNOWN
    assert failures.diagnose("", -9).id == "killed-from-outside"
    assert failures.diagnose("", 137).id == "killed-from-outside"
    assert failures.diagnose("", 1).id == failures.UNKNOWN
    assert failures.diagnose("", 0).id == failures.HEALTHY


def test_a_long_log_is_diagnosed_within_two_seconds():
    import time

    lines = (RECORDED / "gpu/eagle3-missing-module-in-draft.log").read_text().splitlines()
    text = "\n".join(lines[:-30] + [line for line in lines[:-30] if "Capturing" in line] * 100 + lines[-30:])
    begin = time.process_time()
    assert failures.diagnose(text).id == "deep-gemm-missing"
    assert time.process_time() - begin < 2


# ---------------------------------------------------------------- phases


@pytest.mark.parametrize(
    ("log", "phase"),
    [
        ("cpu/kernel-package-missing", "import"),
        ("gpu/main-killed-at-weight-load", "weights"),
        ("gpu/main-killed-in-nvcc-jit", "capture"),
        ("gpu/main-killed-1s-after-spawn-orphans", "scheduler_ready"),
        ("gpu/main-killed-when-ready", "ready"),
        ("gpu/scheduler-stopped-hang", "drain"),
        ("gpu/scheduler-killed", "stopped"),
    ],
)
def test_the_phase_of_a_log_is_how_far_its_start_came(log, phase):
    assert failures.phase_of((RECORDED / f"{log}.log").read_text()) == phase


def test_phases_never_go_back_while_a_log_grows():
    order = {phase: number for number, phase in enumerate(startup_phases.PHASES)}
    lines = (RECORDED / "gpu/eagle3-ready-then-sigterm.log").read_text().splitlines()
    seen = [startup_phases.phase_of("\n".join(lines[:count])) for count in range(len(lines) + 1)]
    assert [order[phase] for phase in seen] == sorted(order[phase] for phase in seen)
    assert set(seen) == set(startup_phases.PHASES)


def test_a_host_of_later_ranks_is_ready_at_the_line_that_sglang_prints_there_alone():
    line = "[2026-11-29 17:35:00] Dummy health check server started in background thread at 127.0.0.1:30000"
    log = (
        "[2026-11-29 17:34:00] server_args=ServerArgs()\n[2026-11-29 17:34:10 TP4] Load weight begin. avail mem=9 GB\n"
    )
    assert failures.phase_of(log) == "weights" and failures.phase_of(f"{log}{line}\n") == "ready"


def test_the_slowest_rank_sets_the_phase_and_is_named():
    progress = startup_phases.progress_of((RECORDED / "made/stuck-one-rank-behind.log").read_text())
    assert progress.phase == "weights"
    assert progress.behind == ("TP5",)


# ---------------------------------------------------------------- make score


def test_the_score_over_the_recorded_logs_is_perfect():
    result = score.score(RECORDED)
    assert (result.precision, result.recall) == (1.0, 1.0), result.report()
    assert len(result.labelled) == len(LABELS)
    assert not any(case.abstained for case in result.cases)


def test_no_log_that_was_held_out_gets_a_wrong_name():
    result = score.score(ROOT / "tests/held-out")
    assert len(result.labelled) == 30 and result.precision == 1.0 and result.recall == 1.0


def test_the_score_tells_wrong_names_from_abstentions(tmp_path, capsys):
    (tmp_path / "a.log").write_text("ModuleNotFoundError: No module named 'sgl_kernel'\n")
    (tmp_path / "b.log").write_text("RuntimeError: never seen before\n")
    (tmp_path / "c.log").write_text("[2026-01-01 00:00:00] Load weight begin. avail mem=1 GB\n")
    (tmp_path / "d.log").write_text("RuntimeError: No CUDA GPUs are available\n")
    (tmp_path / "e.log").write_text("OSError: [Errno 24] Too many open files\n")
    (tmp_path / "labels.yml").write_text(
        "a.log: { is: kernel-package-missing }\nb.log: { is: shm-full }\n"
        "c.log: { is: healthy }\nd.log: { is: gpu-lost }\n"
    )
    assert score.main([str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "4 logs with a label: precision 0.500, recall 0.333, abstentions 1, wrong 1" in told
    assert f"wrong      {tmp_path}/d.log: is gpu-lost, called no-gpu-seen" in told
    assert f"abstained  {tmp_path}/b.log: is shm-full, called unknown" in told
    assert f"no label   {tmp_path}/e.log: too-many-open-files" in told


@pytest.mark.parametrize(
    ("labels", "complaint"),
    [("a.log: { is: nonsense }", "needs `is:` with an entry's id"), ("z.log: { is: healthy }", "there is no z.log")],
)
def test_a_label_that_can_t_be_used_is_refused_in_one_sentence(tmp_path, capsys, labels, complaint):
    (tmp_path / "a.log").write_text("")
    (tmp_path / "labels.yml").write_text(labels)
    assert score.main([str(tmp_path)]) == 2
    assert complaint in capsys.readouterr().err


def test_a_folder_that_is_none_is_refused_in_one_sentence(tmp_path, capsys):
    assert score.main([str(tmp_path / "nowhere")]) == 2
    assert "is no folder: give LOGS=folder" in capsys.readouterr().err
