"""Reports the history of resets. Runs on the control node alone and contacts no host, whatever the play says."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

REPOSITORY = Path(__file__).resolve().parent.parent
if str(REPOSITORY / "plugin_utils") not in sys.path:
    sys.path.append(str(REPOSITORY / "plugin_utils"))

from gpu_control import history, history_report, records  # noqa: E402

ARGUMENTS: dict[str, dict[str, Any]] = {
    "files": {"type": "list", "elements": "str", "default": [records.FILE_NAME]},
    "hosts": {"type": "list", "elements": "str", "default": []},
    "since": {"type": "str", "default": ""},
    "limit": {"type": "int", "default": 0},
    "recent": {"type": "int", "default": history.RECENT},
    "html": {"type": "str", "default": "resets.html"},
    "metrics": {"type": "str", "default": ""},
}
PREFIX = "report_resets_"

display = Display()


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        validated = ArgumentSpecValidator(ARGUMENTS).validate(self._task.args)
        params = validated.validated_parameters
        problems = validated.error_messages or _problems(params, task_vars or {})
        if problems:
            return {**result, "failed": True, "msg": "Nothing was done. " + " ".join(problems)}
        try:
            return {**result, **self._report(params)}
        except history.HistoryError as reason:
            return {**result, "failed": True, "msg": str(reason)}
        except OSError as error:
            return {**result, "failed": True, "msg": f"{error.filename} could not be written: {error.strerror}."}

    def _report(self, params: dict[str, Any]) -> dict[str, Any]:
        now = time.time()
        folder = records.artifacts_folder()
        since = history.since(params["since"], now) if params["since"] else 0.0
        filters = history.Filters(since, params["limit"], tuple(params["hosts"]))
        found = history.read(history.find_files(params["files"], folder))
        summary = history.summarise(found, filters, params["recent"])
        display.display("\n" + history_report.text(summary))
        written = []
        # Counters must not go back because a person looked at one week.
        everything = history.Filters()
        for name, render in (
            ("html", lambda: history_report.html(summary, records.timestamp(now))),
            ("metrics", lambda: history_report.metrics(history.summarise(found, everything, params["recent"]))),
        ):
            if params[name]:
                file = folder / Path(params[name]).expanduser()
                if not self._task.check_mode:
                    history_report.write(file, render())
                written.append(str(file))
        return {
            "changed": False,
            "written": written,
            "hosts": history_report.rows(summary),
            "worse": [host.host for host in summary.worse],
            "broken_lines": [str(problem) for problem in found.problems],
            "msg": f"{'Would write' if self._task.check_mode else 'Written'}: {', '.join(written) or 'nothing'}",
        }


def _problems(params: dict[str, Any], task_vars: dict[str, Any]) -> list[str]:
    """One sentence for each thing that is wrong before anything is read."""
    known = [PREFIX + name for name in ARGUMENTS]
    found = [
        f"There is no variable {name}; report-resets.yml knows {', '.join(known)}."
        for name in sorted(task_vars)
        if name.startswith(PREFIX) and name not in known and name != f"{PREFIX}result"
    ]
    if params["limit"] < 0:
        found.append(f"report_resets_limit: {params['limit']} is no number of resets; give 0 (all) or more.")
    if params["recent"] < history.LEAST:
        found.append(f"report_resets_recent: {params['recent']} is too few to compare; give {history.LEAST} or more.")
    if not params["files"]:
        found.append("report_resets_files: no file is named; leave it out or name at least one.")
    if trouble := history_report.problems_of(params["metrics"]):
        found.append(trouble)
    return found
