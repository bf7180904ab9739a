"""Keeps the record of each reset and ends the play with a table and one verdict a host."""

from __future__ import annotations

DOCUMENTATION = """
name: gpu_verdicts
type: notification
short_description: Records each reset and prints the verdicts
description:
  - Appends the run record of each C(gpu_reset) to C(resets.jsonl), one JSON line a host, also for hosts that are
    unreachable or skipped. Check mode records nothing.
  - Ends the play with a table of the GPUs, of what was ended and spared, and one verdict for each host. The same as
    JSON is in C(last-reset.json) beside the records.
  - A play that resets hosts and matches none ends with exit status 2 instead of a success.
options:
  artifacts_folder:
    description: Where the records are kept. The default is C(artifacts) in the repository.
    type: path
    env:
      - name: GPU_ARTIFACTS
"""

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from ansible.plugins.callback import CallbackBase  # noqa: E402

REPOSITORY = Path(__file__).resolve().parent.parent
if str(REPOSITORY / "plugin_utils") not in sys.path:
    sys.path.append(str(REPOSITORY / "plugin_utils"))

from gpu_control import hooks, records, table  # noqa: E402

MODULE = "gpu_reset"
NO_HOSTS_EXIT_STATUS = 2


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

    def v2_playbook_on_play_start(self, play: Any) -> None:
        self._play_resets = _resets(play)
        self._play_name = play.get_name()
        self._play = play

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
        if _is_reset(result.task):
            self._take(result)

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        if _is_reset(result.task):
            self._take(result)
        elif self._play_resets and result.host.name not in self._by_host and not ignore_errors:
            # Refused or failed before its reset: the host still gets a verdict at the end, but was never touched.
            self._remember(result.host.name, _told(result, "unknown", str(result.result.get("msg", ""))), write=False)

    def v2_runner_on_skipped(self, result: Any) -> None:
        if _is_reset(result.task):
            why = result.result.get("skip_reason") or "the task was skipped"
            condition = result.result.get("false_condition")
            reason = f"{why} ({condition})" if condition else why
            self._remember(result.host.name, _told(result, "skipped", reason), _writes(result))

    def v2_runner_on_unreachable(self, result: Any) -> None:
        if _is_reset(result.task) or self._play_resets:
            host = _host(result)
            self._remember(host, _told(result, "unreachable", _one_line(result.result.get("msg", ""))), _writes(result))

    def v2_playbook_on_stats(self, stats: Any) -> None:
        if not self._by_host:
            return
        merged = [table.merge(ones) for _host_name, ones in sorted(self._by_host.items())]
        self._display.display("\n" + table.report(merged))
        self._write_report(merged)
        hooks.tell_all(merged, hooks.of_play(self._play), self._display.error)
        if self._record_trouble:
            self._display.error(self._record_trouble)

    def _take(self, result: Any) -> None:
        """A result of gpu_reset that came back from a host, or was refused before it got there."""
        returned = result.result
        host = _host(result)
        if "verdict" not in returned:
            reason = _one_line(returned.get("msg") or returned.get("censored") or "the module returned no verdict")
            self._remember(host, _told(result, "unknown", reason), _writes(result) and not returned.get("refused"))
            return
        one = records.record(returned, host)
        if host != result.host.name:
            one["guest"] = result.host.name
        if returned.get("predicted"):
            one["predicted"] = True
        earlier = [records.record(other, host) for other in one["earlier"]]
        one["earlier"] = [other["run_id"] for other in earlier]
        self._remember(host, one, _writes(result), earlier)

    def _remember(
        self, host: str, one: dict[str, Any], write: bool, earlier: list[dict[str, Any]] | None = None
    ) -> None:
        self._by_host.setdefault(host, []).append(one)
        if not write:
            return
        file = self._folder() / records.FILE_NAME
        try:
            records.append(file, [*(earlier or []), one])
        except OSError as error:
            self._record_trouble = (
                f"The record of {host} could not be written to {file} ({error.strerror}): free the disk or set "
                "GPU_ARTIFACTS to a folder that can be written. The host's own journal keeps it until the next reset."
            )

    def _write_report(self, merged: list[dict[str, Any]]) -> None:
        file = self._folder() / "last-reset.json"
        temporary = file.with_name(f".last-reset-{os.getpid()}.json")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(merged, indent=2, default=str) + "\n", encoding="utf-8")
            temporary.replace(file)
        except OSError as error:
            self._record_trouble = self._record_trouble or f"{file} could not be written: {error.strerror}."

    def _folder(self) -> Path:
        return Path(self.get_option("artifacts_folder") or records.artifacts_folder())


def _is_reset(task: Any) -> bool:
    return str(task.action).rpartition(".")[2] == MODULE


def _resets(play: Any) -> bool:
    """Whether a play has a gpu_reset task, in its roles or its own blocks (not behind include_*)."""

    def any_in(entries: Any) -> bool:
        return any(any_in(e.block + e.rescue + e.always) if hasattr(e, "block") else _is_reset(e) for e in entries)

    return any_in(play.compile())


def _fields(result: Any) -> Any:
    """The keywords of a task as it ran. In ansible-core 2.19 the task itself still has its templates."""
    return result._task_fields


def _host(result: Any) -> str:
    """The inventory name of the host that a task ran on: another one under delegate_to."""
    return str(_fields(result).get("delegate_to") or result.host.name)


def _writes(result: Any) -> bool:
    return not _fields(result).get("check_mode") and not result.result.get("predicted")


def _told(result: Any, verdict: str, reason: str) -> dict[str, Any]:
    """A record of a host that returned none."""
    return records.record({"run_id": _run_id(result)}, _host(result), verdict=verdict, reason=_one_line(reason))


def _run_id(result: Any) -> str:
    return str((result.result.get("invocation") or {}).get("module_args", {}).get("run_id") or "")


def _one_line(text: Any) -> str:
    return " ".join(str(text).split()).removeprefix("Task failed: ").removeprefix("Action failed: ")
