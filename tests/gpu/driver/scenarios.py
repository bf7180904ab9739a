"""What is played on the GPU. Each scenario starts its processes, reads, resets, checks; estimates are seconds."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import procs, raw, servers
from .session import Session


@dataclass(frozen=True)
class Scenario:
    name: str
    estimate: float
    gpus: int
    sglang: bool
    play: Callable[[Session], None]
    bystanders: bool = True


ALL: dict[str, Scenario] = {}
JIT_WORDS = ("nvcc", "cicc", "ptxas", "ninja", "cudafe++")


def scenario(
    name: str, estimate: float, *, gpus: int = 1, sglang: bool = True, bystanders: bool = True
) -> Callable[[Callable[[Session], None]], Callable[[Session], None]]:
    def register(play: Callable[[Session], None]) -> Callable[[Session], None]:
        ALL[name] = Scenario(name, estimate, gpus, sglang, play, bystanders)
        return play

    return register


def add_cpu_bystanders(s: Session) -> None:
    """Jobs without a GPU, an orphaned one among them, and commands whose words merely contain the server's."""
    job = str(servers.HERE / "cpu_job.py")
    beat, orphan = s.work / "cpu-job", s.work / "cpu-orphan"
    s.add_bystander("CPU-only Python job", [sys.executable, job, str(beat)], beat)
    s.add_bystander(
        "orphaned multiprocessing.spawn child of a CPU-only job",
        [sys.executable, job, "--orphan", str(orphan)],
        orphan,
        pid_file=Path(f"{orphan}.pid"),
    )
    watched = s.log("sglang.launch_server")
    watched.touch()
    s.add_bystander(
        "shell whose words contain the server's",
        ["sh", "-c", "while sleep 1; do :; done # python -m sglang.launch_server /data/eagle3/output_100k_sglang/4"],
        None,
    )
    s.add_bystander("tail -f on a server log", ["tail", "-f", str(watched)], None)


def add_gpu_bystander(s: Session) -> None:
    """A monitor by name (dcgm-exporter) that holds a context and 64 MiB on GPU 0."""
    beat = s.work / "dcgm-exporter.beat"
    binary = s.bundle.root / "bin" / "dcgm-exporter"
    s.add_bystander("GPU-holding dcgm-exporter", [str(binary), "64", str(beat)], beat, gpu=True)


def empty(gpu: int) -> bool:
    """At most 64 MiB used and no process listed, both read."""
    used, pids = raw.brief()[gpu]
    return used is not None and used <= 64 and not pids


def ready(s: Session, server: servers.Server, seconds: float) -> bool:
    began = time.monotonic()
    good = servers.wait_ready(server, seconds)
    tail = server.log.read_text(errors="replace")[-800:] if server.log.exists() else ""
    return s.check(
        f"{server.name} becomes ready",
        good,
        {"seconds": round(time.monotonic() - began, 1), **({} if good else {"log": tail})},
    )


def holders(s: Session, *tenants: servers.Server) -> list[int]:
    return [facts.pid for server in tenants for facts in s.workers(server)]


def holders_by_gpu(s: Session, server: servers.Server) -> dict[int, list[int]]:
    """Of a server on several GPUs: NVML alone tells which rank uses which; that they are the server's is known."""
    own = {facts.pid for facts in s.workers(server)}
    return {index: [pid for pid in pids if pid in own] for index, (_, pids) in enumerate(raw.brief())}


def stop_with_request_waiting(s: Session, server: servers.Server, worker: procs.Facts) -> None:
    s.kill(worker.key, signal.SIGSTOP)
    s.check(
        "the scheduler is stopped",
        procs.wait_until(lambda: (now := procs.read_facts(worker.pid)) is not None and now.state == "T", 2),
    )
    servers.generate_in_background(server.port)
    time.sleep(1)


@scenario("idle", 20, sglang=False)
def idle(s: Session) -> None:
    """An idle host is clean, and a second reset changes nothing."""
    s.look("before")
    first = s.reset("idle")
    s.expect_clean(first, gone=[])
    s.check("nothing was killed on an idle host", not first.record.get("killed"), first.record.get("killed"))
    second = s.reset("again", probe=False)
    s.check("a second reset reports changed=0", second.rc == 0 and second.changed == 0, second.changed)
    s.look("after")


