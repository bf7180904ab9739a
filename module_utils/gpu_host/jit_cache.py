"""Carries what the JIT compilers of one host built to another host that is like it, so that its first start is warm.

Like it means: every field of the key is equal. Compiled kernels are code; a cache that half fits is worse than none.
No lock is carried (its owner is elsewhere), and nothing that is there already is replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import secrets
import stat
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import cuda_toolkit, filesystems, host_facts, jit_caches, python_packages, readings
from .deadline import Deadline
from .jit_caches import Cache

SCHEMA = 1
_KEY_MEMBER = "key.json"
# A key's field and what it is called in a sentence.
FIELDS = {
    "compute_capability": "compute capability",
    "cuda": "torch's CUDA",
    "nvcc": "nvcc",
    "torch": "torch",
    "triton": "Triton",
    "kernel": "kernel package",
    "flashinfer": "FlashInfer",
    "tvm_ffi": "tvm-ffi",
    "python": "Python",
    "processor": "processor",
    "paths": "cache folders",
}
# Locks and builds in progress: FileBaton's, ninja's, filelock's, tvm-ffi's, SGLang's staging folders, temporary files.
_NOT_CARRIED = re.compile(
    r"^(?:lock|\.lock|.*\.lock|\.ninja_lock|locks|\.staging-.*|tmp.*|\.tmp.*|.*\.tmp|.*\.tmp\..*)$"
)


class CacheError(Exception):
    """Why nothing can be carried; one sentence."""


def run(params: Mapping[str, Any], check_mode: bool = False, diff: bool = False) -> dict[str, Any]:
    """What the module jit_cache returns."""
    started = time.monotonic()
    try:
        result = _run(params, check_mode)
    except (CacheError, OSError, tarfile.TarError) as error:
        result = {"changed": False, "failed": True, "refused": isinstance(error, CacheError), "msg": str(error)}
    return {**result, "seconds": round(time.monotonic() - started, 3)}


def _run(params: Mapping[str, Any], check_mode: bool) -> dict[str, Any]:
    deadline = Deadline(params["timeout"])
    user, home = host_facts.home_of(params["user"])
    if not home:
        raise CacheError(f"There is no user {user} on this host.")
    environment = {name: str(value) for name, value in params["environment"].items()}
    caches = jit_caches.outermost(jit_caches.locations(home, user, environment))
    foreign = [one for one in host_facts.cache_facts(caches, filesystems.mounts()) if one["local"] is False]
    caches = [cache for cache in caches if cache.path not in {one["path"] for one in foreign}]
    key = fingerprint(params["python"], params["compute_capability"], environment, caches, deadline)
    found = {cache.name: _size(cache.path) for cache in caches}
    result: dict[str, Any] = {
        "changed": False,
        "key": key,
        "caches": [{"name": cache.name, "path": cache.path, "files": found[cache.name][0]} for cache in caches],
        "files": sum(files for files, _ in found.values()),
        "mib": sum(size for _, size in found.values()) >> 20,
        "bare": not any(files for files, _ in found.values()),
        "left_out": [one["path"] for one in foreign],
        "archive": params["archive"],
    }
    if params["state"] == "described":
        result["msg"] = "No kernels are cached here." if result["bare"] else f"{result['files']} files are cached here."
        return result
    if not params["archive"]:
        raise CacheError("archive: name the file on the host that the caches are packed to or unpacked from.")
    if params["state"] == "packed":
        return _pack(result, caches, key, params, check_mode)
    return _unpack(result, caches, key, params, user, check_mode)


# What makes two hosts alike


def fingerprint(
    python: str, capability: str, environment: Mapping[str, str], caches: Sequence[Cache], deadline: Deadline
) -> dict[str, str]:
    """The key of this host's caches. CacheError where a field that matters can't be told."""
    known = python_packages.ask(python, deadline.capped(30), (), environment.get("PYTHONPATH", ""))
    if known.get("error"):
        raise CacheError(f"{known['error']} Correct sglang_python.")
    have: Mapping[str, str] = known["versions"]
    if not capability:
        seen = readings.read(deadline.capped(20))
        capability = next((gpu.compute_capability for gpu in seen.gpus if gpu.compute_capability), None) or ""
        if not capability:
            raise CacheError("The GPUs' compute capability can't be read; set gpu_host_compute_capability.")
    packages = str(known.get("packages") or "")
    nvcc = cuda_toolkit.find(deadline, environment, environment.get("PATH", ""), packages)
    kernel = "; ".join(f"{name} {have[name]}" for name in python_packages.KERNEL_PACKAGES if name in have)
    flashinfer = "; ".join(f"{name} {have[name]}" for name in python_packages.FLASHINFER_PACKAGES if name in have)
    return {
        "compute_capability": capability,
        "cuda": str(known["torch"].get("cuda") or ""),
        "nvcc": nvcc.version if nvcc else "",
        "torch": str(known["torch"].get("version") or have.get("torch") or ""),
        "triton": have.get("triton", ""),
        "kernel": kernel,
        "flashinfer": flashinfer,
        "tvm_ffi": have.get("apache-tvm-ffi", ""),
        "python": str(known["python"]),
        "processor": processor(),
        "paths": ";".join(f"{cache.name}={cache.path}" for cache in caches),
    }


def processor(proc_root: str = "/proc") -> str:
    """The processor's model and a digest of what it can do: inductor compiles for the very one that it runs on."""
    try:
        with open(f"{proc_root}/cpuinfo", encoding="utf-8", errors="replace") as file:
            text = file.read().split("\n\n")[0]
    except OSError:
        return ""
    facts = dict(re.findall(r"^(model name|flags|Features)\s*:\s*(.*)$", text, re.M))
    able = facts.get("flags") or facts.get("Features") or ""
    return f"{facts.get('model name', '')} {hashlib.sha256(able.encode()).hexdigest()[:8]}".strip()


