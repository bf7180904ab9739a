"""Reports what gpu_memory returned on each host of the play. Contacts no host."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

REPOSITORY = Path(__file__).resolve().parent.parent
if str(REPOSITORY / "plugin_utils") not in sys.path:
    sys.path.append(str(REPOSITORY / "plugin_utils"))

from gpu_control import fleet, history_report, records  # noqa: E402

ARGUMENTS: dict[str, dict[str, Any]] = {
    "result": {"type": "str", "required": True},
    "json": {"type": "str", "default": fleet.FILE_NAME},
}

display = Display()


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        task_vars = task_vars or {}
        result: dict[str, Any] = super().run(tmp, task_vars)
        validated = ArgumentSpecValidator(ARGUMENTS).validate(self._task.args)
        if validated.error_messages:
            return {**result, "failed": True, "msg": " ".join(validated.error_messages)}
        params = validated.validated_parameters
        hostvars = task_vars["hostvars"]
        found = fleet.report(
            {name: hostvars[name].get(params["result"]) for name in task_vars["ansible_play_hosts_all"]},
            records.timestamp(),
        )
        display.display("\n" + fleet.text(found))
        file = records.artifacts_folder() / Path(params["json"]).expanduser()
        if params["json"] and not self._task.check_mode:
            try:
                history_report.write(file, json.dumps(found, indent=1) + "\n")
            except OSError as error:
                return {**result, "failed": True, "msg": f"{file} could not be written: {error.strerror}."}
        none_read = not any(one["state"] == fleet.READ for one in found["hosts"])
        return {
            **result,
            "changed": False,
            "failed": none_read,
            "msg": "No host could be read." if none_read else fleet.last_line(found),
            "written": str(file) if params["json"] else "",
        }