@scenario("torch-processes", 65, sglang=False)
def torch_processes(s: Session) -> None:
    """A serving parent with children, a 20 GiB orphan in its own session, a stopped worker, all bystanders."""
    add_gpu_bystander(s)
    serving = s.torch("torch-serving", "--tp-size", "2", "--one-gpu")
    orphaned = s.torch("torch-orphaned", "--own-session", "--hold-mib", "20480")
    stopped = s.torch("torch-stopped", "--hold-mib", "2048")
    tenants = [serving, orphaned, stopped]
    if not all(ready(s, server, 90) for server in tenants):
        return
    s.check("the torch server answers", servers.generate(serving.port)[0] == 200)
    s.kill(orphaned.main, signal.SIGKILL)
    stop_with_request_waiting(s, stopped, s.workers(stopped)[0])
    monitors = [one.key[0] for one in s.gpu_bystanders.values()]
    s.check("the 20 GiB orphan outlives its main", len(s.workers(orphaned)) == 1)
    orphan = s.workers(orphaned)[0]
    s.look("before", {0: holders(s, *tenants) + monitors})
    s.start_samples()
    done = s.reset("torch processes", grace=8)
    s.stop_samples()
    s.look("after", {0: monitors})
    s.expect_clean(done, gone=tenants)
    signals = {int(one["pid"]): str(one.get("signal")) for one in done.record.get("killed", [])}
    s.check("the orphan in its own session was ended", orphan.pid in done.killed, sorted(done.killed))
    s.check("the serving main ended by TERM", "TERM" in signals.get(serving.main[0], ""), signals)
    s.check("the main with a stopped worker ended by KILL", "KILL" in signals.get(stopped.main[0], ""), signals)
    s.end_bystanders(gpu_only=True)
    s.check(
        "GPU 0 is empty once the monitor ended too",
        procs.wait_until(lambda: empty(0), 5),
    )


@scenario("main-killed-after-spawn", 95)
def main_killed_after_spawn(s: Session) -> None:
    """Main killed 1 s after it spawned: orphans that hold no GPU yet and would take it ten seconds later."""
    server = s.sglang("killed-after-spawn", from_shell=True)

    def spawned() -> bool:
        s.tracker.look()
        return sum("multiprocessing.spawn" in " ".join(facts.argv) for facts in s.tracker.members(server.name)) >= 1

    if not s.check("the main spawned children", procs.wait_until(spawned, 90, 0.05)):
        return
    time.sleep(1)
    s.kill(server.main, signal.SIGKILL)
    time.sleep(0.3)
    s.check("orphans are left", len(s.tracker.alive(server.name)) >= 1)
    s.look("before")
    s.start_samples()
    done = s.reset("orphans")
    s.look("after")
    s.expect_clean(done, gone=[server])
    s.watch([server], 45)
    s.stop_samples()


@scenario("main-killed-in-jit", 75)
def main_killed_in_jit(s: Session) -> None:
    """Main killed while nvcc compiles: ninja and nvcc live on, nvcc in a process group of its own."""
    server = s.sglang("killed-in-jit")

    def compiling() -> bool:
        s.tracker.look()
        return any(facts.comm in JIT_WORDS for facts in s.tracker.members(server.name))

    def over() -> bool:
        return not procs.is_alive(server.main) or servers.ask(server.port, "/health", None, 1)[0] == 200

    procs.wait_until(lambda: compiling() or over(), 100, 0.02)
    if not s.check("nvcc compiles during a start on an empty cache", compiling()):
        return
    s.kill(server.main, signal.SIGKILL)
    s.look("before")
    done = s.reset("jit")
    s.look("after")
    s.expect_clean(done, gone=[server])
    s.watch([server], 12)


@scenario("ready", 125)
def ready_then_reset(s: Session) -> None:
    """A serving EAGLE-3 server: TERM to its main alone suffices. The start uses the cache a killed nvcc left."""
    server = s.sglang("ready")
    if not ready(s, server, 130):
        return
    status, body = servers.generate(server.port)
    s.check("the server generates", status == 200, body[:600])
    info = servers.ask(server.port, "/server_info")
    s.write("server_info", status=info[0], body=info[1][:20000])
    s.look("before", {0: holders(s, server)})
    s.start_samples()
    done = s.reset("ready", grace=30)
    s.stop_samples()
    s.look("after", {0: []})
    s.expect_clean(done, gone=[server])
    signals = {int(one["pid"]): str(one.get("signal")) for one in done.record.get("killed", [])}
    forced = [pid for pid, name in signals.items() if "KILL" in name]
    s.check("TERM alone sufficed", "TERM" in signals.get(server.main[0], "") and not forced, signals)


@scenario("scheduler-stopped", 85)
def scheduler_stopped(s: Session) -> None:
    """A hang: the scheduler stopped with a request waiting. TERM never ends it, KILL after the grace does."""
    server = s.sglang("stopped")
    if not ready(s, server, 130):
        return
    s.check("the server generates", servers.generate(server.port)[0] == 200)
    stop_with_request_waiting(s, server, s.workers(server)[0])
    s.look("before", {0: holders(s, server)})
    s.start_samples()
    done = s.reset("stopped", grace=10)
    s.stop_samples()
    s.look("after", {0: []})
    s.expect_clean(done, gone=[server])
    signals = {int(one["pid"]): str(one.get("signal")) for one in done.record.get("killed", [])}
    s.check("the main was ended by KILL after the grace", "KILL" in signals.get(server.main[0], ""), signals)


@scenario("main-killed-ready", 70)
def main_killed_ready(s: Session) -> None:
    """Main killed while serving; the reset starts at once, among processes that are just dying."""
    server = s.sglang("killed-ready")
    if not ready(s, server, 130):
        return
    s.look("before", {0: holders(s, server)})
    s.kill(server.main, signal.SIGKILL)
    done = s.reset("main killed")
    s.look("after", {0: []})
    s.expect_clean(done, gone=[server])


