"""The report of a run in all its forms, and the comparison with an earlier one."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from gpu_benchmark import calls, charts, compare, plan, report, results, runs, settings

from . import benchmark_run

ROOT = Path(__file__).resolve().parent.parent.parent
HOST = "gpu01.example.com"
NOT_MEASURED: dict = {
    "not_measured": {"accept_length": "The server told none.", "tokens_per_joule": "NVML gives no power."},
    "accept_length": None,
    "step_ms": None,
    "gpu": {"memory_mib": {}, "watts_mean": None, "tokens_per_joule": None},
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A run with a failing variant against an earlier, faster one, and its report."""
    folder = tmp_path_factory.mktemp("artifacts")
    before = benchmark_run.make(folder, "before", slower=1 / 1.1, seed=9)
    run = benchmark_run.make(folder, "now", failing="eagle3-3-step")
    data, troubles = report.write(run, before)
    assert troubles == []
    return run, data


def texts(run: runs.Run) -> tuple[str, str]:
    return (run.folder / "report.html").read_text(), (run.folder / "report.md").read_text()


def test_every_form_is_written_and_tells_the_same_verdict(written):
    run, data = written
    sentence = data["hosts"][0]["verdict"]["sentence"]
    assert sentence.startswith("Enable with 2 steps up to concurrency 4: 1.49 times (1.4")
    html, markdown = texts(run)
    assert sentence in html and sentence in markdown
    assert sentence in json.loads((run.folder / "results.json").read_text())["hosts"][0]["verdict"]["sentence"]
    assert report.terminal(data)[-1].endswith(sentence)
    assert runs.existing("latest", run.folder.parent.parent).name == "now"


def test_the_table_has_every_column_that_was_promised(written):
    run, _ = written
    rows = list(csv.DictReader((run.folder / "results.csv").open()))
    assert [(row["variant"], row["concurrency"]) for row in rows] == [
        (name, str(number)) for name in ("baseline", "eagle3-1-step", "eagle3-2-step") for number in (1, 4, 16)
    ]
    row = next(one for one in rows if (one["variant"], one["concurrency"]) == ("eagle3-2-step", "4"))
    planted = {"accept_length": 2.36, "published_accept_length": 2.43, "step_ms": 23.5, "speed_up": 2.36 * 13.1 / 23.5,
               "tokens_per_s": 4 * 2360 / 23.5, "tokens_per_s_per_request": 2360 / 23.5, "ttft_p50_ms": 135,
               "ttft_p99_ms": 351, "itl_p50_ms": 23.5, "watts": 2140, "tokens_per_joule": 4 * 2360 / 23.5 / 2140,
               "gpu_memory_mib": 720000, "predicted_speed_up": 2.36 * 13.1 / 23.5}  # fmt: skip
    for name, value in planted.items():
        assert float(row[name]) == pytest.approx(value, rel=0.05), name
    assert (row["nccl_profile"], row["state"], row["steps"]) == ("latency", "faster", "2")
    assert float(row["speed_up_low"]) < float(row["speed_up"]) < float(row["speed_up_high"])
    assert row["same_texts"] == "True"
    html, markdown = texts(run)
    assert "| ▲ 1.31 (1.2" in markdown and "| ▼ 0.81 (0.8" in markdown and "Measured: mixed, 256 tokens" in markdown
    for shown in ("2.36 (2.43)", "23.6", "1.31 (1.2", "135 / 35", "2 140", "0.187", "latency"):
        assert shown in html and shown in markdown, shown


def test_a_variant_that_failed_is_there_with_its_cause(written):
    run, data = written
    for text in (*texts(run), "\n".join(report.terminal(data))):
        assert "eagle3-3-step was not measured: The server ran out of GPU memory" in text
    assert "torch.OutOfMemoryError: CUDA out of memory." in texts(run)[0]
    assert "rounds 1, 2, 3" in texts(run)[0] and "never started" in texts(run)[0]


def test_the_commands_environments_and_versions_are_there_without_secrets(written):
    run, _ = written
    for text in texts(run):
        assert "--speculative-num-steps 2" in text and "bench_serving --base-url" in text
        assert "sglang 0.5.23" in text and "580.95.05" in text and "NCCL_PROTO=LL" in text


