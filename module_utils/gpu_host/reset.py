"""One reset of a GPU host: evidence, kill, clean, verify, in one call.

``run`` returns the run record: the same data that the control node appends to artifacts/resets.jsonl. Nothing is
touched before every parameter, the driver and the GPUs named have been found to make sense.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from . import arguments, filesystems, journal, kernel_log, leftovers, server_record
from .child import run_command
from .deadline import Deadline
from .ending import Ending, Outcome, planned
from .host_lock import HostLock, LockHeld
from .managers import Managers
from .nvml import Reader
from .ports import port_holders
from .processes import COMPILERS, Finding, Patterns
from .procfs import Proc, Process
from .readings import Gpu, UnknownGpu
from .scope import Scope
from .storage import StorageError
from .survey import Look, Survey
from .verdict import DEAD_PID, GHOST_LATCH, UNOWNED_MEMORY, Policy, Verdict

SCHEMA = 1
READ_SECONDS = 10.0  # longest wait for one look at all GPUs
EVIDENCE_SECONDS = 5.0
PROBE_SECONDS = 60.0
GPU_RESET_SECONDS = 60.0
LATE_ROUNDS = 3  # how often orphans that show only in verify are ended
POLL_SECONDS = (0.02, 0.25)  # first and longest pause between two looks at the GPUs
KERNEL_LOG_SECONDS = 600.0  # how far back kernel messages may explain what is found now
SIMULATED = "-simulated"  # ends the driver version of a simulated host


class Refused(Exception):
    """No reset as things stand; the text says what was found, what was expected and what to do."""


class Senseless(Refused):
    """The call itself makes no sense on this host. Nothing was changed, and there is nothing to keep a record of."""


def run(params: Mapping[str, Any], check_mode: bool = False, diff: bool = False) -> dict[str, Any]:
    """Reset the host that this runs on and return the run record.

    ``params`` are those of library/gpu_reset.py. In check mode nothing is signalled, written or deleted: ``killed``
    and ``cleaned`` hold what would be. ``failed`` is set unless the host is clean.
    """
    reset = Reset(params, check_mode)
    try:
        reset.run()
    except Senseless as reason:
        reset.refuse(f"Nothing was done. {reason}")
        reset.record["refused"] = True
    except (Refused, UnknownGpu, LockHeld, StorageError, leftovers.Refused) as reason:
        reset.refuse(str(reason))
    finally:
        reset.close()
    if diff:
        reset.record["diff"] = _diff(reset.record)
    return reset.record


class Reset:
    """The state of one run: what was read, and the record as it grows."""

    def __init__(self, params: Mapping[str, Any], check_mode: bool, proc: Proc | None = None) -> None:
        self.params = params
        self.check_mode = check_mode
        self.proc = proc or Proc()
        own_uid = os.getuid() if params["own_processes_only"] else None
        self.scope = Scope.of(params, own_uid)
        self.patterns = Patterns.of(params)
        self.reader = Reader()
        self.survey = Survey(
            self.proc,
            self.patterns,
            self.scope,
            self.reader,
            params["gpus"],
            params["kill_strangers"],
            params["device_folder"],
        )
        self.managers = Managers(self.proc)
        self.policy = Policy(free_mib=params["free_mib"], protected_mib=params["protected_mib"])
        self.outcome = Outcome()
        self.dirty: list[str] = []
        self.record = _empty_record(params)
        self._lock_folders: list[str] = []
        self._trees: list[str] = []
        self._known_servers: list[server_record.ServerRecord] = []
        self._began = time.monotonic()
        self._journal: journal.Journal | None = None
        self._lock: HostLock | None = None
        self._gate: Any = None  # policy.Gate, where the policy has a say
        self._restored = False
        self._decided: frozenset[tuple[int, int]] | None = None  # mains that a sparing policy has looked at

    def run(self) -> None:
        """All phases that were asked for, in their order, and the verdict."""
        self._check_parameters()
        phases = self.params["phases"]
        if not self.check_mode:
            self._take_lock()
        with self._timed("look"):
            try:
                self.survey.read(Deadline(READ_SECONDS))
            except UnknownGpu as reason:  # a mistake of the call, unless one could not be read or, later, has gone
                if self.survey.readings.error:
                    raise
                raise Senseless(str(reason)) from None
            self._check_driver()
            look = self.survey.look()
            before, _ = self.survey.judge(look, self.policy)
        self._note_gpus(before)
        if "kill" in phases and not self._policy_allows(look):
            return
        self._find_places(look)
        self._note_servers(look)
        if not self.check_mode:
            self._begin_journal()
        if "evidence" in phases and self._needs_evidence(look, before):
            with self._timed("evidence"):
                self._collect_evidence(look)
        if self._gate is not None and not self.check_mode and not self._is_clear(look):
            return
        if "kill" in phases:
            with self._timed("kill"):
                self._kill(look)
        if "clean" in phases:
            with self._timed("clean"):
                self._clean(look)
        if "verify" in phases or "kill" in phases:
            with self._timed("verify"):
                self._verify(wait="verify" in phases)
        self._decide()
        self._finish()

    def refuse(self, sentence: str) -> None:
        """End without a verdict: nothing on the host was changed."""
        self.record.update(verdict="unknown", reason=sentence, msg=sentence, failed=True)
        self._finish()

    def close(self) -> None:
        self.reader.close()
        if self._gate is not None and self._gate.taken and not self._restored:
            self._gate.put_back_living()
        if self._lock is not None:
            self._lock.release()

    # Before anything happens

    def _check_parameters(self) -> None:
        if problems := arguments.problems(dict(self.params)):
            raise Senseless(" ".join(problems))
        if os.geteuid() != 0 and not self.params["own_processes_only"]:
            raise Senseless(
                f"A reset ends processes of every user and runs as uid {os.geteuid()}: use become: true, or set"
                " own_processes_only: true when only this user's processes are meant."
            )

    def _take_lock(self) -> None:
        folder = self.params["state_folder"]
        self._lock = HostLock(folder, self.record["run_id"], _who(), self.params["lock_timeout"]).acquire()
        self.record["earlier"] = journal.unrecorded(
            folder, self.params["last_recorded_run"], live_run=self.record["run_id"]
        )

    def _check_driver(self) -> None:
        readings = self.survey.readings
        self.record["source"] = readings.source
        self.record["simulated"] = bool(readings.driver_version and readings.driver_version.endswith(SIMULATED))
        if readings.source == "none":
            raise Refused(f"No GPU can be judged on this host: {readings.error}")
        if not readings.gpus and not readings.error:
            raise Refused("The driver lists no GPU on this host; take it out of the inventory or look in dmesg.")

    def _begin_journal(self) -> None:
        self._journal = journal.Journal(self.params["state_folder"], self.record["run_id"])
        self._journal.begun({name: self.record[name] for name in ("host", "servers", "policy", "started", "simulated")})

    # The policy

    def _policy_allows(self, look: Look) -> bool:
        """Whether the servers may be ended, decided before anything is. Where there is none, there is nobody to ask."""
        name = self.params["policy"]
        if name == "force" or (name != "zombies_only" and not any(one.ours for one in look.chosen.values())):
            return True
        from . import policy  # slow to import, and not needed on a host without a server

        with self._timed("policy"):
            self._gate = policy.Gate(self.params, self.patterns, self.scope, self.proc, self.record["run_id"])
            skip = self._gate.decide(look.chosen, self.survey.readings)
        if name in policy.SPARING:
            self._decided = frozenset(
                (pid, one.process.start_ticks) for pid, one in look.chosen.items() if one.ours and one.main
            )
        if skip:
            self._skip(skip)
        elif self.check_mode and (first := self._gate.intention()):
            self.record["notes"].append(f"policy {name} would first {first}")
        return not skip

    def _is_clear(self, look: Look) -> bool:
        """Whether the servers may be told to end now: out of the router, their requests finished."""
        from . import policy

        try:
            with self._timed("drain"):
                skip = self._gate.clear(look.chosen, self.survey.readings)
        except policy.RouterTrouble as trouble:
            raise Refused(f"Nothing was ended: {trouble}") from None
        if skip:
            self._skip(skip)
        return not skip

    def _skip(self, why: str) -> None:
        """End with the host as it was found."""
        self.record.update(verdict="skipped", reason=why, servers=self._gate.names, predicted=self.check_mode)
        self.record["msg"] = f"{'would be ' if self.check_mode else ''}skipped: {why}"
        self._finish()

    def _restore_router(self) -> None:
        """Put back into the router what lives and serves; what could not be put back fails the run."""
        record = self.record
        if self._gate is None or self._restored or self.check_mode:
            return
        self._restored = True
        record["notes"] += self._gate.notes
        living = record["verdict"] == "skipped" or self._gate.mains_left()
        problem = self._gate.put_back_living() if living else ""
        record["router"] = self._gate.report
        if problem:
            verdict = "unknown" if record["verdict"] == "skipped" else record["verdict"]
            reason = "; ".join(filter(None, (record["reason"], problem)))
            record.update(verdict=verdict, reason=reason, msg=reason, failed=True)
        out = set(record["router"].get("taken_out", ())) - set(record["router"].get("put_back", ()))
        if out and not problem:
            record["notes"].append(
                f"{', '.join(sorted(out))} is out of the router {record['router']['url']} until its server is started"
                " again (restart, deploy) or router_worker is run"
            )

    # What was found

    def _note_gpus(self, verdicts: Sequence[tuple[Gpu, Verdict]]) -> None:
        """Put readings and verdicts into the record; the first readings stay as those from before."""
        before = {gpu["uuid"]: gpu["used_mib_before"] for gpu in self.record["gpus"]}
        planned = {row["pid"] for row in self.record["killed"]} if self.check_mode else set()
        self.record["gpus"] = [
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "pci_bus_id": gpu.pci_bus_id,  # Xids in the kernel log name a GPU by it
                "used_mib_before": before.get(gpu.uuid, gpu.used_mib),
                "used_mib_after": gpu.used_mib,
                "verdict": one.verdict,
                "cure": "This reset would end what uses it." if planned and planned >= set(one.pids) else one.cure,
                "detail": one.detail,
                "pids": one.pids,
            }
            for gpu, one in verdicts
        ]

    def _note_servers(self, look: Look) -> None:
        """Name the servers that are to end, and keep what it takes to start each one again while it still lives.

        A server whose main is gone has its name from the record that carries its run id, where there is one.
        """
        listed = self.survey.listed()
        by_run_id = {one.run_id: one.name for one in self._known_servers if one.run_id}
        names = {by_run_id[finding.group] for finding in look.chosen.values() if finding.group in by_run_id}
        for finding in look.chosen.values():
            if not finding.main:
                continue
            members = [pid for pid, other in look.chosen.items() if other.group == finding.group]
            uuids = {uuid for pid in members for uuid in listed.get(pid, ())}
            record = server_record.from_process(
                self.proc,
                finding.process,
                uuids,
                unit=self._unit_of(finding),
                run_id="" if finding.group.startswith("server-") else finding.group,
                who=_who(),
            )
            if record is not None:
                names.add(record.name)
                if not self.check_mode:
                    server_record.save(record, self.params["state_folder"])
        self.record["servers"] = sorted(names)

    def _unit_of(self, finding: Finding) -> str:
        manager = self.managers.of(finding.process, Deadline(READ_SECONDS))
        if manager is not None and manager.kind == "unit" and manager.main_pid == finding.process.pid:
            return manager.name
        return ""

    # Phases

    def _needs_evidence(self, look: Look, verdicts: Sequence[tuple[Gpu, Verdict]]) -> bool:
        return not self.check_mode and bool(look.chosen or any(not one.clean for _, one in verdicts))

    def _collect_evidence(self, look: Look) -> None:
        from . import evidence  # not needed on a clean host, and slow to import

        log = kernel_log.read(Deadline(1.0), since=time.time() - KERNEL_LOG_SECONDS)
        self.record["kernel_events"] = [asdict(event) for event in log.events]
        if not log.available:
            self.record["notes"].append(f"The kernel log is unavailable: {log.why}")
        self.record["evidence"] = evidence.collect(
            self.params["state_folder"],
            self.record["run_id"],
            self.proc,
            [finding.process for finding in look.chosen.values()],
            self.survey.readings,
            log,
            Deadline(EVIDENCE_SECONDS),
        )

    def _kill(self, look: Look) -> None:
        if self.check_mode:
            self.record["killed"] = planned(look.chosen)
        elif look.chosen:
            self._end()

    def _end(self, hopeless: frozenset[int] = frozenset()) -> None:
        """End what each new look chooses, but for ``hopeless`` pids, until nothing is left or the time is over."""
        if self._journal is None:
            return

        def chosen() -> tuple[Mapping[int, Any], Mapping[int, Finding]]:
            now = self.survey.look()
            fresh = self._undecided_groups(now.chosen)
            return now.processes, {
                pid: finding
                for pid, finding in now.chosen.items()
                if pid not in hopeless and finding.group not in fresh
            }

        outcome = Ending(
            self.proc, chosen, self.managers, self._journal, self.params["grace"], self.params["kill_timeout"]
        ).run()
        self.outcome.add(outcome)
        self.record["killed"] += outcome.killed
        self.record["respawners"] += outcome.respawners
        self.record["notes"] += outcome.notes + self.managers.notes
        self.managers.notes = []
        self.dirty += outcome.respawners
        self.dirty += [
            f"{finding.process.name} ({finding.process.pid}) did not end within {self.params['kill_timeout']:g} s of"
            " SIGKILL: reboot the host"
            for finding in outcome.alive
        ]

    def _undecided_groups(self, chosen: Mapping[int, Finding]) -> set[str]:
        """Servers that started after a sparing policy had decided, and that it therefore does not allow to end."""
        if self._decided is None:
            return set()
        return {
            one.group
            for pid, one in chosen.items()
            if one.ours and one.main and (pid, one.process.start_ticks) not in self._decided
        }

    def _end_latecomers(self, look: Look, unkillable: frozenset[int]) -> bool:
        """End orphans that show only now: between two images while they were looked for, or born meanwhile."""
        kill = "kill" in self.params["phases"] and not self.check_mode
        late = [pid for pid, finding in look.chosen.items() if finding.kind == "orphan" and pid not in unkillable]
        if kill and late:
            self._end(unkillable)
        return bool(kill and late)

    def _find_places(self, look: Look) -> None:
        """Where the servers that are to end keep their modules and build their extensions, read while they live."""
        uids, environments, search_path = {os.getuid()}, [], []
        for finding in look.chosen.values():
            uids.add(finding.process.uid)
            if finding.main:
                environment = self.proc.environ(finding.process.pid) or {}
                cwd = self.proc.cwd(finding.process.pid) or ""
                environments.append(environment)
                search_path += leftovers.module_search_path(finding.process.argv, environment, cwd)
        self._known_servers, problems = server_record.load_all(self.params["state_folder"])
        self.record["notes"] += problems
        for record in self._known_servers:
            uids.add(record.uid)
            environments.append(record.environment or {})
            search_path += leftovers.module_search_path(record.argv, record.environment or {}, record.cwd)
        self._lock_folders = self.params["lock_folders"] or leftovers.default_lock_folders(sorted(uids), environments)
        self._trees = [
            tree for name in self.params["bytecode_paths"] for tree in leftovers.bytecode_trees(name, search_path)
        ]

    def _clean(self, look: Look) -> None:
        """Delete what the ended servers left behind; in check mode judged as if they were dead already."""
        doomed = frozenset(look.chosen) if self.check_mode else frozenset()
        surroundings = leftovers.Surroundings(
            self.proc,
            alive=functools.cache(lambda: self._living_users(look, doomed)),
            as_if_dead=doomed,
            sees=lambda process: self.scope.sees(self.proc, process),
            own_folders=(self.scope.folder,) if self.scope.folder else (),
        )
        found = leftovers.find(surroundings, self._trees, self._lock_folders, self.params["shm_folder"])
        if self.check_mode:
            self.record["cleaned"] = [{"path": item.shown, "why": item.why} for item in found if item.deletable]
            self.record["kept"] = [{"path": item.shown, "why": item.why_kept} for item in found if not item.deletable]
            return
        for outcome in leftovers.remove_all(found, surroundings, self._note_removed):
            self.record["cleaned" if outcome.removed else "kept"].append({"path": outcome.path, "why": outcome.why})

    def _note_removed(self, outcome: leftovers.Outcome) -> None:
        if self._journal is not None:
            self._journal.removed({"path": outcome.path, "why": outcome.why})

    def _living_users(self, look: Look, doomed: frozenset[int]) -> tuple[Process, ...]:
        """Servers and compilers that live on: what they lock or map is in use, whatever its name says."""
        now = look if self.check_mode else self.survey.look()
        return tuple(
            process
            for pid, process in now.processes.items()
            if pid not in doomed
            and ((pid in now.findings and now.findings[pid].ours) or process.exe_name in COMPILERS)
        )

    def _verify(self, wait: bool) -> None:
        """Wait until every GPU asked for is free or can be named, and look whether any server process is left."""
        unkillable = frozenset(finding.process.pid for finding in self.outcome.alive)
        deadline = Deadline(self.params["verify_timeout"] if wait and not self.check_mode else 0.0)
        pause, longest = POLL_SECONDS
        rounds = LATE_ROUNDS
        while True:
            self.survey.read(Deadline(READ_SECONDS))
            look = self.survey.look()
            if rounds and self._end_latecomers(look, unkillable):
                unkillable |= {finding.process.pid for finding in self.outcome.alive}
                rounds -= 1
                continue
            verdicts, settled = self.survey.judge(look, self.policy, unkillable)
            clean = all(one.clean for _, one in verdicts) and settled
            doomed = {one.group for one in look.chosen.values()} - self._undecided_groups(look.chosen)
            ending = doomed and "kill" in self.params["phases"]
            hopeless = not ending and settled and not any(_may_change(one) for _, one in verdicts)
            if clean or hopeless or deadline.expired():
                break
            time.sleep(min(pause, deadline.remaining()))
            pause = min(pause * 2, longest)
        if not self.check_mode:
            verdicts = self._repair(look, verdicts, unkillable)
            if self.params["probe"]:
                self._probe([gpu for gpu, one in verdicts if one.clean])
        self._note_gpus(verdicts)
        self._note_spared(look)
        self._note_ports(look)
        if self.check_mode:
            return
        self._note_left(look, unkillable)

    def _note_left(self, look: Look, unkillable: frozenset[int]) -> None:
        """Server processes that are there at the end, one sentence a server."""
        killed = {row["pid"] for row in self.record["killed"]} | unkillable
        left: dict[str, list[Finding]] = {}
        for pid, finding in look.chosen.items():
            if finding.ours and pid not in killed:
                left.setdefault(finding.group, []).append(finding)
        for group in left.values():
            first = min(group, key=lambda finding: not finding.main).process
            parent = look.processes.get(first.ppid)
            by = f", started by {parent.name} ({parent.pid})" if parent is not None and parent.pid != 1 else ""
            many = f" and {len(group) - 1} more" if len(group) > 1 else ""
            what = "appeared after the kill" if "kill" in self.params["phases"] else "still there, nothing was ended"
            self.dirty.append(f"{first.name} ({first.pid}){many} {what}{by}: reset again, with all phases")

    def _repair(
        self, look: Look, verdicts: list[tuple[Gpu, Verdict]], unkillable: frozenset[int]
    ) -> list[tuple[Gpu, Verdict]]:
        """Try the cures that were asked for by name on GPUs that no process uses, gentlest first."""
        for cure in ("probe", "gpu_reset"):
            broken = [gpu for gpu, one in verdicts if one.verdict in (GHOST_LATCH, UNOWNED_MEMORY, DEAD_PID)]
            if cure not in self.params["repair"] or not broken:
                continue
            if cure == "probe":
                from . import cuda_probe

                cuda_probe.touch(broken, Deadline(PROBE_SECONDS))
            else:
                for gpu in broken:
                    done = run_command(["nvidia-smi", "--gpu-reset", "-i", gpu.uuid], Deadline(GPU_RESET_SECONDS))
                    self.record["notes"].append(f"nvidia-smi --gpu-reset of GPU {gpu.index}: {done.stdout.strip()}")
            self.survey.forget_samples()
            for _ in range(4):  # a latch shows over several samples
                self.survey.read(Deadline(READ_SECONDS))
                verdicts, _settled = self.survey.judge(look, self.policy, unkillable)
                if all(one.clean for _, one in verdicts):
                    break
                time.sleep(self.policy.latch_seconds / 3)
            self.record["changed"] = True
        return verdicts

    def _probe(self, gpus: Sequence[Gpu]) -> None:
        from . import cuda_probe

        with self._timed("probe"):
            probes = cuda_probe.probe(gpus, Deadline(PROBE_SECONDS))
        self.record["probes"] = [asdict(one) for one in probes]
        failed: dict[str, list[str]] = {}
        for one in probes:
            if not one.ok:
                failed.setdefault(one.error.rstrip("."), []).append(str(one.index))
        self.dirty += [f"GPU {', '.join(indices)} empty but not usable: {error}" for error, indices in failed.items()]

    def _note_spared(self, look: Look) -> None:
        """Everything that was looked at and let live, and what of it makes the host dirty."""
        for pid, finding in sorted(look.findings.items()):
            if pid in look.chosen:
                continue
            why = finding.why
            if pid in look.elsewhere:
                why = f"{why}; runs on GPUs that were not asked for"
            if pid in look.undecided:
                why = f"{why}; the driver lists it on no GPU, so it may still take one of those asked for"
            self.record["spared"].append(
                {"pid": pid, "name": finding.process.name, "class": finding.kind, "why": why}
            )
            if finding.doubtful or (pid in look.undecided and (finding.main or finding.kind == "orphan")):
                self.dirty.append(f"{finding.process.name} ({pid}): {why}; end it yourself, or reset all GPUs")

    def _note_ports(self, look: Look) -> None:
        holders = port_holders(self.proc, self.params["ports"])
        self.record["ports"] = holders
        self.record["shm_free_mib"] = filesystems.free_mib(self.params["shm_folder"])
        if self.check_mode:
            return
        self.dirty += [
            f"port {one['port']} is still held by {one['name'] or 'a process that cannot be seen'} ({one['pid']})"
            for one in holders
        ]
        free, least = self.record["shm_free_mib"], self.params["min_shm_free_mib"]
        if least and free is not None and free < least:
            self.dirty.append(
                f"{self.params['shm_folder']} has {free} MiB free, {least} MiB are asked for: NCCL fails to start there"
            )

    # The verdict

    def _decide(self) -> None:
        record = self.record
        bad = [gpu for gpu in record["gpus"] if gpu["verdict"] not in ("free", "protected_only")]
        reasons = [f"GPU {gpu['index']} is {gpu['verdict']}: {gpu['detail']}" for gpu in bad] + self.dirty
        record["changed"] = record["changed"] or bool(record["killed"] or record["cleaned"])
        judged = "verify" in self.params["phases"] or "kill" in self.params["phases"]
        if not judged:
            record["verdict"], reasons = "unknown", ["neither kill nor verify was asked for"]
        elif self.survey.readings.error and not record["gpus"]:
            record["verdict"], reasons = "unknown", [f"GPUs cannot be judged: {self.survey.readings.error}"]
        elif bad and all(gpu["verdict"] == "unknown" for gpu in bad) and not self.dirty:
            record["verdict"] = "unknown"
        else:
            record["verdict"] = "dirty" if reasons else "clean"
        record["reason"] = "; ".join(reasons)
        record["predicted"] = self.check_mode
        record["failed"] = judged and record["verdict"] not in ("clean", "skipped") and not self.check_mode
        record["msg"] = self._message()

    def _message(self) -> str:
        record = self.record
        mark = "SIMULATED: " if record["simulated"] else ""
        if self.check_mode:
            return (
                f"{mark}would end {len(record['killed'])} processes and delete {len(record['cleaned'])} files;"
                f" the host is {record['verdict']} now"
            )
        done = f"{len(record['killed'])} processes ended, {len(record['cleaned'])} files deleted"
        return f"{mark}{record['verdict']}: {record['reason'] or done}"

    def _finish(self) -> None:
        self._restore_router()
        self.record["seconds"]["total"] = round(time.monotonic() - self._began, 3)
        if self.outcome.last_exit is not None:
            self.record["seconds"]["last_exit_to_verdict"] = round(time.monotonic() - self.outcome.last_exit, 3)
        if self._journal is not None:
            self._journal.finished({name: value for name, value in self.record.items() if name != "earlier"})
            if self._journal.problem:
                self.record["notes"].append(self._journal.problem)

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.record["seconds"][phase] = round(time.monotonic() - began, 3)


def _may_change(one: Verdict) -> bool:
    """Whether waiting can help: the driver gives memory back some time after the process is gone."""
    return one.verdict in (DEAD_PID, UNOWNED_MEMORY)


def _who() -> str:
    """Who asked for this, for the lock and the records: the person behind sudo where there is one."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        name = str(os.getuid())
    return os.environ.get("SUDO_USER") or name


