"""Which processes a call may see at all: everything, one control group, or one working folder."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .procfs import Proc, Process


@dataclass(frozen=True)
class Scope:
    """``cgroup`` keeps a hypervisor's call to one guest, ``folder`` a simulated host's call to its own processes."""

    cgroup: str = ""
    folder: str = ""
    uid: int | None = None

    def problems(self) -> list[str]:
        """One sentence for each part that would select too much or nothing."""
        found = []
        for name, value in (("scope_cgroup", self.cgroup), ("scope_folder", self.folder)):
            if value and (not value.startswith("/") or os.path.normpath(value) != value.rstrip("/") or value == "/"):
                found.append(f"{name}: {value!r} is not an absolute path below /; give the full path, without '..'.")
        return found

    def sees(self, proc: Proc, process: Process) -> bool:
        """Whether the call may consider this process. What cannot be read is not seen."""
        if self.uid is not None and process.uid != self.uid:
            return False
        if self.folder and not _within(proc.cwd(process.pid) or "", self.folder):
            return False
        return not self.cgroup or any(_within(path, self.cgroup) for path in proc.cgroups(process.pid))


def _within(path: str, folder: str) -> bool:
    folder = folder.rstrip("/")
    return path == folder or path.startswith(folder + "/")
