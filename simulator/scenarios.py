"""What stands on a simulated host when it has started."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from simulator.host import HostError, SimulatedHost, wait_for, wait_gone

FAR = 100_000
"""Seconds that nobody waits for."""


def hung(host: SimulatedHost) -> str:
    """A TP-8 EAGLE-3 server that hangs, orphans of two earlier ones, stale files, and bystanders to spare."""
    titled = host.start_server("earlier-ready", gpus=[0, 1], memory_mib=18000, outlive_main=True)
    early = host.start_server("earlier-importing", gpus=[2, 3], import_seconds=FAR)
    server = host.start_server("sglang", memory_mib=74000)
    monitor = host.start_monitor()
    job = host.start_data_job()
    wait_for(lambda: len(early.processes()) >= 5 or not early.main.alive(), "workers of the earlier server", 30)
    early.main.send(signal.SIGKILL)
    titled.wait_ready().main.send(signal.SIGKILL)
    server.wait_ready()
    os.kill(server.scheduler_pids[3], signal.SIGSTOP)
    client = host.start_bench_client(server)
    wait_gone([titled.main_pid, early.main_pid], 10)
    wait_for(lambda: not titled.main.alive() and not early.main.alive(), "the earlier mains", 10)
    _leave_stale_files(host, titled.main_pid)
    return (
        f"a server on GPUs 0-7 that hangs (main {server.main_pid}, port {server.port}: one scheduler stopped, "
        f"a request waiting); {len(titled.processes())} titled orphans of an earlier one, "
        "two holding memory of GPUs 0 and 1; "
        f"{len(early.processes())} orphans of one that died while importing; a monitor ({monitor.pid}), "
        f"a data job ({job.pid}) and a benchmark client ({client.pid}), which a reset must spare; "
        "a stale lock and stale shared memory"
    )


def serving(host: SimulatedHost) -> str:
    """A healthy TP-8 EAGLE-3 server and bystanders."""
    server = host.start_server("sglang")
    host.start_monitor()
    host.start_data_job()
    server.wait_ready()
    return f"a healthy server on GPUs 0-7 (main {server.main_pid}, port {server.port}), a monitor and a data job"


def two_servers(host: SimulatedHost) -> str:
    """Two healthy servers, on GPUs 0-3 and 4-7."""
    first = host.start_server("first", gpus=[0, 1, 2, 3])
    second = host.start_server("second", gpus=[4, 5, 6, 7])
    first.wait_ready()
    second.wait_ready()
    return (
        f"a server on GPUs 0-3 (main {first.main_pid}, port {first.port}) and one on GPUs 4-7 "
        f"(main {second.main_pid}, port {second.port})"
    )


def clean(host: SimulatedHost) -> str:
    """No server: a monitor and a data job alone."""
    host.start_monitor()
    host.start_data_job()
    return "no server; a monitor and a data job"


SCENARIOS: dict[str, Callable[[SimulatedHost], str]] = {
    "hung": hung,
    "serving": serving,
    "two-servers": two_servers,
    "clean": clean,
}


def start(host: SimulatedHost, name: str) -> str:
    """Make the host anew with that scenario; returns what stands there. Raises `HostError`; then nothing runs."""
    if name not in SCENARIOS:
        raise HostError(f"There is no scenario {name!r}; there are: {', '.join(SCENARIOS)}")
    host.create(scenario=name)
    try:
        return SCENARIOS[name](host)
    except BaseException:
        host.stop()
        raise


def _leave_stale_files(host: SimulatedHost, dead_pid: int) -> None:
    """A FileBaton lock of an hour ago without an owner, and shared memory of a process that is gone."""
    lock = host.folder / "home" / ".cache" / "torch_extensions" / "py311_cu130" / "fused_marlin_moe" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    segment = host.folder / "shm" / f"sgl_shm_mm_{dead_pid}_0"
    segment.write_bytes(bytes(1 << 20))
    an_hour_ago = time.time() - 3600
    for path in (lock, segment):
        os.utime(path, (an_hour_ago, an_hour_ago))
