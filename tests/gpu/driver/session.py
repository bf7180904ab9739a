"""One session on a real GPU: raw readings, resets, checks, all written to one JSON-lines file as they happen."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import procs, raw, servers

REPOSITORY = Path(__file__).resolve().parents[3]
RECORDS = REPOSITORY / "artifacts" / "resets.jsonl"
CLEAN_GPU = ("free", "protected_only")


@dataclass
class Reset:
    """What one run of playbooks/reset.yml did, and the run record that it left."""

    rc: int
    seconds: float
    record: dict[str, Any]
    changed: int | None

    @property
    def killed(self) -> set[int]:
        return {int(one["pid"]) for one in self.record.get("killed", [])}


@dataclass
class Session:
    """State of a running session; `out` receives session.jsonl, `work` everything else."""

    out: Path
    work: Path
    playbook_command: list[str]
    bundle: servers.Bundle
    commit: str
    variables: dict[str, Any]
    end: float
    play_seconds: float = 170  # longest deployment; a cold start was measured at 71 to 93 s
    records: Path = field(default_factory=lambda: RECORDS)
    tracker: procs.Tracker = field(default_factory=procs.Tracker)
    scenario: str = ""
    failures: list[str] = field(default_factory=list)
    cpu_bystanders: dict[str, Bystander] = field(default_factory=dict)
    gpu_bystanders: dict[str, Bystander] = field(default_factory=dict)
    started: list[servers.Server] = field(default_factory=list)
    _samples: list[list[Any]] = field(default_factory=list)
    _sampling: threading.Event = field(default_factory=threading.Event)
    _ports: int = 20000

    def __post_init__(self) -> None:
        for folder in (self.out, self.work, self.work / "logs", self.bundle.home):
            folder.mkdir(parents=True, exist_ok=True)
        self.tracker.start()

    # --- the record -------------------------------------------------------------------------------------------

    def write(self, kind: str, **values: Any) -> None:
        line = json.dumps({"kind": kind, "scenario": self.scenario, "time": round(time.time(), 3), **values})
        with (self.out / "session.jsonl").open("a") as file:
            file.write(line.replace(str(REPOSITORY), "<repository>") + "\n")

    def say(self, text: str) -> None:
        print(f"[{max(0.0, self.end - time.monotonic()):4.0f} s left] {self.scenario}: {text}", flush=True)

    def check(self, sentence: str, good: bool, detail: Any = None) -> bool:
        """A sentence that must hold; what does not is told at the end and the session goes on."""
        self.write("check", sentence=sentence, ok=bool(good), detail=detail)
        self.say(f"{'ok  ' if good else 'FAIL'} {sentence}" + ("" if good else f" -- {str(detail)[:500]}"))
        if not good:
            self.failures.append(f"{self.scenario}: {sentence} -- {str(detail)[:150]}")
        return bool(good)

    def open(self) -> None:
        self.write(
            "session",
            commit=self.commit,
            date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            kernel=platform.release(),
            machine=platform.machine(),
            python=platform.python_version(),
            cpus=os.cpu_count(),
            multicast={name: os.environ.get(name) for name in servers.MULTICAST_OFF},
            sglang="0.5.17" if self.bundle.ready() else None,
        )

    def look(
        self,
        moment: str,
        holders: dict[int, list[int]] | None = None,
        mains: list[servers.Server] | None = None,
    ) -> dict[str, Any]:
        """A full raw reading. `holders` is the session's own knowledge: GPU index -> pids that it put there."""
        reading = raw.reading()
        trees = {one.name: procs.plain(self.tracker.alive(one.name)) for one in mains or self.started}
        self.write(
            "reading",
            moment=moment,
            reading=reading,
            trees=trees,
            truth={str(gpu): pids for gpu, pids in (holders or {}).items()},
            protected=[one.key[0] for one in self.gpu_bystanders.values()],
        )
        return reading

    def start_samples(self) -> None:
        """Used MiB and listed pids of each GPU, twice a second, until stop_samples()."""
        self._samples = []
        self._sampling.clear()

        def sample() -> None:
            began = time.time()
            while not self._sampling.wait(0.5):
                self._samples.append([round(time.time() - began, 2), raw.brief()])

        threading.Thread(target=sample, daemon=True).start()

    def stop_samples(self) -> None:
        self._sampling.set()
        self.write("samples", columns=["seconds", "[[used_mib, pids] per GPU]"], samples=self._samples)

    # --- processes --------------------------------------------------------------------------------------------

    def port(self) -> int:
        # 1000 apart: SGLang takes further ports at random up to 1000 above its own.
        self._ports += 1000
        return self._ports

    def log(self, name: str) -> Path:
        return self.work / "logs" / f"{name}.log"

    def sglang(
        self,
        name: str,
        *,
        eagle3: bool = True,
        tp: int = 1,
        gpu: int = 0,
        home: Path | None = None,
        from_shell: bool = False,
    ) -> servers.Server:
        home = home or self.bundle.home
        home.mkdir(parents=True, exist_ok=True)
        port = self.port()
        command = servers.sglang_command(self.bundle, port, eagle3=eagle3, tp=tp, gpu=gpu)
        environment = servers.sglang_environment(self.bundle, name, home)
        if from_shell:
            job = [self.bundle.python, str(servers.HERE / "cpu_job.py"), str(self.work / f"{name}.job")]
            server = servers.start_from_shell(self.tracker, name, command, environment, port, self.log(name), job)
        else:
            server = servers.start(self.tracker, name, command, environment, port, self.log(name))
        self.started.append(server)
        return server

    def torch(self, name: str, *more: str) -> servers.Server:
        port, heartbeat = self.port(), self.work / f"{name}.beat"
        command = servers.torch_command(self.bundle.python, port, heartbeat, *more)
        server = servers.start(
            self.tracker, name, command, servers.torch_environment(self.bundle, name), port, self.log(name), heartbeat
        )
        self.started.append(server)
        return server

    def workers(self, server: servers.Server, title: str = "sglang::scheduler") -> list[procs.Facts]:
        return [facts for facts in self.tracker.alive(server.name) if facts.title.startswith(title)]

    def kill(self, key: tuple[int, int], number: signal.Signals) -> None:
        """Only what the session started, and only while it is that very process."""
        if procs.is_alive(key):
            with suppress(ProcessLookupError):
                os.kill(key[0], number)

    def add_bystander(
        self,
        name: str,
        command: list[str],
        beat: Path | None,
        *,
        gpu: bool = False,
        pid_file: Path | None = None,
    ) -> bool:
        with self.log(f"bystander-{name}").open("ab") as out:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.work, start_new_session=True
            )
        threading.Thread(target=child.wait, daemon=True).start()
        alive = beat is None or procs.wait_until(lambda: servers.beat(beat) > 0, 15)
        pid = int(pid_file.read_text()) if pid_file and pid_file.exists() else child.pid
        facts = procs.read_facts(pid)
        if not alive or facts is None or not facts.alive:
            return self.check(f"the bystander {name} runs", False, self.log(f"bystander-{name}").read_text()[-400:])
        (self.gpu_bystanders if gpu else self.cpu_bystanders)[name] = Bystander(facts.key, beat)
        return True

    def end_bystanders(self, *, gpu_only: bool = False) -> None:
        ending = [*self.gpu_bystanders.values(), *([] if gpu_only else self.cpu_bystanders.values())]
        for one in ending:
            self.kill(one.key, signal.SIGKILL)
        procs.wait_until(lambda: not any(procs.is_alive(one.key) for one in ending), 5)
        self.gpu_bystanders.clear()
        if not gpu_only:
            self.cpu_bystanders.clear()

    def sweep(self) -> None:
        """Between scenarios: whatever the reset left of this session's servers ends here, and is told."""
        left = [facts for server in self.started for facts in self.tracker.alive(server.name)]
        extra = [(name, key) for server in self.started for name, key in server.bystanders.items()]
        if left:
            self.write("swept", processes=procs.plain(left))
        for key in [facts.key for facts in left] + [key for _, key in extra]:
            self.kill(key, signal.SIGCONT)
            self.kill(key, signal.SIGKILL)
        procs.wait_until(lambda: not any(procs.is_alive(facts.key) for facts in left), 5)
        for server in self.started:
            if server.terminal and server.terminal.stdin:
                server.terminal.stdin.close()
        self.started.clear()

    # --- the reset --------------------------------------------------------------------------------------------

    def reset(
        self,
        label: str = "",
        *,
        gpus: list[int] | None = None,
        grace: float = 10,
        probe: bool = True,
        seconds: float = 90,
    ) -> Reset:
        """`ansible-playbook playbooks/reset.yml` over a local connection, and its run record."""
        before = self.records.stat().st_size if self.records.exists() else 0
        variables = {
            "gpu_reset_grace": grace,
            "gpu_reset_probe": probe,
            "reset_confirmed": True,
            "gpu_reset_gpus": [str(gpu) for gpu in gpus or []],
            "gpu_reset_ports": [server.port for server in self.started] if gpus is None else [],
            "gpu_reset_state_folder": str(self.work / "host-state"),
            **self.variables,
        }
        extra = self.work / "variables.json"
        extra.write_text(json.dumps(variables))
        command = [
            *self.playbook_command,
            "playbooks/reset.yml",
            "-i",
            "tests/gpu/inventory",
            "-e",
            f"@{extra}",
        ]
        environment = {
            **os.environ,
            "PATH": f"{self.bundle.site / 'bin'}:{os.environ['PATH']}",
            "NO_COLOR": "1",
        }
        began = time.monotonic()
        try:
            done = subprocess.run(
                command,
                cwd=REPOSITORY,
                env=environment,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
            rc, output = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired as error:
            rc = -1
            output = f"not done after {seconds} s\n" + decoded(error.stdout) + decoded(error.stderr)
        took = round(time.monotonic() - began, 2)
        record = self._record_after(before)
        changed = changed_of(output)
        self.write(
            "reset",
            label=label,
            variables=variables,
            rc=rc,
            seconds=took,
            changed=changed,
            record=record,
            members={one.name: [facts.key for facts in self.tracker.members(one.name)] for one in self.started},
            output=output[-6000:],
        )
        self.say(f"reset {label}: rc {rc}, {took} s, verdict {record.get('verdict')}, {record.get('reason', '')}")
        if rc != 0 or not record:
            print(output[-1500:], flush=True)
        return Reset(rc, took, record, changed)

    def _record_after(self, offset: int) -> dict[str, Any]:
        if not self.records.exists():
            return {}
        with self.records.open("rb") as file:
            file.seek(offset)
            lines = file.read().decode().splitlines()
        return dict(json.loads(lines[-1])) if lines else {}

    def expect_clean(self, done: Reset, *, gone: list[servers.Server], probe: bool = True) -> None:
        """The reset says clean and it is true: servers gone, bystanders at work, memory back, probe passed."""
        record = done.record
        self.check(
            "the reset exits 0 with the verdict clean",
            done.rc == 0 and record.get("verdict") == "clean",
            {"rc": done.rc, "verdict": record.get("verdict"), "reason": record.get("reason")},
        )
        self.check(
            "the verdict does not claim to be simulated",
            record.get("simulated") is False,
            record.get("simulated"),
        )
        self.check(
            "every GPU in scope is free or held by protected processes only",
            bool(record.get("gpus")) and all(gpu["verdict"] in CLEAN_GPU for gpu in record["gpus"]),
            record.get("gpus"),
        )
        if probe:
            self.check("the probe ran", (record.get("seconds") or {}).get("probe") is not None, record.get("seconds"))
        self.expect_gone(gone)
        self.expect_bystanders(done)

    def expect_gone(self, gone: list[servers.Server]) -> None:
        left = [facts for server in gone for facts in self.tracker.alive(server.name)]
        self.check("no process of the server is left", not left, procs.plain(left))

    def expect_bystanders(self, done: Reset) -> None:
        shared = {name: Bystander(key, None) for server in self.started for name, key in server.bystanders.items()}
        for name, one in {**self.cpu_bystanders, **self.gpu_bystanders, **shared}.items():
            works = procs.is_alive(one.key) and (one.beat is None or servers.beats_on(one.beat))
            self.check(
                f"the bystander ({name}) survives and goes on working",
                works and one.key[0] not in done.killed,
                {"pid": one.key[0], "killed": one.key[0] in done.killed},
            )

    def watch(self, gone: list[servers.Server], seconds: float = 45) -> None:
        """After "clean": no process of these servers, no port and no MiB may come back within `seconds`."""
        known = {one.key[0] for one in self.gpu_bystanders.values()}
        back: list[Any] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end and not back:
            back += procs.plain(facts for server in gone for facts in self.tracker.alive(server.name))
            back += [{"gpu": index, "pids": pids} for index, (_, pids) in enumerate(raw.brief()) if set(pids) - known]
            back += [{"port": server.port} for server in gone if servers.ask(server.port, "/health", None, 1)[0]]
            time.sleep(0.5)
        self.check(f"{seconds:.0f} s after the verdict no process, port or MiB is back", not back, back)


@dataclass(frozen=True)
class Bystander:
    """A process that must survive; `beat` is the file it counts in, when it does."""

    key: tuple[int, int]
    beat: Path | None


def decoded(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""


def changed_of(output: str) -> int | None:
    """changed=N of the play recap, whatever the callback; None when there is none."""
    for line in reversed(output.splitlines()):
        for word in line.split():
            if word.startswith("changed="):
                with suppress(ValueError):
                    return int(word.split("=", 1)[1].rstrip(",;"))
    return None
