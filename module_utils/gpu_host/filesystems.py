"""Which file system a folder lies on, and whether others than the processes we see can use its files.

Asked by the open folder's mount id, so neither links nor stacked mounts nor made-up device numbers (btrfs, overlay)
mislead it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from dataclasses import dataclass

# Only these are taken for local: on any other (NFS, Lustre, CIFS, CephFS, FUSE, 9p, virtiofs, GPFS, BeeGFS, one not
# known yet) a file may be in use on another host, which nothing here could see.
LOCAL_TYPES = frozenset(
    ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "reiserfs", "tmpfs", "ramfs", "overlay")
)
# The kernel's own views of itself: no files of anybody, and asking about them never hangs.
_VIRTUAL = """
proc sysfs cgroup cgroup2 devpts devtmpfs mqueue debugfs tracefs securityfs pstore bpf configfs hugetlbfs efivarfs
binfmt_misc nsfs rpc_pipefs fusectl selinuxfs squashfs
"""
VIRTUAL_TYPES = frozenset(_VIRTUAL.split())
# Inode of the IPC namespace that the kernel itself starts with (PROC_IPC_INIT_INO in linux/proc_ns.h).
INITIAL_IPC_NAMESPACE = 0xEFFFFFFF
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """One line of /proc/<pid>/mountinfo. ``root`` is the part of the file system that is mounted at ``point``."""

    mount_id: int
    device: str
    root: str
    point: str
    type: str

    @property
    def local(self) -> bool:
        return self.type in LOCAL_TYPES

    @property
    def may_hang(self) -> bool:
        """Whether a stat may wait for another machine or a daemon."""
        return not self.local and self.type not in VIRTUAL_TYPES


def mounts(proc_root: str = "/proc", pid: int | str = "self") -> list[Mount]:
    """The mount table that the process sees, in the order of mounting; [] when it can't be read."""
    try:
        with open(f"{proc_root}/{pid}/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().split("\n")
    except OSError:
        return []
    found = []
    for line in lines:
        head, dash, tail = line.partition(" - ")
        fields, kind = head.split(" "), tail.split(" ")[0]
        if dash and len(fields) >= 6 and fields[0].isdigit():
            found.append(Mount(int(fields[0]), fields[2], _plain(fields[3]), _plain(fields[4]), kind))
    return found


def _plain(text: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match.group(1), 8)), text)


def mount_of(folder: int) -> Mount | None:
    """The mount on which an open folder (file descriptor) lies; None when the kernel doesn't say."""
    try:
        with open(f"/proc/self/fdinfo/{folder}") as file:
            facts = dict(line.split(":", 1) for line in file if ":" in line)
        wanted = int(facts["mnt_id"])
    except (OSError, KeyError, ValueError):
        return None
    return next((mount for mount in mounts() if mount.mount_id == wanted), None)


def why_not_private(mount: Mount | None, in_guest: bool, table: list[Mount]) -> str:
    """'' when every user of the file system is a process that can be seen from here, else why not.

    In a guest (a container, an LXC guest) a folder that was mounted from outside may be mounted in others as well.
    """
    if mount is None:
        return "the file system that it lies on can't be told"
    if not mount.local:
        return f"it lies on {mount.point}, a {mount.type} file system that other hosts may use"
    if in_guest and mount.root != "/" and mount.point != "/":
        base = next((entry for entry in reversed(table) if entry.point == "/"), None)
        inside = base is not None and base.device == mount.device and _within(mount.root, base.root)
        if not inside:
            return f"it lies on {mount.point}, mounted from outside this guest, which other guests may share"
    return ""


def why_shared_memory_not_private(mount: Mount | None, in_guest: bool) -> str:
    """'' unless this guest uses the machine's own /dev/shm (a container with the host's IPC namespace)."""
    if not in_guest or mount is None or mount.type != "tmpfs":
        return ""
    try:
        initial = os.stat("/proc/self/ns/ipc").st_ino == INITIAL_IPC_NAMESPACE
    except OSError:
        return "whether other guests share this memory can't be told"
    return "this guest shares its memory segments with the machine that it runs on" if initial else ""


def _within(path: str, folder: str) -> bool:
    return folder == "/" or path == folder or path.startswith(folder.rstrip("/") + "/")


def open_folder(path: str) -> tuple[int, frozenset[int]]:
    """Open a folder and say who owns the links on the way: (file descriptor, uids other than root).

    Whoever owns a link chooses where it leads, so the caller compares these uids with the owner of what he finds.
    OSError as from open(2).
    """
    owners: set[int] = set()
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    todo = [part for part in os.path.abspath(path).split("/") if part]
    here = os.open("/", flags)
    hops = 0
    try:
        while todo:
            part = todo.pop(0)
            try:
                inner = os.open(part, flags, dir_fd=here)
            except OSError as error:
                facts = os.stat(part, dir_fd=here, follow_symlinks=False)
                hops += 1
                if not stat.S_ISLNK(facts.st_mode) or hops > 40:
                    raise error
                target = os.readlink(part, dir_fd=here)
                owners.add(facts.st_uid)
                todo = [word for word in target.split("/") if word not in ("", ".")] + todo
                if target.startswith("/"):
                    os.close(here)
                    here = os.open("/", flags)
                continue
            os.close(here)
            here = inner
        opened = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=here)
    finally:
        os.close(here)
    return opened, frozenset(owners - {0})


def missing(error: OSError) -> bool:
    """Whether the error says that there is nothing at that path."""
    return error.errno in (errno.ENOENT, errno.ENOTDIR)


def free_mib(folder: str) -> int | None:
    """Free space in MiB for whoever is not root, None when it can't be told."""
    try:
        facts = os.statvfs(folder)
    except OSError:
        return None
    return facts.f_bavail * facts.f_frsize >> 20
