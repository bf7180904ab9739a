"""Plans a benchmark, keeps what was measured and writes the report, all on the control node; no host is contacted.

The other names (benchmark_record, benchmark_report) are links to this file.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible import constants as C
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible.utils.vars import load_extra_vars

REPOSITORY = Path(__file__).resolve().parent.parent
for _folder in (REPOSITORY / "module_utils", REPOSITORY / "plugin_utils"):
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))

from gpu_benchmark import calls, nodes, settings  # noqa: E402

# Where a variable of the host stands in for an option that the task leaves out.
SERVER_VARIABLES = {
    "speculation": "sglang_speculation",
    "drafter": "sglang_drafter_path",
    "arguments": "sglang_arguments",
    "environment": "sglang_environment",
    "nccl_profile": "nccl_env_profile",
    "nodes": "sglang_nodes",
}

display = Display()


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True
    _supports_diff = False
    _supports_async = False

    def run(self, tmp: None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        task_vars = task_vars or {}
        result: dict[str, Any] = super().run(tmp, task_vars)
        name = self._task.action.rpartition(".")[2]
        given = dict(self._task.args)
        host = task_vars["inventory_hostname"]
        if name == "benchmark_plan":
            self._fill(given, task_vars)
        validated = ArgumentSpecValidator(calls.SPECIFICATIONS[name]).validate(given)
        if validated.error_messages:
            return {**result, "failed": True, "refused": True, "msg": " ".join(validated.error_messages)}
        parameters = validated.validated_parameters
        context = calls.Context(
            repository=REPOSITORY,
            temporary=Path(C.DEFAULT_LOCAL_TMP),
            host=parameters.get("host") or nodes.head(parameters.get("nodes"), host),
            now=time.time(),
            clock=calls.this_clock(),
            check_mode=bool(self._task.check_mode),
            overriding=self._extra_variables(),
            node=host if name == "benchmark_plan" and not parameters.get("host") else "",
            begun=tuple(task_vars["ansible_play_hosts_all"]),
            here=tuple(task_vars["ansible_play_hosts"]),
        )
        returned = calls.CALLS[name](parameters, context)
        for line in returned.pop("tell", ()):
            display.display(line)
        return {**result, **returned}

    def _fill(self, given: dict[str, Any], task_vars: Mapping[str, Any]) -> None:
        """What the task leaves out comes from the host's variables."""
        for one in settings.SETTINGS:
            if one.name not in given and one.variable in task_vars:
                given[one.name] = self._templar.template(task_vars[one.variable])
        for option, variable in SERVER_VARIABLES.items():
            if option not in given and variable in task_vars:
                given[option] = self._templar.template(task_vars[variable])
        asked = [name for name in task_vars if name.startswith("serving_benchmark_") and not name.endswith("_result")]
        given["asked"] = {name: self._templar.template(task_vars[name]) for name in asked}
        given["nodes_of_others"] = self._nodes_of_others(given.get("nodes"), task_vars)
        given["known_variables"] = [*given.get("known_variables", []), *settings.RESERVED]
        given["variable_names"] = [str(name) for name in task_vars if str(name).startswith(settings.PREFIX)]

    def _nodes_of_others(self, named: Any, task_vars: Mapping[str, Any]) -> dict[str, Any]:
        """What the hosts that share a server are told of it themselves."""
        if not isinstance(named, list):
            return {}
        there = [one for one in named if isinstance(one, str) and one in task_vars["hostvars"]]
        return {one: self._templar.template(task_vars["hostvars"][one].get("sglang_nodes")) for one in there}

    def _extra_variables(self) -> dict[str, Any]:
        """What stands on the command line goes before everything that a play can set."""
        return json.loads(json.dumps(load_extra_vars(self._loader), default=str))
