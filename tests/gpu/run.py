"""Plays the reset on a real GPU: `python3 -m tests.gpu.run --out FOLDER` (tests/gpu/README.md).

Exit status: 0 all checks held, 1 some did not, 2 nothing could be played.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tarfile
import time
import traceback
from pathlib import Path

from .driver import against_aiperf, benchmark, deploy, procs, raw, scenarios, servers
from .driver.session import RECORDS, REPOSITORY, Session

TORCH = ["idle", "torch-processes"]
ONE_GPU = [
    *TORCH,
    "main-killed-after-spawn",
    "main-killed-in-jit",
    "ready",
    "scheduler-stopped",
    "main-killed-ready",
]
TWO_GPUS = ["two-gpus-torch", "two-gpus-sglang", "two-gpus-tp2", "instants-1", "instants-2"]
DEPLOY = [
    "deploy-baseline",
    "deploy-again",
    "deploy-simulated-acceptance",
    "deploy-random-drafter",
    "deploy-eagle3",
    "deploy-stalled",
    "deploy-kernel",
    "deploy-readings",
    "deploy-end",
]
NAMED_SETS = {
    "torch": TORCH,
    "one": ONE_GPU,
    "two": TWO_GPUS,
    "two-torch": ["two-gpus-torch"],
    "deploy": DEPLOY,
    "deploy-two": ["deploy-stalled-tp2", "all-reduce"],
    "benchmark": [benchmark.NAME],
    "benchmark-starts": [benchmark.STARTS],
    "aiperf": [against_aiperf.NAME],
}


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for session.jsonl and the raw files")
    parser.add_argument(
        "--scenarios",
        default="torch",
        help="comma-separated names or sets: " + ", ".join([*NAMED_SETS, *scenarios.ALL]),
    )
    parser.add_argument("--seconds", type=float, default=1800, help="no scenario starts that would not end by then")
    parser.add_argument("--play-seconds", type=float, default=170, help="longest deployment")
    parser.add_argument("--bundle", type=Path, default=Path("/tmp/gpu-session"), help="what setup.sh unpacked")
    parser.add_argument("--playbook-command", default="ansible-playbook")
    parser.add_argument("--server-python", default=sys.executable, help="interpreter with torch (and SGLang)")
    parser.add_argument("--variables", type=json.loads, default={}, help="more playbook variables, as JSON")
    parser.add_argument("--commit", default="", help="the commit that is tested, when this is no git checkout")
    parser.add_argument("--stop-early", action="store_true", help="stop when the first scenario fails a check")
    parser.add_argument("--keep-caches", action="store_true", help="pack the JIT caches for a later session")
    return parser.parse_args(words)


def chosen(text: str) -> list[scenarios.Scenario]:
    names: list[str] = []
    for word in text.split(","):
        names += NAMED_SETS.get(word, [word])
    return [scenarios.ALL[name] for name in dict.fromkeys(names)]


def commit_of(args: argparse.Namespace) -> str:
    if args.commit:
        return str(args.commit)
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def play(session: Session, one: scenarios.Scenario) -> None:
    """One scenario with its own clean-up; an error of the session itself counts as a failed check."""
    session.scenario = one.name
    left = session.end - time.monotonic()
    if one.gpus > max(1, len(raw.brief())):
        session.write("skipped", why=f"needs {one.gpus} GPUs")
        session.say(f"skipped, needs {one.gpus} GPUs")
        return
    if one.estimate > left:
        session.write("skipped", why=f"needs about {one.estimate:.0f} s, {left:.0f} s are left")
        session.say(f"skipped, needs about {one.estimate:.0f} s")
        return
    if one.sglang and not procs.wait_until(session.bundle.ready, min(120, left / 2), 0.5):
        session.check("SGLang is unpacked", False, f"no {session.bundle.root}/site.ready: run tests/gpu/setup.sh")
        return
    began = time.monotonic()
    try:
        one.play(session)
    except Exception:  # the next scenario is worth more than a clean stop
        session.check("the scenario ran to its end", False, traceback.format_exc()[-1500:])
    finally:
        session.stop_samples()
        session.sweep()
    session.write("scenario", seconds=round(time.monotonic() - began, 1))


def pack(target: Path, *sources: Path, limit_mib: float = 15) -> None:
    """A tar.xz that stays under what one file may have; removed again when it does not."""
    with tarfile.open(target, "w:xz", preset=3) as tar:
        for source in sources:
            if source.exists():
                tar.add(source, arcname=source.name)
    if target.stat().st_size > limit_mib * 2**20:
        target.unlink()


def build_helpers(target: Path) -> None:
    """Compiles the GPU-holding bystander under its protected name, and the small init; needs a C compiler."""
    here = Path(__file__).resolve().parent
    target.mkdir(parents=True, exist_ok=True)
    for name, source in (("dcgm-exporter", "cuda_holder.c"), ("tini", "tini.c")):
        if not (target / name).exists():
            subprocess.run(["cc", "-O1", "-o", str(target / name), str(here / source), "-ldl"], check=True)


def ensure_init(args: argparse.Namespace) -> None:
    """Where orphans would go to an interpreter, start again under a small init, as containers have."""
    found = procs.adopter()
    name = Path(found.exe).name if found else ""
    print(f"orphans go to pid {found.pid if found else '?'} ({name})", flush=True)
    known = found is not None and (found.pid == 1 or name in ("tini", "systemd", "init", "dumb-init"))
    if known and not name.startswith(("python", "pypy")):
        return
    small_init = args.bundle / "bin" / "tini"
    if small_init.exists() and name != "tini":
        os.execv(small_init, [str(small_init), sys.executable, "-m", "tests.gpu.run", *sys.argv[1:]])


def main(words: list[str] | None = None) -> int:
    args = arguments(words)
    todo = chosen(args.scenarios)
    if not raw.brief():
        print(
            f"No GPU can be read here ({raw.nvml().get('error')}): this session needs a real NVIDIA GPU, driver and "
            "nvidia-ml-py.",
            file=sys.stderr,
        )
        return 2
    if words is None:
        ensure_init(args)
    session = Session(
        out=args.out.absolute(),
        work=args.bundle.absolute() / "work",
        playbook_command=shlex.split(args.playbook_command),
        bundle=servers.Bundle(args.bundle.absolute(), args.server_python),
        commit=commit_of(args),
        variables=args.variables,
        end=time.monotonic() + args.seconds,
        play_seconds=args.play_seconds,
    )
    session.open()
    if not session.bundle.ready():
        build_helpers(session.bundle.root / "bin")
    try:
        if any(one.bystanders for one in todo):
            scenarios.add_cpu_bystanders(session)
        for one in todo:
            play(session, one)
            if args.stop_early and session.failures and one is todo[0]:
                session.say("stopping: the first scenario failed, the rest would too")
                break
    finally:
        session.scenario = "end"
        session.end_bystanders()
        session.write("end", failures=session.failures)
        session.tracker.close()
        deploy.end_all(session)
        pack(
            args.out / "raw.tar.xz",
            session.work / "logs",
            session.work / "host-state",
            session.work / "config",
            RECORDS.parent / "health",
            RECORDS.parent / "preflight",
        )
        if args.keep_caches:
            pack(args.out / "jit-caches.tar.xz", session.bundle.home)
    print(f"\n{len(session.failures)} checks failed" + "".join(f"\n  {line}" for line in session.failures))
    return 1 if session.failures else 0


if __name__ == "__main__":
    sys.exit(main())