def test_a_regression_is_marked_only_beyond_the_interval(written, tmp_path):
    run, data = written
    rows = data["hosts"][0]["comparison"]["rows"]
    assert {row["state"] for row in rows} == {"regression"} and len(rows) == 9
    assert "regression" in texts(run)[0] and "**regression**" in texts(run)[1]
    assert any("REGRESSION against before: eagle3-2-step at 4, 0.9" in line for line in report.terminal(data))
    same = benchmark_run.make(tmp_path, "same", seed=21)
    other = results.build(benchmark_run.make(tmp_path, "again", seed=22), same)["hosts"][0]["comparison"]
    assert {row["state"] for row in other["rows"]} == {"same"}
    faster = results.build(benchmark_run.make(tmp_path, "faster", seed=23, slower=0.9), same)["hosts"][0]["comparison"]
    assert {row["state"] for row in faster["rows"]} == {"improvement"}


def test_a_comparison_says_what_else_differs(tmp_path):
    old = benchmark_run.make(tmp_path, "old", data={"versions": {"sglang": "0.5.17"}})
    new = benchmark_run.make(tmp_path, "new", data={"prompt_set": {"sha256": "other"}})
    found = compare.hosts(new, old, "gpu01.example.com", 0.95)
    assert found["remarks"] == [
        "sglang was 0.5.17 and is 0.5.23.",
        "The prompts differ, so accept lengths and times may too.",
    ]
    assert compare.hosts(new, old, "gpu09", 0.95)["remarks"] == ["Run old has no host gpu09."]


def test_runs_that_have_little_or_nothing_in_common_say_so_instead_of_no_regression(tmp_path):
    old = benchmark_run.make(tmp_path, "old", given={"output_lengths": [64]})
    data = results.build(benchmark_run.make(tmp_path, "new"), old)
    lines = " ".join(report.terminal(data))
    assert "Nothing can be compared with old: Only this run has the loads c1-o256-mixed" in lines
    assert "No regression" not in lines
    both = benchmark_run.make(tmp_path, "both", given={"output_lengths": [64, 256]}, slower=1.5)
    data = results.build(both, old)
    assert "Only this run has the loads" in data["hosts"][0]["comparison"]["remarks"][0]
    assert "REGRESSION against old: baseline at 1 (c1-o64-mixed), 0.6" in " ".join(report.terminal(data))
    once = results.build(benchmark_run.make(tmp_path, "once", rounds=1), benchmark_run.make(tmp_path, "was", rounds=1))
    assert "12 of 12 figures rest on one round and tell nothing" in " ".join(report.terminal(once))


def test_a_comparison_tells_of_another_way_of_asking(tmp_path):
    old, new = benchmark_run.make(tmp_path, "old"), benchmark_run.make(tmp_path, "new")
    new.write_plan(HOST, {**(new.plan(HOST) or {}), "asked": {"serving_benchmark_temperature": 0.7}})
    assert compare.hosts(new, old, HOST, 0.95)["remarks"] == ["serving_benchmark_temperature differs."]


def test_texts_that_differ_and_accept_lengths_from_the_server_itself_are_remarked(tmp_path):
    run = benchmark_run.make(tmp_path, "odd", data={"accept_length_source": "log"})
    for one in run.measurements(HOST):
        if (one.variant, one.data["concurrency"]) == ("eagle3-2-step", 4):
            run.write_measurement(HOST, replace(one, data={**one.data, "output_sha256": "other"}))
    remarks = " ".join(results.build(run)["hosts"][0]["remarks"])
    assert "eagle3-2-step answers other texts than baseline at 4 requests at a time." in remarks
    assert "The accept length of eagle3-1-step, eagle3-2-step, eagle3-3-step is from the server's log" in remarks


def test_an_open_verdict_says_what_to_type(tmp_path):
    data = results.build(benchmark_run.make(tmp_path, "short", rounds=1, given={"rounds": 1, "max_rounds": 1}))
    assert "To go on: -e benchmark_run=short -e benchmark_max_rounds=3." in data["hosts"][0]["verdict"]["notes"]


def test_a_cure_that_the_cause_tells_already_is_not_told_twice(tmp_path):
    run = benchmark_run.make(tmp_path, "failing", rounds=1)
    run.write_failure(HOST, runs.Failure("baseline", 1, "Out of memory. Lower it. Evidence: /x", "Lower it.", log="/x"))
    report.write(run)
    html, markdown = texts(run)
    assert html.count("Lower it.") == markdown.count("Lower it.") and "Log and evidence" not in html
    assert html.count("Out of memory. Lower it. Evidence: /x") == html.count("Lower it.")


