"""Servers with chosen acceptance side by side on one GPU, measured in turn by the module serving_benchmark.

A baseline, and EAGLE-3 with SGLANG_SIMULATE_ACC_LEN: the accept length is known, so what speculation costs is all that
the GPU decides. Every measurement is written to the session's record at once, with what it takes to derive the speed-up
a second time: what the server logged of its steps meanwhile.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from . import procs, raw, servers
from .scenarios import empty, holders, scenario
from .session import REPOSITORY, Session

# The code under test, as tests/conftest.py makes it known to the tests.
sys.path[:0] = [str(REPOSITORY / name) for name in ("module_utils", "plugin_utils")]

NAME = "benchmark"
STARTS = "benchmark-starts"
BASELINE = "baseline"
WITHIN = 0.05  # the predicted speed-up of the measured one
LEAST_ROUNDS = 5
# A step of the rehearsal's own model (1.7 M parameters) waits for the processor, which gives it another time from one
# second to the next. A step of this one waits for the GPU's memory: 13 G parameters, 26 GB, drawn by SGLang itself.
SIZE: Mapping[str, int] = {
    "hidden_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 13824,
    "max_position_embeddings": 8192,
}
SPECULATION = {"algorithm": "EAGLE3", "num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4}
MODULE = "import json, sys; from gpu_host import {0}; print(json.dumps({0}.run(json.load(sys.stdin))))"
_DECODE = re.compile(r"^.*Decode batch.*$", re.MULTILINE)
_LINE = re.compile(
    r"#running-req: (?P<running>\d+).*?(?:accept len: (?P<accepted>[\d.]+).*?)?"
    r"gen throughput \(token/s\): (?P<rate>[\d.]+)"
)


@dataclass(frozen=True)
class Shape:
    """What is measured. `variants`: by name the accept length that is simulated, 0 for the drafter's own, None for no
    speculation. `loads`: by concurrency the number of requests. Lengths in tokens."""

    variants: Mapping[str, float | None] = field(
        default_factory=lambda: {BASELINE: None, "accept-1.5": 1.5, "accept-2": 2.0, "accept-3": 3.0}
    )
    loads: Mapping[str, int] = field(default_factory=lambda: {"1": 1, "4": 4})
    output_length: int = 512
    prompt_characters: int = 0  # of each prompt, from the repository's own texts; 0: the short ones below
    # Tokens of a short and a long stream that are sent before each measurement. A step takes the longer the more tokens
    # there are before it: the long one is as long as the measured answers.
    probe: Sequence[int] = (32, 512)
    rounds: int = 12
    starts: int = 12  # of the scenario that starts the baseline again and again
    repeats: int = 3  # of each load in each of those starts
    size: Mapping[str, int] = field(default_factory=lambda: dict(SIZE))  # {}: the rehearsal's own models
    ready_seconds: float = 200.0
    port: int = 21000
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    warm_client: bool = True


ARGUMENTS: dict[str, Any] = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "mem_fraction_static": 0.2,
    "max_total_tokens": 16384,
    "max_running_requests": 4,
    "chunked_prefill_size": 512,
    "cuda_graph_max_bs_decode": 4,
    "disable_custom_all_reduce": True,
    "enable_metrics": True,
    # The idle ones must not take the processor from the one that is measured.
    "sleep_on_idle": True,
}
# Of what is free when a server has loaded, a tenth of what was free before it began is left alone: however many start
# at a time, there is room for max_total_tokens, and no server takes more.
SIZED_ARGUMENTS: dict[str, Any] = {
    "load_format": "dummy",
    "mem_fraction_static": 0.9,
    "max_total_tokens": 8192,
    "cuda_graph_max_bs_prefill": 256,
}

PROMPTS = (
    "What is the capital of France? Answer in one word.",
    "Explain in a few sentences why the sky is blue.",
    "Write a short Python function that returns the n-th Fibonacci number.",
    "List the planets of the solar system, one a line, with one fact about each.",
    "Summarize how a steam engine works for a ten-year-old child.",
    "What is the capital of Italy?",
    "What is the capital of Japan?",
    "What is the capital of Germany?",
)


SUMMARIES = REPOSITORY / "data" / "prompts" / "summary.json"


def prompts(shape: Shape, load: str) -> list[str]:
    """The measurement's, in their order."""
    count = shape.loads[load]
    if not shape.prompt_characters:
        return list(PROMPTS[:count])
    texts = [one["conversations"][0]["value"] for one in json.loads(SUMMARIES.read_text(encoding="utf-8"))]
    text = "\n\n".join(texts)
    # Of as many tokens each: whose turn comes first must not matter.
    return [f"{number}. {text}"[: shape.prompt_characters] for number in range(1, count + 1)]


