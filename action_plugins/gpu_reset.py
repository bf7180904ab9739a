"""Runs gpu_reset, gpu_memory and server_info on a host by one exec of the pinned interpreter.

The other two names are links to this file. What it does and an ordinary module call would not: it refuses bad input
before the host is touched, and it is lean (see plugin_utils/gpu_control/lean.py). Where a connection can't pipeline,
with async, or where the interpreter has yet to be discovered, the ordinary module of the same name runs instead.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from ansible import constants as C
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

REPOSITORY = Path(__file__).resolve().parent.parent
for _folder in (REPOSITORY / "module_utils", REPOSITORY / "plugin_utils"):
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))

from gpu_control import breaker, health, hooks, lean, measuring, progress, records, reports, together  # noqa: E402
from gpu_control import gate as gates  # noqa: E402
from gpu_host import arguments, data_jobs, nccl_environment, staging_sources  # noqa: E402

# Module name: argument spec, and the module of gpu_host whose run() does the work.
CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "gpu_reset": (arguments.GPU_RESET, "reset"),
    "gpu_memory": (arguments.GPU_MEMORY, "memory_report"),
    "server_info": (arguments.SERVER_INFO, "server_state"),
    "gpu_host_info": (arguments.GPU_HOST_INFO, "host_info"),
    "kernel_build": (arguments.KERNEL_BUILD, "kernel_build"),
    "kernel_package_info": (arguments.KERNEL_PACKAGE_INFO, "kernel_package"),
    "jit_cache": (arguments.JIT_CACHE, "jit_cache"),
    "server_launch": (arguments.SERVER_LAUNCH, "server_launch"),
    "router_worker": (arguments.ROUTER_WORKER, "router_worker"),
    "server_health": (arguments.SERVER_HEALTH, "server_health"),
    "server_watch": (arguments.SERVER_WATCH, "server_watch"),
    "nccl_environment": (arguments.NCCL_ENVIRONMENT, "nccl_environment"),
    "model_staging": (arguments.MODEL_STAGING, "staging"),
    "serving_benchmark": (arguments.SERVING_BENCHMARK, "serving_benchmark"),
    "data_jobs": (arguments.DATA_JOBS, "data_jobs"),
}

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


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    _supports_check_mode = True
    _supports_diff = True
    _supports_async = True

    def run(self, tmp: None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        task_vars = task_vars or {}
        result: dict[str, Any] = super().run(tmp, task_vars)
        name = self._task.action.rpartition(".")[2]
        if name == "gpu_reset" and (gate := self._gate(task_vars)) is not None:
            return self._run_gated(gate, result, task_vars)
        return self._run(name, result, task_vars)

    def _run(self, name: str, result: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        spec, entry = CALLS[name]

        # A host may say in one sentence why it can't be used now (gpu_host_not_ready, see group_vars/gpu_hosts.yml).
        if not_ready := self._variable(task_vars, "gpu_host_not_ready"):
            return {**result, "failed": True, "refused": True, "msg": str(not_ready)}
        given = {**self._host_options(task_vars, spec), **self._task.args}
        if given.get("router_url") and not given.get("worker_url"):
            address = self._variable(task_vars, "ansible_host") or task_vars["inventory_hostname"]
            given["worker_url"] = f"http://{address}:{{port}}"  # the server's own port
        validated = ArgumentSpecValidator(spec).validate(given)
        problems = validated.error_messages or arguments.problems(validated.validated_parameters)
        if name == "nccl_environment" and not problems:
            problems = nccl_environment.problems(validated.validated_parameters)
        if name == "data_jobs" and not problems:
            problems = data_jobs.problems(validated.validated_parameters)
        if name == "model_staging" and not problems:
            problems = staging_sources.problems(validated.validated_parameters)
        if name == "serving_benchmark" and not problems:
            problems = arguments.benchmark_problems(validated.validated_parameters)
            problems = problems or measuring.take_prompts(validated.validated_parameters, REPOSITORY)
        if name == "gpu_reset" and not problems:
            problems = hooks.problems({key: self._variable(task_vars, key) for key in hooks.VARIABLES})
        if problems:
            return {**result, "failed": True, "refused": True, "msg": "Nothing was done. " + " ".join(problems)}
        params = validated.validated_parameters

        if name == "gpu_reset":
            host = self._task.delegate_to or task_vars["inventory_hostname"]
            params["run_id"] = params["run_id"] or records.new_run_id()
            params["last_recorded_run"] = params["last_recorded_run"] or records.last_recorded_run(
                records.artifacts_folder() / records.FILE_NAME, host
            )

        if "task" in spec:
            params["task"] = params["task"] or records.new_run_id()
        if name == "server_launch":
            params["who"] = params["who"] or records.who()

        if name == "server_watch":
            params.update(lean.kept(REPOSITORY / "module_utils" / lean.PACKAGE, "watch_look", params))

        interpreter = str(self._variable(task_vars, "ansible_python_interpreter") or "auto")
        if self._task.async_val or interpreter.startswith("auto") or not self._is_pipelining_enabled("new"):
            display.vvv(f"{name}: ordinary module (no pipelining, async, or no pinned interpreter)")

            def call() -> dict[str, Any]:
                return self._run_ordinary_module(name, params, task_vars)

        else:

            def call() -> dict[str, Any]:
                return self._run_lean(interpreter, entry, params)

        host = self._task.delegate_to or task_vars["inventory_hostname"]
        if "patience" in spec and not self._task.async_val:
            params["patience"] = params["patience"] or progress.PATIENCE
        if name == "server_health":
            returned = health.follow(call, params, host, display.display, self._together(params["nodes"], host))
            params["carry"] = None  # as it was called
        else:
            returned = progress.follow(call, display.display, host)
        if name == "serving_benchmark":
            returned = measuring.completed(returned)
        for line in returned.pop("told", []):
            display.display(f"  {host}: {line}")
        if name == "gpu_host_info" and not self._task.async_val:
            returned["report"] = reports.write(host, returned)
        hidden = {option for option, facts in spec.items() if facts.get("no_log")}
        returned["invocation"] = {
            "module_args": {**params, **dict.fromkeys(hidden, "VALUE_SPECIFIED_IN_NO_LOG_PARAMETER")}
        }
        return {**result, **returned}

    def _gate(self, task_vars: dict[str, Any]) -> gates.Gate | None:
        """What a run over many hosts asks before each of them is begun (plugin_utils/gpu_control/gate.py)."""
        if "__reset_gate" not in task_vars or self._task.delegate_to:
            return None
        host = task_vars["inventory_hostname"]
        nodes = [str(node) for node in self._variable(task_vars, "sglang_nodes") or []]
        check_mode = bool(self._task.check_mode)
        return gates.Gate(
            task_vars["__reset_plan"], host, nodes, Path(C.DEFAULT_LOCAL_TMP), records.artifacts_folder(), check_mode
        )

    def _run_gated(self, gate: gates.Gate, result: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        def not_ready(node: str) -> str:
            hostvars = task_vars["hostvars"]
            return str(hostvars[node].get("gpu_host_not_ready") or "") if node in hostvars else ""

        policy = str(self._task.args.get("policy") or arguments.GPU_RESET["policy"]["default"])
        reason = gate.begin(task_vars["ansible_play_hosts_all"], not_ready)
        if not reason and (waited := gate.wait_for_head(policy)) is not None:
            reason = waited
            self._task.args["policy"] = "force"  # the server's first node was asked, and has ended
        if reason:
            return {**result, **gates.skipped(reason, policy, bool(self._task.check_mode))}
        returned = None
        try:
            returned = self._run("gpu_reset", result, task_vars)
        finally:
            last_word = self._task.args.get("phases") == ["verify"]  # the hypervisor has been asked by then
            try:
                gate.end(returned, not last_word and bool(self._variable(task_vars, "gpu_hypervisor")))
            except (OSError, breaker.Unreadable) as error:
                display.warning(f"{gate.host} was not counted for the breaker: {error}")
        return returned

    def _together(self, nodes: list[str], host: str) -> together.Together | None:
        """What lets the hosts of one server know of each other; None for a server of one host."""
        if len(nodes) < 2 or host not in nodes:
            return None
        return together.Together(Path(C.DEFAULT_LOCAL_TMP), self._task._uuid, nodes, host)

    def _run_lean(self, interpreter: str, entry: str, params: dict[str, Any]) -> dict[str, Any]:
        program = lean.program(
            lean.cached_sources(REPOSITORY / "module_utils" / lean.PACKAGE, entry, Path(C.DEFAULT_LOCAL_TMP)),
            entry,
            params,
            check_mode=bool(self._task.check_mode),
            diff=bool(self._task.diff),
        )
        display.vvv(f"lean path: gpu_host.{entry} in {len(program)} bytes on the standard input of {interpreter}")
        command = f"{self._compute_environment_string()} {interpreter} -c {shlex.quote(lean.BOOTSTRAP)}"
        answer = self._low_level_execute_command(command.strip(), sudoable=True, in_data=program)
        return lean.result(answer["rc"], answer["stdout"], answer["stderr"], interpreter)

    def _run_ordinary_module(self, name: str, params: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        wrap_async = self._task.async_val and not self._connection.has_native_async
        returned: dict[str, Any] = self._execute_module(
            module_name=name, module_args=dict(params), task_vars=task_vars, wrap_async=wrap_async
        )
        if not wrap_async:
            self._remove_tmp_path(self._connection._shell.tmpdir)
            returned.pop("finished", None)  # only async needs it
        return returned

    def _host_options(self, task_vars: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
        """What the inventory says of the host holds for a call outside of the roles, an ad hoc one, too."""
        none_given = not any(self._task.environment or ())
        if none_given and (environment := self._variable(task_vars, "gpu_host_environment")):
            self._task.environment = [environment]
        values = {option: self._variable(task_vars, f"gpu_reset_{option}") for option in HOST_OPTIONS if option in spec}
        return {option: value for option, value in values.items() if value is not None}

    def _variable(self, task_vars: dict[str, Any], name: str) -> Any:
        """A variable of the host that the task runs on, which is another one under delegate_to."""
        if self._task.delegate_to:
            task_vars = task_vars.get("ansible_delegated_vars", {}).get(self._task.delegate_to, {})
        return self._templar.template(task_vars[name]) if name in task_vars else None
