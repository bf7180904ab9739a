#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Reset a GPU host: evidence, kill, clean, verify in one call. The work is done in module_utils/gpu_host/reset.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_reset
short_description: Reset a GPU host and say whether it is clean
version_added: "1.0.0"
description:
  - Ends the SGLang and vLLM servers of a host with all that belongs to them, removes what they left behind, and waits
    until every GPU is free or the reason is known.
  - Never touches pid 1, its own ancestors, sshd, kernel threads and protected processes. What is in doubt is reported,
    and the host is dirty.
  - Fails unless the verdict is clean or skipped.
author:
  - The maintainers (@maintainers)
extends_documentation_fragment:
  - servers
  - servers.patterns
options:
  phases:
    description:
      - What to do. Without kill and clean nothing is changed on the host.
    type: list
    elements: str
    choices: [evidence, kill, clean, verify]
    default: [evidence, kill, clean, verify]
  gpus:
    description:
      - >-
        Only servers on these GPUs are ended, only these are verified: NVML indices, UUIDs or PCI
        ids. Empty means all GPUs of the host.
    type: list
    elements: str
    default: []
  grace:
    description:
      - Seconds that requests get to finish before SIGTERM (O(policy=drain)), and again from SIGTERM to SIGKILL. A
        server without requests takes 3 to 12 to end.
    type: float
    default: 30
  kill_timeout:
    description:
      - Seconds after SIGKILL until a process that is still there is called unkillable.
    type: float
    default: 10
  verify_timeout:
    description:
      - Seconds to wait for the GPUs' memory to come back.
    type: float
    default: 30
  lock_timeout:
    description:
      - Seconds to wait for another reset of the same host to end.
    type: float
    default: 60
  free_mib:
    description:
      - A GPU with at most this much memory in use (MiB, without the driver's own) is free.
    type: int
    default: 64
  protected_mib:
    description:
      - Protected processes alone may hold this much memory (MiB) of a GPU that counts as clean.
    type: int
    default: 1024
  protected:
    description:
      - File names of executables that are never touched, besides those always protected (nvidia-
        persistenced, nv-hostengine, dcgm-exporter, nv-fabricmanager, nvidia-cuda-mps-*, Xorg,
        monitoring).
    type: list
    elements: str
    default: []
  kill_strangers:
    description:
      - End also processes that hold memory of these GPUs and belong to no server (a training job, a
        notebook). Without it they are reported and the host is dirty. Protected processes are
        spared in any case.
    type: bool
    default: false
  own_processes_only:
    description:
      - Only processes of the user that the module runs as are meant. Without it a module that is
        not root refuses.
    type: bool
    default: false
  bytecode_paths:
    description:
      - Source trees on the host whose stale bytecode (__pycache__) is deleted.
    type: list
    elements: str
    default: []
  lock_folders:
    description:
      - Folders of JIT caches whose lock files without an owner are deleted, besides
        ~/.cache/torch_extensions and ~/.cache/flashinfer of the servers' users. Never on a network
        file system.
    type: list
    elements: str
    default: []
  shm_folder:
    description:
      - Where shared-memory segments of dead servers are looked for.
    type: str
    default: /dev/shm
  min_shm_free_mib:
    description:
      - The host is dirty when less than this (MiB) is free in the shared-memory folder after
        cleaning.
    type: int
    default: 0
  ports:
    description:
      - Ports that must be free after the reset. Who still holds one is reported, and the host is
        dirty.
    type: list
    elements: int
    default: []
  probe:
    description:
      - >-
        Prove that each GPU can be used, not merely that it is empty: open a context, write most of
        its free memory and read it back. A few seconds for all GPUs together.
    type: bool
    default: false
  repair:
    description:
      - Cures that may be tried on a GPU that stays dirty. probe clears a ghost latch; gpu_reset and
        reboot are done only when named here.
    type: list
    elements: str
    choices: [probe, gpu_reset, reboot]
    default: []
  policy:
    description:
      - Which hosts are reset, and how their servers are asked to go. V(drain) takes every one; requests that were
        accepted get up to O(grace) seconds to finish, then the servers are told to end. V(idle_only) skips a host
        where a request runs or waits, or may. V(zombies_only) skips a host unless every server that would end holds
        memory and does not answer. V(force) ends every server at once.
    type: str
    choices: [drain, idle_only, zombies_only, force]
    default: drain
  router_url:
    description:
      - Address of the SGLang router (sgl-router or model gateway) in front of the host's servers, as the host reaches
        it. Every policy but force takes the servers out of it before they end; V(force) leaves it alone. Where it does
        not answer, the reset does not begin, unless the servers are hung or dead anyway.
    type: str
    default: ""
  router_api_key_file:
    description:
      - File on the host whose first line is the router's key.
    type: str
    default: ""
  worker_url:
    description:
      - Address by which the router knows the host's server; {port} in it is the server's own port. Where it is
        empty, http://<the host's address in the inventory>:{port}.
    type: str
    default: ""
  run_id:
    description:
      - Name of this run in the record and of its evidence folder. Made up where it is empty.
    type: str
    default: ""
  last_recorded_run:
    description:
      - The newest run of this host that the control node has a record of. Later ones in the journal
        of the host are returned in RV(earlier), so that no kill stays untold.
    type: str
    default: ""
  head_is_reset:
    description:
      - The first host of a server over several hosts has been reset in this run. The later ranks here, which can't be
        asked, are ended with it; what O(policy) says of other servers of this host holds as ever.
    type: bool
    default: false
  role_variables:
    description:
      - Each option that the task does not give is what the variable of that name of the role C(gpu_reset) says
        (O(grace) is C(gpu_reset_grace)), where there is one.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
    description: Lists what would be ended and deleted. The verdict is that of now.
  diff_mode:
    support: full
    description: Shows the processes and files before and after.
  platform:
    platforms: linux
    support: full
    description: Works on Linux.
requirements:
  - Python >= 3.9 on the host
  - the NVIDIA driver, with nvidia-ml-py or nvidia-smi
notes:
  - In this repository an action plugin of the same name runs it, which validates its arguments on the control node.
"""

EXAMPLES = r"""
- name: Reset the host
  gpu_reset:

- name: Reset four GPUs of eight, and leave the server on the others alone
  gpu_reset:
    gpus: ["4", "5", "6", "7"]
    grace: 15

- name: Say what a reset would find, and change nothing
  gpu_reset:
    phases: [verify]
    verify_timeout: 0
"""

RETURN = r"""
schema:
  description: Version of this record.
  type: int
  returned: always
  sample: 1
run_id:
  description: Name of this run.
  type: str
  returned: always
  sample: 20260401T031500.123Z-0a1b2c3d4e5f
host:
  description: The host's own name.
  type: str
  returned: always
servers:
  description: Names of the server records of the servers that were found.
  type: list
  elements: str
  returned: always
policy:
  description: The policy that was asked for.
  type: str
  returned: always
router:
  description: >-
    Where a router was asked, its C(url), the addresses in C(taken_out) and those in C(put_back), and C(problem).
  type: dict
  returned: always
started:
  description: When the run began, ISO 8601 in UTC.
  type: str
  returned: always
verdict:
  description: V(clean), V(dirty), V(unknown) or V(skipped).
  type: str
  returned: always
refused:
  description: Whether the call itself makes no sense on this host, so that nothing was done and nothing is recorded.
  type: bool
  returned: when refused
reason:
  description: One sentence that names what makes the host dirty.
  type: str
  returned: always
simulated:
  description: Whether the GPUs are simulated ones.
  type: bool
  returned: always
predicted:
  description: The lists say what would be done.
  type: bool
  returned: in check mode
gpus:
  description: >-
    Each GPU in scope with C(index), C(uuid), C(pci_bus_id), C(used_mib_before), C(used_mib_after) (MiB), C(verdict),
    C(cure) and C(pids).
  type: list
  elements: dict
  returned: always
killed:
  description: >-
    Each process that was ended, with C(pid), C(start_time), C(name), C(class), C(why), C(signal) and C(seconds) until
    it was gone.
  type: list
  elements: dict
  returned: always
spared:
  description: Processes that were left alone though they use a GPU, with C(pid), C(name), C(class) and C(why).
  type: list
  elements: dict
  returned: always
cleaned:
  description: What was deleted, with C(path) and C(why).
  type: list
  elements: dict
  returned: always
kept:
  description: What looks left behind and was kept, with C(path) and C(why).
  type: list
  elements: dict
  returned: always
evidence:
  description: Folder on the host with the state before anything was touched.
  type: str
  returned: always
kernel_events:
  description: The driver's messages in the kernel log (Xid and others).
  type: list
  elements: dict
  returned: always
respawners:
  description: Processes that start an ended server again.
  type: list
  elements: dict
  returned: always
ports:
  description: Chosen ports that are still held, with C(port), C(pid) and C(name).
  type: list
  elements: dict
  returned: always
shm_free_mib:
  description: Free space (MiB) of the shared-memory folder after cleaning.
  type: int
  returned: always
source:
  description: Where the GPU readings come from, V(nvml), V(nvidia-smi) or V(none).
  type: str
  returned: always
seconds:
  description: Seconds by phase, and in C(total).
  type: dict
  returned: always
earlier:
  description: Records of earlier runs of this host that the control node never got.
  type: list
  elements: dict
  returned: always
"""

from ansible.module_utils.gpu_host import arguments, ordinary_module, reset


def main() -> None:
    # async_status takes a result that has started and no finished for that of a job which still runs.
    ordinary_module.main(arguments.GPU_RESET, reset.run, arguments.problems, finished=True)


if __name__ == "__main__":
    main()