def cell_name(load: str, shape: Shape) -> str:
    """As plugin_utils/gpu_benchmark names it."""
    return f"c{load}-o{shape.output_length}-session"


def arguments(shape: Shape) -> dict[str, Any]:
    given = {**ARGUMENTS, **(SIZED_ARGUMENTS if shape.size else {}), **shape.arguments}
    return {name: value for name, value in given.items() if value is not None}


def resized(config: Mapping[str, Any], size: Mapping[str, int]) -> dict[str, Any]:
    """A model's config.json with other dimensions. A drafter keeps its one layer, and drafts from all tokens: without
    weights there is no map from its own."""
    made = {**config, **size}
    if "draft_vocab_size" in config:
        made.update(num_hidden_layers=config["num_hidden_layers"], draft_vocab_size=config["vocab_size"])
    return made


def resize(source: Path, target: Path, size: Mapping[str, int]) -> None:
    """A model's folder without weights. Its tokenizer shows each token as it is written in the vocabulary: what such a
    model says are no letters, and a token that shows nothing is no delivery to a client."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name == "config.json":
            text = json.dumps(resized(json.loads(file.read_text()), size), indent=1)
        elif file.name == "tokenizer.json":
            text = json.dumps({**json.loads(file.read_text()), "decoder": {"type": "Fuse"}}, ensure_ascii=False)
        elif file.suffix != ".safetensors":
            text = file.read_text()
        else:
            continue
        path = target / file.name
        if not path.exists() or path.read_text() != text:  # a server may be reading it
            path.write_text(text)


def models(s: Session, shape: Shape) -> Path:
    """The folder with target/ and drafter/ of the size that is measured."""
    if not shape.size:
        return s.bundle.models
    sized = s.work / "models"
    for name in ("target", "drafter"):
        resize(s.bundle.models / name, sized / name, shape.size)
    return sized


def variant(s: Session, shape: Shape, name: str) -> dict[str, Any]:
    """As a variant of a benchmark's plan."""
    length = shape.variants[name]
    return {
        "name": name,
        "speculation": {} if length is None else SPECULATION,
        "drafter": "" if length is None else str(models(s, shape) / "drafter"),
        "nccl_profile": "latency",
        "arguments": arguments(shape),
        "environment": {"SGLANG_SIMULATE_ACC_LEN": str(length)} if length else {},
        "reference": "" if name == BASELINE else BASELINE,
    }


def words(given: Mapping[str, Any]) -> list[str]:
    found = []
    for name, value in given.items():
        found += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return found


@dataclass
class Running:
    """A variant's server; `state` is the folder with its record."""

    variant: dict[str, Any]
    server: servers.Server
    environment: dict[str, str]

    @property
    def name(self) -> str:
        return str(self.variant["name"])


def start(s: Session, shape: Shape, name: str, port: int) -> Running:
    one = variant(s, shape, name)
    command = [s.bundle.python, "-m", "sglang.launch_server", "--model-path", str(models(s, shape) / "target")]
    command += ["--host", "127.0.0.1", "--port", str(port), *words(one["arguments"])]
    if one["speculation"]:
        command += words({f"speculative_{key}": value for key, value in one["speculation"].items()})
        command += ["--speculative-draft-model-path", one["drafter"]]
    environment = {**servers.sglang_environment(s.bundle, name, s.bundle.home), **shape.environment}
    server = servers.start(
        s.tracker, name, command, {**environment, **one["environment"]}, port, s.log(name)
    )  # fmt: skip
    s.started.append(server)
    return Running(one, server, environment)