def _diff(record: Mapping[str, Any]) -> dict[str, str]:
    """What ends and what is deleted, as Ansible shows a difference."""
    lines = [f"process {row['pid']} {row['name']} ({row['why']})" for row in record["killed"]]
    lines += [f"file {row['path']} ({row['why']})" for row in record["cleaned"]]
    return {"before": "".join(line + "\n" for line in lines), "after": ""}


def _empty_record(params: Mapping[str, Any]) -> dict[str, Any]:
    now = datetime.now(timezone.utc)
    return {
        "schema": SCHEMA,
        "run_id": params["run_id"] or f"{now:%Y%m%dT%H%M%S.%f}-{os.getpid()}",
        "host": os.uname().nodename,
        "servers": [],
        "policy": params["policy"],
        "router": {},
        "started": now.isoformat(timespec="milliseconds"),
        "verdict": "unknown",
        "reason": "",
        "simulated": False,
        "gpus": [],
        "killed": [],
        "spared": [],
        "cleaned": [],
        "kept": [],
        "evidence": "",
        "kernel_events": [],
        "respawners": [],
        "ports": [],
        "notes": [],
        "shm_free_mib": None,
        "source": "none",
        "seconds": {},
        "earlier": [],
        "changed": False,
        "failed": False,
        "msg": "",
    }
