"""Writes what each task returned to the file that KEPT_RESULTS names, one JSON object a line, for the session."""

from __future__ import annotations

DOCUMENTATION = """
name: kept_results
type: notification
short_description: Keeps the results of all tasks as JSON lines
description:
  - Appends task, action, status and result of each task to the file in C(KEPT_RESULTS); nothing without that variable.
"""

import json  # noqa: E402
import os  # noqa: E402
from typing import Any  # noqa: E402

from ansible.plugins.callback import CallbackBase  # noqa: E402


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "notification"
    CALLBACK_NAME = "kept_results"
    CALLBACK_NEEDS_ENABLED = True

    def _keep(self, result: Any, status: str) -> None:
        path = os.environ.get("KEPT_RESULTS")
        if not path:
            return
        # What a task was called with is no part of what it returned, and may hold secrets.
        returned = {key: value for key, value in result.result.items() if key != "invocation"}
        line = {
            "task": result.task_name,
            "action": str(result._task_fields.get("action", "")).rpartition(".")[2],
            "status": "changed" if status == "ok" and returned.get("changed") else status,
            "result": returned,
        }
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")

    def v2_runner_on_ok(self, result: Any) -> None:
        self._keep(result, "ok")

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        self._keep(result, "failed")

    def v2_runner_on_unreachable(self, result: Any) -> None:
        self._keep(result, "unreachable")