@scenario("two-gpus-torch", 60, gpus=2, sglang=False)
def two_gpus_torch(s: Session) -> None:
    """One torch server a GPU, both holding both device nodes: a reset of GPU 1 leaves the other computing."""
    first, second = s.torch("torch-gpu0"), s.torch("torch-gpu1", "--base-gpu-id", "1")
    if not all([ready(s, first, 90), ready(s, second, 90)]):
        return
    keep, end = s.workers(first)[0], s.workers(second)[0]
    devices = {f"/dev/nvidia{gpu['minor']}" for gpu in raw.nvml()["gpus"]}
    for worker in (keep, end):
        nodes = procs.open_nodes(worker.pid)
        s.check("a CUDA process holds both device nodes", devices <= set(nodes), nodes)
    s.look("before", {0: [keep.pid], 1: [end.pid]})
    before = servers.beat(Path(f"{first.heartbeat}.0"))
    done = s.reset("GPU 1", gpus=[1])
    s.look("after", {0: [keep.pid], 1: []})
    s.expect_clean(done, gone=[second])
    beat = Path(f"{first.heartbeat}.0")
    s.check("the server on GPU 0 went on computing", servers.beat(beat) > before and servers.beats_on(beat))
    s.check("the server on GPU 0 still answers", servers.generate(first.port)[0] == 200)
    s.check("nothing of it was killed", not done.killed & {facts.pid for facts in s.tracker.members(first.name)})
    whole = s.reset("both GPUs")
    s.look("after both", {0: [], 1: []})
    s.expect_clean(whole, gone=[first, second])


@scenario("two-gpus-sglang", 130, gpus=2)
def two_gpus_sglang(s: Session) -> None:
    """SGLang on each GPU: a reset of GPU 1 leaves the server on GPU 0 answering."""
    first, second = s.sglang("sglang-gpu0", gpu=0), s.sglang("sglang-gpu1", gpu=1)
    if not all([ready(s, first, 150), ready(s, second, 150)]):
        return
    s.look("before", {0: holders(s, first), 1: holders(s, second)})
    done = s.reset("GPU 1", gpus=[1], grace=30)
    s.look("after", {0: holders(s, first), 1: []})
    s.expect_clean(done, gone=[second])
    status, body = servers.generate(first.port)
    s.check("the server on GPU 0 still generates", status == 200, body[:300])
    s.check("nothing of it was killed", not done.killed & {facts.pid for facts in s.tracker.members(first.name)})
    whole = s.reset("both GPUs", grace=30)
    s.look("after both", {0: [], 1: []})
    s.expect_clean(whole, gone=[first, second])


@scenario("two-gpus-tp2", 110, gpus=2)
def two_gpus_tp2(s: Session) -> None:
    """Tensor parallel 2 with EAGLE-3, one scheduler stopped with a request waiting."""
    server = s.sglang("tp2", tp=2)
    if not ready(s, server, 150):
        return
    status, body = servers.generate(server.port)
    s.check("the server generates", status == 200, body[:300])
    workers = s.workers(server)
    s.check("there are two schedulers", len(workers) == 2, [facts.title for facts in workers])
    truth = holders_by_gpu(s, server)
    stop_with_request_waiting(s, server, workers[-1])
    s.look("before", truth)
    done = s.reset("tp2", grace=10)
    s.look("after", {0: [], 1: []})
    s.expect_clean(done, gone=[server])


def instants(s: Session, seed: int, count: int = 5, latest: float = 50) -> None:
    """`count` starts of different age, all mains killed at one moment, one reset, 45 s of watching.

    Each server is killed at a random instant of its own start-up; that they die together is only to save time.
    """
    ages = sorted((random.Random(seed).uniform(1, latest) for _ in range(count)), reverse=True)
    gpus = max(1, len(raw.brief()))
    began = time.monotonic()
    tenants = []
    for number, age in enumerate(ages):
        time.sleep(max(0.0, began + ages[0] - age - time.monotonic()))
        tenants.append(s.sglang(f"instant-{seed}-{number}", gpu=number % gpus))
    time.sleep(max(0.0, began + ages[0] - time.monotonic()))
    s.look("before")
    for server in tenants:
        s.kill(server.main, signal.SIGKILL)
    time.sleep(0.2)
    for server, age in zip(tenants, ages, strict=True):
        lines = [line for line in server.log.read_text(errors="replace").splitlines() if line.strip()]
        s.write(
            "instant",
            server=server.name,
            seed=seed,
            age=round(age, 2),
            last_line=lines[-1][-300:] if lines else "",
            left=procs.plain(s.tracker.alive(server.name)),
        )
    done = s.reset(f"instants {seed}")
    s.look("after")
    s.expect_clean(done, gone=tenants)
    s.watch(tenants, 45)


@scenario("instants-1", 130)
def instants_1(s: Session) -> None:
    instants(s, 1)


@scenario("instants-2", 130)
def instants_2(s: Session) -> None:
    instants(s, 2)
