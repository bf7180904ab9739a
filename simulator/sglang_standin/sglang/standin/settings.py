"""What a stand-in server does can be chosen by environment variables, each with the prefix ``SGLANG_STANDIN_``.

How it shows itself
    VERSION             0.5.17 (default; recorded on a GPU) or 0.5.23
    BLANK_ENVIRON       1: setproctitle blanks /proc/<pid>/environ of the workers; default 0: it stays readable
    RENAME_WORKER       title of the last scheduler instead of sglang::scheduler_TP<n>
    INDUCTOR_WORKERS    torch inductor processes under each scheduler with speculation (default 2; really 17)
    DEVICE_FOLDER       whose nvidia<N> and nvidiactl every process opens (default /dev)
    NO_GPU              1: neither opens devices nor takes memory
    MEMORY_MIB          what each scheduler takes of its GPU in the end (default 76000)
    SHM_FOLDER          where a start leaves its sglang_loads_*.shm (default: nowhere; really /dev/shm)
    MAX_CONTEXT         context length of the model where its config.json does not say (default 262144)

How long things take, in seconds; SPEED (default 1) divides them all
    IMPORT_SECONDS      until a child has its title (default 0.1; really 10)
    INIT_SECONDS LOAD_SECONDS DRAFT_SECONDS POOL_SECONDS CAPTURE_SECONDS WARMUP_SECONDS   phases of the start-up
    JIT_SECONDS         life of a ninja and an nvcc under scheduler 0 in capture (default 0: none)
    ORPHAN_SECONDS      an orphaned scheduler holds its GPU that long, then BrokenPipeError ends it (default 20)
    TERM_POLL_SECONDS   how often SIGTERM and the drain are looked at (default 5)
    RELEASE_SECONDS     a scheduler's own exit at shut-down (default 2.5)
    EXIT_WAIT_SECONDS   how long main waits for that before it kills (default 15)
    MEET_SECONDS        how long ranks of several hosts wait for each other (default 600; --dist-timeout)
    WATCH_SECONDS       how often main looks for dead workers (default 1)
    CRASH_SECONDS       between a dead worker and the end of the tree (default 5)
    COREDUMP_SECONDS    how long main then waits while a scheduler lives (default 60)
    HEALTH_SECONDS      the least time of /health (default 1)
    HEALTH_TIMEOUT_SECONDS   until /health gives up (default: SGLANG_HEALTH_CHECK_TIMEOUT, else 20)
    DISCONNECT_SECONDS  how often a waiting request looks whether its client is still there (default 4)
    STEP_SECONDS        one decode step (default 0.012);  VERIFY_SECONDS  one with speculation (default 0.020)
    STEP_TABLE VERIFY_TABLE   the same by requests that run, e.g. 1:0.012,16:0.017 (between them in proportion)
    PREFILL_SECONDS     one prefill of 1000 tokens (default 0.05)
    ACCEPT_LENGTH       mean accept length (default: Kimi-K2.5's for the number of steps); also SGLANG_SIMULATE_ACC_LEN

    NO_SPEC_META        1: answers tell nothing of acceptance, as in older versions

What goes wrong
    REFUSE_EVERY        of the streamed requests one in so many is answered 503 (default 0: none)
    DIE_AFTER_REQUESTS  the scheduler dies when it has answered so many requests (default 0: never)
    IGNORE_TERM         1: main ignores SIGTERM, in every phase
    OUTLIVE_MAIN        1: workers do not ask the kernel to die with main (they did not in every version)
    HANG_AFTER          import, init, weights, draft, pool, capture: schedulers stop for ever after that phase
    FAIL                dies as recorded in failures/<name>.log: eagle3-missing-module-in-draft,
                        draft-context-length-mismatch, eagle3-unsupported-attention-backend, kernel-package-missing,
                        common-ops-cannot-load-libcuda, topk-missing, steps-missing-topk-given

Memory comes from the state folder of the simulated GPUs, GPU_SIMULATOR_STATE (default /run/simulated-gpu).
CUDA_VISIBLE_DEVICES (indices or UUIDs), --base-gpu-id and --gpu-id-step choose the GPUs as with real SGLang.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

PREFIX = "SGLANG_STANDIN_"

TEXTS = {
    "VERSION": "0.5.17",
    "RENAME_WORKER": "",
    "DEVICE_FOLDER": "/dev",
    "SHM_FOLDER": "",
    "HANG_AFTER": "",
    "FAIL": "",
    "STEP_TABLE": "",
    "VERIFY_TABLE": "",
}
FLAGS = ("BLANK_ENVIRON", "NO_GPU", "IGNORE_TERM", "OUTLIVE_MAIN", "NO_SPEC_META")
NUMBERS = {
    "INDUCTOR_WORKERS": 2,
    "MEMORY_MIB": 76000,
    "MAX_CONTEXT": 262144,
    "DIE_AFTER_REQUESTS": 0,
    "REFUSE_EVERY": 0,
}
SECONDS = {
    "IMPORT_SECONDS": 0.1,
    "INIT_SECONDS": 0.05,
    "LOAD_SECONDS": 0.1,
    "DRAFT_SECONDS": 0.05,
    "POOL_SECONDS": 0.05,
    "CAPTURE_SECONDS": 0.1,
    "WARMUP_SECONDS": 0.05,
    "JIT_SECONDS": 0.0,
    "ORPHAN_SECONDS": 20.0,
    "TERM_POLL_SECONDS": 5.0,
    "RELEASE_SECONDS": 2.5,
    "EXIT_WAIT_SECONDS": 15.0,
    "MEET_SECONDS": 600.0,
    "WATCH_SECONDS": 1.0,
    "CRASH_SECONDS": 5.0,
    "COREDUMP_SECONDS": 60.0,
    "HEALTH_SECONDS": 1.0,
    "DISCONNECT_SECONDS": 4.0,
    "STEP_SECONDS": 0.012,
    "VERIFY_SECONDS": 0.020,
    "PREFILL_SECONDS": 0.05,
}
CLIENTS = ("CLIENT", "CLIENT_PAUSE")
"""Settings of the benchmark client, which may stand in a server's environment too."""
PHASES = ("import", "init", "weights", "draft", "pool", "capture")


