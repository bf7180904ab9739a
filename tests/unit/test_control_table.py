"""What a person reads at the end of a play."""

from __future__ import annotations

from gpu_control import records, table


def gpu(index: int, before: int | None, after: int | None, verdict: str = "free", cure: str = "") -> dict:
    return {
        "index": index,
        "uuid": f"GPU-{index}",
        "used_mib_before": before,
        "used_mib_after": after,
        "verdict": verdict,
        "cure": cure,
        "pids": [],
    }


def record(host: str, verdict: str = "clean", **values) -> dict:
    return records.record({"verdict": verdict, **values}, host)


def test_the_table_shows_each_gpu_before_and_after_with_its_cure():
    rows = table.gpu_table([record("gpu01", gpus=[gpu(0, 95123, 0), gpu(7, None, 1200, "in_use", "End pid 99.")])])
    assert rows == [
        "host   GPU  MiB before  after  verdict  cure",
        "gpu01    0      95 123      0  free",
        "gpu01    7           ?  1 200  in_use   End pid 99.",
    ]


def test_killed_and_spared_are_listed_with_why():
    killed = {
        "pid": 12,
        "name": "sglang::scheduler_TP0",
        "class": "server",
        "why": "child of 10",
        "signal": "KILL",
        "seconds": 0.21,
    }
    spared = {"pid": 1234, "name": "dcgm-exporter", "class": "protected", "why": "on the protected list"}
    assert table.host_details(record("a", killed=[killed], spared=[spared], evidence="/e")) == [
        "a: clean",
        "  killed:",
        "    12  sglang::scheduler_TP0  server: child of 10 (KILL) 0.2 s",
        "  spared:",
        "    1234  dcgm-exporter  protected: on the protected list",
        "  evidence on the host: /e",
    ]


def test_processes_alike_share_a_line():
    found = [{"pid": pid, "name": "compile_worker", "class": "server", "why": "child of 3"} for pid in (7, 8, 9)]
    assert table.processes("killed", found) == ["  killed:", "    7  compile_worker (and 2 more)  server: child of 3"]


def test_check_mode_says_would():
    details = table.host_details(
        {**record("a", "dirty", cleaned=[{"path": "/x/lock", "why": "no owner"}]), "predicted": True}
    )
    assert details == ["a: now dirty", "  would be cleaned:", "    /x/lock  no owner"]


def test_the_last_line_names_every_host_once_the_worst_first_and_what_is_simulated():
    all_of_them = [
        record("h1"),
        record("h2", "skipped"),
        record("h3", "unknown"),
        record("h4", "unreachable"),
        record("h5", "dirty"),
        record("h6", simulated=True),
    ]
    last = table.report(all_of_them).splitlines()[-1]
    assert last == "Verdicts - dirty: h5; unreachable: h4; unknown: h3; skipped: h2; clean: h1, h6 (SIMULATED)"


def test_a_reset_that_went_on_to_the_hypervisor_is_one_row_from_first_look_to_last():
    first = record("guest", "dirty", gpus=[gpu(0, 95000, 95000, "unowned_memory")], killed=[{"pid": 1}])
    last = record("guest", gpus=[gpu(0, 95000 - 1, 0)], killed=[])
    merged = table.merge([first, last])
    assert (merged["verdict"], merged["gpus"][0]["used_mib_before"], merged["gpus"][0]["used_mib_after"]) == (
        "clean",
        95000,
        0,
    )
    assert merged["killed"] == [{"pid": 1}]


def test_a_hypervisor_that_was_asked_has_no_verdict_of_its_own():
    asked = {**record("pve", "dirty"), "guest": "gpu01"}
    assert table.last_line([record("gpu01"), asked]) == "Verdicts - clean: gpu01"


def test_a_verdict_that_is_not_known_here_is_named_first():
    assert table.last_line([record("a"), record("b", "on_fire")]) == "Verdicts - on_fire: b; clean: a"
