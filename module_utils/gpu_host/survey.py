"""What there is on the host: its processes, its GPUs, and which of the processes a reset would end."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from . import verdict
from .deadline import Deadline
from .kernel_log import KernelEvent
from .nvml import Reader
from .processes import Finding, Patterns, classify, servers_on_gpus
from .procfs import Proc, Process
from .readings import Gpu, Readings, select
from .scope import Scope
from .verdict import Policy, Sight, Verdict


@dataclass(frozen=True)
class Look:
    """All processes at one moment: those that matter, those to end, and those that could not be decided.

    ``elsewhere`` are servers that run on GPUs that were not asked for, ``undecided`` those that NVML lists on no GPU
    at all while only some GPUs were asked for.
    """

    processes: Mapping[int, Process]
    findings: Mapping[int, Finding]
    chosen: Mapping[int, Finding]
    elsewhere: Mapping[int, Finding]
    undecided: Mapping[int, Finding]


class Survey:
    """Looks at processes and GPUs as often as it is asked; changes nothing.

    ``wanted`` names GPUs by index, UUID or PCI id; empty means all of them, and then servers without any GPU are to
    end as well.
    """

    def __init__(
        self,
        proc: Proc,
        patterns: Patterns,
        scope: Scope,
        reader: Reader,
        wanted: Sequence[str] = (),
        kill_strangers: bool = False,
        device_folder: str = "/dev",
    ) -> None:
        self.proc = proc
        self._patterns = patterns
        self._scope = scope
        self._reader = reader
        self._wanted = list(wanted)
        self._kill_strangers = kill_strangers
        self._device_folder = device_folder.rstrip("/")
        self._ending: frozenset[str] = frozenset()
        self._samples: dict[str, list[tuple[float, int | None]]] = {}
        self.readings = Readings("none", None, None, (), "not read yet")
        self.selected: list[Gpu] = []

    def read(self, deadline: Deadline) -> Readings:
        """Read all GPUs. Raises UnknownGpu when one was asked for that is not there."""
        self.readings = self._reader.read(deadline)
        now = time.monotonic()
        for gpu in self.readings.gpus:
            self._samples.setdefault(gpu.uuid, []).append((now, gpu.utilization_percent))
        if self.readings.gpus:
            self.selected = select(self.readings, self._wanted)
        return self.readings

    def forget_samples(self) -> None:
        """Begin anew with the samples of utilization, after a cure."""
        self._samples.clear()

    def listed(self) -> dict[int, frozenset[str]]:
        """UUIDs of the GPUs on which the driver lists each pid, as last read."""
        found: dict[int, frozenset[str]] = {}
        for gpu in self.readings.gpus:
            for process in gpu.processes or ():
                found[process.pid] = found.get(process.pid, frozenset()) | {gpu.uuid}
        return found

    def look(self) -> Look:
        """Judge every process as it is now, by the GPUs as last read."""
        processes = self.proc.snapshot()
        listed = self.listed()
        findings = classify(
            processes,
            self.proc,
            self._patterns,
            os.getpid(),
            lambda process: self._scope.sees(self.proc, process),
            listed,
            self._device_folder,
        )
        ours = {pid: finding for pid, finding in findings.items() if finding.ours}
        uuids = frozenset(gpu.uuid for gpu in self.selected)
        if not self._wanted:
            chosen, elsewhere, undecided = dict(ours), {}, {}
        else:
            on_selected, nowhere = servers_on_gpus(findings, listed, uuids)
            # A server keeps its fate when the worker that held the GPU is the first to go.
            self._ending |= on_selected
            on_selected = self._ending
            nowhere -= on_selected | self._excluded_by_maps(ours, nowhere)
            chosen = {pid: finding for pid, finding in ours.items() if finding.group in on_selected}
            undecided = {pid: finding for pid, finding in ours.items() if finding.group in nowhere}
            elsewhere = {pid: finding for pid, finding in ours.items() if pid not in chosen and pid not in undecided}
        if self._kill_strangers:
            for pid, finding in findings.items():
                if finding.kind == "stranger" and listed.get(pid, frozenset()) & uuids and self._may_end(finding):
                    chosen[pid] = finding
        return Look(processes, findings, chosen, elsewhere, undecided)

    def _may_end(self, finding: Finding) -> bool:
        return not finding.doubtful and self._scope.sees(self.proc, finding.process)

    def _excluded_by_maps(self, ours: Mapping[int, Finding], groups: frozenset[str]) -> frozenset[str]:
        """Groups that have GPUs mapped, but none of those asked for: they belong elsewhere.

        A process maps the node of every GPU that it can see, so what is mapped excludes and never selects.
        """
        minors = {gpu.minor for gpu in self.selected}
        if None in minors:
            return frozenset()
        node = re.compile(re.escape(self._device_folder) + r"/nvidia(\d+)$")
        mapped: dict[str, set[int]] = {}
        for pid, finding in ours.items():
            if finding.group in groups:
                numbers = {int(found.group(1)) for path in self.proc.maps(pid) or () if (found := node.match(path))}
                mapped.setdefault(finding.group, set()).update(numbers)
        return frozenset(group for group, numbers in mapped.items() if numbers and not numbers & minors)

    def sight(self, look: Look, unkillable: frozenset[int] = frozenset()) -> Sight:
        """What /proc says about every process that the driver lists."""
        guest = self.proc.in_guest()
        states, names = {}, {}
        for pid in [*self.listed(), *unkillable]:
            process = look.processes.get(pid)
            if process is None:
                states[pid] = "unseen" if guest or 1 not in look.processes else "dead"
            else:
                states[pid] = "dead" if process.gone else "live"
                names[pid] = process.name
        protected = frozenset(pid for pid, finding in look.findings.items() if finding.kind == "protected")
        return Sight(states, names, protected, unkillable, guest)

    def judge(
        self, look: Look, policy: Policy, unkillable: frozenset[int] = frozenset(), events: Sequence[KernelEvent] = ()
    ) -> tuple[list[tuple[Gpu, Verdict]], bool]:
        """A verdict on each GPU asked for, and whether another look could no longer change one for the better."""
        sight = self.sight(look, unkillable)
        verdicts, settled = [], True
        for gpu in self.selected:
            sampled = replace(policy, utilization=tuple(self._samples[gpu.uuid]))
            verdicts.append((gpu, verdict.judge(gpu, sight, sampled, events)))
            settled = settled and verdict.settled(gpu, sampled)
        return verdicts, settled