def test_one_round_against_one_round_is_never_a_regression(tmp_path):
    old, new = benchmark_run.make(tmp_path, "old", rounds=1), benchmark_run.make(tmp_path, "new", rounds=1, slower=1.5)
    assert {row["state"] for row in compare.hosts(new, old, "gpu01.example.com", 0.95)["rows"]} == {"unknown"}


def test_what_can_not_be_measured_is_said_so_and_never_0(tmp_path):
    run = benchmark_run.make(tmp_path, "bare", data=NOT_MEASURED)
    data, _ = report.write(run)
    row = next(row for row in data["hosts"][0]["rows"] if row["variant"] == "eagle3-2-step")
    assert (row["accept_length"], row["step_ms"], row["watts"], row["tokens_per_joule"]) == (None, None, None, None)
    html, markdown = texts(run)
    assert html.count("not measurable") > 20 and markdown.count("not measurable") > 20
    for text in (html, markdown):
        assert text.count("Not measurable: accept length. The server told none.") == 1
    assert "Not measurable here: accept length, step time and baseline's step time." in html.replace("&#39;", "'")
    assert html.count("<figure>") == 3  # no accept length, no energy
    line = next(csv.DictReader((run.folder / "results.csv").open()))
    assert line["accept_length"] == "" and line["watts"] == ""
    assert "Enable with 2 steps" in html  # the throughput decides


def test_of_a_server_over_several_hosts_all_are_named_and_the_power_of_one_is_not_that_of_all(tmp_path):
    run = benchmark_run.make(tmp_path, "pair")
    names = ["gpu01.example.com", "gpu02.example.com"]
    run.write_plan(names[0], {**(run.plan(names[0]) or {}), "nodes": names})
    data, _ = report.write(run)
    for text in (*texts(run), "\n".join(report.terminal(data))):
        assert "gpu01.example.com, gpu02.example.com" in text
    row = data["hosts"][0]["rows"][0]
    assert (row["watts"], row["tokens_per_joule"], row["gpu_memory_mib"]) == (None, None, None)
    why = "Not measurable: power. Memory and power are read on gpu01.example.com alone, and the server's GPUs are on 2"
    assert texts(run)[0].replace("&#39;", "'").count(why) == 1


def test_a_simulated_host_is_called_simulated(tmp_path):
    run = benchmark_run.make(tmp_path, "demo", data={"versions": {"driver": "580.95.05-simulated"}})
    data, _ = report.write(run)
    assert data["hosts"][0]["verdict"]["sentence"].startswith("SIMULATED: Enable")


def test_a_run_without_a_measurement_gets_a_report_that_says_so(tmp_path):
    run = benchmark_run.make(tmp_path, "empty", rounds=0)
    data, _ = report.write(run)
    assert data["hosts"][0]["verdict"]["kind"] == "no_result"
    assert "There is no result" in texts(run)[0]
    assert "There is no result" in report.terminal(data)[-1]


def test_several_hosts_and_loads_are_told_apart(tmp_path):
    given = {"output_lengths": [64, 256]}
    benchmark_run.make(tmp_path, "both", host="a", given=given)
    run = benchmark_run.make(tmp_path, "both", host="b", given=given, seed=5)
    data, _ = report.write(run)
    html, markdown = texts(run)
    assert [host["host"] for host in data["hosts"]] == ["a", "b"]
    assert html.count("<h2>") == 2 and markdown.count("### mixed, 64 tokens") == 2
    names = {path.name for path in (run.folder / "charts").glob("*.png")}
    assert {"a-mixed-o64-speed-up.png", "b-mixed-o256-speed-up.png"} <= names
    assert len(names) == 2 * 2 * 5


def test_a_clock_that_jumped_is_remarked(tmp_path):
    run = benchmark_run.make(tmp_path, "jump", rounds=1, data={"clock_jump_s": -3600.0, "problems": ["Odd."]})
    remarks = results.build(run)["hosts"][0]["remarks"]
    assert any("clock jumped" in one and "(36 measurements)" in one for one in remarks)
    assert "Odd. (36 measurements)" in remarks


def test_the_page_is_one_file_and_asks_for_nothing(written):
    html, _ = texts(written[0])
    assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', html)
    assert not re.findall(r"url\((?!#)", html) and "<script" not in html and "@import" not in html
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', html)) | set(re.findall(r"url\(#([^)]+)\)", html)) <= set(ids)