def keep_record(s: Session, one: Running, gpus: Sequence[str]) -> bool:
    """The server's record, by which the module finds it; False where the server is gone."""
    from gpu_host import server_record
    from gpu_host.procfs import Proc

    proc = Proc()
    main = proc.process(one.server.main[0])
    record = server_record.from_process(proc, main, gpus) if main else None
    if record is None:
        return False
    record = replace(record, name=one.name, port=one.server.port, log=str(one.server.log))
    server_record.save(record, str(s.work / "host-state"))
    return True


# The client


class Client:
    """What the module is told to run as Python: the client with its imports done, once it is there."""

    def __init__(self, s: Session, shape: Shape) -> None:
        self._s = s
        self._environment = {**servers.sglang_environment(s.bundle, "client", s.bundle.home), **shape.environment}
        self._environment.pop(procs.MARK)
        self._socket = s.work / "warm-client.socket"
        self._program = s.work / "warm-client"
        self._child: subprocess.Popen[bytes] | None = None
        if shape.warm_client:
            script = str(servers.HERE / "warm_client.py")
            subprocess.run([sys.executable, script, "program", str(self._socket), str(self._program)], check=True)
            with s.log("warm-client").open("ab") as out:
                self._child = subprocess.Popen(
                    [s.bundle.python, script, "serve", str(self._socket), str(models(s, shape) / "target")],
                    # It imports for others: without a GPU of its own there is no CUDA state that a fork could inherit.
                    env={**self._environment, "CUDA_VISIBLE_DEVICES": ""},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )

    def warm(self) -> bool:
        return self._child is not None and self._child.poll() is None and self._socket.exists()

    def parameters(self) -> dict[str, Any]:
        """Of the module: its Python and that one's environment."""
        python = str(self._program) if self.warm() else self._s.bundle.python
        names = ("PYTHONPATH", "HOME", "PYTHONPYCACHEPREFIX", "SGLANG_IS_FLASHINFER_AVAILABLE", "HF_HUB_OFFLINE")
        kept = {name: value for name, value in self._environment.items() if name in names or name not in os.environ}
        return {"python": python, "environment": kept}

    def close(self) -> None:
        """From now on the client is started as usual."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None


def measure(s: Session, shape: Shape, one: Running, load: str, client: Client, seconds: float) -> dict[str, Any]:
    """The module's result, from its one call in a Python of its own, as on a managed host."""
    from gpu_host import arguments as specifications

    dataset = [
        {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "-"}]}
        for text in prompts(shape, load)
    ]
    given: dict[str, Any] = {name: spec.get("default") for name, spec in specifications.SERVING_BENCHMARK.items()}
    given.update(
        name=one.name,
        prompts="session",
        dataset=json.dumps(dataset),
        concurrency=int(load),
        output_length=shape.output_length,
        timeout=seconds,
        sample_seconds=0.25,
        state_folder=str(s.work / "host-state"),
        **client.parameters(),
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", MODULE.format("serving_benchmark")],
            input=json.dumps(given),
            env={**os.environ, "PYTHONPATH": str(REPOSITORY / "module_utils")},
            capture_output=True,
            text=True,
            timeout=seconds + 20,
            check=False,
        )
        result: dict[str, Any] = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError) as error:
        words_ = "" if isinstance(error, subprocess.TimeoutExpired) else done.stderr[-600:]
        return {"failed": True, "msg": f"{type(error).__name__}: {words_}", "measurement": None}
    if not result.get("failed"):
        result.pop("log_tail", None)
    return result


# Step times


