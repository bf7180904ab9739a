"""Keeps the record of each reset and ends the play with a table and one verdict a host."""

from __future__ import annotations

DOCUMENTATION = """
name: gpu_verdicts
type: notification
short_description: Records each reset and prints the verdicts
description:
  - Appends the run record of each C(gpu_reset) to C(resets.jsonl), one JSON line a host, also for hosts that are
    unreachable, skipped, or never begun. C(play) is the same in all records of one C(ansible-playbook). Check mode
    records nothing, and a run that was refused before it began only where the breaker did that.
  - A run that is ended by SIGINT or SIGTERM records its other hosts as its last act. What one that was killed did not
    record, the next run does.
  - Ends the play with a table of the GPUs, of what was ended and spared, and one verdict for each host. The same as
    JSON is in C(last-reset.json) beside the records.
  - A play that resets hosts and matches none ends with exit status 2 instead of a success. So does a run whose
    records could not be written, and one whose hosts failed without stopping its other batches.
options:
  artifacts_folder:
    description: Where the records are kept. The default is C(artifacts) in the repository.
    type: path
    env:
      - name: GPU_ARTIFACTS
"""

import atexit  # noqa: E402
import contextlib  # noqa: E402
import ctypes  # noqa: E402
import gc  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from ansible import constants as C  # noqa: E402
from ansible.plugins.callback import CallbackBase  # noqa: E402

REPOSITORY = Path(__file__).resolve().parent.parent
for _folder in (REPOSITORY / "module_utils", REPOSITORY / "plugin_utils"):
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))

from gpu_control import breaker, gate, hooks, interrupted, records, table, whole_file  # noqa: E402

