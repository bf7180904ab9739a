"""Real SGLang on the rehearsal's host, measured by the module serving_benchmark as on a managed host.

What is measured are short requests, so the benchmark client is forked from a process that has imported it once
(tests/gpu/warm_client.py): its imports take longer than the measurement and are not part of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_host import arguments, prompt_set, server_record
from gpu_host.procfs import Proc

from simulator.host import MARKER, Server, Started, wait_for
from tests.aiperf import Load
from tests.rehearsal import environment
from tests.rehearsal.host import RehearsalHost

MODULE = "import json, sys; from gpu_host import serving_benchmark as b; print(json.dumps(b.run(json.load(sys.stdin))))"
WARM_CLIENT = environment.ROOT / "tests" / "gpu" / "warm_client.py"
PROMPTS = environment.ROOT / "data" / "prompts" / "chat.json"


@contextlib.contextmanager
def host() -> Iterator[RehearsalHost]:
    with (
        tempfile.TemporaryDirectory(prefix="rehearsal-") as folder,
        RehearsalHost(Path(folder) / "host", environment.models()) as made,
    ):
        yield made


@contextlib.contextmanager
def server(made: RehearsalHost, *words: str, seconds: float = 600) -> Iterator[Started]:
    """A server that is ready, with a record of its own; ended at exit and waited for."""
    made.log.unlink(missing_ok=True)
    started = made.start(*words)
    try:
        wait_for(lambda: made.ready() or not started.alive(), "the server's ready line", seconds)
        keep_record(made, started)
        yield started
    finally:
        for pid in made.left().processes:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not made.left(), "the server's end", 60)


@contextlib.contextmanager
def steady_server(made: RehearsalHost, **settings: object) -> Iterator[Server]:
    """The stand-in in the real one's place: its steps last the same each time, so that one percent can be seen."""
    words = ("--model-path", str(made.models / "target"))  # the client wants its tokenizer
    server = made.simulated.start_server(made.name, [0], port=made.port, eagle3=False, arguments=words, **settings)
    keep_record(made, server.wait_ready().main)
    yield server  # ends with the host


def keep_record(made: RehearsalHost, started: Started) -> None:
    """By which the module finds the server."""
    proc = Proc()
    main = proc.process(started.pid)
    record = server_record.from_process(proc, main, ()) if main else None
    if record is None:
        raise environment.NotReady(f"The server ended while it started:\n{made.log_text()[-2000:]}")
    record = replace(record, name=made.name, port=made.port, log=str(made.log))
    server_record.save(record, str(made.folder / "host-state"))


def client_environment(made: RehearsalHost) -> dict[str, str]:
    """Without what would make the client one of the host's servers: it holds no GPU, and a reset must not see it."""
    variables = made.server_environment()
    for name in ("REHEARSAL_GPU_MIB", "REHEARSAL_FOLDER", "GPU_SIMULATOR_STATE", MARKER):
        variables.pop(name)
    return variables


@contextlib.contextmanager
def warm_client(made: RehearsalHost, seconds: float = 300) -> Iterator[str]:
    """A program to be used as the client's Python, whose imports are done."""
    door, program = made.folder / "warm-client.socket", made.folder / "warm-client"
    subprocess.run([sys.executable, str(WARM_CLIENT), "program", str(door), str(program)], check=True)
    variables = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    with (made.folder / "logs" / "warm-client.log").open("ab") as out:
        child = subprocess.Popen(
            [str(environment.PYTHON), str(WARM_CLIENT), "serve", str(door), str(made.models / "target")],
            env={**variables, **client_environment(made)},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        wait_for(lambda: door.exists() or child.poll() is not None, "the client's imports", seconds)
        if not door.exists():
            raise environment.NotReady((made.folder / "logs" / "warm-client.log").read_text()[-2000:])
        yield str(program)
    finally:
        child.kill()
        child.wait()


def measure(made: RehearsalHost, load: Load, python: str, *, prompts: Path = PROMPTS) -> dict[str, Any]:
    """The measurement. AssertionError where the module says that there is none."""
    given: dict[str, Any] = {name: spec.get("default") for name, spec in arguments.SERVING_BENCHMARK.items()}
    given.update(
        name=made.name,
        python=python,
        prompts=str(prompts),
        num_prompts=load.prompts,
        concurrency=load.concurrency,
        output_length=load.output_length,
        warmup=load.warmup,
        environment=client_environment(made),
        state_folder=str(made.folder / "host-state"),
        timeout=600,
    )
    done = subprocess.run(
        [sys.executable, "-c", MODULE],
        input=json.dumps(given),
        env={
            **os.environ,
            **made.simulated.reset_environment(),
            "PYTHONPATH": str(environment.ROOT / "module_utils"),
        },
        capture_output=True,
        text=True,
        timeout=700,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    assert not result.get("failed"), result["msg"]
    measured: dict[str, Any] = result["measurement"]
    return measured


BY_HAND = "from sglang.benchmark.serving import cli_main\ncli_main()\n"


def by_hand(made: RehearsalHost, python: str, command: str, *, prompts: Path = PROMPTS) -> dict[str, Any]:
    """What SGLang's client reports when it is run without the module, with the words of a measurement's `command`."""
    script, out, data = (made.folder / name for name in ("by-hand.py", "by-hand.jsonl", "by-hand-prompts.json"))
    script.write_text(BY_HAND)
    out.unlink(missing_ok=True)
    words = shlex.split(command)[3:]  # after python, bench_client.py and its notes
    count = int(words[words.index("--num-prompts") + 1])
    data.write_text(prompt_set.load(str(prompts)).first(count).dataset())
    for name, value in (("--dataset-path", data), ("--output-file", out)):
        words[words.index(name) + 1] = str(value)
    done = subprocess.run(
        [python, str(script), *words],
        env={"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", **client_environment(made)},
        capture_output=True,
        text=True,
        timeout=700,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
    return found


def machine() -> dict[str, Any]:
    """What else ran: processors and the load average of the last minute."""
    return {"cpus": os.cpu_count(), "load_1_min": round(os.getloadavg()[0], 1), "time": round(time.time())}


def speeds(measured: Sequence[dict[str, Any]]) -> list[float]:
    return [round(float(one["output_tokens_per_s"]), 2) for one in measured]
