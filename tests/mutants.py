"""Faults put in on purpose: each must make a test fail, or the tests have no teeth.

``python -m tests.mutants [NAME ...]`` copies the repository, puts one fault in, runs the tests that should notice,
and fails when they still pass. A fault whose place is gone is an error: the list must follow the code.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "module_utils/gpu_host"
CONTROL = "plugin_utils/gpu_control"
ROLLING = ("tests/unit/test_rolling.py",)
INTERRUPTED = ("tests/unit/test_interrupted.py",)


@dataclass(frozen=True)
class Mutant:
    """``old`` stands once in ``file`` and becomes ``new``; ``tests`` are what should fail then."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = (
    Mutant(
        "start time ignored",
        f"{PACKAGE}/signals.py",
        "(now.start_ticks, now.argv) != (process.start_ticks, process.argv)",
        "now.argv != process.argv",
        ("tests/unit/test_signals.py",),
    ),
    Mutant(
        "only two GPUs checked",
        f"{PACKAGE}/survey.py",
        "for gpu in self.selected:\n            sampled",
        "for gpu in self.selected[:2]:\n            sampled",
        ("tests/unit/test_survey.py",),
    ),
    Mutant(
        "unit not stopped",
        f"{PACKAGE}/managers.py",
        "return members if members and members <= allowed else set()",
        "return set()",
        ("tests/unit/test_managers.py",),
    ),
    Mutant(
        "unreadable environment taken for an empty one",
        f"{PACKAGE}/procfs.py",
        'if raw is None or not raw.strip(b"\\0"):\n            return None',
        'if raw is None or not raw.strip(b"\\0"):\n            return {}',
        ("tests/unit/test_processes.py",),
    ),
    Mutant(
        "index taken for minor",
        f"{PACKAGE}/survey.py",
        "minors = {gpu.minor for gpu in self.selected}",
        "minors = {gpu.index for gpu in self.selected}",
        ("tests/unit/test_survey.py",),
    ),
    Mutant(
        "group taken without a server as its leader",
        f"{PACKAGE}/processes.py",
        "        if leader in servers:",
        "        servers = dict.fromkeys([leader], next(iter(servers.values()), ''))\n        if servers[leader]:",
        ("tests/unit/test_processes.py",),
    ),
    Mutant(
        "protected list empty",
        f"{PACKAGE}/processes.py",
        "if process.exe_name in patterns.protected:\n        return True",
        "if process.exe_name in ():\n        return True",
        ("tests/unit/test_processes.py",),
    ),
    Mutant(
        "a living parent ignored",
        f"{PACKAGE}/processes.py",
        "    while not reparented(top, processes):",
        "    while False:",
        ("tests/unit/test_processes.py",),
    ),
    Mutant(
        "TERM sent to every process of a server",
        f"{PACKAGE}/ending.py",
        "[victim for victim in free if victim.finding.main or not victim.finding.ours]",
        "free",
        ("tests/unit/test_ending.py",),
    ),
    Mutant(
        "idle_only ignores the queue",
        f"{PACKAGE}/policy.py",
        "return (state.running or 0) + (state.waiting or 0)",
        "return state.running or 0",
        ("tests/unit/test_policy.py",),
    ),
    Mutant(
        "requests that are not told taken for none",
        f"{PACKAGE}/policy.py",
        "if state.running is None and state.waiting is None:\n        return None",
        "if state.running is None and state.waiting is None:\n        return 0",
        ("tests/unit/test_policy.py",),
    ),
    Mutant(
        "zombies_only takes a hung server whose memory can't be read",
        f"{PACKAGE}/policy.py",
        'state.state == "hung" and bool(state.memory_mib)',
        'state.state == "hung" and state.memory_mib != 0',
        ("tests/unit/test_policy.py",),
    ),
    Mutant(
        "no second look before the end",
        f"{PACKAGE}/policy.py",
        "            self._decision = self._look(chosen, readings)\n            if self._decision.skip or",
        "            if self._decision.skip or",
        ("tests/unit/test_policy.py",),
    ),
    Mutant(
        "a drain that does not wait",
        f"{PACKAGE}/policy.py",
        "        if not self._decision.wait_for and not self.taken:",
        "        if not self.taken:",
        ("tests/unit/test_policy.py",),
    ),
    Mutant(
        "a server that starts put back into the router",
        f"{PACKAGE}/policy.py",
        'state.state in ("idle", "busy") and not state.draining',
        'state.state in ("idle", "busy", "starting") and not state.draining',
        ("tests/unit/test_policy.py",),
    ),
    Mutant(
        "taken out of the router without a note",
        f"{PACKAGE}/policy.py",
        "                    router.write_note(self._state_folder, known)\n",
        "",
        ("tests/unit/test_policy.py",),
    ),
    Mutant(
        "a host begun after the window",
        f"{CONTROL}/gate.py",
        "if end is not None and self.clock() > end:",
        "if end is not None and self.clock() > end + 3600:",
        ROLLING,
    ),
    Mutant(
        "the nodes of a server decided one by one",
        f"{CONTROL}/gate.py",
        'self._unit = "\\n".join(self.nodes)',
        "self._unit = host",
        ROLLING,
    ),
    Mutant(
        "the other nodes follow a first one that was skipped",
        f"{CONTROL}/gate.py",
        'if verdict in ("clean", "dirty"):',
        'if verdict in ("clean", "dirty", "skipped"):',
        ROLLING,
    ),
    Mutant(
        "the other nodes don't wait for the first one",
        f"{CONTROL}/gate.py",
        'if self.host == self.head or policy == "force":',
        'if self.host == self.head or policy != "zombies_only":',
        ROLLING,
    ),
    Mutant(
        "a host that was dirty before counts as newly dirty",
        f"{CONTROL}/gate.py",
        'kind = breaker.DONE if before == "dirty" else breaker.NEWLY_DIRTY',
        "kind = breaker.NEWLY_DIRTY",
        ROLLING,
    ),
    Mutant(
        "a tripped breaker that the next run passes over",
        f"{CONTROL}/gate.py",
        'return f"not begun: {trip.sentence}" if trip else ""',
        'return ""',
        ROLLING,
    ),
    Mutant(
        "skipped hosts count in the breaker's share",
        f"{CONTROL}/gate.py",
        'hosts = self.plan["count"] - sum(one == breaker.SKIPPED for one in counted.values())',
        'hosts = self.plan["count"]',
        ROLLING,
    ),
    Mutant(
        "a breaker that can't be read taken for none",
        f"{CONTROL}/breaker.py",
        "(FileNotFoundError, NotADirectoryError)",
        "(FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError, AttributeError)",
        ROLLING,
    ),
    Mutant(
        "one dirty host stops the run",
        f"{CONTROL}/breaker.py",
        "LEAST_DIRTY = 2",
        "LEAST_DIRTY = 1",
        ROLLING,
    ),
    Mutant(
        "a server cut between two batches",
        f"{CONTROL}/rolling.py",
        "        for member in joined:\n            unit_of[member] = joined\n",
        "        unit_of[host] = joined\n",
        ROLLING,
    ),
    Mutant(
        "a misspelt host that is not held out",
        f"{CONTROL}/rolling.py",
        "if not found[one] and one not in set(groups)]",
        "if not found[one] and one in set(groups)]",
        ROLLING,
    ),
    Mutant(
        "a server reset without its node that is not ready",
        f"{CONTROL}/rolling.py",
        "for node in others if not_ready.get(node)]",
        "for node in others if node in held]",
        ROLLING,
    ),
    Mutant(
        "a node begun after its run has ended",
        f"{CONTROL}/gate.py",
        "reason = self.tally.decide(self.host, reason)",
        "reason = reason or ''",
        INTERRUPTED,
    ),
    Mutant(
        "a host that was begun told as not begun",
        f"{CONTROL}/interrupted.py",
        'return ("skipped", reason) if reason else ("unknown", BEGUN)',
        'return ("skipped", reason or NOT_BEGUN)',
        INTERRUPTED,
    ),
    Mutant(
        "a run that goes on taken for a dead one",
        f"{CONTROL}/interrupted.py",
        "fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        INTERRUPTED,
    ),
    Mutant(
        "a later rank killed while its first one lives",
        f"{PACKAGE}/later_rank.py",
        "return states == {_CLOSE_WAIT}",
        "return _CLOSE_WAIT in states",
        ("tests/unit/test_later_rank.py",),
    ),
)


def copy_of_the_repository(folder: Path) -> Path:
    """What git knows and what it would add, and a link to the environment."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in listed.stdout.splitlines():
        source = ROOT / name
        if source.exists() or source.is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name, follow_symlinks=False)
    return folder


def noticed(mutant: Mutant, folder: Path) -> bool:
    """Whether the tests fail with the fault in; the fault is taken out again."""
    file = folder / mutant.file
    text = file.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: its place is not once in {mutant.file}; let the list follow the code.")
    file.write_text(text.replace(mutant.old, mutant.new))
    try:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", *mutant.tests]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    finally:
        file.write_text(text)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{mutant.name}: pytest could not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 1


def main(names: list[str]) -> int:
    wanted = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of_the_repository(Path(folder))
        for mutant in wanted:
            caught = noticed(mutant, copy)
            survivors += not caught
            print(f"{'caught  ' if caught else 'SURVIVED'}  {mutant.name}", flush=True)
    print(f"{len(wanted) - survivors} of {len(wanted)} faults were noticed")
    return 1 if survivors or not wanted else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