MODULE = "gpu_reset"
PLAN = "reset_plan"
NO_HOSTS_EXIT_STATUS = 2
FAILED_EXIT_STATUS = 2
UNREACHABLE_EXIT_STATUS = 4  # as ansible-playbook's own
PR_SET_TIMERSLACK = 29  # linux/prctl.h; nanoseconds


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "notification"
    CALLBACK_NAME = "gpu_verdicts"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self._by_host: dict[str, list[dict[str, Any]]] = {}
        self._play_resets = False
        self._play_name = ""
        self._play: Any = None
        self._record_trouble = ""
        self._before = records.START  # where the file of records ended when the first play that resets began
        self._run = {"play": records.new_run_id(), "schedule": ""}
        self._hosts: dict[str, None] = {}  # all that the plays that reset are for, in their order
        self._patterns: set[str] = set()
        self._plan: dict[str, Any] = {}
        self._refusal = ""  # why no host was begun at all
        self._refusal_is_kept = False
        self._check_mode = False
        self._begun = 0  # tasks of hosts
        self._note: interrupted.Note | None = None  # while hosts of the run may have no record yet
        self._ends_by: signal.Signals | None = None
        self._ansibles_handler: Any = None

    def v2_playbook_on_play_start(self, play: Any) -> None:
        _wait_patiently()
        self._play_resets = _has(play, MODULE, PLAN)
        self._play_name = play.get_name()
        self._play = play
        if self._play_resets and str(play.hosts) not in self._patterns:  # each batch is a start of the same play
            if not self._patterns:
                self._before = records.Place.at_the_end_of(self._folder() / records.FILE_NAME)
            self._patterns.add(str(play.hosts))
            known = play.get_variable_manager().get_vars(play=play, include_hostvars=False)
            self._hosts.update(dict.fromkeys(known["ansible_play_hosts_all"]))
            self._check_mode = bool(known.get("ansible_check_mode"))
            self._run["schedule"] = str(known.get("reset_schedule_name") or "")

    def v2_runner_on_start(self, host: Any, task: Any) -> None:
        self._begun += 1
        if self._begun % 50 == 0:
            _keep_from_collecting()

    def v2_playbook_on_no_hosts_matched(self) -> None:
        if not self._play_resets:
            return
        self._display.display(
            f"Nothing was done: the play {self._play_name!r} matches no host. Put hosts into the group gpu_hosts of "
            "the inventory, or choose others with --limit.",
            color="red",
        )
        # A callback has no other way to tell the caller that nothing was reset.
        raise SystemExit(NO_HOSTS_EXIT_STATUS)

    def v2_runner_on_ok(self, result: Any) -> None:
        if _calls(result.task, MODULE):
            self._take(result)
        elif _calls(result.task, PLAN):
            self._plan = dict(result.result)
            self._run["play"] = self._plan["id"]
            self._leave_note()

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        host = result.host.name
        if _calls(result.task, MODULE):
            self._take(result)
        elif not self._play_resets:
            return
        elif _fields(result).get("run_once"):
            # Decided for all hosts: none of them is begun.
            self._refusal = _why(result)
            self._refusal_is_kept = bool(result.result.get("kept"))
        elif host not in self._by_host:
            # Failed before its reset: the host still gets a verdict at the end, but was never touched.
            self._remember(host, self._told(result, "unknown", _why(result)), write=False)
        elif self._by_host[host][-1]["verdict"] == "clean":
            self._by_host[host][-1]["failed_afterwards"] = _why(result)
            self._count_failure(host)

    def _count_failure(self, host: str) -> None:
        """A host that did not get its server back counts for the breaker as a newly dirty one."""
        if not self._plan or self._check_mode:
            return
        try:
            gate.Gate(self._plan, host, [host], Path(C.DEFAULT_LOCAL_TMP), self._folder()).failed_afterwards()
        except (OSError, breaker.Unreadable) as error:
            self._display.warning(f"{host} was not counted for the breaker: {error}")

    def v2_runner_on_skipped(self, result: Any) -> None:
        if _calls(result.task, MODULE):
            why = result.result.get("skip_reason") or "the task was skipped"
            condition = result.result.get("false_condition")
            reason = f"{why} ({condition})" if condition else why
            self._remember(result.host.name, self._told(result, "skipped", reason), _writes(result))

    def v2_runner_on_unreachable(self, result: Any) -> None:
        host = _host(result)
        if self._play_resets and self._by_host.get(host, [{}])[-1].get("verdict") == "clean":
            self._by_host[host][-1]["failed_afterwards"] = _why(result)
            self._count_failure(host)
        elif _calls(result.task, MODULE) or self._play_resets:
            self._remember(host, self._told(result, "unreachable", _why(result)), _writes(result))

    def v2_playbook_on_stats(self, stats: Any) -> None:
        self._remember_those_not_begun()
        self._close_note()
        if not self._by_host:
            return
        merged = self._report()
        hooks.tell_all(merged, hooks.of_play(self._play), self._display.error)
        if self._record_trouble:
            self._display.error(self._record_trouble)
        if status := self._exit_status(merged, {**stats.failures, **stats.dark}):
            # As above: what Ansible itself would not fail for. Its own callback has printed its statistics by now.
            raise SystemExit(status)

    def _report(self) -> list[dict[str, Any]]:
        """Write and print what came of each host; the records that say so."""
        merged = [table.merge(ones) for _host_name, ones in sorted(self._by_host.items())]
        self._write_report(merged)
        self._display.display("\n" + table.report(merged))
        return merged

    def _leave_note(self) -> None:
        """Whatever ends the run from now on, its hosts get their records: here, or from the next run."""
        if self._check_mode or self._note is not None:
            return
        for sentence in interrupted.settle_dead(self._folder()):
            self._display.warning(sentence)
        tally = gate.tally_folder(Path(C.DEFAULT_LOCAL_TMP), self._plan["id"])
        try:
            self._note = interrupted.Note(self._folder(), self._plan, list(self._hosts), tally)
        except OSError as error:
            self._display.warning(f"Should this run be killed, its other hosts get no record: {error}")
            return
        atexit.register(self._end_early)
        self._ansibles_handler = signal.signal(signal.SIGTERM, self._on_term)

    def _close_note(self) -> None:
        if self._note is not None:
            self._note.close()
            self._note = None

    def _on_term(self, signum: int, frame: Any) -> None:
        """End as by Ctrl-C. By Ansible's own handler the process would be gone at once, and what it knows with it."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._ends_by = signal.SIGTERM
        if callable(self._ansibles_handler):
            self._ansibles_handler(signal.SIGINT, frame)  # tells the workers, and raises the same
        raise KeyboardInterrupt

    def _end_early(self) -> None:
        """The last act of a run that ended without its statistics."""
        if self._note is None or self._note.pid != os.getpid():
            return
        try:
            for one in self._note.settle(self._by_host):
                self._by_host.setdefault(one["host"], []).append(one)
        except (OSError, LookupError) as error:
            self._display.error(f"Hosts of this run have no record yet: {error}")  # the note stays, for the next run
        else:
            self._close_note()
            self._report()
        if self._ends_by is not None:
            sys.stdout.flush()
            os.kill(os.getpid(), self._ends_by)

    def _remember_those_not_begun(self) -> None:
        """No host of a run is without a verdict, whatever ended the run before its turn."""
        reason = self._refusal or "not begun: the run ended before its turn"
        write = not self._check_mode and (not self._refusal or self._refusal_is_kept)
        for host in self._hosts:
            if host not in self._by_host:
                one = records.record({}, host, verdict="skipped", reason=reason, **self._run)
                self._remember(host, one if not self._check_mode else {**one, "predicted": True}, write)

    def _exit_status(self, merged: list[dict[str, Any]], failed: dict[str, Any]) -> int:
        """The exit status that the run must have and would not get from Ansible; 0 where that has its own."""
        if self._record_trouble:
            return FAILED_EXIT_STATUS
        if failed or self._check_mode or not self._plan:
            return 0
        verdicts = {one["verdict"] for one in merged if not one.get("guest")}
        if verdicts - {"clean", "skipped", "unreachable"} or any(one.get("failed_afterwards") for one in merged):
            return FAILED_EXIT_STATUS
        return UNREACHABLE_EXIT_STATUS if "unreachable" in verdicts else 0

    def _take(self, result: Any) -> None:
        """A result of gpu_reset that came back from a host, or was refused before it got there."""
        returned = result.result
        host = _host(result)
        if "verdict" not in returned:
            reason = _one_line(returned.get("msg") or returned.get("censored") or "the module returned no verdict")
            write = _writes(result) and not returned.get("refused")
            self._remember(host, self._told(result, "unknown", reason), write)
            return
        one = records.record(returned, host, **self._run)
        if host != result.host.name:
            one["guest"] = result.host.name
        if returned.get("predicted"):
            one["predicted"] = True
        # The host tells all that it has where the record that it is asked about is not its own.
        file = self._folder() / records.FILE_NAME
        earlier = records.unrecorded(file, [records.record(other, host) for other in one["earlier"]])
        one["earlier"] = [other["run_id"] for other in earlier]
        if returned.get("refused"):
            self._remember(host, one, write=False)  # what the host has to tell of earlier runs it tells again
            return
        self._remember(host, one, _writes(result), earlier)

    def _remember(
        self, host: str, one: dict[str, Any], write: bool, earlier: list[dict[str, Any]] | None = None
    ) -> None:
        self._by_host.setdefault(host, []).append(one)
        if not write:
            return
        file = self._folder() / records.FILE_NAME
        try:
            records.append(file, [*(earlier or []), one], records.START if earlier else self._before)
        except OSError as error:
            self._record_trouble = (
                f"The record of {host} could not be written to {file} ({error.strerror}): free the disk or set "
                "GPU_ARTIFACTS to a folder that can be written. The host's own journal keeps it until the next reset."
            )

    def _write_report(self, merged: list[dict[str, Any]]) -> None:
        file = self._folder() / "last-reset.json"
        try:
            whole_file.write(file, json.dumps(merged, indent=2, default=str) + "\n")
        except OSError as error:
            self._record_trouble = self._record_trouble or f"{file} could not be written: {error.strerror}."

    def _told(self, result: Any, verdict: str, reason: str) -> dict[str, Any]:
        """A record of a host that returned none."""
        told = {"run_id": _run_id(result)}
        return records.record(told, _host(result), verdict=verdict, reason=_one_line(reason), **self._run)

    def _folder(self) -> Path:
        return Path(self.get_option("artifacts_folder") or records.artifacts_folder())


def _wait_patiently() -> None:
    """Ansible waits for a free fork in a loop of sleeps of 0.1 ms, half a core's work; now each may take 10 ms."""
    with contextlib.suppress(AttributeError, OSError):  # Linux only
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 10_000_000)


