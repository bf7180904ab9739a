"""The modules that run on a host, each with what it has of its own on the control node. action_plugins/ links here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from ansible import constants as C
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.module_utils.parsing.convert_bool import boolean
from gpu_host import arguments, data_jobs, nccl_environment, staging_sources

from . import breaker, health, hooks, lean, measuring, records, reports, role_variables, together
from . import gate as gates
from .host_module import PACKAGE, REPOSITORY, HostModule, display

# Options of gpu_reset that are no variable of its role: they belong to one call.
OF_ONE_CALL = ("run_id", "last_recorded_run", "head_is_reset", "role_variables")


class GpuMemory(HostModule):
    spec, entry = arguments.GPU_MEMORY, "memory_report"


class ServerInfo(HostModule):
    spec, entry = arguments.SERVER_INFO, "server_state"


class RoleModule(HostModule):
    """One that a role calls: it refuses that role's variables by their names, and those that the role does not have."""

    role: ClassVar[str]

    def call(self) -> dict[str, Any]:
        if self._task._role is None or self._task._role.get_name() != self.role:
            return super().call()
        known = role_variables.options(self.role)
        if problems := role_variables.unknown(map(str, self.task_vars), f"{self.role}_", known):
            return {"failed": True, "refused": True, "msg": "Nothing was done. " + " ".join(problems)}
        returned = super().call()
        if returned.get("refused"):
            returned["msg"] = role_variables.in_words_of_the_play(returned["msg"], self._variable_of)
        return returned

    def _variable_of(self, option: str) -> str:
        """The variable that an option of the module was given by."""
        if option not in self.spec:
            return option
        names = (f"{self.role}_{option}", f"sglang_{option}")
        return next((name for name in names if name in self.task_vars), option)


class KernelBuild(RoleModule):
    role = "sgl_kernel"
    spec, entry = arguments.KERNEL_BUILD, "kernel_build"


class KernelPackageInfo(HostModule):
    spec, entry = arguments.KERNEL_PACKAGE_INFO, "kernel_package"


class JitCache(RoleModule):
    role = "jit_cache"
    spec, entry = arguments.JIT_CACHE, "jit_cache"


class RouterWorker(HostModule):
    spec, entry = arguments.ROUTER_WORKER, "router_worker"


class NcclEnvironment(RoleModule):
    role = "nccl_env"
    spec, entry = arguments.NCCL_ENVIRONMENT, "nccl_environment"
    judges = (arguments.problems, nccl_environment.problems)


class ModelStaging(RoleModule):
    role = "model_staging"
    spec, entry = arguments.MODEL_STAGING, "staging"
    judges = (arguments.problems, staging_sources.problems)


class DataJobs(RoleModule):
    role = "run_jobs"
    spec, entry = arguments.DATA_JOBS, "data_jobs"
    judges = (arguments.problems, data_jobs.problems)


class GpuHostInfo(RoleModule):
    role = "preflight"
    spec, entry = arguments.GPU_HOST_INFO, "host_info"

    def judge(self, params: dict[str, Any]) -> list[str]:
        return reports.misspelt_codes(params["skip"])

    def finish(self, returned: dict[str, Any]) -> dict[str, Any]:
        if not self._task.async_val:
            returned["report"] = reports.write(self.host, returned)
        return returned


class ServerLaunch(RoleModule):
    role = "server_launch"
    spec, entry = arguments.SERVER_LAUNCH, "server_launch"

    def prepare(self, params: dict[str, Any]) -> None:
        params["who"] = params["who"] or records.who()


class ServerWatch(RoleModule):
    role = "server_watch"
    spec, entry = arguments.SERVER_WATCH, "server_watch"

    def prepare(self, params: dict[str, Any]) -> None:
        params.update(lean.kept(PACKAGE, "watch_look", params))


class ServerHealth(RoleModule):
    role = "server_health"
    spec, entry = arguments.SERVER_HEALTH, "server_health"

    def follow(self, call: Callable[[], dict[str, Any]], params: dict[str, Any]) -> dict[str, Any]:
        returned = health.follow(call, params, self.host, display.display, self._together(params["nodes"]))
        params["carry"] = None  # as it was called
        return returned

    def _together(self, nodes: list[str]) -> together.Together | None:
        """What lets the hosts of one server know of each other; None for a server of one host."""
        if len(nodes) < 2 or self.host not in nodes:
            return None
        return together.Together(Path(C.DEFAULT_LOCAL_TMP), self._task._uuid, nodes, self.host)


