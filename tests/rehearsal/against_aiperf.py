"""serving_benchmark against NVIDIA's AIPerf on one real server: ``python -m tests.rehearsal.against_aiperf``.

Both send the same prompts, as many at a time, with answers of the same length, to SGLang on the CPU, in turn. AIPerf
lives in an environment of its own (.rehearsal/aiperf). It asks the OpenAI endpoint and counts tokens as the server
tells them; the module's client asks /generate. AIPerf's inter-token latency is what SGLang's client calls TPOT: the
time after the first token over the tokens after the first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_host import prompt_set

from tests.rehearsal import environment, measured
from tests.rehearsal.measured import Load

AIPERF = "aiperf==0.13.0"
FOLDER = environment.FOLDER / "aiperf"
PROGRAM = FOLDER / "bin" / "aiperf"
RESULT = environment.ROOT / "tests" / "bench" / "results" / "aiperf.json"
# Long prompts, so that the first token's time is that of their computation, not of the web server.
PROMPTS = environment.ROOT / "data" / "prompts" / "summary.json"
MOST_CHARACTERS = 2200  # some 1300 tokens of the model's 2048
LOADS = {"c1": Load(1, 6, 192, 1), "c4": Load(4, 12, 192, 4)}
WITHIN = 0.03


def install() -> None:
    """A minute, and 1.2 GB."""
    if PROGRAM.exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    pip = [str(FOLDER / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, AIPERF], check=True)


def prompts(made: measured.RehearsalHost) -> Path:
    """Those that leave the model room for the answer, as a file for the module."""
    texts = [one["conversations"][0]["value"] for one in json.loads(PROMPTS.read_text())]
    short = [text for text in texts if len(text) <= MOST_CHARACTERS]
    rows = [{"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "-"}]} for text in short]
    path = made.folder / "aiperf-prompts.json"
    path.write_text(json.dumps(rows))
    return path


def texts_of(path: Path, load: Load) -> list[str]:
    """The measurement's, in the order in which they stand."""
    chosen = json.loads(prompt_set.load(str(path)).first(load.prompts).dataset())
    return [one["conversations"][0]["value"] for one in chosen]


def aiperf(made: measured.RehearsalHost, load: Load, chosen: Path) -> dict[str, float]:
    """tokens_per_s, ttft_ms, itl_ms as AIPerf measured them."""
    folder = made.folder / "aiperf"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    lines = folder / "prompts.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts_of(chosen, load)))
    words = [
        "profile", "--model", str(made.models / "target"), "--tokenizer", str(made.models / "target"),
        "--url", f"http://127.0.0.1:{made.port}", "--endpoint-type", "chat", "--streaming",
        "--input-file", str(lines), "--custom-dataset-type", "single_turn",
        "--dataset-sampling-strategy", "sequential", "--use-server-token-count", "--use-legacy-max-tokens",
        "--concurrency", str(load.concurrency), "--request-count", str(load.prompts),
        "--warmup-request-count", str(load.warmup), "--extra-inputs", f"max_tokens:{load.output_length}",
        "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0",
        "--artifact-dir", str(folder), "--ui-type", "none", "--workers-max", "1", "--no-server-metrics",
        "--no-gpu-telemetry",
    ]  # fmt: skip
    done = subprocess.run(
        [str(PROGRAM), *words],
        cwd=folder,
        env={
            # Its own offline mode refuses a tokenizer in a folder; nothing may be asked of a hub all the same.
            "PATH": os.environ["PATH"], "HOME": str(made.folder / "home"), "HF_ENDPOINT": "http://127.0.0.1:9",
            "AIPERF_SERVICE_REGISTRATION_TIMEOUT": "120", "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )  # fmt: skip
    found = sorted(folder.rglob("profile_export_aiperf.json"))
    if done.returncode or not found:
        raise SystemExit(f"AIPerf ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    report = json.loads(found[-1].read_text())
    lengths = report["output_sequence_length"]["avg"]
    assert lengths == load.output_length, f"AIPerf's answers have {lengths} tokens, not {load.output_length}"
    return {
        "tokens_per_s": report["output_token_throughput"]["avg"],
        "ttft_ms": report["time_to_first_token"]["avg"],
        "itl_ms": report["inter_token_latency"]["avg"],
        "requests": report["request_count"]["avg"],
        "input_tokens": report["input_sequence_length"]["avg"] * report["request_count"]["avg"],
    }


def ours(made: measured.RehearsalHost, load: Load, python: str, chosen: Path) -> dict[str, float]:
    found = measured.measure(made, load, python, prompts=chosen)
    return {
        "tokens_per_s": found["output_tokens_per_s"],
        "ttft_ms": found["ttft_ms"]["mean"],
        "itl_ms": found["tpot_ms"]["mean"],
        "requests": found["completed"],
        "input_tokens": found["input_tokens"],
    }


def compare(pairs: dict[str, list[tuple[dict[str, float], dict[str, float]]]]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name, found in pairs.items():
        for what in ("tokens_per_s", "ttft_ms", "itl_ms"):
            each = [mine[what] / other[what] for mine, other in found]
            mean, low, high = measured.interval(each)
            rows[f"{name} {what}"] = {
                "module": round(statistics.median(mine[what] for mine, _ in found), 3),
                "aiperf": round(statistics.median(other[what] for _, other in found), 3),
                "ratio": round(statistics.median(each), 4),
                "mean_ratio": round(mean, 4),
                "interval": [round(low, 4), round(high, 4)],
            }
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare serving_benchmark with AIPerf on the same server.")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--into", type=Path, default=RESULT)
    asked = parser.parse_args()
    install()
    pairs: dict[str, list[tuple[dict[str, float], dict[str, float]]]] = {name: [] for name in LOADS}
    load_average = []
    # Without a cache of prefixes, which the module flushes after its warm-up and AIPerf does not.
    plain = "--disable-radix-cache"
    with measured.host() as made, measured.server(made, plain), measured.warm_client(made) as python:
        chosen = prompts(made)
        for number in range(asked.rounds):
            load_average.append(measured.machine()["load_1_min"])
            for name, load in LOADS.items():
                began = time.monotonic()
                if number % 2:
                    mine, other = ours(made, load, python, chosen), aiperf(made, load, chosen)
                else:
                    other, mine = aiperf(made, load, chosen), ours(made, load, python, chosen)
                same = [(one["requests"], one["input_tokens"]) for one in (mine, other)]
                assert same[0] == same[1], f"They did not ask the same: {same}"
                pairs[name].append((mine, other))
                print(f"round {number + 1} {name}: {mine} {other} {time.monotonic() - began:.0f} s", flush=True)
    rows = compare(pairs)
    result = {
        "aiperf": AIPERF.partition("==")[2], "sglang": environment.SGLANG, "rounds": asked.rounds,
        "load_average": load_average, "loads": {name: vars(load) for name, load in LOADS.items()}, "figures": rows,
    }  # fmt: skip
    asked.into.write_text(json.dumps(result, indent=1) + "\n")
    apart = {what: row["ratio"] for what, row in rows.items() if abs(row["ratio"] - 1) > WITHIN}
    for what, row in rows.items():
        print(f"{what:<18} {row}")
    print(f"More than 3 % apart: {apart}" if apart else "All within 3 %.")
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main())