def _keep_from_collecting() -> None:
    """A garbage collector that visits what is known of a thousand hosts makes each fork a copy of that memory."""
    gc.collect()
    gc.freeze()


def _calls(task: Any, *modules: str) -> bool:
    return str(task.action).rpartition(".")[2] in modules


def _has(play: Any, *modules: str) -> bool:
    """Whether a play has a task of these modules, in its roles or its own blocks (not behind include_*)."""

    def any_in(entries: Any) -> bool:
        return any(
            any_in(e.block + e.rescue + e.always) if hasattr(e, "block") else _calls(e, *modules) for e in entries
        )

    return any_in(play.compile())


def _fields(result: Any) -> Any:
    """The keywords of a task as it ran. In ansible-core 2.19 the task itself still has its templates."""
    return result._task_fields


def _host(result: Any) -> str:
    """The inventory name of the host that a task ran on: another one under delegate_to."""
    return str(_fields(result).get("delegate_to") or result.host.name)


def _writes(result: Any) -> bool:
    return not _fields(result).get("check_mode") and not result.result.get("predicted")


def _why(result: Any) -> str:
    """The reason of a failed task; of a loop those of its items, since the loop's own says only that some failed."""
    items = [one for one in result.result.get("results") or () if one.get("failed") or one.get("unreachable")]
    reasons = [_one_line(one["msg"]) for one in items if one.get("msg")]
    return " ".join(dict.fromkeys(reasons)) or _one_line(result.result.get("msg") or "the task failed")


def _run_id(result: Any) -> str:
    return str((result.result.get("invocation") or {}).get("module_args", {}).get("run_id") or "")


def _one_line(text: Any) -> str:
    return " ".join(str(text).split()).removeprefix("Task failed: ").removeprefix("Action failed: ")
