"""Which processes a call may see at all: everything, one control group, or one working folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .procfs import Proc, Process


@dataclass(frozen=True)
class Scope:
    """``cgroup`` keeps a hypervisor's call to one guest, ``folder`` a simulated host's call to its own processes."""

    cgroup: str = ""
    folder: str = ""
    uid: int | None = None

    @classmethod
    def of(cls, params: Mapping[str, Any], uid: int | None = None) -> Scope:
        """From a module's parameters."""
        return cls(params["scope_cgroup"], params["scope_folder"], uid)

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
