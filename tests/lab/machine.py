"""The machine that runs the lab, as the hypervisor of its guests: it sees their processes, GPUs and containers.

A reset that runs here never sees more than one guest of this lab: `Machine.guest_scope` refuses everything else.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_control import lean

from tests.lab import resets
from tests.lab.command import LabError
from tests.lab.host import Host
from tests.lab.image import CACHE
from tests.lab.lab import Lab

# The lab's podman has a storage, a network and a mount namespace of its own.
PODMAN = """\
#!/bin/sh
echo "$*" >> {log}
export CONTAINERS_CONF={folder}/containers.conf CONTAINERS_STORAGE_CONF={folder}/storage.conf
exec nsenter --mount={folder}/namespaces/mount --net=/run/netns/{namespace} -- {podman} --log-level error "$@"
"""


class Machine:
    """`gpus_of` is the guest whose GPUs the machine has; `folder` is where its journal and evidence lie."""

    def __init__(self, lab: Lab, gpus_of: Host, folder: Path) -> None:
        self.lab = lab
        self.state_folder = folder / "gpu-host"
        self._log = folder / "podman.log"
        self._programs = folder / "bin"
        self._programs.mkdir(parents=True)
        wrapper = self._programs / "podman"
        podman = shutil.which("podman") or "/usr/bin/podman"
        words = {"log": self._log, "folder": lab.folder, "namespace": lab.namespace, "podman": podman}
        wrapper.write_text(PODMAN.format(**{name: shlex.quote(str(word)) for name, word in words.items()}))
        wrapper.chmod(0o755)
        self.environment = {
            "PATH": f"{self._programs}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LD_LIBRARY_PATH": str(CACHE / "nvml"),
            "GPU_SIMULATOR_STATE": str(gpus_of.state_folder),
        }

    def guest_scope(self, guest: Host) -> str:
        """The guest's cgroup on this machine, once it is sure that it is the whole of one container of this lab."""
        cgroup = guest.cgroup
        ids = self.lab.podman("ps", "--all", "--quiet", "--no-trunc").stdout.split()
        assert re.fullmatch(r"/\S+/libpod-[0-9a-f]{64}", cgroup), cgroup
        assert cgroup[-64:] in ids, f"{cgroup} is no container of the lab {self.lab.name}"
        return cgroup

    def reset(self, guest: Host, check: bool = False, timeout: float = 100, **given: Any) -> dict[str, Any]:
        """Reset one guest from here; returns the run record."""
        given |= {"scope_cgroup": self.guest_scope(guest), "state_folder": str(self.state_folder)}
        done = subprocess.run(
            [sys.executable, "-c", lean.BOOTSTRAP],
            input=resets.program(given, check),
            env=os.environ | self.environment,
            capture_output=True,
            timeout=timeout,
        )
        try:
            record = dict(json.loads(done.stdout))
        except ValueError as error:
            raise LabError(f"The reset gave no record: {done.stdout[-1000:]!r}{done.stderr[-3000:]!r}") from error
        assert "verdict" in record, record
        return record

    def asked_of_podman(self) -> list[list[str]]:
        """The arguments of every call of podman that a reset made here."""
        return [shlex.split(line) for line in self._log.read_text().splitlines()] if self._log.exists() else []
