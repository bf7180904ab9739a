"""NVML through nvidia-ml-py, in a child process that may hang without us.

One child keeps NVML initialised (that costs some 100 ms on real hardware) and answers many reads. Each field is read
by itself: a GPU that is lost, a field that is unsupported or forbidden, leaves the others as they are. The child
writes the name of each call before it makes it where the parent can see it, so that a hang has a name.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Callable

from .child import Child, Gone, Silent, Whereabouts
from .deadline import Deadline
from .readings import Gpu, GpuProcess, Readings, driver_trouble, whole_gpu

if TYPE_CHECKING:
    from . import nvidia_smi

_MIB = 1 << 20
# What identifies a GPU does not change while the driver is loaded: read once, kept where it was read.
_IDENTITY = ("uuid", "minor", "name", "pci_bus_id", "compute_capability")
# NVML itself lacks the call, or the binding does.
_MISSING = ("FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH", "INVALID_ARGUMENT")


def _by_nvidia_smi() -> nvidia_smi.Reader:
    from . import nvidia_smi  # here, since its XML parser is slow to import and seldom needed

    return nvidia_smi.Reader()


class Reader:
    """Reads all GPUs again and again through one child; falls back to nvidia-smi where NVML can't be used.

    `source`: 'auto', or 'nvml' or 'nvidia-smi' to allow only that one. After a hang the child is abandoned, and the
    next read starts a new one.
    """

    def __init__(self, source: str = "auto") -> None:
        self._source = source
        self._child: Child | None = None
        self._now = Whereabouts()
        self._smi = _by_nvidia_smi() if source == "nvidia-smi" else None
        self._no_driver = ""
        self.abandoned: list[int] = []  # pids of children that outlived SIGKILL for the moment we looked

    @property
    def child_pid(self) -> int | None:
        """Our own helper, which must not be taken for a user of the GPU."""
        return self._child.pid if self._child else None

    def start(self) -> None:
        """Start NVML in the child and come back at once, so that the first read() need not wait for it."""
        if self._child is None and self._smi is None:
            self._now = Whereabouts()
            self._child = Child(_Work(self._now))

    def read(self, deadline: Deadline) -> Readings:
        """One look at every GPU. Never raises for what the driver does, never outlives the deadline."""
        if self._smi is None:
            try:
                return self._ask(deadline)
            except _NotHere as reason:
                self.close()
                if self._source == "nvml":
                    return _nothing(str(reason))
                self._smi = _by_nvidia_smi()
                self._no_driver = str(reason) if reason.driver else ""
        found = self._smi.read(deadline)
        return replace(found, error=self._no_driver) if self._no_driver and found.source == "none" else found

    def close(self) -> None:
        """End the child; quick, and safe to call twice."""
        child, self._child = self._child, None
        if child is not None and not child.close():
            self.abandoned.append(child.pid)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, deadline: Deadline) -> Readings:
        gpus: list[Gpu] = []
        head: dict[str, Any] = {}
        started = deadline.remaining()
        try:
            self.start()
            child = self._child
            if child is None:
                raise Gone()
            child.ask("read")
            while True:
                part = child.answer(deadline)
                if part["part"] == "gpu":
                    gpus[part["index"]] = _gpu(part)
                elif part["part"] == "head":
                    head = part
                    gpus = [_unread(identity) for identity in part["gpus"]]
                elif part["part"] == "end":
                    return Readings("nvml", head["driver_version"], head["nvml_version"], tuple(gpus), None)
                elif part["part"] == "not_here":
                    raise _NotHere(part["why"], part["driver"])
                else:
                    self.close()
                    return _nothing(driver_trouble(part["why"]))
        except Silent:
            return self._given_up(
                f"NVML did not answer within {started:.1f} s: it hangs in {self._now.read()}", head, gpus
            )
        except Gone:
            return self._given_up(f"the process that reads NVML died in {self._now.read()}", head, gpus)

    def _given_up(self, why: str, head: dict[str, Any], gpus: list[Gpu]) -> Readings:
        child, self._child = self._child, None
        if child is not None and not child.abandon():
            self.abandoned.append(child.pid)
            why += f" (its process {child.pid} outlived SIGKILL)"
        if not gpus:
            return _nothing(why)
        told = [gpu if gpu.errors != _UNREAD else replace(gpu, errors={"gpu": why}) for gpu in gpus]
        return Readings("nvml", head["driver_version"], head["nvml_version"], tuple(told), None)


class _NotHere(Exception):
    """NVML can't be used from Python here; `driver`: because there is no driver, so that nothing else will do."""

    def __init__(self, why: str, driver: bool) -> None:
        super().__init__(why)
        self.driver = driver