class Settings:
    """The settings of this process tree, read from its environment; seconds are divided by SPEED already."""

    blank_environ: bool
    no_gpu: bool
    ignore_term: bool
    outlive_main: bool
    no_spec_meta: bool
    inductor_workers: int
    memory_mib: int
    max_context: int
    die_after_requests: int
    refuse_every: int
    import_seconds: float
    init_seconds: float
    load_seconds: float
    draft_seconds: float
    pool_seconds: float
    capture_seconds: float
    warmup_seconds: float
    jit_seconds: float
    orphan_seconds: float
    term_poll_seconds: float
    release_seconds: float
    exit_wait_seconds: float
    meet_seconds: float
    watch_seconds: float
    crash_seconds: float
    coredump_seconds: float
    health_seconds: float
    disconnect_seconds: float
    step_seconds: float
    verify_seconds: float
    prefill_seconds: float

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        given = os.environ if environ is None else environ

        def value(name: str, default: object) -> str:
            return given.get(PREFIX + name) or str(default)

        known = {*TEXTS, *FLAGS, *NUMBERS, *SECONDS, *CLIENTS, "SPEED", "HEALTH_TIMEOUT_SECONDS", "ACCEPT_LENGTH"}
        unknown = sorted(n for n in given if n.startswith(PREFIX) and n[len(PREFIX) :] not in known)
        if unknown:
            raise SystemExit(f"the stand-in server has no setting {', '.join(unknown)}; see standin/settings.py")
        speed = float(value("SPEED", 1))
        self.version = value("VERSION", TEXTS["VERSION"])
        self.rename_worker = value("RENAME_WORKER", "")
        self.device_folder = value("DEVICE_FOLDER", TEXTS["DEVICE_FOLDER"])
        self.shm_folder = value("SHM_FOLDER", "")
        self.hang_after = value("HANG_AFTER", "")
        self.fail = value("FAIL", "")
        self.step_table = _table(value("STEP_TABLE", ""), speed)
        self.verify_table = _table(value("VERIFY_TABLE", ""), speed)
        for name in FLAGS:
            setattr(self, name.lower(), value(name, "0") not in ("0", "false"))
        for name, number in NUMBERS.items():
            setattr(self, name.lower(), int(value(name, number)))
        for name, seconds in SECONDS.items():
            setattr(self, name.lower(), float(value(name, seconds)) / speed)
        timeout = value("HEALTH_TIMEOUT_SECONDS", given.get("SGLANG_HEALTH_CHECK_TIMEOUT") or 20)
        self.health_timeout_seconds = float(timeout) / speed
        length = value("ACCEPT_LENGTH", given.get("SGLANG_SIMULATE_ACC_LEN") or 0)
        self.accept_length = float(length)
        self.state_folder = given.get("GPU_SIMULATOR_STATE") or "/run/simulated-gpu"
        if self.hang_after and self.hang_after not in PHASES:
            raise SystemExit(f"{PREFIX}HANG_AFTER={self.hang_after!r}: the phases are {', '.join(PHASES)}")

    def step(self, speculative: bool, running: int) -> float:
        """Seconds of one step with so many requests."""
        table = self.verify_table if speculative else self.step_table
        if not table:
            return self.verify_seconds if speculative else self.step_seconds
        below = max((at for at in table if at <= running), default=min(table))
        above = min((at for at in table if at >= running), default=max(table))
        if below == above:
            return table[below]
        return table[below] + (table[above] - table[below]) * (running - below) / (above - below)


def _table(text: str, speed: float) -> dict[int, float]:
    """1:0.012,16:0.017"""
    pairs = (pair.split(":") for pair in text.split(",") if pair)
    return {int(requests): float(seconds) / speed for requests, seconds in pairs}
