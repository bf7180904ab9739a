"""A module of gpu_host, run on a host by one exec of the pinned interpreter.

What this does and an ordinary module call would not: it refuses bad input before the host is touched, it is lean (see
lean.py), and it follows a call that takes long. Where a connection can't pipeline, with async, or where the interpreter
has yet to be discovered, the ordinary module of the same name (library/) runs instead.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from ansible import constants as C
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from gpu_host import arguments

from . import lean, progress, records, variables, wrong_types

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PACKAGE = REPOSITORY / "module_utils" / lean.PACKAGE

# What narrows or describes a host: without it a call could end processes that the inventory leaves out.
HOST_OPTIONS = (
    "own_processes_only",
    "protected",
    "scope_cgroup",
    "scope_folder",
    "device_folder",
    "shm_folder",
    "state_folder",
    "server_modules",
    "server_commands",
    "server_titles",
)

display = Display()

Judge = Callable[[dict[str, Any]], list[str]]
"""Sentences about parameters that make no sense; none where they do."""


class HostModule(ActionBase):
    """An action: `spec` and `judges` say what it takes, `entry` names the module of gpu_host whose run() does it."""

    TRANSFERS_FILES = False
    _supports_check_mode = True
    _supports_diff = True
    _supports_async = True

    spec: ClassVar[Mapping[str, dict[str, Any]]]
    entry: ClassVar[str]
    judges: ClassVar[tuple[Judge, ...]] = (arguments.problems,)

    def run(self, tmp: None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        self.task_vars = task_vars or {}
        result: dict[str, Any] = super().run(tmp, self.task_vars)
        return {**result, **self.call()}

    @property
    def host(self) -> str:
        return str(self._task.delegate_to or self.task_vars["inventory_hostname"])

    # What a module may have of its own

    @classmethod
    def validator(cls) -> ArgumentSpecValidator:
        return ArgumentSpecValidator(cls.spec)

    def judge(self, params: dict[str, Any]) -> list[str]:
        """Sentences on what only the control node can see to be wrong."""
        return []

    def prepare(self, params: dict[str, Any]) -> None:
        """Add what the control node knows."""

    def follow(self, call: Callable[[], dict[str, Any]], params: dict[str, Any]) -> dict[str, Any]:
        """Call, again and again while the work goes on."""
        return progress.follow(call, display.display, self.host)

    def finish(self, returned: dict[str, Any]) -> dict[str, Any]:
        """What the task returns."""
        return returned

    # The call

    def call(self) -> dict[str, Any]:
        """Judge the parameters, run the module on the host, return its result or why nothing was done."""
        # A host may say in one sentence why it can't be used now (gpu_host_not_ready, see group_vars/all.yml).
        if not_ready := self.variable("gpu_host_not_ready"):
            return {"failed": True, "refused": True, "msg": str(not_ready)}
        given = self._given()
        validated = self.validator().validate(given)
        params = validated.validated_parameters
        problems = wrong_types.reworded(validated.error_messages, self.spec, given)
        for judge in (*self.judges, self.judge):
            problems = problems or judge(params)
        if problems:
            return {"failed": True, "refused": True, "msg": "Nothing was done. " + " ".join(problems)}
        if "task" in self.spec:
            params["task"] = params["task"] or records.new_run_id()
        if "patience" in self.spec and not self._task.async_val:
            params["patience"] = params["patience"] or progress.PATIENCE
        self.prepare(params)
        returned = self.finish(self.follow(self._caller(params), params))
        for line in returned.pop("told", []):
            display.display(f"  {self.host}: {line}")
        hidden = {option for option, facts in self.spec.items() if facts.get("no_log")}
        returned["invocation"] = {
            "module_args": {**params, **dict.fromkeys(hidden, "VALUE_SPECIFIED_IN_NO_LOG_PARAMETER")}
        }
        return returned

    def variable(self, name: str) -> Any:
        """A variable of the host that the task runs on, which is another one under delegate_to."""
        known = self.task_vars
        if self._task.delegate_to:
            known = known.get("ansible_delegated_vars", {}).get(self._task.delegate_to, {})
        return variables.read(self._templar, known, name) if name in known else None

    def _given(self) -> dict[str, Any]:
        """The task's arguments, over what the inventory says of the host: that holds for an ad hoc call, too."""
        none_given = not any(self._task.environment or ())
        if none_given and (environment := self.variable("gpu_host_environment")):
            self._task.environment = [environment]
        open_ = [option for option in HOST_OPTIONS if option in self.spec and option not in self._task.args]
        known = {option: self.variable(f"gpu_reset_{option}") for option in open_}
        given = {option: value for option, value in known.items() if value is not None} | self._task.args
        if given.get("router_url") and not given.get("worker_url"):
            address = self.variable("ansible_host") or self.task_vars["inventory_hostname"]
            given["worker_url"] = f"http://{address}:{{port}}"  # the server's own port
        return given

    def _caller(self, params: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        interpreter = str(self.variable("ansible_python_interpreter") or "auto")
        if self._task.async_val or interpreter.startswith("auto") or not self._is_pipelining_enabled("new"):
            display.vvv(f"{self.entry}: ordinary module (no pipelining, async, or no pinned interpreter)")
            return lambda: self._run_ordinary_module(params)
        return lambda: self._run_lean(interpreter, params)

    def _run_lean(self, interpreter: str, params: dict[str, Any]) -> dict[str, Any]:
        program = lean.program(
            lean.cached_sources(PACKAGE, self.entry, Path(C.DEFAULT_LOCAL_TMP)),
            self.entry,
            params,
            check_mode=bool(self._task.check_mode),
            diff=bool(self._task.diff),
        )
        display.vvv(f"lean path: gpu_host.{self.entry} in {len(program)} bytes on the standard input of {interpreter}")
        command = f"{self._compute_environment_string()} {interpreter} -c {shlex.quote(lean.BOOTSTRAP)}"
        answer = self._low_level_execute_command(command.strip(), sudoable=True, in_data=program)
        return lean.result(answer["rc"], answer["stdout"], answer["stderr"], interpreter)

    def _run_ordinary_module(self, params: dict[str, Any]) -> dict[str, Any]:
        wrap_async = self._task.async_val and not self._connection.has_native_async
        returned: dict[str, Any] = self._execute_module(
            module_name=self._task.action.rpartition(".")[2],
            module_args=dict(params),
            task_vars=self.task_vars,
            wrap_async=wrap_async,
        )
        if not wrap_async:
            self._remove_tmp_path(self._connection._shell.tmpdir)
            returned.pop("finished", None)  # only async needs it
        return returned