def probe(port: int, count: int, tokens: int, seconds: float = 20) -> list[dict[str, Any]]:
    """`count` streams at a time of so many tokens. By the server's own clock and counts: latency_s, tokens, verified
    (None without speculation)."""
    found: list[dict[str, Any]] = [{} for _ in range(count)]

    def stream(number: int) -> None:
        body = {
            "text": PROMPTS[number % len(PROMPTS)],
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
            "stream": True,
        }
        status, text = servers.ask(port, "/generate", body, seconds)
        events = [part for part in text.split("\n\n") if part.startswith("data: {")]
        if status != 200 or not events:
            found[number] = {"error": f"{status} {text[-300:]}"}
            return
        about = json.loads(events[-1][len("data: ") :])["meta_info"]
        found[number] = {
            "latency_s": about.get("e2e_latency"),
            "tokens": about["completion_tokens"],
            "verified": about.get("spec_verify_ct"),
        }

    threads = [threading.Thread(target=stream, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 5)
    return found


def steps(row: Mapping[str, Any]) -> float:
    """Of a stream after its first token, which comes with the prompt."""
    return float(row["verified"]) if row.get("verified") else float(row["tokens"]) - 1


def step_ms(rows: Mapping[str, Any]) -> float | None:
    """Of a probe with `short` and `long` streams: what the additional steps took. The prompt's time drops out."""
    both = [*rows.get("short", ()), *rows.get("long", ())]
    if not both or any(not row.get("latency_s") for row in both):
        return None
    more = fmean(map(steps, rows["long"])) - fmean(map(steps, rows["short"]))
    took = fmean(row["latency_s"] for row in rows["long"]) - fmean(row["latency_s"] for row in rows["short"])
    return 1000 * took / more if more > 0 and took > 0 else None


def log_step_ms(lines: Iterable[str], concurrency: int) -> float | None:
    """From the server's log: in a line `running` requests made `rate` tokens a second, `accepted` a step and request.

    Lines with fewer requests than asked are of a beginning or an end, and the first counts the idle time before it.
    """
    found = [match for line in lines if (match := _LINE.search(line))]
    full = [one for one in found[1:] if int(one["running"]) == concurrency and float(one["rate"]) > 0]
    taken = [1000 * concurrency * float(one["accepted"] or 1) / float(one["rate"]) for one in full]
    return median(taken) if taken else None


WAYS = {"log": "log_step_ms", "client": "client_step_ms", "probe": "probe_step_ms"}
WHOSE = {"log": "the server's log of the same time", "client": "the same requests", "probe": "streams sent before"}


def predictions(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each variant and load, over the rounds in which the baseline was measured as well:

    - `measured`: the median speed-up, tokens a second over the baseline's of the same round.
    - by each of `WAYS` to know the step times: `<way>_predicted`, the median of accept length x baseline step /
      speculative step of the same round, and `<way>_ratio`, the median of predicted over measured of each round.

    The ways: `log` is of what the server logged while it was measured, by its own clock. `client` is the client's
    decoding time over the server's count of verifications of the same requests, so only the wait for first tokens and
    between requests can make it differ. `probe` is of streams sent some seconds earlier: where a step takes another
    time from one second to the next it tells nothing of the measurement.
    """
    cells: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for line in lines:
        if line.get("kind") == "measurement" and (line["result"] or {}).get("measurement"):
            told = {**line, "client_step_ms": line["result"]["measurement"].get("step_ms")}
            cells.setdefault(line["cell"], {}).setdefault(line["variant"], []).append(told)
    found = []
    for cell, variants in cells.items():
        base = {line["round"]: line for line in variants.get(BASELINE, ())}
        for name, rows in variants.items():
            pairs = [(line, base[line["round"]]) for line in rows if line["round"] in base]
            if name == BASELINE or not pairs:
                continue
            lengths = [_accept_length(line) for line, _ in pairs]
            one: dict[str, Any] = {
                "cell": cell,
                "variant": name,
                "rounds": len(pairs),
                "measured": median(_rate(line) / _rate(other) for line, other in pairs),
                "accept_length": fmean(filter(None, lengths)) if all(lengths) else None,
            }
            for way, key in WAYS.items():
                told_by = [
                    (line, other) for line, other in pairs if _accept_length(line) and line.get(key) and other.get(key)
                ]
                predicted = [(_accept_length(line) or 0) * other[key] / line[key] for line, other in told_by]
                if predicted:
                    one[f"{way}_predicted"] = median(predicted)
                    one[f"{way}_ratio"] = median(
                        each * _rate(other) / _rate(line)
                        for each, (line, other) in zip(predicted, told_by, strict=True)
                    )
            found.append(one)
    return found


def _accept_length(line: Mapping[str, Any]) -> float | None:
    length: float | None = line["result"]["measurement"]["accept_length"]
    return length


def _rate(line: Mapping[str, Any]) -> float:
    return float(line["result"]["measurement"]["output_tokens_per_s"])


# The session


def order(names: Sequence[str], number: int) -> list[str]:
    """Another one in each round, every second backwards."""
    shift = (number - 1) % len(names)
    turned = [*names[shift:], *names[:shift]]
    return turned[::-1] if number % 2 == 0 else turned


def become_ready(s: Session, shape: Shape, client: Client) -> list[Running]:
    """All start at the same time; those that are ready, each warmed up at every load."""
    running = [start(s, shape, name, shape.port + 1500 * number) for number, name in enumerate(shape.variants)]
    began, ready_after = time.monotonic(), dict[str, float]()

    def settled() -> bool:
        for one in running:
            waiting = one.name not in ready_after and procs.is_alive(one.server.main)
            if waiting and servers.ask(one.server.port, "/health", None, 3)[0] == 200:
                ready_after[one.name] = round(time.monotonic() - began, 1)
                s.say(f"{one.name} is ready after {ready_after[one.name]} s")
        return all(one.name in ready_after or not procs.is_alive(one.server.main) for one in running)

    procs.wait_until(settled, min(shape.ready_seconds, s.end - time.monotonic() - 45), 0.3)
    for one in running:
        tail = one.server.log.read_text(errors="replace")[-1500:] if one.name not in ready_after else ""
        s.check(f"{one.name} becomes ready", one.name in ready_after, tail or ready_after.get(one.name))
    chosen = [one for one in running if one.name in ready_after]
    procs.wait_until(client.warm, 15 if shape.warm_client else 0, 0.2)
    s.write("client", warm=client.warm(), printed=s.log("warm-client").read_text()[-2000:] if shape.warm_client else "")
    gpus = [gpu["uuid"] for gpu in raw.nvml().get("gpus", [])[:1]]
    chosen = [one for one in chosen if s.check(f"{one.name} has a record", keep_record(s, one, gpus))]
    for one in chosen:
        warmed = [probe(one.server.port, int(load), 24, 30) for load in shape.loads]
        status, body = servers.ask(one.server.port, "/server_info", None, 5)
        s.write("server_info", variant=one.name, status=status, body=body[:20000], warmed=warmed)
    return chosen


def one_measurement(
    s: Session, shape: Shape, one: Running, load: str, number: int, client: Client, repeat: int = 1
) -> float:
    """Probe where that is asked for, then measure; written at once. Seconds."""
    began = time.monotonic()
    sent = zip(("short", "long"), shape.probe, strict=False)
    rows = {what: probe(one.server.port, int(load), tokens) for what, tokens in sent}
    log_from = one.server.log.stat().st_size
    result = measure(s, shape, one, load, client, max(15.0, min(40.0, s.end - time.monotonic())))
    with one.server.log.open("rb") as file:
        file.seek(log_from)
        lines = _DECODE.findall(file.read().decode(errors="replace"))
    line = {
        "round": number,
        "variant": one.name,
        "cell": cell_name(load, shape),
        "repeat": repeat,
        "result": result,
        "probe": rows,
        "probe_step_ms": step_ms(rows),
        "log": lines,
        "log_step_ms": log_step_ms(lines, int(load)),
    }
    took = time.monotonic() - began
    s.write("measurement", **line, seconds=round(took, 2))
    found = result.get("measurement") or {}
    s.say(
        f"round {number}, {one.name}, {load} at a time: {result.get('msg')} step {line['log_step_ms']} (log), "
        f"{found.get('step_ms')} (client) ms; {took:.1f} s"
    )
    if result.get("failed") and client.warm():
        s.say("the client is started as usual from now on")
        client.close()
    return took


def tell(s: Session, shape: Shape) -> None:
    """What is to be measured."""
    s.write(
        "benchmark",
        shape=asdict(shape),
        variants=[variant(s, shape, name) for name in shape.variants],
        cells=[
            {"name": cell_name(load, shape), "concurrency": int(load), "input_length": 0, "num_prompts": count,
             "output_length": shape.output_length, "prompts": "session", "prompt_set": "session"}
            for load, count in shape.loads.items()
        ],
    )  # fmt: skip


@scenario(NAME, 60, bystanders=False)
def benchmark(s: Session) -> None:
    """All variants at once on one GPU, measured in turn, round after round, until the time is up."""
    shape = Shape(**s.variables.get(NAME, {}))
    tell(s, shape)
    client = Client(s, shape)
    try:
        running = become_ready(s, shape, client)
        s.look("ready", {0: holders(s, *(one.server for one in running))})
        by_name = {one.name: one for one in running}
        if not s.check("there is a baseline to compare with", BASELINE in by_name and len(by_name) > 1, list(by_name)):
            return
        longest = 8.0
        for number in range(1, shape.rounds + 1):
            for load in shape.loads:
                for name in order(list(by_name), number):
                    if s.end - time.monotonic() < longest + 9:
                        s.say("the time is up")
                        return
                    longest = max(longest, one_measurement(s, shape, by_name[name], load, number, client))
    finally:
        client.close()
        judge(s, shape)


def written(s: Session) -> list[dict[str, Any]]:
    """The measurements of this scenario."""
    lines = [json.loads(line) for line in (s.out / "session.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "measurement" and line["scenario"] == s.scenario]


def all_measured(s: Session) -> tuple[bool, Any]:
    """Whether there is one and none failed; why, or how many."""
    lines = written(s)
    failed = [line["result"]["msg"] for line in lines if line["result"]["failed"]]
    return bool(lines) and not failed, failed or len(lines)


def judge(s: Session, shape: Shape) -> None:
    """The claims, from what the session has written."""
    s.check("every measurement gave figures", *all_measured(s))
    for one in predictions(written(s)):
        wanted = shape.variants[one["variant"]]
        length = one["accept_length"]
        s.write("prediction", **one)
        s.check(f"{one['variant']}, {one['cell']}: {LEAST_ROUNDS} rounds count", one["rounds"] >= LEAST_ROUNDS, one)
        if wanted:
            s.check(
                f"{one['variant']}, {one['cell']}: the accept length is the simulated one",
                length is not None and abs(length / wanted - 1) < 0.03,
                length,
            )
        for way, whose in WHOSE.items():
            if way == "probe" and not shape.probe:
                continue
            ratio = one.get(f"{way}_ratio")
            s.check(
                f"{one['variant']}, {one['cell']}: with the steps of {whose} the arithmetic predicts the speed-up "
                "within 5 %",
                ratio is not None and abs(ratio - 1) <= WITHIN,
                one,
            )


@scenario(STARTS, 90, bystanders=False)
def starts(s: Session) -> None:
    """The baseline alone, started again and again, and each start measured some times, until the time is up."""
    shape = Shape(**{"variants": {BASELINE: None}, "probe": (), **s.variables.get(STARTS, {})})
    tell(s, shape)
    client = Client(s, shape)
    longest = 45.0
    try:
        for number in range(1, shape.starts + 1):
            began = time.monotonic()
            if s.end - began < longest + 15:
                s.say("the time is up")
                break
            running = become_ready(s, replace(shape, port=shape.port + 1500 * (number - 1)), client)
            for repeat in range(1, shape.repeats + 1):
                for one in running:
                    for load in shape.loads:
                        one_measurement(s, shape, one, load, number, client, repeat)
            s.sweep()
            freed = procs.wait_until(lambda: empty(0), 20, 0.2)
            s.check("the GPU is empty before the next start", freed, raw.brief())
            longest = max(longest, time.monotonic() - began)
    finally:
        client.close()
    s.check("every measurement gave figures", *all_measured(s))
