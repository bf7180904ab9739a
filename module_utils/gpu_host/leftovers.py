"""What a dead server leaves behind: stale bytecode, JIT locks without an owner, shared memory of dead processes.

Finding and deleting are apart. `find` lists what there is and why each item may go or must stay; `remove` judges the
item again, with a fresh look at all processes, and unlinks it only when it is still the very same file. What can't be
proven unused stays, with the reason. Nothing but the three kinds is ever considered; flock files and /tmp never are.
"""

from __future__ import annotations

import functools
import importlib.machinery
import os
import pwd
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Callable

from . import filesystems
from .filesystems import Mount
from .holders import Holders, look
from .procfs import Proc, Process

BYTECODE, LOCK, SEGMENT = "bytecode", "lock", "shared memory"
# Seconds by which the clock may disagree about what came first, a file or a process.
CLOCK_SLACK = 2.0


@dataclass(frozen=True)
class SegmentKind:
    """A family of names in /dev/shm; the group `pid`, where there is one, is the creator's in his own namespace."""

    who: str
    pattern: re.Pattern[str]


def segment_kind(who: str, pattern: str) -> SegmentKind:
    return SegmentKind(who, re.compile(pattern))


# SGLang's names: srt/utils/stale_shm_cleanup.py, managers/load_snapshot.py, managers/multi_tokenizer_mixin.py,
# mem_cache/storage/mmap/mmap_allocator.py of 0.5.23.
SEGMENT_KINDS = (
    segment_kind("SGLang", r"sgl_shm(?:_[A-Za-z][A-Za-z0-9]*)+_(?P<pid>[0-9]+)_[0-9A-Za-z_]+"),
    segment_kind("SGLang", r"multi_tokenizer_args_(?P<pid>[0-9]+)"),
    segment_kind("SGLang", r"sglang_loads_[0-9A-Za-z._-]+_[0-9A-Za-z]+\.shm"),
    segment_kind("SGLang", r"sglang_host_pool_[0-9A-Za-z]+\.mmap"),
    segment_kind("loky", r"sem\.loky-(?P<pid>[0-9]+)-[0-9A-Za-z_-]+"),
    segment_kind("torch", r"torch_(?P<pid>[0-9]+)_[0-9A-Za-z_]+"),
    segment_kind("Python", r"psm_[0-9A-Za-z]{4,32}"),
    segment_kind("NCCL", r"nccl-[0-9A-Za-z_-]+"),
    segment_kind("CUDA", r"cuda\.shm\.[0-9A-Fa-f.]+"),
)


class Refused(Exception):
    """What was named can't be cleaned; the text is one sentence for the user."""


@dataclass(frozen=True)
class Identity:
    """What makes a file this very file: taken when found, compared before it is unlinked."""

    device: int
    inode: int
    changed_ns: int
    size: int
    folder_device: int
    folder_inode: int


@dataclass(frozen=True)
class Leftover:
    """One file. `why` says what it is; `why_kept` why it must stay, empty when it may go."""

    path: str
    kind: str
    why: str
    deletable: bool
    why_kept: str = ""
    identity: Identity | None = None
    pid: int = 0

    @property
    def shown(self) -> str:
        """The path as one printable line."""
        return shown(self.path)


@dataclass(frozen=True)
class Outcome:
    """What became of a leftover: `why` is what it was when removed, and why it stays when not."""

    path: str
    kind: str
    removed: bool
    why: str


def _everything(process: Process) -> bool:
    return True


@dataclass(frozen=True)
class Surroundings:
    """What the judgement rests on.

    `alive` tells the servers and compilers that live on (in check mode without those that would be ended); it is
    asked only when there is a file to judge.
    `as_if_dead`: pids that check mode takes for dead. `sees`: the processes that count as holders, all of them
    unless the folders belong to a narrower scope alone. `own_folders`: folders declared to be ours alone, though
    they are mounted from outside this guest.
    """

    proc: Proc
    alive: Callable[[], tuple[Process, ...]] = tuple
    as_if_dead: frozenset[int] = frozenset()
    sees: Callable[[Process], bool] = _everything
    own_folders: tuple[str, ...] = ()
    kinds: tuple[SegmentKind, ...] = SEGMENT_KINDS
    mount_of: Callable[[int], Mount | None] = field(default=filesystems.mount_of)

    def look(self) -> Holders:
        return look(self.proc, self.sees, self.as_if_dead)


