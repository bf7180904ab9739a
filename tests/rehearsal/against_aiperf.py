"""serving_benchmark against NVIDIA's AIPerf on one real server: ``python -m tests.rehearsal.against_aiperf``.

On the CPU, in turn; what they are asked and what is compared is in tests/aiperf.py. AIPerf lives in an environment of
its own (.rehearsal/aiperf).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from gpu_host import prompt_set

from tests import aiperf
from tests.aiperf import Figures, Load
from tests.rehearsal import environment, measured

FOLDER = environment.FOLDER / "aiperf"
PROGRAM = FOLDER / "bin" / "aiperf"
RESULT = environment.ROOT / "tests" / "bench" / "results" / "aiperf.json"
# Long prompts, so that the first token's time is that of their computation, not of the web server.
PROMPTS = environment.ROOT / "data" / "prompts" / "summary.json"
MOST_CHARACTERS = 2200  # some 1300 tokens of the model's 2048
LOADS = {"c1": Load(1, 6, 192, 1), "c4": Load(4, 12, 192, 4)}


def install() -> None:
    """A minute, and 1.2 GB."""
    if PROGRAM.exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    pip = [str(FOLDER / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, f"aiperf=={aiperf.VERSION}"], check=True)


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


def theirs(made: measured.RehearsalHost, load: Load, chosen: Path) -> Figures:
    model = str(made.models / "target")
    texts = texts_of(chosen, load)
    return aiperf.measure([str(PROGRAM)], model, made.port, load, texts, made.folder / "aiperf", 600)


def ours(made: measured.RehearsalHost, load: Load, python: str, chosen: Path) -> Figures:
    return aiperf.of_module(measured.measure(made, load, python, prompts=chosen))


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare serving_benchmark with AIPerf on the same server.")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--into", type=Path, default=RESULT)
    asked = parser.parse_args()
    install()
    pairs: dict[str, list[tuple[Figures, Figures]]] = {name: [] for name in LOADS}
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
                    mine, other = ours(made, load, python, chosen), theirs(made, load, chosen)
                else:
                    other, mine = theirs(made, load, chosen), ours(made, load, python, chosen)
                assert mine.asked() == other.asked(), f"They did not ask the same: {mine} {other}"
                pairs[name].append((mine, other))
                print(f"round {number + 1} {name}: {mine} {other} {time.monotonic() - began:.0f} s", flush=True)
    rows = aiperf.compare(pairs)
    result = {
        "aiperf": aiperf.VERSION, "sglang": environment.SGLANG, "rounds": asked.rounds,
        "load_average": load_average, "loads": {name: vars(load) for name, load in LOADS.items()}, "figures": rows,
    }  # fmt: skip
    asked.into.write_text(json.dumps(result, indent=1) + "\n")
    apart = aiperf.apart(rows)
    for what, row in rows.items():
        print(f"{what:<18} {row}")
    print(f"More than 3 % apart: {apart}" if apart else "All within 3 %.")
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main())