def test_the_charts_are_legible_in_grey():
    """Each variant has a marker, a line and a hatch of its own."""
    styles = [charts._style(number) for number in range(8)]
    for part in ("marker", "line", "hatch", "colour"):
        assert len({str(getattr(one, part)) for one in styles}) == 8


def test_the_charts_are_pictures_with_a_text_for_those_who_do_not_see_them(written):
    run, data = written
    drawn = charts.draw(data["hosts"][0])
    assert [one.title for one in drawn] == ["Speed-up with its interval", "Throughput",
                                            "Accept length, and what it has to be", "Time to the first token",
                                            "Energy"]  # fmt: skip
    for one in drawn:
        assert (run.folder / "charts" / f"{one.name}.png").read_bytes().startswith(b"\x89PNG")
        assert 'role="img" aria-label="' in one.svg and one.svg.startswith("<svg")
    assert "eagle3-2-step at 16: 2.36, needed 2.9" in drawn[2].text


def test_without_matplotlib_everything_but_the_charts_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = benchmark_run.make(tmp_path, "plain")
    _, troubles = report.write(run)
    assert troubles == ["The report has no charts, since matplotlib is not installed: pip install -r requirements.txt"]
    assert "Enable with 2 steps" in texts(run)[0] and "<figure>" not in texts(run)[0]


def test_the_module_returns_the_verdict_and_check_mode_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("GPU_ARTIFACTS", str(tmp_path))
    run = benchmark_run.make(tmp_path, "now", given={"compare_to": "before"})
    context = calls.Context(ROOT, tmp_path, "h", 1.8e9, plan.Clock("b", 0.0), check_mode=True)
    answer = calls.report({"run": "now", "compare_to": ""}, context)
    assert answer["failed"] and "There is no benchmark run before" in answer["msg"]
    benchmark_run.make(tmp_path, "before", seed=3)
    answer = calls.report({"run": "now", "compare_to": ""}, context)
    assert not (run.folder / "report.html").exists() and answer["report"] == ""
    assert answer["verdicts"]["gpu01.example.com"]["up_to_concurrency"] == 4
    assert answer["verdicts"]["gpu01.example.com"]["kind"] == "enable"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "not measurable"), (0, "0"), (0.04261, "0.0426"), (9.999, "10.00"), (12.345, "12.3"), (12345.6, "12 346")],
)
def test_numbers_are_shown_with_three_digits(value, shown):
    assert report.number(value) == shown


def test_the_documentation_lists_every_variable_as_it_is():
    document = ROOT / "docs/benchmark.md"
    assert document.read_text() == settings.updated(document.read_text()), "run: make docs"
    done = subprocess.run(
        [sys.executable, "-c", "import gpu_benchmark.settings as s; print(len(s.SETTINGS))"],
        env={"PYTHONPATH": str(ROOT / "plugin_utils")}, capture_output=True, text=True,
    )  # fmt: skip
    assert int(done.stdout) == len(settings.SETTINGS)


def test_the_arithmetic_takes_its_figures_from_within_the_rounds(tmp_path):
    """All is twice as slow in round 2, and the variant has a round of its own in round 3: neither changes the ratio."""
    run = benchmark_run.make(tmp_path, "odd", rounds=2)
    host, slower = "gpu01.example.com", {1: 1.0, 2: 2.0}
    for one in run.measurements(host):
        data = {**one.data, "step_ms": one.data["step_ms"] * slower[one.round],
                "output_tokens_per_s": one.data["output_tokens_per_s"] / slower[one.round]}  # fmt: skip
        run.write_measurement(host, runs.Measurement(one.variant, one.round, one.cell, one.repeat, data))
    extra = next(one for one in run.measurements(host) if one.variant == "eagle3-2-step")
    data = {**extra.data, "step_ms": 900.0}
    run.write_measurement(host, runs.Measurement(extra.variant, 3, extra.cell, 1, data))
    found = [one for one in results.build(run)["hosts"][0]["explanations"] if one["variant"] == "eagle3-2-step"]
    ratios = {one["concurrency"]: one["predicted_decode"] for one in found}
    assert ratios == {number: pytest.approx(2.36 * base / step, rel=0.02) for number, base, step in
                      ((1, 12.0, 18.9), (4, 13.1, 23.5), (16, 17.5, 51.0))}  # fmt: skip