def find(
    surroundings: Surroundings,
    bytecode_paths: Sequence[str] = (),
    lock_folders: Sequence[str] = (),
    shm_folder: str = "",
    module_search_path: Sequence[str] = (),
) -> list[Leftover]:
    """Every leftover in the named places, deletable or not. Refused when a named tree can't be one."""
    trees = [tree for name in bytecode_paths for tree in bytecode_trees(name, module_search_path)]
    found = [item for tree in dict.fromkeys(trees) for item in _bytecode(surroundings, tree)]
    holders = functools.cache(surroundings.look)  # once, and only when there is a file to ask about
    for folder in dict.fromkeys(lock_folders):
        found += _locks(surroundings, folder, holders)
    if shm_folder:
        found += _segments(surroundings, shm_folder, holders)
    unique = {(item.identity or item.path): item for item in found}
    return list(unique.values())


def remove(leftover: Leftover, surroundings: Surroundings, holders: Holders | None = None) -> Outcome:
    """Judge the item again and unlink it if it is still the same file and still unused.

    `holders` is a look taken a moment ago, for many items at once; without it a fresh one is taken.
    """
    if not leftover.deletable or leftover.identity is None:
        return Outcome(leftover.shown, leftover.kind, False, leftover.why_kept)
    now = replace(surroundings, as_if_dead=frozenset())
    if holders is None:
        holders = now.look() if leftover.kind != BYTECODE else Holders()
    folder_path, name = os.path.split(leftover.path)
    try:
        folder, _ = filesystems.open_folder(folder_path)
    except OSError as error:
        return Outcome(leftover.shown, leftover.kind, False, _reason(error))
    try:
        facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if _identity(folder, facts) != leftover.identity:
            return Outcome(leftover.shown, leftover.kind, False, "it has changed since it was found")
        # The same folder on the same device: that it is a private one still holds.
        why = _why_used(now, leftover, facts, folder, holders)
        if why:
            return Outcome(leftover.shown, leftover.kind, False, why)
        os.unlink(name, dir_fd=folder)
    except OSError as error:
        return Outcome(leftover.shown, leftover.kind, False, _reason(error))
    finally:
        os.close(folder)
    return Outcome(leftover.shown, leftover.kind, True, leftover.why)