class ServingBenchmark(HostModule):
    spec, entry = arguments.SERVING_BENCHMARK, "serving_benchmark"
    judges = (arguments.problems, arguments.benchmark_problems)

    def judge(self, params: dict[str, Any]) -> list[str]:
        return measuring.take_prompts(params, REPOSITORY)

    def finish(self, returned: dict[str, Any]) -> dict[str, Any]:
        return measuring.completed(returned)


class GpuReset(HostModule):
    spec, entry = arguments.GPU_RESET, "reset"
    _validator = ArgumentSpecValidator(spec)  # made in the process that is forked for each host, not in every fork

    @classmethod
    def validator(cls) -> ArgumentSpecValidator:
        return cls._validator

    def run(self, tmp: None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        self.task_vars = task_vars or {}
        if boolean(self._task.args.pop("role_variables", False)):
            self._task.args = self._role_variables() | self._task.args
        return super().run(tmp, task_vars)

    def _role_variables(self) -> dict[str, Any]:
        """The options as the variables of the role gpu_reset say. A constant needs no template, so this is cheap."""
        named = {option: self.variable(f"gpu_reset_{option}") for option in self.spec if option not in OF_ONE_CALL}
        return {option: value for option, value in named.items() if value is not None}

    def judge(self, params: dict[str, Any]) -> list[str]:
        return hooks.problems({key: self.variable(key) for key in hooks.VARIABLES})

    def prepare(self, params: dict[str, Any]) -> None:
        params["run_id"] = params["run_id"] or records.new_run_id()
        params["last_recorded_run"] = params["last_recorded_run"] or records.last_recorded_run(
            records.artifacts_folder() / records.FILE_NAME, self.host
        )

    def call(self) -> dict[str, Any]:
        gate = self._gate()
        return super().call() if gate is None else self._call_gated(gate)

    def _gate(self) -> gates.Gate | None:
        """What a run over many hosts asks before each of them is begun (gate.py)."""
        if "__reset_gate" not in self.task_vars or self._task.delegate_to:
            return None
        nodes = [str(node) for node in self.variable("sglang_nodes") or []]
        folders = Path(C.DEFAULT_LOCAL_TMP), records.artifacts_folder()
        return gates.Gate(self.task_vars["__reset_plan"], self.host, nodes, *folders, bool(self._task.check_mode))

    def _call_gated(self, gate: gates.Gate) -> dict[str, Any]:
        def not_ready(node: str) -> str:
            hostvars = self.task_vars["hostvars"]
            return str(hostvars[node].get("gpu_host_not_ready") or "") if node in hostvars else ""

        policy = str(self._task.args.get("policy") or self.spec["policy"]["default"])
        reason = gate.begin(self.task_vars["ansible_play_hosts_all"], not_ready)
        if not reason and (waited := gate.wait_for_head(policy)) is not None:
            reason = waited
            self._task.args["head_is_reset"] = True  # the server's first node was asked, and has ended
        if reason:
            return gates.skipped(reason, policy, bool(self._task.check_mode))
        returned = None
        try:
            returned = super().call()
        finally:
            last_word = self._task.args.get("phases") == ["verify"]  # the hypervisor has been asked by then
            try:
                gate.end(returned, not last_word and bool(self.variable("gpu_hypervisor")))
            except (OSError, breaker.Unreadable) as error:
                display.warning(f"{gate.host} was not counted for the breaker: {error}")
        return returned


MODULES: dict[str, type[HostModule]] = {
    "data_jobs": DataJobs,
    "gpu_host_info": GpuHostInfo,
    "gpu_memory": GpuMemory,
    "gpu_reset": GpuReset,
    "jit_cache": JitCache,
    "kernel_build": KernelBuild,
    "kernel_package_info": KernelPackageInfo,
    "model_staging": ModelStaging,
    "nccl_environment": NcclEnvironment,
    "router_worker": RouterWorker,
    "server_health": ServerHealth,
    "server_info": ServerInfo,
    "server_launch": ServerLaunch,
    "server_watch": ServerWatch,
    "serving_benchmark": ServingBenchmark,
}
"""By the name of the module and of its action plugin."""