_UNREAD = {"gpu": "not read"}


def _nothing(why: str) -> Readings:
    return Readings("none", None, None, (), why)


def _unread(identity: dict[str, Any]) -> Gpu:
    return _gpu({**identity, "errors": _UNREAD})


def _gpu(part: dict[str, Any]) -> Gpu:
    processes = part.get("processes")
    return Gpu(
        index=part["index"],
        uuid=part.get("uuid") or "",
        minor=part.get("minor"),
        name=part.get("name") or "",
        pci_bus_id=part.get("pci_bus_id") or "",
        compute_capability=part.get("compute_capability"),
        total_mib=part.get("total_mib"),
        used_mib=part.get("used_mib"),
        free_mib=part.get("free_mib"),
        reserved_mib=part.get("reserved_mib"),
        utilization_percent=part.get("utilization_percent"),
        power_watts=part.get("power_watts"),
        mig=part.get("mig"),
        processes=None if processes is None else tuple(GpuProcess(*one) for one in processes),
        errors=dict(part["errors"]),
    )


class _Work:
    """What the child does. Everything below runs there."""

    def __init__(self, now: Whereabouts) -> None:
        self._now = now
        self._nvml: Any = None
        self._known: dict[int, dict[str, Any]] = {}

    def __call__(self, ask: Callable[[], Any], answer: Callable[[Any], None]) -> None:
        trouble = self._trouble(self._start)
        while ask() is not None:
            trouble = trouble or self._trouble(self._read, answer)
            if trouble is not None:
                answer(trouble)
                return  # the parent starts anew: a driver that was absent may be there by then
        with contextlib.suppress(Exception):
            self._nvml.nvmlShutdown()

    def _trouble(self, step: Callable[..., None], *args: Any) -> dict[str, Any] | None:
        """Run a step; what to tell the parent when it failed as a whole."""
        try:
            step(*args)
        except _NotHere as reason:
            return {"part": "not_here", "why": str(reason), "driver": reason.driver}
        except Exception as reason:
            return {"part": "refused", "why": str(reason) or type(reason).__name__}
        return None

    def _read(self, answer: Callable[[Any], None]) -> None:
        system: dict[str, str] = {}
        versions = {
            "driver_version": self._get(system, "driver", "nvmlSystemGetDriverVersion"),
            "nvml_version": self._get(system, "nvml", "nvmlSystemGetNVMLVersion"),
        }
        count = self._get(system, "count", "nvmlDeviceGetCount")
        if count is None:
            raise _Refused(system["count"])
        handles: dict[int, tuple[Any, dict[str, str]]] = {}
        for index in range(count):
            errors: dict[str, str] = {}
            handle = self._get(errors, "gpu", "nvmlDeviceGetHandleByIndex", index, about=f"GPU {index}")
            if handle is not None:
                self._identify(index, handle, errors)
            handles[index] = (handle, errors)
        known = [{**self._known.get(index, {}), "index": index} for index in range(count)]
        answer({"part": "head", **versions, "gpus": known})
        for index, (handle, errors) in handles.items():
            values = {} if handle is None else self._state(index, handle, errors)
            answer({"part": "gpu", **known[index], **values, "errors": whole_gpu(errors)})
        answer({"part": "end"})

    def _start(self) -> None:
        self._now.write("the import of nvidia-ml-py")
        try:
            import pynvml
        except Exception as error:  # an ImportError, or whatever another package of that name does
            raise _NotHere(f"nvidia-ml-py can't be imported by this Python ({error})", False) from None
        self._now.write("nvmlInit")
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
                raise _NotHere(driver_trouble(str(error)), True) from None
            raise _Refused(str(error)) from None
        self._nvml = pynvml

    def _get(self, errors: dict[str, str], field: str, call: str, *args: Any, about: str = "") -> Any:
        """What the call gives; None, with NVML's words under `field`, when it fails."""
        self._now.write(f"{call} of {about}" if about else call)
        function = getattr(self._nvml, call, None)
        if function is None:
            errors[field] = f"this nvidia-ml-py has no {call}"
            return None
        try:
            value = function(*args)
        except self._nvml.NVMLError as error:
            errors[field] = str(error)
            return None
        except Exception as error:  # a value that the binding can't take apart spoils this field only
            errors[field] = f"{call}: {error}"
            return None
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

    def _identify(self, index: int, handle: Any, errors: dict[str, str]) -> None:
        about = f"GPU {index}"
        known = self._known.setdefault(index, {})
        calls = {
            "uuid": "nvmlDeviceGetUUID",
            "minor": "nvmlDeviceGetMinorNumber",
            "name": "nvmlDeviceGetName",
            "pci_bus_id": "nvmlDeviceGetPciInfo",
            "compute_capability": "nvmlDeviceGetCudaComputeCapability",
        }
        for field in _IDENTITY:
            if field in known:
                continue
            value = self._get(errors, field, calls[field], handle, about=about)
            if value is None:
                continue
            if field == "pci_bus_id":
                value = value.busId.decode() if isinstance(value.busId, bytes) else value.busId
            elif field == "compute_capability":
                value = f"{value[0]}.{value[1]}"
            known[field] = value

    def _state(self, index: int, handle: Any, errors: dict[str, str]) -> dict[str, Any]:
        about = f"GPU {index}"
        values = self._memory(handle, errors, about)
        values["processes"] = self._processes(handle, errors, about)
        load = self._get(errors, "utilization_percent", "nvmlDeviceGetUtilizationRates", handle, about=about)
        values["utilization_percent"] = None if load is None else load.gpu
        power = self._get(errors, "power_watts", "nvmlDeviceGetPowerUsage", handle, about=about)
        values["power_watts"] = None if power is None else power / 1000.0
        values["mig"] = self._mig(handle, errors, about)
        return values

    def _memory(self, handle: Any, errors: dict[str, str], about: str) -> dict[str, Any]:
        nvml = self._nvml
        version = getattr(nvml, "nvmlMemory_v2", None)
        why = "this nvidia-ml-py has no nvmlMemory_v2"
        if version is not None:
            self._now.write(f"nvmlDeviceGetMemoryInfo_v2 of {about}")
            try:
                return _in_mib(nvml.nvmlDeviceGetMemoryInfo(handle, version=version))
            except nvml.NVMLError as error:
                if error.value not in [getattr(nvml, f"NVML_ERROR_{name}", None) for name in _MISSING]:
                    errors["memory"] = str(error)
                    return {}
                why = str(error)
        memory = self._get(errors, "memory", "nvmlDeviceGetMemoryInfo", handle, about=about)
        if memory is None:
            return {}
        errors["reserved_mib"] = f"no version 2 of the memory reading ({why}): used_mib counts the driver's reserve"
        return _in_mib(memory)

    def _processes(self, handle: Any, errors: dict[str, str], about: str) -> list[tuple[int, int | None, str]] | None:
        compute = self._get(errors, "processes", "nvmlDeviceGetComputeRunningProcesses", handle, about=about)
        if compute is None:
            return None
        found = {process.pid: (process.pid, _mib_up(process.usedGpuMemory), "compute") for process in compute}
        # Clients of MPS and of the display are more to find; where the card has no such list there are none of them.
        for name, kind in (
            ("nvmlDeviceGetMPSComputeRunningProcesses", "compute"),
            ("nvmlDeviceGetGraphicsRunningProcesses", "graphics"),
        ):
            extra: dict[str, str] = {}
            more = self._get(extra, "processes", name, handle, about=about)
            for process in more or []:
                found.setdefault(process.pid, (process.pid, _mib_up(process.usedGpuMemory), kind))
            if extra and kind == "graphics" and not _unsupported(extra["processes"]):
                errors["processes"] = f"graphics: {extra['processes']}"
                return None
        return sorted(found.values())

    def _mig(self, handle: Any, errors: dict[str, str], about: str) -> bool | None:
        trouble: dict[str, str] = {}
        mode = self._get(trouble, "mig", "nvmlDeviceGetMigMode", handle, about=about)
        if mode is not None:
            return bool(mode[0])
        if _unsupported(trouble["mig"]):
            return False  # a card without MIG
        errors["mig"] = trouble["mig"]
        return None


class _Refused(Exception):
    """NVML started and refused, or did not start; the text is its own."""


def _unsupported(words: str) -> bool:
    low = words.lower()
    return low in ("not supported", "function not found") or low.startswith("this nvidia-ml-py has no")


def _mib_up(size: int | None) -> int | None:
    """Any used byte counts: nothing that is held is rounded to 0."""
    return None if size is None else -(-size // _MIB)


def _in_mib(memory: Any) -> dict[str, Any]:
    reserved = getattr(memory, "reserved", None)
    return {
        "total_mib": memory.total // _MIB,
        "used_mib": _mib_up(memory.used),
        "free_mib": memory.free // _MIB,
        "reserved_mib": _mib_up(reserved),
    }