def differences(key: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """What differs between two hosts, one short text each; [] when a cache of one serves the other."""
    return [
        f"{label} {other.get(name) or 'none'} there, {key.get(name) or 'none'} here"
        for name, label in FIELDS.items()
        if key.get(name, "") != other.get(name, "")
    ]


# Packing


def _carried(name: str) -> bool:
    return not _NOT_CARRIED.match(name)


def files_to_carry(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Regular files below, relative and sorted; no locks, no builds in progress, nothing through links."""
    for at, inner, names in os.walk(path):
        inner[:] = sorted(name for name in inner if _carried(name) and not os.path.islink(os.path.join(at, name)))
        for name in sorted(names):
            with contextlib.suppress(OSError):
                facts = os.lstat(os.path.join(at, name))
                if _carried(name) and stat.S_ISREG(facts.st_mode):
                    yield os.path.relpath(os.path.join(at, name), path), facts


def _size(path: str) -> tuple[int, int]:
    files = size = 0
    for _, facts in files_to_carry(path):
        files, size = files + 1, size + facts.st_size
    return files, size


def _pack(
    result: dict[str, Any], caches: Sequence[Cache], key: Mapping[str, str], params: Mapping[str, Any], check_mode: bool
) -> dict[str, Any]:
    if result["bare"]:
        raise CacheError("There is nothing to pack: no kernels are cached on this host yet.")
    archive = params["archive"]
    content = {cache.name: [(p, f.st_size, f.st_mtime_ns) for p, f in files_to_carry(cache.path)] for cache in caches}
    digest = hashlib.sha256(json.dumps([key, content], sort_keys=True).encode()).hexdigest()
    if _packed_digest(archive) == digest:
        result["msg"] = f"{archive} holds these caches already."
        return result
    result.update(changed=True, msg=f"{result['files']} files ({result['mib']} MiB) are packed in {archive}.")
    if check_mode:
        return result
    passing = f"{archive}.{secrets.token_hex(4)}.new"
    os.makedirs(os.path.dirname(archive), mode=0o755, exist_ok=True)
    number = os.open(passing, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    try:
        with os.fdopen(number, "wb") as file, tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as tar:
            head = json.dumps({"schema": SCHEMA, "key": dict(key), "digest": digest}).encode()
            member = tarfile.TarInfo(_KEY_MEMBER)
            member.size = len(head)
            tar.addfile(member, io.BytesIO(head))
            for cache in caches:
                for relative, _, _ in content[cache.name]:
                    _add(tar, f"{cache.name}/{relative}", os.path.join(cache.path, relative))
        os.replace(passing, archive)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(passing)
        raise
    return result


def _add(tar: tarfile.TarFile, name: str, path: str) -> None:
    """A file that vanishes or changes its size under us is left out: a cache entry is whole or absent."""
    try:
        with open(path, "rb") as file:
            facts = os.fstat(file.fileno())
            content = file.read()
    except OSError:
        return
    if len(content) != facts.st_size:
        return
    member = tarfile.TarInfo(name)
    # Whole seconds, never rounded up: to ninja an output newer than its log says would be out of date.
    member.size, member.mode, member.mtime = len(content), stat.S_IMODE(facts.st_mode) & 0o755, int(facts.st_mtime)
    tar.addfile(member, io.BytesIO(content))


def _head(archive: str) -> dict[str, Any] | None:
    try:
        with tarfile.open(archive, "r:gz") as tar:
            first = tar.next()
            file = tar.extractfile(first) if first is not None and first.name == _KEY_MEMBER else None
            value = json.loads(file.read()) if file is not None else None
    except (OSError, tarfile.TarError, ValueError, EOFError):
        return None
    return value if isinstance(value, dict) else None


def _packed_digest(archive: str) -> str:
    return str((_head(archive) or {}).get("digest", ""))


# Unpacking


def _unpack(
    result: dict[str, Any],
    caches: Sequence[Cache],
    key: Mapping[str, str],
    params: Mapping[str, Any],
    user: str,
    check_mode: bool,
) -> dict[str, Any]:
    archive = params["archive"]
    head = _head(archive)
    if head is None or head.get("schema") != SCHEMA:
        raise CacheError(f"{archive} is no archive of JIT caches; pack it anew on the host that has them.")
    unlike = differences(key, head["key"])
    if unlike:
        raise CacheError(
            f"The caches were built on a host that differs ({'; '.join(unlike)}); nothing was unpacked. Choose a host "
            "like this one as jit_cache_source, or let this one build its own at its first start."
        )
    folders = {cache.name: cache.path for cache in caches}
    owner = _owner(user)
    new = 0
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            name, _, relative = member.name.partition("/")
            if member.name == _KEY_MEMBER or not member.isreg() or name not in folders or not _inside(relative):
                continue
            if not all(_carried(part) for part in relative.split("/")):
                continue
            target = os.path.join(folders[name], relative)
            if os.path.lexists(target):
                continue
            new += 1
            if not check_mode:
                source = tar.extractfile(member)
                assert source is not None
                _place(target, source.read(), member.mode & 0o755, member.mtime, folders[name], owner)
    text = f"{new} files of JIT caches were put in place." if new else "These caches are in place already."
    result.update(changed=new > 0, new=new, msg=text)
    return result


def _owner(user: str) -> tuple[int, int]:
    import pwd

    entry = pwd.getpwnam(user) if not user.isdigit() else pwd.getpwuid(int(user))
    return entry.pw_uid, entry.pw_gid


def _inside(relative: str) -> bool:
    parts = relative.split("/")
    return bool(relative) and not relative.startswith("/") and not any(part in ("", ".", "..") for part in parts)


def _place(target: str, content: bytes, mode: int, mtime: float, root: str, owner: tuple[int, int]) -> None:
    """Write a file that is whole or absent, with the folders above it; owned by the server's user, never via a link."""
    _folders(os.path.dirname(target), root, owner)
    passing = f"{target}.{secrets.token_hex(4)}.tmp"
    number = os.open(passing, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), mode)
            if os.geteuid() == 0:
                os.fchown(file.fileno(), *owner)
        os.utime(passing, (mtime, mtime))  # ninja builds again what is older than its source
        os.link(passing, target)
    except FileExistsError:
        pass
    finally:
        os.unlink(passing)


def _folders(folder: str, root: str, owner: tuple[int, int]) -> None:
    missing = []
    here = folder
    while not os.path.isdir(here):
        missing.append(here)
        here = os.path.dirname(here)
    if (here == root or here.startswith(root + "/")) and os.path.realpath(here) != os.path.realpath(root) + here[
        len(root) :
    ]:
        raise CacheError(f"{here} leads elsewhere by a link; nothing more was unpacked.")
    for path in reversed(missing):
        os.mkdir(path, 0o755)
        if os.geteuid() == 0:
            os.chown(path, *owner)
