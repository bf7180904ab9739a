"""The history of resets: read whatever the files hold, and told for people and for Prometheus."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpu_control import history, history_report, records
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parent.parent.parent
CASES = yaml.safe_load((Path(__file__).parent / "cases/history.yml").read_text())
VERDICTS = {"c": "clean", "d": "dirty", "u": "unreachable", "?": "unknown", "s": "skipped"}
DAY = 86400.0
NOON = 1_790_000_000.0


def record(number: int, host: str = "gpu01", verdict: str = "clean", **more: Any) -> dict[str, Any]:
    """A record as a reset writes it, one a day."""
    extra = {key: more.pop(key) for key in [*more] if key not in records.KEYS}
    started = records.timestamp(NOON + number * DAY)
    return records.record({"run_id": f"r{number}", "started": started, "verdict": verdict, **more}, host) | extra


def gpu(index: int, verdict: str = "free", uuid: str = "") -> dict[str, Any]:
    return {
        "index": index,
        "uuid": uuid or f"GPU-{index}",
        "verdict": verdict,
        "pci_bus_id": f"00000000:{0xC1 + index:02X}:00.0",
    }


def xid(number: int, seconds: float, pci: str = "0000:c1:00") -> dict[str, Any]:
    return {"kind": "xid", "xid": number, "seconds": seconds, "pci_bus_id": pci, "text": f"NVRM: Xid ({pci}): {number}"}


def file_of(folder: Path, *found: dict[str, Any] | str | bytes, name: str = "resets.jsonl") -> Path:
    path = folder / name
    lines = [
        records.line(one) if isinstance(one, dict) else one.encode() if isinstance(one, str) else one for one in found
    ]
    path.write_bytes(b"".join(lines))
    return path


def summary_of(folder: Path, *found: dict[str, Any] | str | bytes, **filters: Any) -> history.Summary:
    return history.summarise(history.read([file_of(folder, *found)]), history.Filters(**filters))


# ---- reading ----


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"schema": 1 "host"}\n', "no JSON at column 14"),
        ("Traceback (most recent call last):\n", "no JSON at column 1"),
        ("[1, 2]\n", "the line holds no JSON object"),
        ('{"schema": 1, "verdict": "clean", "started": "2026-01-01T00:00:00Z"}\n', "host is missing"),
        ('{"schema": 1, "host": "a", "started": "2026-01-01T00:00:00Z"}\n', "verdict is missing"),
        ('{"schema": 1, "host": "a", "verdict": "clean", "started": "yesterday"}\n', "started is 'yesterday', no time"),
        ('{"schema": 7, "what": "else"}\n', "host is missing (schema 7)"),
        (b"\xff\xfe\x00 binary\n", "no JSON"),
        (b"\0" * 300 + b"\n", "no JSON"),
        ("[" * 100_000 + "\n", "no record: nested too deep"),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_a_broken_line_is_named_with_file_and_number_and_costs_no_other(tmp_path, line, why):
    file = file_of(tmp_path, record(1), line, record(2))
    before = file.read_bytes()
    found = history.read([file])
    assert [one.run_id for one in found.resets] == ["r1", "r2"]
    (problem,) = found.problems
    assert str(problem).startswith(f"{file}, line 2: ") and why in str(problem)
    assert file.read_bytes() == before


def test_a_half_line_at_the_end_is_named_and_the_next_reset_ends_it(tmp_path):
    file = file_of(tmp_path, record(1), records.line(record(2))[:80])
    (problem,) = history.read([file]).problems
    assert problem.line == 2 and "cut short" in problem.why
    records.append(file, [record(3)])
    found = history.read([file])
    assert [one.run_id for one in found.resets] == ["r1", "r3"]
    assert [problem.line for problem in found.problems] == [2]


def test_a_line_that_is_being_written_is_waited_for(tmp_path):
    file = file_of(tmp_path, record(1))
    line = records.line(record(2))
    with file.open("ab", buffering=0) as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        writer.write(line[:50])

        def finish() -> None:
            writer.write(line[50:])
            fcntl.flock(writer, fcntl.LOCK_UN)

        timer = threading.Timer(0.2, finish)
        timer.start()
        found = history.read([file])
        timer.join()
    assert (len(found.resets), found.problems) == (2, [])


@pytest.mark.parametrize("schema", [0, 2, "3.1", None])
def test_another_schema_is_taken_for_what_it_shares_and_said(tmp_path, schema):
    found = history.read([file_of(tmp_path, record(1), record(2) | {"schema": schema, "new": {"a": [1]}})])
    assert (len(found.resets), found.problems) == (2, [])
    assert f"1 record of schema {schema!r} instead of 1" in found.notes[0]


HOSTILE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(records.KEYS), HOSTILE))
def test_whatever_the_values_are_a_line_is_taken_or_named(tmp_path_factory, values):
    folder = tmp_path_factory.mktemp("hostile")
    found = history.read([file_of(folder, record(1), record(2) | values, record(3))])
    assert found.lines == 3 and len(found.resets) + len(found.problems) >= 2
    summary = history.summarise(found)
    assert "on record" in history_report.text(summary)
    assert list(text_string_to_metric_families(history_report.metrics(summary)))
    assert "</html>" in history_report.html(summary, "now")


def test_a_run_that_is_in_a_rotated_file_as_well_counts_once(tmp_path):
    new = file_of(tmp_path, record(2), record(3))
    old = file_of(tmp_path, record(1), record(2), name="resets.jsonl.1")
    packed = tmp_path / "resets.jsonl.2.gz"
    packed.write_bytes(gzip.compress(records.line(record(0)) + b"{broken\n"))
    files = history.find_files(["resets.jsonl", "resets.jsonl.*"], tmp_path)
    assert files == [new, old, packed]
    found = history.read(files)
    assert [one.run_id for one in found.resets] == ["r0", "r1", "r2", "r3"]
    assert [(problem.file, problem.line) for problem in found.problems] == [(str(packed), 2)]


def test_a_packed_file_that_is_cut_short_gives_what_it_has_and_is_named(tmp_path):
    packed = tmp_path / "old.gz"
    whole = gzip.compress(b"".join(records.line(record(number)) for number in range(400)))
    packed.write_bytes(whole[: len(whole) // 2])
    found = history.read([file_of(tmp_path, record(1)), packed])
    assert "the rest can't be read" in found.problems[-1].why
    assert len(found.resets) >= 1


@pytest.mark.parametrize("wanted", [["resets.jsonl"], ["resets.jsonl*"], ["/nonexistent/x.jsonl"], ["."]])
def test_a_missing_history_is_one_sentence(tmp_path, wanted):
    with pytest.raises(history.HistoryError, match="There is no history in"):
        history.find_files(wanted, tmp_path)


def test_the_records_of_one_play_and_host_are_one_reset_its_hypervisors_part_included(tmp_path):
    before = record(1, "guest", "dirty", gpus=[gpu(0, "unowned_memory")], seconds={"total": 3}, play="p1")
    above = record(2, "pve", "dirty", killed=[{"pid": 9, "class": "orphan"}], play="p1", guest="guest")
    after = record(3, "guest", "clean", gpus=[gpu(0)], seconds={"total": 1}, play="p1")
    other = record(4, "guest", "clean", play="p2")
    summary = summary_of(tmp_path, before, above, after, other)
    (host,) = summary.hosts
    assert (host.host, dict(host.verdicts), host.orphans) == ("guest", {"clean": 2}, 1)
    assert host.resets[0].seconds == 4
    assert summary.gpus[0].not_free == 0


def test_a_hypervisors_part_without_a_play_ends_no_reset_of_its_guest(tmp_path):
    above = record(2, "pve", "dirty", killed=[{"pid": 9, "class": "orphan"}], guest="guest")
    (host,) = summary_of(tmp_path, record(1, "guest", "dirty"), above, record(3, "guest")).hosts
    assert (dict(host.verdicts), host.orphans, host.last.run_id) == ({"dirty": 1, "clean": 1}, 1, "r3")


# ---- what it tells ----


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_whether_a_host_gets_worse(tmp_path, case):
    letters = case["verdicts"].replace(" ", "")
    found = []
    for number, letter in enumerate(letters):
        orphans = case.get("orphans", [0] * 99)[number]
        xids = [xid(79, number * 10.0 + one) for one in range(case.get("xids", [0] * 99)[number])]
        found.append(
            record(
                number,
                verdict=VERDICTS[letter],
                killed=[{"class": "orphan"}] * orphans,
                kernel_events=xids,
                seconds={"total": case.get("seconds", [5] * 99)[number]},
            )
        )
    (host,) = summary_of(tmp_path, *found).hosts
    assert host.worse == case["worse"]


def test_an_xid_counts_once_though_the_next_reset_saw_it_too_and_belongs_to_its_gpu(tmp_path):
    gpus = [gpu(0), gpu(1)]
    first = record(1, gpus=gpus, kernel_events=[xid(79, 100.0), xid(31, 101.0, "0000:c2:00")])
    second = record(2, gpus=gpus, kernel_events=[xid(79, 100.0), xid(79, 500.0), {"kind": "hung_task"}])
    summary = summary_of(tmp_path, first, second)
    assert dict(summary.hosts[0].xids) == {79: 2, 31: 1}
    assert [dict(one.xids) for one in summary.gpus] == [{79: 2}, {31: 1}]


def test_a_gpu_is_told_by_its_uuid_and_shown_under_its_newest_number(tmp_path):
    moved = [gpu(0, "lost", "GPU-a"), gpu(1, "free", "GPU-b")]
    summary = summary_of(tmp_path, record(1, gpus=[gpu(0, "free", "GPU-b")]), record(2, verdict="dirty", gpus=moved))
    assert [(one.uuid, one.index, one.seen, one.not_free, one.last) for one in summary.gpus] == [
        ("GPU-a", 0, 1, 1, "lost"),
        ("GPU-b", 1, 2, 0, "free"),
    ]


@pytest.mark.parametrize(
    ("filters", "runs"),
    [
        ({}, ["r0", "r1", "r2", "r3", "r4", "r5"]),
        ({"newest": 1}, ["r4", "r5"]),
        ({"hosts": ("gpu-0",)}, ["r0", "r2", "r4"]),
        ({"hosts": ("gpu-*",), "newest": 2}, ["r2", "r3", "r4", "r5"]),
        ({"since": NOON + 3.5 * DAY}, ["r4", "r5"]),
    ],
    ids=str,
)
def test_filters_choose_the_resets(tmp_path, filters, runs):
    summary = summary_of(tmp_path, *[record(n, f"gpu-{n % 2}") for n in range(6)], **filters)
    assert sorted(one.run_id for host in summary.hosts for one in host.resets) == runs


@pytest.mark.parametrize(
    ("filters", "sentence"),
    [
        ({"hosts": ("gpu99", "x*")}, r"No reset of gpu99, x\* is on record in .*; there are resets of gpu01\."),
        ({"since": NOON + 99 * DAY}, r"No reset since .*Z is on record in .*; the newest is of 2026-09-2\dT"),
    ],
    ids=str,
)
def test_filters_that_leave_nothing_say_what_there_is(tmp_path, filters, sentence):
    with pytest.raises(history.HistoryError, match=sentence):
        summary_of(tmp_path, record(1), **filters)


def test_a_history_of_broken_lines_only_says_so(tmp_path):
    with pytest.raises(
        history.HistoryError, match=r"no reset on record .*\(2 of its lines can't be read, the first is"
    ):
        summary_of(tmp_path, "x\n", "y\n")


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("36h", NOON - 1.5 * DAY),
        ("7d", NOON - 7 * DAY),
        ("2w", NOON - 14 * DAY),
        ("1970-01-02", DAY),
        ("1970-01-02T01:00:00+01:00", DAY),
    ],
)
def test_a_moment_is_a_span_a_date_or_a_time(text, moment):
    assert history.since(text, NOON) == moment


@pytest.mark.parametrize("text", ["yesterday", "7", "-3d", "2026-13-01", "7 days"])
def test_what_is_no_moment_is_said(text):
    with pytest.raises(history.HistoryError, match=r"report_resets_since: .* is no time; give a span"):
        history.since(text, NOON)


def test_the_terminal_names_the_bad_hosts_first_and_every_broken_line(tmp_path):
    reason = "GPU 7 is lost: \x1b[31mNVML says\nGPU is lost"
    found = [record(1, "good"), "broken\n", record(2, "bad", "dirty", reason=reason, schedule="nightly")]
    text = history_report.text(summary_of(tmp_path, *found, hosts=("good", "bad", "gone")))
    assert text.index("bad  dirty  2026-") < text.index("Hosts that get worse:")
    assert "GPU 7 is lost: ?[31mNVML says?GPU is lost" in text and "\x1b" not in text
    assert "1 line passed over, left as they are:" in text and "resets.jsonl, line 2: no JSON" in text
    assert "No reset of gone is on record." in text
    assert "nightly: dirty" in text and "by hand: clean" in text


# ---- HTML ----


class Page(HTMLParser):
    """Elements that need something else than this file, and whether every element is closed."""

    VOID = ("meta", "br", "img", "link", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.outside: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        self.outside += [name for name, _value in attrs if name in ("src", "href") or name.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_page_needs_nothing_else_and_nothing_in_a_record_becomes_markup(tmp_path):
    evil = "<script>alert(1)</script>"
    found = [record(1, evil, "dirty", reason=evil, gpus=[gpu(0, evil, evil)], schedule=evil), record(2, "b", evil)]
    page = history_report.html(summary_of(tmp_path, *found, evil + "\n"), "2026-01-01T00:00:00Z")
    read = Page(page)
    assert read.open == [] and read.outside == []
    assert not {"script", "link", "img", "iframe"} & set(read.seen)
    assert "url(" not in page and "@import" not in page and "http" not in page
    assert 'name="viewport"' in page and "@media print" in page
    assert read.words.count(evil) >= 4


def test_the_page_has_every_host_and_every_gpu_that_was_not_free(tmp_path):
    found = [record(n, f"gpu{n:02d}", "dirty", gpus=[gpu(3, "lost", f"GPU-{n}")]) for n in range(60)]
    words = Page(history_report.html(summary_of(tmp_path, *found), "now")).words
    assert all(f"gpu{n:02d}" in words and f"GPU-{n}" in words for n in range(60))


# ---- Prometheus ----


def test_the_metrics_are_what_a_strict_reader_takes(tmp_path):
    odd = 'back\\slash "quoted"'
    found = [
        record(1, odd, "dirty", gpus=[gpu(0, "lost")], kernel_events=[xid(79, 1.0)], seconds={"total": 2.5}),
        record(2, "b", killed=[{"class": "orphan"}, {"class": "server"}]),
        "broken\n",
    ]
    text = history_report.metrics(summary_of(tmp_path, *found))
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = [(s.name, tuple(sorted(s.labels.items()))) for f in families.values() for s in f.samples]
    assert len(samples) == len(set(samples)) == sum(not line.startswith("#") for line in text.splitlines())
    assert all(family.documentation and family.type in ("counter", "gauge") for family in families.values())
    assert text.endswith("\n") and not any(sample.timestamp for f in families.values() for sample in f.samples)

    def value(name: str, **labels: str) -> float:
        return next(s.value for f in families.values() for s in f.samples if s.name == name and s.labels == labels)

    assert value("gpu_reset_resets_total", host=odd, verdict="dirty") == 1
    assert value("gpu_reset_last_verdict", host=odd, verdict="clean") == 0
    assert value("gpu_reset_last_timestamp_seconds", host="b") == NOON + 2 * DAY
    assert value("gpu_reset_last_duration_seconds", host=odd) == 2.5
    assert value("gpu_reset_orphans_total", host="b") == 1
    assert value("gpu_reset_xids_total", host=odd, xid="79") == 1
    assert value("gpu_reset_gpu_not_free_total", host=odd, gpu="0", uuid="GPU-0") == 1
    assert value("gpu_reset_history_broken_lines") == 1


# ---- the play ----


def report(folder: Path, *arguments: str, **variables: Any) -> subprocess.CompletedProcess[str]:
    inventory = folder / "hosts.yml"
    # Nobody answers there: a play that contacted a host would say so.
    unreachable = {"ansible_host": "127.0.0.1", "ansible_port": 1}
    hosts = dict.fromkeys(("gpu01", "gpu02", "never"), unreachable)
    inventory.write_text(yaml.safe_dump({"all": {"children": {"gpu_hosts": {"hosts": hosts}}}}))
    words = ["ansible-playbook", "-i", str(inventory), "playbooks/report-resets.yml", "-e", json.dumps(variables)]
    return subprocess.run(
        [*words, *arguments],
        cwd=ROOT,
        env={**os.environ, "GPU_ARTIFACTS": str(folder), "ANSIBLE_NOCOLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_play_prints_the_summary_and_writes_page_and_metrics(tmp_path):
    file = file_of(tmp_path, record(1), "broken\n", record(2, "gpu02", "dirty", reason="GPU 3 is lost"))
    before = file.read_bytes()
    done = report(tmp_path, report_resets_metrics="gpu.prom", report_resets_limit=1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gpu02  dirty" in done.stdout and "line 2: no JSON" in done.stdout
    assert "GPU 3 is lost" in (tmp_path / "resets.html").read_text()
    assert "gpu_reset_resets_total" in (tmp_path / "gpu.prom").read_text()
    assert file.read_bytes() == before


def test_check_mode_prints_and_writes_nothing(tmp_path):
    file_of(tmp_path, record(1))
    done = report(tmp_path, "--check", report_resets_metrics="gpu.prom")
    assert done.returncode == 0 and "1 reset of 1 host" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hosts.yml", "resets.jsonl"]


def test_limit_chooses_the_hosts_and_metrics_stay_whole(tmp_path):
    file_of(tmp_path, record(1), record(2, "gpu02", "dirty"))
    done = report(tmp_path, "--limit", "gpu01", report_resets_metrics="gpu.prom")
    assert done.returncode == 0, done.stdout
    assert "gpu02" not in done.stdout and "gpu02" not in (tmp_path / "resets.html").read_text()
    assert 'host="gpu02"' in (tmp_path / "gpu.prom").read_text()


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"report_resets_since": "soon"}, "report_resets_since: 'soon' is no time"),
        ({"report_resets_limit": -1}, "report_resets_limit: -1 is no number of resets"),
        ({"report_resets_recent": 1}, "report_resets_recent: 1 is too few to compare"),
        ({"report_resets_metrics": "gpu.txt"}, "does not end in .prom"),
        (
            {"report_resets_metric": "gpu.prom"},
            "There is no variable report_resets_metric; did you mean report_resets_metrics?",
        ),
        ({"report_reset_since": "7d"}, "There is no variable report_reset_since; did you mean report_resets_since?"),
        ({"report_resets_files": []}, "report_resets_files: no file is named"),
        ({"report_resets_files": ["gone.jsonl"]}, "There is no history in"),
        ({"report_resets_hosts": ["gpu99"]}, "No reset of gpu99 is on record"),
        ({"report_resets_html": "/proc/none/x.html"}, "/proc/none could not be written"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_input_is_one_sentence(tmp_path, variables, sentence):
    file_of(tmp_path, record(1))
    done = report(tmp_path, **variables)
    assert done.returncode == 2
    assert sentence in " ".join(done.stdout.split()), done.stdout
    assert not (tmp_path / "resets.html").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM")
def test_a_long_history_is_read_without_holding_it(tmp_path):
    killed = [{"pid": n, "name": "sglang::scheduler_TP0", "class": "server", "why": "x" * 60} for n in range(70)]
    lines = [
        records.line(record(n, f"gpu{n % 50}", gpus=[gpu(one) for one in range(8)], killed=killed))
        for n in range(6_000)
    ]
    file = file_of(tmp_path, *lines)
    program = (
        "import sys; from pathlib import Path; from gpu_control import history, history_report as r\n"
        "s = history.summarise(history.read([Path(sys.argv[1])])); r.text(s); r.html(s, ''); r.metrics(s)\n"
        "print(s.resets, open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    )
    words = [sys.executable, "-c", program, str(file)]
    path = os.pathsep.join(str(ROOT / name) for name in ("module_utils", "plugin_utils"))
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    resets, peak_kib = map(int, done.stdout.split())
    assert resets == 6_000 and file.stat().st_size > 60 << 20
    assert peak_kib < file.stat().st_size / 1024
