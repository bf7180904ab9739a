"""The modules of a benchmark: they plan it, keep what was measured and write the report. action_plugins/ links here."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from ansible import constants as C
from ansible.utils.display import Display
from ansible.utils.vars import load_extra_vars
from gpu_control import role_variables, variables
from gpu_control.control_module import ControlModule

from . import calls, nodes, settings

REPOSITORY = Path(__file__).resolve().parent.parent.parent
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


class BenchmarkModule(ControlModule):
    """One of the calls of calls.py, of this name."""

    name: ClassVar[str]

    def act(self, params: dict[str, Any]) -> dict[str, Any]:
        host = self.task_vars["inventory_hostname"]
        context = calls.Context(
            repository=REPOSITORY,
            temporary=Path(C.DEFAULT_LOCAL_TMP),
            host=params.get("host") or nodes.head(params.get("nodes"), host),
            now=time.time(),
            clock=calls.this_clock(),
            check_mode=self.check_mode,
            overriding=self._extra_variables(),
            node=host if self.name == "benchmark_plan" and not params.get("host") else "",
            begun=tuple(self.task_vars["ansible_play_hosts_all"]),
            here=tuple(self.task_vars["ansible_play_hosts"]),
        )
        returned = calls.CALLS[self.name](params, context)
        for line in returned.pop("tell", ()):
            display.display(line)
        return returned

    def _extra_variables(self) -> dict[str, Any]:
        """What stands on the command line goes before everything that a play can set."""
        found: dict[str, Any] = json.loads(json.dumps(load_extra_vars(self._loader), default=str))
        return found


class BenchmarkBefore(BenchmarkModule):
    name = "benchmark_before"
    spec = calls.SPECIFICATIONS[name]


class BenchmarkRecord(BenchmarkModule):
    name = "benchmark_record"
    spec = calls.SPECIFICATIONS[name]


class BenchmarkReport(BenchmarkModule):
    name = "benchmark_report"
    spec = calls.SPECIFICATIONS[name]


class BenchmarkPlan(BenchmarkModule):
    name = "benchmark_plan"
    spec = calls.SPECIFICATIONS[name]

    def run(self, tmp: None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        if result.get("refused"):
            settings_by_option = {one.name: one.variable for one in settings.SETTINGS}
            named = settings_by_option | SERVER_VARIABLES
            result["msg"] = role_variables.in_words_of_the_play(result["msg"], lambda option: named.get(option, option))
        return result

    def given(self) -> dict[str, Any]:
        """What the task leaves out comes from the host's variables."""
        given, task_vars = super().given(), self.task_vars
        for one in settings.SETTINGS:
            if one.name not in given and one.variable in task_vars:
                given[one.name] = variables.read(self._templar, task_vars, one.variable)
        for option, variable in SERVER_VARIABLES.items():
            if option not in given and variable in task_vars:
                given[option] = variables.read(self._templar, task_vars, variable)
        asked = [name for name in task_vars if name.startswith("serving_benchmark_") and not name.endswith("_result")]
        given["asked"] = {name: variables.read(self._templar, task_vars, name) for name in asked}
        given["nodes_of_others"] = self._nodes_of_others(given.get("nodes"), task_vars["hostvars"])
        given["known_variables"] = [*given.get("known_variables", []), *settings.RESERVED]
        given["variable_names"] = [str(name) for name in task_vars if str(name).startswith(settings.PREFIX)]
        return given

    def _nodes_of_others(self, named: Any, hostvars: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """What the hosts that share a server are told of it themselves."""
        if not isinstance(named, list):
            return {}
        there = [one for one in named if isinstance(one, str) and one in hostvars]
        return {one: self._templar.template(hostvars[one].get("sglang_nodes")) for one in there}


MODULES: dict[str, type[BenchmarkModule]] = {
    module.name: module for module in (BenchmarkBefore, BenchmarkPlan, BenchmarkRecord, BenchmarkReport)
}
"""By the name of the module and of its action plugin."""
