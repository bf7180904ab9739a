"""Usable, not merely empty: a context on each GPU, most of its free memory written and read back.

Through the CUDA driver library (libcuda.so.1) alone, one child process a GPU, all in parallel, all under one deadline.
Every word of the memory gets a value of its own (so a stuck address line shows), and a kernel compares them where
they lie, after all has been written (so nothing is answered from a cache). Plain device memory only, never managed.

Opening and closing a context is also the first cure of a ghost latch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Callable

from .child import Child, Gone, Silent, Whereabouts
from .deadline import Deadline
from .readings import Gpu, normal_pci

_MIB = 1 << 20
_CHUNK_MIB = 2048
_LEAST_CHUNK_MIB = 16
_BLOCKING_SYNC = 4  # CU_CTX_SCHED_BLOCKING_SYNC: eight waiting children must not spin on eight cores
_OUT_OF_MEMORY = 2
_JIT_MISSING = (200, 209, 218, 221, 222)  # no usable PTX compiler beside this driver, or it wants another PTX
_SEED = 0x5EED1E55


@dataclass(frozen=True)
class Probe:
    """What the probe of one GPU found.

    `mib_checked` were written and read back; `seconds` is the whole probe, `context_seconds` its start, `gb_per_s`
    written and read bytes over the time that took. `method`: 'kernel' (every word compared) or 'sampled' (no PTX
    compiler here: all written by the copy engine, one MiB in 64 compared on the host). `error` is '' or one sentence.
    """

    index: int
    uuid: str
    ok: bool
    mib_checked: int
    seconds: float
    context_seconds: float
    gb_per_s: float
    method: str
    error: str
    pid: int | None  # of a child that was abandoned, else None


def probe(gpus: Sequence[Gpu], deadline: Deadline, fraction: float = 0.9, library: str = "libcuda.so.1") -> list[Probe]:
    """Probe the GPUs in parallel, each over `fraction` of its free memory (0: only open and close a context).

    Never raises for what the driver does, never outlives the deadline: a child that hangs is killed, left and named.
    """
    running = [(gpu, _Run(gpu, fraction, library)) for gpu in gpus]
    return [run.result(deadline) for _, run in running]


def touch(gpus: Sequence[Gpu], deadline: Deadline, library: str = "libcuda.so.1") -> list[Probe]:
    """Open and close a context on each GPU, which releases a ghost latch."""
    return probe(gpus, deadline, 0.0, library)


class _Run:
    def __init__(self, gpu: Gpu, fraction: float, library: str) -> None:
        self._gpu = gpu
        self._started = time.monotonic()
        self._now = Whereabouts()
        self._trouble = ""
        try:
            self._child: Child | None = Child(_Work(gpu.pci_bus_id, fraction, library, self._now))
        except OSError as error:
            self._child = None
            self._trouble = f"no process could be started for the probe of GPU {gpu.index}: {error.strerror}"

    def result(self, deadline: Deadline) -> Probe:
        child = self._child
        said: dict[str, Any] = {}
        if child is None:
            return self._probe({}, self._trouble)
        try:
            said = child.answer(deadline)
        except Silent:
            ended = child.abandon()
            seconds = time.monotonic() - self._started
            why = f"the probe of GPU {self._gpu.index} hung in {self._now.read()} for {seconds:.1f} s"
            if ended:
                return self._probe({}, why + " and was killed.")
            return self._probe(
                {}, f"{why}; its process {child.pid} outlived SIGKILL and may still hold memory.", child.pid
            )
        except Gone:
            child.close()
            return self._probe({}, f"the process that probed GPU {self._gpu.index} died in {self._now.read()}.")
        if not child.close(patience=max(0.05, min(2.0, deadline.remaining()))):
            return self._probe(said, f"the process that probed GPU {self._gpu.index} does not end.", child.pid)
        return self._probe(said, said.get("error", ""))

    def _probe(self, said: dict[str, Any], error: str, pid: int | None = None) -> Probe:
        return Probe(
            index=self._gpu.index,
            uuid=self._gpu.uuid,
            ok=not error,
            mib_checked=said.get("mib_checked", 0),
            seconds=round(said.get("seconds", time.monotonic() - self._started), 3),
            context_seconds=round(said.get("context_seconds", 0.0), 3),
            gb_per_s=round(said.get("gb_per_s", 0.0), 1),
            method=said.get("method", ""),
            error=error,
            pid=pid,
        )


class CudaError(Exception):
    """A call of the driver library failed; the text names the call and CUDA's own name of the error."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call} gave {name} ({code})")
        self.code = code