def remove_all(
    leftovers: Iterable[Leftover],
    surroundings: Surroundings,
    removed: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Remove what may go, after one fresh look at all processes; `removed` is told of each at once (the journal)."""
    outcomes = []
    holders: Holders | None = None
    for leftover in leftovers:
        if holders is None and leftover.deletable and leftover.kind != BYTECODE:
            holders = replace(surroundings, as_if_dead=frozenset()).look()
        outcome = remove(leftover, surroundings, holders)
        outcomes.append(outcome)
        if outcome.removed:
            removed(outcome)
    return outcomes


def shown(path: str) -> str:
    """A path as one printable line, whatever bytes are in it."""
    text = path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _reason(error: OSError) -> str:
    return "it is gone already" if filesystems.missing(error) else f"it could not be removed: {error.strerror}"


def _identity(folder: int, facts: os.stat_result) -> Identity:
    around = os.fstat(folder)
    return Identity(facts.st_dev, facts.st_ino, facts.st_ctime_ns, facts.st_size, around.st_dev, around.st_ino)


def _why_used(surroundings: Surroundings, item: Leftover, facts: os.stat_result, folder: int, holders: Holders) -> str:
    """'' when the file may go. The same judgement when it is found and before it is unlinked."""
    if not stat.S_ISREG(facts.st_mode):
        return "it is not a regular file"
    if item.kind == BYTECODE:
        return ""
    if item.kind == LOCK and facts.st_size:
        return "it is not empty, so it is no FileBaton lock"
    holding = holders.of((facts.st_dev, facts.st_ino), os.path.basename(item.path) if item.kind == SEGMENT else "")
    if holding:
        return f"{holders.named(holding)} has it open or mapped"
    if item.kind == LOCK:
        around = os.fstat(folder)
        building = holders.working_in.get((around.st_dev, around.st_ino), set())
        if building:
            return f"{holders.named(building)} works in its folder"
    if item.kind == SEGMENT and item.pid:
        creator = _living_creator(surroundings.proc, holders, item.pid, facts)
        if creator is not None:
            return f"its creator {creator.name} (pid {creator.pid}) lives"
    else:
        server = next((process for process in surroundings.alive() if process.uid == facts.st_uid), None)
        if server is not None:
            return f"{server.name} (pid {server.pid}) of the same user lives and may own it"
    hidden = holders.could_hold(facts)
    if hidden:
        return f"{_hidden(hidden)} can't be looked into, so nobody can say that it is unused; run as root"
    return ""


def _hidden(processes: list[Process]) -> str:
    first = processes[0]
    more = f" and {len(processes) - 1} more" if len(processes) > 1 else ""
    return f"{first.name} (pid {first.pid}){more}"


def _why_not_private(surroundings: Surroundings, path: str, folder: int, kind: str) -> str:
    """'' when all who could use the folder's files are processes that can be seen. Its file system decides."""
    mount = surroundings.mount_of(folder)
    real = os.path.realpath(path) + "/"
    declared = any(real.startswith(os.path.realpath(own).rstrip("/") + "/") for own in surroundings.own_folders)
    in_guest = surroundings.proc.in_guest() and not declared
    why = filesystems.why_not_private(mount, in_guest, filesystems.mounts())
    if not why and kind == SEGMENT:
        why = filesystems.why_shared_memory_not_private(mount, in_guest)
    return why


def _judged(item: Leftover, why_kept: str, facts: os.stat_result, folder: int) -> Leftover:
    return replace(item, deletable=not why_kept, why_kept=why_kept, identity=_identity(folder, facts))


# ---- shared memory ----


def _living_creator(proc: Proc, holders: Holders, pid: int, facts: os.stat_result) -> Process | None:
    """Whoever has this pid in his own PID namespace and may have made the file; None when the creator is dead.

    A process that started after the file was last changed is another one under the same pid.
    """
    for process in holders.processes.values():
        if process.namespaced_pid != pid or process.gone or process.kernel_thread:
            continue
        if not _reaches(proc, process.pid, facts.st_dev):
            continue
        if proc.start_time_epoch(process) <= facts.st_ctime + CLOCK_SLACK:
            return process
    return None


def _reaches(proc: Proc, pid: int, device: int) -> bool:
    """Whether the process has the file system mounted at all. In doubt it has."""
    try:
        if os.readlink(f"{proc.root}/{pid}/ns/mnt") == os.readlink(f"{proc.root}/self/ns/mnt"):
            return True
    except OSError:
        return True
    name = f"{os.major(device)}:{os.minor(device)}"
    theirs = filesystems.mounts(proc.root, pid)
    if not theirs or not any(mount.device == name for mount in filesystems.mounts(proc.root)):
        return True
    return any(mount.device == name for mount in theirs)


def _segments(surroundings: Surroundings, path: str, holders: Callable[[], Holders]) -> Iterator[Leftover]:
    try:
        folder, _ = filesystems.open_folder(path)
    except OSError:
        return
    try:
        foreign = _why_not_private(surroundings, path, folder, SEGMENT)
        for name in sorted(os.listdir(folder)):
            matches = ((kind, kind.pattern.fullmatch(name)) for kind in surroundings.kinds)
            kind, match = next(((kind, match) for kind, match in matches if match), (None, None))
            if kind is None or match is None:
                continue
            try:
                facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
            except OSError:
                continue
            pid = int(match.groupdict().get("pid") or 0)
            size = f"{facts.st_size / (1 << 20):.1f} MiB" if facts.st_size >= 1 << 20 else f"{facts.st_size} bytes"
            whose = f"whose creator (pid {pid}) is dead" if pid else "that no process has open or mapped"
            why = f"shared memory of {kind.who}, {size}, {whose}"
            item = Leftover(os.path.join(path, name), SEGMENT, why, False, pid=pid)
            why_kept = foreign or _why_used(surroundings, item, facts, folder, holders())
            yield _judged(item, why_kept, facts, folder)
    finally:
        os.close(folder)


# ---- JIT locks ----

# torch.utils.cpp_extension names this folder py<version>_<cu version or cpu>; below it, one folder an extension.
_PYTHON_AND_CUDA = re.compile(r"py[0-9]+[a-z]*_(?:cpu|cu[0-9]+|rocm[0-9.]+|xpu)")
_MOST_FOLDERS = 10_000


def default_lock_folders(uids: Iterable[int], environments: Iterable[Mapping[str, str]] = ()) -> list[str]:
    """Where torch puts the extensions that these users' servers (with these environments) build.

    FlashInfer, tvm-ffi and the Hugging Face hub lock with flock, which needs no cleaning: not among them.
    """
    folders = []
    for uid in uids:
        try:
            folders.append(os.path.join(pwd.getpwuid(uid).pw_dir, ".cache/torch_extensions"))
        except KeyError:
            continue
    for environment in environments:
        named = environment.get("TORCH_EXTENSIONS_DIR", "")
        home = environment.get("HOME", "")
        cache = environment.get("XDG_CACHE_HOME", "") or (home and os.path.join(home, ".cache"))
        for folder in (named, cache and os.path.join(cache, "torch_extensions")):
            if folder.startswith("/"):
                folders.append(os.path.normpath(folder))
    return list(dict.fromkeys(folders))


def _locks(surroundings: Surroundings, root: str, holders: Callable[[], Holders]) -> Iterator[Leftover]:
    for path in _extension_folders(root):
        try:
            folder, link_owners = filesystems.open_folder(path)
        except OSError:
            continue
        try:
            facts = os.stat("lock", dir_fd=folder, follow_symlinks=False)
            if stat.S_ISDIR(facts.st_mode):
                continue
            why = "FileBaton lock of a build that no longer runs: whoever loads this extension would wait for ever"
            item = Leftover(os.path.join(path, "lock"), LOCK, why, False)
            why_kept = _why_not_private(surroundings, path, folder, LOCK)
            if link_owners - {os.fstat(folder).st_uid}:
                why_kept = "a link of another user leads there; name the folder itself"
            why_kept = why_kept or _why_used(surroundings, item, facts, folder, holders())
            yield _judged(item, why_kept, facts, folder)
        except FileNotFoundError:
            continue
        finally:
            os.close(folder)


def _extension_folders(root: str) -> list[str]:
    """The folders in which torch builds one extension each: <root>/<name> and <root>/<py_cuda>/<name>."""
    found = []
    for name in _subfolders(root):
        path = os.path.join(root, name)
        if _PYTHON_AND_CUDA.fullmatch(name):
            found += [os.path.join(path, inner) for inner in _subfolders(path)]
        else:
            found.append(path)
    return found[:_MOST_FOLDERS]


def _subfolders(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


# ---- bytecode ----

_PYC = re.compile(
    r"(?P<module>[^/]+?)\.(?:cpython|pypy)-?[0-9]+[a-z]*(?:-pytest-[0-9.]+)?(?:\.opt-[0-9A-Za-z]+)?\.pyc", re.DOTALL
)
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*")
# Folders that hold far more than one source tree.
_WIDE = """
/ /bin /boot /data /dev /etc /home /lib /lib64 /media /mnt /opt /proc /root /run /sbin /srv /sys /tmp /usr /usr/bin
/usr/lib /usr/local /usr/local/lib /usr/share /var /var/lib /var/tmp
"""
_TOO_WIDE = frozenset(_WIDE.split())


def bytecode_trees(name: str, module_search_path: Sequence[str] = ()) -> list[str]:
    """The source trees that a path or an importable module's dotted name stands for. Refused when it is neither."""
    if _MODULE.fullmatch(name):
        return _module_folders(name, module_search_path)
    if not os.path.isabs(name):
        raise Refused(f"{name!r} is neither an absolute path nor a module's name; give the full path of a source tree.")
    path = os.path.realpath(name)
    if path in _TOO_WIDE or _is_home(path):
        raise Refused(f"{shown(name)} holds more than one source tree; name the tree itself.")
    if not os.path.isdir(path):
        raise Refused(f"{shown(name)} is no folder; give the path of a Python source tree.")
    if not _is_python_tree(path):
        raise Refused(f"{shown(name)} holds no Python package; give the path of a Python source tree.")
    return [path]


def _is_home(path: str) -> bool:
    try:
        return os.path.realpath(pwd.getpwuid(os.stat(path).st_uid).pw_dir) == path
    except (OSError, KeyError):
        return False


def _is_python_tree(path: str, depth: int = 2) -> bool:
    """A package, a folder of modules, or a checkout with its packages at most two folders down."""
    try:
        with os.scandir(path) as entries:
            inner = list(entries)
    except OSError:
        return False
    if any(entry.name.endswith(".py") and entry.is_file() for entry in inner):
        return True
    return depth > 0 and any(
        entry.is_dir(follow_symlinks=False)
        and not entry.name.startswith(".")
        and _is_python_tree(entry.path, depth - 1)
        for entry in inner
    )


def _module_folders(name: str, search_path: Sequence[str]) -> list[str]:
    """Where the module's files lie, found without importing anything."""
    path: list[str] | None = [entry for entry in search_path if os.path.isabs(entry)]
    spec = None
    words = name.split(".")
    for position in range(len(words)):
        spec = importlib.machinery.PathFinder.find_spec(".".join(words[: position + 1]), path)
        if spec is None:
            break
        path = list(spec.submodule_search_locations or ())
    if spec is None or not (path or spec.origin):
        where = ", ".join(search_path) or "no folder"
        raise Refused(f"No module {name} was found in {where}; give the path of its source tree.")
    return [os.path.realpath(folder) for folder in path or [os.path.dirname(str(spec.origin))]]


def module_search_path(argv: Sequence[str], environment: Mapping[str, str], cwd: str) -> list[str]:
    """Where the Python of a server with this command line, environment and working folder looks for modules."""
    python = argv[0] if argv and os.path.isabs(argv[0]) else ""
    prefixes = [os.path.dirname(os.path.dirname(python))] if python else []
    prefixes += [environment[name] for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if environment.get(name)]
    found = [entry for entry in environment.get("PYTHONPATH", "").split(":") if entry]
    found += [cwd] if "-m" in argv else []
    for prefix in prefixes:
        lib = os.path.join(prefix, "lib")
        for version in _subfolders(lib):
            if version.startswith("python3"):
                found += [os.path.join(lib, version, kind) for kind in ("site-packages", "dist-packages")]
    return [entry for entry in dict.fromkeys(found) if os.path.isabs(entry) and os.path.isdir(entry)]


def _bytecode(surroundings: Surroundings, tree: str) -> Iterator[Leftover]:
    """Compiled files of the tree whose source lies beside their __pycache__. Links and other mounts are not entered."""
    try:
        root, _ = filesystems.open_folder(tree)
    except OSError:
        return
    try:
        device = os.fstat(root).st_dev
        foreign = _why_not_private(surroundings, tree, root, BYTECODE)
        for where, folders, files, number in os.fwalk(".", dir_fd=root, follow_symlinks=False):
            if os.fstat(number).st_dev != device:
                folders.clear()
                continue
            if os.path.basename(where) != "__pycache__":
                continue
            folders.clear()
            for name in sorted(files):
                match = _PYC.fullmatch(name)
                if not match or not _has_source(number, match.group("module")):
                    continue
                try:
                    facts = os.stat(name, dir_fd=number, follow_symlinks=False)
                except OSError:
                    continue
                path = os.path.normpath(os.path.join(tree, where, name))
                item = Leftover(path, BYTECODE, "bytecode, compiled again when it is next imported", False)
                why_kept = foreign or _why_used(surroundings, item, facts, number, Holders())
                yield _judged(item, why_kept, facts, number)
    finally:
        os.close(root)


def _has_source(pycache: int, module: str) -> bool:
    try:
        facts = os.stat(f"../{module}.py", dir_fd=pycache, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISREG(facts.st_mode) or stat.S_ISLNK(facts.st_mode)
