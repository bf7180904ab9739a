"""Measures a running server with SGLang's own benchmark client, once, and says what came of it.

``run`` begins the measurement in a process of its own and follows it for `patience` seconds; called again with the same
`task` it follows on, until the end. A measurement that nobody follows any more ends by itself. Prompts, output and
notes lie in a private folder that is removed with the result.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Callable

from . import (
    background,
    bench_client,
    bench_output,
    listeners,
    masking,
    measurement,
    prompt_set,
    server_http,
    server_record,
    server_start,
)
from .background import Program
from .bench_output import Notes, OutputError
from .child import run_command
from .deadline import Deadline
from .gpu_samples import Sampler
from .measurement import Asked, Span
from .procfs import Proc, Process
from .prompt_set import PromptError, PromptSet
from .server_http import Endpoint
from .server_record import ServerRecord
from .storage import StorageError, dict_of, private_folder, text_of, write_private

FOLDER = "benchmark"
ABANDONED_SECONDS = 90.0  # without a call that follows
FOLLOWED_SECONDS = 12.0  # between two looks of a call that follows, at most
LOCK_SECONDS = 20.0
IDLE_SECONDS = 10.0
_LOOK_SECONDS = 0.25
_LOG_BYTES = 8 << 20
_TAIL_BYTES = 256 << 10
_BAR = re.compile(r"(\d+)/(\d+) \[")
_MAIN_RUN = "Starting main benchmark run"
# Everybody's, which say nothing about this server.
_USUAL = frozenset(("HOME", "LANG", "LOGNAME", "PATH", "PWD", "SHELL", "USER")) | server_record.PASSING_VARIABLES

# The client's last words, and what they mean for the user.
_TROUBLE = (
    (
        re.compile(r"chat_template is not set|no chat template|Cannot use chat template", re.I),
        "The model's tokenizer has no chat template: say serving_benchmark_chat_template=false (acceptance is then that"
        " of bare texts, which is higher).",
    ),
    (
        re.compile(r"/flush_cache"),
        "The server's cache could not be flushed: other requests run there; measure a server that nobody uses.",
    ),
    (re.compile(r"\b401\b|Unauthorized"), "The server refuses the key that it was started with."),
    (re.compile(r"output_len too small"), "serving_benchmark_output_length must be 4 at least."),
    (
        re.compile(r"IndexError: list index out of range"),
        "None of the prompts has at most serving_benchmark_input_length tokens: allow longer ones.",
    ),
)


class Refused(Exception):
    """Nothing was begun; the text is one sentence that says why and what to do."""


class Failed(Exception):
    """The measurement failed; the text is one sentence. `died`: the server ended meanwhile."""

    def __init__(self, sentence: str, died: bool = False) -> None:
        super().__init__(sentence)
        self.died = died


def run(params: Mapping[str, Any], check_mode: bool = False, diff: bool = False) -> dict[str, Any]:
    """What the module serving_benchmark returns; `unfinished` where it goes on after `patience` seconds."""
    del diff
    try:
        return _Call(params).run(check_mode)
    except (Refused, PromptError, StorageError) as error:
        return {"changed": False, "failed": True, "msg": str(error), "measurement": None, "server_alive": None}


@dataclass(frozen=True)
class Server:
    """The server to measure: its record, its main process, and where it answers."""

    record: ServerRecord
    main: Process
    endpoint: Endpoint

    def alive(self, proc: Proc) -> bool:
        now = proc.process(self.main.pid)
        return now is not None and not now.gone and now.start_ticks == self.main.start_ticks

    @property
    def url(self) -> str:
        host = f"[{self.endpoint.address}]" if ":" in self.endpoint.address else self.endpoint.address
        return f"{'https' if self.endpoint.tls else 'http'}://{host}:{self.endpoint.port}"


class _Call:
    def __init__(self, params: Mapping[str, Any], proc: Proc | None = None) -> None:
        self._params = params
        self._proc = proc or Proc()
        self._task: str = params["task"] or secrets.token_hex(6)
        self._root = os.path.join(params["state_folder"], FOLDER)
        self._folder = os.path.join(self._root, self._task)

    def run(self, check_mode: bool) -> dict[str, Any]:
        if not os.path.isdir(self._folder):
            prompts = self._prompts()
            record = self._record()
            if check_mode:
                server = self._server(record, Deadline(0.0))
                what = f"{len(prompts.conversations)} prompts, {self._params['concurrency']} at a time"
                return {
                    "changed": False,
                    "failed": False,
                    "predicted": True,
                    "measurement": None,
                    "msg": f"{server.record.name} would be measured with {what}.",
                }
            self._begin(record, prompts)
        return self._follow(Deadline(self._params["patience"] or self._params["timeout"] + ABANDONED_SECONDS))

    # Before anything is begun

    def _prompts(self) -> PromptSet:
        """From the action plugin, which read the file on the control node, else from a file of this host."""
        if self._params["dataset"]:
            given = prompt_set.parse(self._params["dataset"].encode(), self._params["prompts"] or "prompts")
        elif self._params["prompts"]:
            given = prompt_set.load(self._params["prompts"])
        else:
            raise Refused("No prompts are given; name a file in ShareGPT's format with serving_benchmark_prompts.")
        return given.first(self._params["num_prompts"], spare=bool(self._params["input_length"]))

    def _record(self) -> ServerRecord:
        name = self._params["name"]
        record = server_record.load(self._params["state_folder"], name)
        if record is None:
            raise Refused(f"There is no record of a server {name} on this host: start it with server_launch.")
        return record

    def _server(self, record: ServerRecord, deadline: Deadline) -> Server:
        """The running server. Refused: there is none, it is deaf, or it is still busy at the deadline."""
        name = record.name
        main = self._main(record)
        if main is None:
            raise Refused(f"The server {name} does not run: start it before it is measured.")
        family = server_start.family(self._proc.snapshot(), main.pid)
        own = listeners.of_processes(self._proc, family, listeners.listeners(self._proc, main.pid))
        here = [one for one in own if one.port == record.port]
        if not here:
            raise Refused(f"The server {name} does not listen on port {record.port} yet: wait until it is ready.")
        key = server_http.api_key(record.argv, self._proc.environ(main.pid), record.cwd)
        tls = bool(server_http.option(record.argv, "--ssl-certfile"))
        endpoint = Endpoint(here[0].address, record.port, tls, key)
        while True:
            answer = server_http.load(endpoint, Deadline(10.0))
            if not answer.answered:
                raise Refused(f"The server {name} does not answer on port {record.port} (it is {answer.trouble}).")
            running = answer.load.requests if answer.load is not None else None
            if not running:
                break
            if deadline.expired():
                raise Refused(
                    f"The server {name} is busy with {running} requests of others: measure it when nobody uses it."
                )
            time.sleep(0.2)
        if not os.access(self._params["python"], os.X_OK):
            raise Refused(f"There is no Python {self._params['python']} on this host: correct sglang_python.")
        return Server(record, main, endpoint)

    def _main(self, record: ServerRecord) -> Process | None:
        if record.main_alive(self._proc):
            return self._proc.process(record.main_pid)
        if not record.unit:
            return None
        # systemd may have restarted it.
        answer = run_command(["systemctl", "show", record.unit, "-p", server_start.UNIT_FACTS], Deadline(10.0))
        main = self._proc.process(server_start.parse_unit(record.unit, answer.stdout).main_pid)
        return None if main is None or main.gone or not main.argv else main

    # The measurement's process

    def _begin(self, record: ServerRecord, prompts: PromptSet) -> None:
        private_folder(self._params["state_folder"])
        private_folder(self._root)
        lock = self._lock(record.name)
        try:
            # Requests of a measurement that was just given up are still being dropped.
            server = self._server(record, Deadline(IDLE_SECONDS))
            private_folder(self._folder)
            for name in (CLIENT, DATASET):
                write_private(os.path.join(self._folder, name), self._text(name, prompts))
            worker = Worker(self._folder, self._params, server, prompts)
            _touch(os.path.join(self._folder, FOLLOWED))
            background.begin(worker.run, keep=lock)
        except OSError as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise Refused(f"{self._folder} can't be written: {error.strerror}.") from None
        finally:
            os.close(lock)

    @staticmethod
    def _text(name: str, prompts: PromptSet) -> str:
        if name == DATASET:
            return prompts.dataset()
        text = background.text_of(bench_client)
        if not text:
            raise Refused("The program bench_client did not come along to this host.")
        return text

    def _lock(self, name: str) -> int:
        """One measurement of a server at a time. One that nobody follows any more is ended first."""
        path = os.path.join(self._root, f"{name}.lock")
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        wait = Deadline(LOCK_SECONDS)
        while True:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                other = os.pread(number, 100, 0).decode("ascii", "replace").strip()
            else:
                os.ftruncate(number, 0)
                os.pwrite(number, self._task.encode(), 0)
                return number
            folder = os.path.join(self._root, other) if other else ""
            if folder and _seconds_since_followed(folder) > FOLLOWED_SECONDS:
                with contextlib.suppress(OSError), open(os.path.join(folder, STOP), "w"):
                    pass
            if wait.expired():
                os.close(number)
                raise Refused(f"The server {name} is being measured already (task {other}): wait until that has ended.")
            time.sleep(0.2)

    # Following it

    def _follow(self, deadline: Deadline) -> dict[str, Any]:
        while True:
            _touch(os.path.join(self._folder, FOLLOWED))
            result = dict_of(os.path.join(self._folder, RESULT))
            if result is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                return {"changed": False, **result}
            status = dict_of(os.path.join(self._folder, STATUS)) or {}
            if self._gone(status):
                if os.path.exists(os.path.join(self._folder, RESULT)):
                    continue
                shutil.rmtree(self._folder, ignore_errors=True)
                return _failed(
                    "The measurement ended without a word (killed, or the host is out of memory): try again."
                )
            if deadline.expired():
                line = progress_line(self._params, status)
                return {"changed": False, "unfinished": True, "progress": line, "msg": line}
            time.sleep(min(_LOOK_SECONDS, max(0.01, deadline.remaining())))

    def _gone(self, status: Mapping[str, Any]) -> bool:
        if not status:  # which is the first thing that it writes
            number = os.open(os.path.join(self._root, f"{self._params['name']}.lock"), os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
            finally:
                os.close(number)
            return not os.path.exists(os.path.join(self._folder, STATUS))
        process = self._proc.process(int(status["pid"]))
        return process is None or process.gone or process.start_ticks != status["start_ticks"]


# Names in the folder of one measurement.
CLIENT, DATASET, OUTPUT, NOTES = "bench_client.py", "prompts.json", "output.jsonl", "notes.jsonl"
PRINTED, STATUS, RESULT, FOLLOWED, STOP = "printed", "status.json", "result.json", "followed", "stop"


def progress_line(params: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    """One line for people."""
    words = [f"{params['name']}, {params['concurrency']} at a time: {status.get('phase') or 'starts'}"]
    if status.get("total"):
        words.append(f"{status['done']} of {status['total']} requests")
    words.append(f"{float(status.get('seconds') or 0):.0f} s")
    if status.get("done") and status.get("total"):
        left = float(status["main_seconds"]) * (status["total"] - status["done"]) / status["done"]
        words.append(f"about {left:.0f} s left")
    return ", ".join(words)


class Worker:
    """One measurement, from the client's start to the result in the folder."""

    def __init__(
        self,
        folder: str,
        params: Mapping[str, Any],
        server: Server,
        prompts: PromptSet,
        proc: Proc | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._params = params
        self._server = server
        self._prompts = prompts
        self._proc = proc or Proc()
        self._wall = wall
        self._began = time.monotonic()
        self._main_run = 0.0
        self._log_from = _size(server.record.log)
        self.command: list[str] = []

    def run(self) -> None:
        """To the end, whatever happens; the outcome is the result file."""
        try:
            result = self._measured()
        except Failed as failure:
            result = self._result(str(failure), failure.died)
        except Exception as error:
            result = self._result(f"The measurement itself failed, {type(error).__name__}: {error}.")
        if os.path.exists(self._path(STOP)):
            shutil.rmtree(self._folder, ignore_errors=True)
            return
        write_private(self._path(RESULT), json.dumps(result))

    def say(self, phase: str, **more: Any) -> None:
        """Replace the status."""
        me = self._proc.process(os.getpid())
        facts = {
            "phase": phase, "pid": os.getpid(), "start_ticks": me.start_ticks if me else 0,
            "seconds": time.monotonic() - self._began, **more,
        }  # fmt: skip
        write_private(self._path(STATUS), json.dumps(facts))

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def _result(self, trouble: str, died: bool = False, measured: dict[str, Any] | None = None) -> dict[str, Any]:
        """The module's result; with trouble it failed."""
        alive = self._server.alive(self._proc) and not died
        msg = trouble or _summary(self._server.record.name, measured or {})
        return {
            "failed": bool(trouble),
            "msg": masking.mask_text(msg),
            "measurement": measured,
            "server_alive": alive,
            "problems": (measured or {}).get("problems", []),
            "log_tail": "" if alive and not trouble else masking.mask_text(self._log(_TAIL_BYTES)),
        }

    # The work

    def _measured(self) -> dict[str, Any]:
        params, server = self._params, self._server
        started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.say("imports the client")
        sampler = Sampler(server.record.gpu_uuids, params["sample_seconds"])
        sampler.start()
        wall, clock = self._wall(), time.monotonic()
        try:
            trouble = self._run_client()
        finally:
            jump = (self._wall() - wall) - (time.monotonic() - clock)
            sampler.stop()
        notes = bench_output.parse_notes(text_of(self._path(NOTES)))
        if not self._server.alive(self._proc):
            raise Failed(self._died(), died=True)
        if trouble:
            raise Failed(self._said(trouble, notes))
        try:
            output = bench_output.parse(text_of(self._path(OUTPUT)))
        except OutputError as error:
            raise Failed(f"{error} {self._last_words()}".strip()) from None
        requests = notes.requests if notes.requests is not None else output.requests
        ended = notes.ended or os.stat(self._path(OUTPUT)).st_mtime - self._wall() + time.monotonic()
        span = Span(notes.began or ended - output.numbers["duration"], ended, jump)
        asked = self._asked()
        found = measurement.build(
            asked, output, notes, span, sampler.samples, sampler.trouble, self._log(_LOG_BYTES)
        )  # fmt: skip
        found.update(
            started=started,
            command=shlex.join(masking.mask_argv(self.command)),
            environment=self._shown_environment(),
            server_command=shlex.join(masking.mask_argv(server.main.argv)),
            versions=self._versions(notes, output.server_info, sampler.driver),
            client_module=notes.module,
            warmup=self._warmup(),
            prompt_set={
                "name": self._prompts.name,
                "sha256": self._prompts.digest,
                "prompts": len(self._prompts.conversations),
            },
            chat_template=params["chat_template"],
            seed=params["seed"],
        )
        if notes.requests is None:
            found["problems"].append(
                "This version of the client keeps no accept length for each request; latencies are added up from its "
                "gaps."
            )
        failed = measurement.failure(asked, requests, int(output.numbers["completed"]))
        return self._result(failed, measured=found)

    def _asked(self) -> Asked:
        return Asked(
            self._params["num_prompts"] or len(self._prompts.conversations),
            self._params["concurrency"],
            self._params["output_length"],
            self._params["input_length"],
            self._params["ignore_eos"],
        )

    def _warmup(self) -> int:
        return self._params["warmup"] or self._params["concurrency"]

    def arguments(self) -> list[str]:
        """What the client is told."""
        params, argv = self._params, self._server.record.argv
        model = server_http.option(argv, "--model-path") or server_http.option(argv, "--model")
        words = [
            "--backend", "sglang", "--base-url", self._server.url,
            "--dataset-name", "sharegpt", "--dataset-path", self._path(DATASET),
            "--num-prompts", self._asked().requested, "--sharegpt-output-len", params["output_length"],
            "--max-concurrency", params["concurrency"], "--warmup-requests", self._warmup(),
            "--seed", params["seed"], "--output-file", self._path(OUTPUT), "--output-details",
        ]  # fmt: skip
        if model:
            words += ["--model", model, "--tokenizer", server_http.option(argv, "--tokenizer-path") or model]
        if params["input_length"]:
            words += ["--sharegpt-context-len", params["input_length"] + params["output_length"]]
        if params["temperature"]:
            words += ["--temperature", params["temperature"]]
        for wanted, word in (
            (params["flush"], "--flush-cache"),
            (params["chat_template"], "--apply-chat-template"),
            (not params["ignore_eos"], "--disable-ignore-eos"),
        ):
            words += [word] if wanted else []
        return [str(word) for word in words]

    def _environment(self) -> dict[str, str]:
        """The client's: ours, what the server's Python needs, and nothing from the network."""
        found = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
        found.update({name: str(value) for name, value in self._params["environment"].items()})
        found.update(
            PYTHONUNBUFFERED="1",
            PYTHONDONTWRITEBYTECODE="1",
            HF_HUB_OFFLINE="1",
            HF_MODULES_CACHE=self._path("modules"),  # code of a model's own, which is copied there
        )
        for name in ("OPENAI_API_KEY", "API_KEY", "SGLANG_IS_IN_CI"):
            found.pop(name, None)
        if self._server.endpoint.key:
            found["OPENAI_API_KEY"] = self._server.endpoint.key
        return found

    def _run_client(self) -> str:
        """To its end. '' when it ended well, else why not. Failed: it was stopped from here."""
        self.command = [self._params["python"], self._path(CLIENT), self._path(NOTES), *self.arguments()]
        try:
            client = Program(self.command, self._environment(), self._path(PRINTED))
        except OSError as error:
            raise Failed(f"{self._params['python']} can't be started: {error.strerror}.") from None
        deadline = Deadline(self._params["timeout"])
        followed = _Followed(self._path(FOLLOWED))
        try:
            said = 0.0
            while client.process.poll() is None:
                if not self._server.alive(self._proc):
                    raise Failed(self._died(), died=True)
                if deadline.expired():
                    done, total = self._progress()
                    raise Failed(
                        f"After {self._params['timeout']:g} s only {done} of {total or self._asked().requested} "
                        "requests were answered: raise serving_benchmark_timeout, or ask for fewer or shorter answers."
                    )
                if os.path.exists(self._path(STOP)) or followed.for_seconds() > ABANDONED_SECONDS:
                    _touch(self._path(STOP))
                    raise Failed("Nobody follows this measurement any more.")
                if time.monotonic() - said > 1.0:
                    said = time.monotonic()
                    self._tell()
                time.sleep(_LOOK_SECONDS)
        finally:
            client.end()
        status = client.process.returncode
        return "" if status == 0 else f"signal {-status}" if status < 0 else f"status {status}"

    def _progress(self) -> tuple[int, int]:
        """Answered and asked so far, by the client's progress bar."""
        printed = text_of(self._path(PRINTED), last=4096)
        bars = _BAR.findall(printed)
        return (int(bars[-1][0]), int(bars[-1][1])) if bars else (0, 0)

    def _tell(self) -> None:
        if not self._main_run and _MAIN_RUN in text_of(self._path(PRINTED)):
            self._main_run = time.monotonic()
        if self._main_run:
            done, total = self._progress()
            self.say("measures", done=done, total=total, main_seconds=time.monotonic() - self._main_run)
        elif text_of(self._path(NOTES)):
            self.say("reads the prompts and warms up")
        else:
            self.say("imports the client")

    # What went wrong

    def _died(self) -> str:
        done, total = self._progress()
        when = f"after {done} of {total} requests" if total else "before the first request"
        return (
            f"The server {self._server.record.name} died while it was measured, {when} (its main process was "
            f"{self._server.main.pid})."
        )

    def _said(self, how: str, notes: Notes) -> str:
        """Why the client failed."""
        if notes.import_failed:
            return (
                f"SGLang's benchmark client can't be imported by {self._params['python']} ({notes.import_failed}): "
                "install what is missing there, or correct sglang_python."
            )
        printed = text_of(self._path(PRINTED), last=1 << 16)
        known = next((sentence for pattern, sentence in _TROUBLE if pattern.search(printed)), "")
        return known or f"SGLang's benchmark client ended with {how}. {self._last_words()}".strip()

    def _last_words(self) -> str:
        printed = text_of(self._path(PRINTED), last=1 << 14)
        lines = [line.strip() for line in re.split(r"[\r\n]+", printed) if line.strip()]
        return f"Its last words: {masking.mask_text(lines[-1][:300])}" if lines else ""

    def _log(self, most: int) -> str:
        """What the server logged since we began."""
        try:
            with open(self._server.record.log, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                start = self._log_from if self._log_from <= size else 0
                file.seek(max(start, size - most))
                return file.read(most).decode("utf-8", "replace")
        except OSError:
            return ""

    def _shown_environment(self) -> dict[str, str]:
        """The server's variables at its start, without everybody's, secrets masked."""
        environment = self._proc.environ(self._server.main.pid) or self._server.record.environment or {}
        return masking.mask_environ({name: value for name, value in sorted(environment.items()) if name not in _USUAL})

    def _versions(self, notes: Notes, info: Mapping[str, Any], driver: str) -> dict[str, str]:
        found = {**self._server.record.versions, **notes.versions}
        if info.get("version"):
            found["sglang"] = str(info["version"])
        if driver:
            found["driver"] = driver
        return {**found, "client_python": self._params["python"], "python": sys.version.split()[0]}


class _Followed:
    """Since when nobody has touched the file, by the monotonic clock: the host's clock may be set meanwhile."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._stamp = _stamp(path)
        self._at = time.monotonic()

    def for_seconds(self) -> float:
        now = _stamp(self._path)
        if now != self._stamp:
            self._stamp, self._at = now, time.monotonic()
        return time.monotonic() - self._at


def _stamp(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _seconds_since_followed(folder: str) -> float:
    stamp = _stamp(os.path.join(folder, FOLLOWED))
    return time.time() - stamp / 1e9 if stamp else 0.0


def _failed(sentence: str) -> dict[str, Any]:
    return {"changed": False, "failed": True, "msg": sentence, "measurement": None, "server_alive": None,
            "problems": [], "log_tail": ""}  # fmt: skip


def _summary(name: str, found: Mapping[str, Any]) -> str:
    length = found.get("accept_length")
    words = [
        f"{found['output_tokens_per_s']:.1f} tokens/s over {found['completed']} requests",
        f"{found['concurrency']} at a time",
        f"first token after {found['ttft_ms']['p50']:.0f} ms",
        f"accept length {length:.2f}" if length else "",
    ]
    return f"{name}: {', '.join(word for word in words if word)}."


def _touch(path: str) -> None:
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        os.utime(path)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