class _Driver:
    """The few calls of libcuda that the probe needs. Every failure is a CudaError."""

    def __init__(self, library: str, now: Whereabouts) -> None:
        self._now = now
        self._library = ctypes.CDLL(library)

    def __call__(self, call: str, *args: Any) -> None:
        self._now.write(call)
        code = getattr(self._library, call)(*args)
        if code:
            raise CudaError(call, code, self._error_name(code))

    def _error_name(self, code: int) -> str:
        name = ctypes.c_char_p()
        with contextlib.suppress(AttributeError):
            self._library.cuGetErrorName(code, ctypes.byref(name))
        return (name.value or b"an unknown error").decode()


class _Work:
    """What the child does: one GPU from the context to its release."""

    def __init__(self, pci_bus_id: str, fraction: float, library: str, now: Whereabouts) -> None:
        self._pci = normal_pci(pci_bus_id)
        self._fraction = fraction
        self._library = library
        self._now = now

    def __call__(self, ask: Callable[[], Any], answer: Callable[[Any], None]) -> None:
        # Chosen by PCI id, of all GPUs: the caller's own choice of visible ones must not hide it.
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        os.environ["CUDA_CACHE_DISABLE"] = "1"  # leave no ~/.nv behind for a kernel of 60 lines
        started = time.monotonic()
        result: dict[str, Any] = {"mib_checked": 0}
        try:
            cuda = _Driver(self._library, self._now)
            self._probe(cuda, result)
        except OSError as error:
            result["error"] = f"{self._library} can't be loaded ({error}): install the NVIDIA driver's CUDA library."
        except (CudaError, _Wrong) as error:
            result["error"] = f"{error}."
        except Exception as error:
            result["error"] = f"the probe failed: {type(error).__name__}: {error}."
        result["seconds"] = time.monotonic() - started
        answer(result)

    def _probe(self, cuda: _Driver, result: dict[str, Any]) -> None:
        started = time.monotonic()
        cuda("cuInit", 0)
        device = ctypes.c_int()
        cuda("cuDeviceGetByPCIBusId", ctypes.byref(device), self._pci.encode())
        with contextlib.suppress(CudaError):
            cuda("cuDevicePrimaryCtxSetFlags_v2", device, _BLOCKING_SYNC)
        context = ctypes.c_void_p()
        cuda("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        try:
            cuda("cuCtxSetCurrent", context)
            cuda("cuCtxSynchronize")
            result["context_seconds"] = time.monotonic() - started
            if self._fraction > 0:
                self._memory(cuda, result)
        except Exception:
            with contextlib.suppress(CudaError):  # after a fault every call fails: the first one is the news
                cuda("cuDevicePrimaryCtxRelease_v2", device)
            raise
        cuda("cuDevicePrimaryCtxRelease_v2", device)

    def _memory(self, cuda: _Driver, result: dict[str, Any]) -> None:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        cuda("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        checker = _checker(cuda)
        result["method"] = checker.method
        chunks: list[tuple[int, int]] = []
        try:
            _allocate(cuda, int(free.value * min(self._fraction, 1.0)) // _MIB, chunks)
            started = time.monotonic()
            for number, (address, mib) in enumerate(chunks):
                checker.fill(address, mib, _SEED + number)
            cuda("cuCtxSynchronize")
            for number, (address, mib) in enumerate(chunks):
                checker.check(address, mib, _SEED + number)
                result["mib_checked"] += mib
            seconds = max(time.monotonic() - started, 1e-9)
            result["gb_per_s"] = 2 * result["mib_checked"] * _MIB / 1e9 / seconds
        finally:
            with contextlib.suppress(CudaError):
                checker.close()
                for address, _ in chunks:
                    cuda("cuMemFree_v2", ctypes.c_uint64(address))


class _Wrong(Exception):
    """Memory did not give back what was written."""


def _allocate(cuda: _Driver, mib: int, chunks: list[tuple[int, int]]) -> None:
    """Add chunks of device memory, (address, MiB), up to so many MiB; fewer when the memory is in pieces."""
    size, left = _CHUNK_MIB, mib
    while left >= _LEAST_CHUNK_MIB and size >= _LEAST_CHUNK_MIB:
        size = min(size, left)
        address = ctypes.c_uint64()
        try:
            cuda("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size * _MIB))
        except CudaError as error:
            if error.code != _OUT_OF_MEMORY:
                raise
            size //= 2
            continue
        chunks.append((address.value, size))
        left -= size
    if not chunks:
        raise _Wrong(f"no memory could be allocated, though {mib} MiB are said to be free")


def _checker(cuda: _Driver) -> _Kernels | _Sampled:
    try:
        return _Kernels(cuda)
    except CudaError as error:
        if error.code not in _JIT_MISSING:
            raise
        return _Sampled(cuda)


class _Kernels:
    """Fills and compares by two small kernels that the driver compiles for the GPU at hand."""

    method = "kernel"

    def __init__(self, cuda: _Driver) -> None:
        self._cuda = cuda
        self._module = ctypes.c_void_p()
        cuda("cuModuleLoadData", ctypes.byref(self._module), PTX.encode())
        self._fill, self._check, self._wrong = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
        cuda("cuModuleGetFunction", ctypes.byref(self._fill), self._module, b"fill")
        cuda("cuModuleGetFunction", ctypes.byref(self._check), self._module, b"check")
        cuda("cuMemAlloc_v2", ctypes.byref(self._wrong), ctypes.c_size_t(16))

    def fill(self, address: int, mib: int, seed: int) -> None:
        self._launch(self._fill, *_sizes(address, mib, seed))

    def check(self, address: int, mib: int, seed: int) -> None:
        self._cuda("cuMemsetD32_v2", self._wrong, ctypes.c_uint(0), ctypes.c_size_t(4))
        self._launch(self._check, *_sizes(address, mib, seed), self._wrong)
        wrong = ctypes.c_uint()
        self._cuda("cuMemcpyDtoH_v2", ctypes.byref(wrong), self._wrong, ctypes.c_size_t(4))
        if wrong.value:
            raise _Wrong(
                f"{wrong.value} of {mib * _MIB // 16} words of 16 bytes did not read back as written: replace"
                " the GPU or retire its pages"
            )

    def close(self) -> None:
        self._cuda("cuMemFree_v2", self._wrong)

    def _launch(self, function: ctypes.c_void_p, *values: Any) -> None:
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        shape = [ctypes.c_uint(number) for number in (2048, 1, 1, 256, 1, 1, 0)]
        self._cuda("cuLaunchKernel", function, *shape, None, pointers, None)


def _sizes(address: int, mib: int, seed: int) -> tuple[Any, Any, Any]:
    return ctypes.c_uint64(address), ctypes.c_uint(mib * _MIB // 16), ctypes.c_uint(seed & 0xFFFFFFFF)


class _Sampled:
    """Without a compiler: a constant in every word, and one MiB in 64 compared on the host."""

    method = "sampled"
    _EVERY_MIB = 64

    def __init__(self, cuda: _Driver) -> None:
        self._cuda = cuda
        self._host = ctypes.create_string_buffer(_MIB)

    def fill(self, address: int, mib: int, seed: int) -> None:
        self._cuda(
            "cuMemsetD32_v2",
            ctypes.c_uint64(address),
            ctypes.c_uint(seed & 0xFFFFFFFF),
            ctypes.c_size_t(mib * _MIB // 4),
        )

    def check(self, address: int, mib: int, seed: int) -> None:
        expected = (seed & 0xFFFFFFFF).to_bytes(4, "little") * (_MIB // 4)
        for offset in sorted({*range(0, mib, self._EVERY_MIB), mib - 1}):
            self._cuda("cuMemcpyDtoH_v2", self._host, ctypes.c_uint64(address + offset * _MIB), ctypes.c_size_t(_MIB))
            if self._host.raw != expected:
                raise _Wrong(
                    f"the MiB at {offset} MiB of a chunk did not read back as written: replace the GPU or"
                    " retire its pages"
                )

    def close(self) -> None:
        pass


def clean(probes: Iterable[Probe]) -> bool:
    """Whether every GPU that was probed can be used."""
    return all(one.ok for one in probes)


# Word i (16 bytes) of a chunk holds {x, x + 1, ~x, x ^ seed} with x = i * 0x9E3779B1 + seed. An old version and target:
# every driver since CUDA 9 compiles it for whatever GPU it finds.
PTX = """.version 6.0
.target sm_52
.address_size 64
.visible .entry fill(.param .u64 base, .param .u32 count, .param .u32 seed)
{
    .reg .pred %p;
    .reg .b32 %i, %n, %step, %s, %x, %y, %z, %w, %t;
    .reg .b64 %b, %a;
    ld.param.u64 %b, [base];
    cvta.to.global.u64 %b, %b;
    ld.param.u32 %n, [count];
    ld.param.u32 %s, [seed];
    mov.u32 %t, %ntid.x;
    mov.u32 %i, %ctaid.x;
    mov.u32 %x, %tid.x;
    mad.lo.u32 %i, %i, %t, %x;
    mov.u32 %step, %nctaid.x;
    mul.lo.u32 %step, %step, %t;
    setp.ge.u32 %p, %i, %n;
    @%p bra done;
loop:
    mad.lo.u32 %x, %i, 0x9E3779B1, %s;
    add.u32 %y, %x, 1;
    not.b32 %z, %x;
    xor.b32 %w, %x, %s;
    mul.wide.u32 %a, %i, 16;
    add.u64 %a, %b, %a;
    st.global.v4.u32 [%a], {%x, %y, %z, %w};
    add.u32 %i, %i, %step;
    setp.lt.u32 %p, %i, %n;
    @%p bra loop;
done:
    ret;
}
.visible .entry check(.param .u64 base, .param .u32 count, .param .u32 seed, .param .u64 wrong)
{
    .reg .pred %p, %q;
    .reg .b32 %i, %n, %step, %s, %x, %y, %z, %w, %t, %a0, %a1, %a2, %a3, %bad, %one;
    .reg .b64 %b, %a, %r;
    ld.param.u64 %b, [base];
    cvta.to.global.u64 %b, %b;
    ld.param.u64 %r, [wrong];
    cvta.to.global.u64 %r, %r;
    ld.param.u32 %n, [count];
    ld.param.u32 %s, [seed];
    mov.u32 %t, %ntid.x;
    mov.u32 %i, %ctaid.x;
    mov.u32 %x, %tid.x;
    mad.lo.u32 %i, %i, %t, %x;
    mov.u32 %step, %nctaid.x;
    mul.lo.u32 %step, %step, %t;
    mov.u32 %bad, 0;
    setp.ge.u32 %p, %i, %n;
    @%p bra done;
loop:
    mul.wide.u32 %a, %i, 16;
    add.u64 %a, %b, %a;
    ld.global.v4.u32 {%a0, %a1, %a2, %a3}, [%a];
    mad.lo.u32 %x, %i, 0x9E3779B1, %s;
    add.u32 %y, %x, 1;
    not.b32 %z, %x;
    xor.b32 %w, %x, %s;
    xor.b32 %x, %x, %a0;
    xor.b32 %y, %y, %a1;
    xor.b32 %z, %z, %a2;
    xor.b32 %w, %w, %a3;
    or.b32 %x, %x, %y;
    or.b32 %z, %z, %w;
    or.b32 %x, %x, %z;
    setp.ne.u32 %q, %x, 0;
    selp.u32 %one, 1, 0, %q;
    add.u32 %bad, %bad, %one;
    add.u32 %i, %i, %step;
    setp.lt.u32 %p, %i, %n;
    @%p bra loop;
    setp.eq.u32 %q, %bad, 0;
    @%q bra done;
    red.global.add.u32 [%r], %bad;
done:
    ret;
}
"""
