#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""The memory of every GPU: who holds it, what to think of it, what to do; can wait until it is free."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_memory
short_description: Report the memory of NVIDIA GPUs with a verdict on each, or wait until it is free
description:
  - Reads every GPU through NVML (with nvidia-ml-py where the host's Python has it, else through C(nvidia-smi)), looks
    up the processes that hold it, and gives each GPU a verdict and a cure in one sentence.
  - Changes nothing. A GPU or a field that can't be read leaves the others as they are, and says why in C(errors).
  - Every call into the driver is made in a child process that is left behind when O(timeout) is over.
extends_documentation_fragment:
  - changes_nothing
options:
  gpus:
    description: GPUs to report, by NVML index, UUID or PCI id. All GPUs of the host when empty.
    type: list
    elements: str
    default: []
  wait:
    description: Look again until all chosen GPUs are V(free) or V(protected_only), and fail at O(timeout) otherwise.
    type: bool
    default: false
  timeout:
    description: Seconds for the whole call, hanging drivers included.
    type: float
    default: 30
  free_mib:
    description: A GPU without a process is free up to this much used memory (MiB, without the driver's reserve).
    type: int
    default: 64
  protected_mib:
    description: Protected processes alone may hold up to this much of a GPU (MiB).
    type: int
    default: 1024
  protected:
    description: Executables to protect besides the known ones (nvidia-persistenced, dcgm-exporter, Xorg and the like).
    type: list
    elements: str
    default: []
  device_folder:
    description: Where the device nodes C(nvidia<minor>) are.
    type: str
    default: /dev
notes:
  - An open device node says that a process uses the driver, not which GPU. C(holders) is a hint, C(processes) the
    proof.
seealso:
  - module: gpu_reset
author:
  - The authors of this repository
"""

EXAMPLES = r"""
- name: Report all GPUs
  gpu_memory:
  register: memory

- name: Show what to do about each GPU that is not free
  ansible.builtin.debug:
    msg: "GPU {{ item.index }}: {{ item.verdict }}. {{ item.cure }}"
  loop: "{{ memory.gpus | rejectattr('verdict', 'in', ['free', 'protected_only']) }}"

- name: Wait until GPUs 4 to 7 are free
  gpu_memory:
    gpus: ["4", "5", "6", "7"]
    wait: true
    timeout: 60
"""

RETURN = r"""
source:
  description: Where the readings come from, V(nvml), V(nvidia-smi), or V(none) where nothing could be read.
  type: str
  returned: always
error:
  description: Why nothing could be read (no driver, driver and library differ, a hanging driver), else empty.
  type: str
  returned: always
driver_version:
  description: Version of the loaded driver.
  type: str
  returned: always
  sample: 580.95.05
nvml_version:
  description: Version of the NVML library, null through nvidia-smi.
  type: str
  returned: always
simulated:
  description: Whether these are the GPUs of a simulated host.
  type: bool
  returned: always
free:
  description: Whether all chosen GPUs are V(free) or V(protected_only).
  type: bool
  returned: always
seconds:
  description: How long the call took on the host, waiting included.
  type: float
  returned: always
gpus:
  description: The chosen GPUs in NVML's order. A value that could not be read is null.
  type: list
  elements: dict
  returned: always
  contains:
    index:
      description: NVML's index.
      type: int
    minor:
      description: The number in C(/dev/nvidia<minor>), which may differ from the index.
      type: int
    uuid:
      description: The GPU's UUID.
      type: str
    name:
      description: The product's name.
      type: str
    pci_bus_id:
      description: The PCI id.
      type: str
    compute_capability:
      description: Compute capability.
      type: str
      sample: "12.0"
    total_mib:
      description: All memory (MiB).
      type: int
    used_mib:
      description: Used memory without the driver's reserve (MiB, version 2 of NVML's reading).
      type: int
    free_mib:
      description: Free memory (MiB).
      type: int
    reserved_mib:
      description: What the driver and firmware keep for themselves (MiB).
      type: int
    utilization_percent:
      description: Share of the last sample period with a kernel running. Never proves a GPU free.
      type: int
    power_watts:
      description: Power draw.
      type: float
    mig:
      description: Whether MIG is on.
      type: bool
    processes:
      description:
        - What the driver lists, each with C(pid), C(name), C(used_mib), C(kind) (V(compute) or V(graphics)), C(user),
          C(start_time) (ISO 8601, UTC), C(protected) and C(state).
        - C(state) is V(live), V(dead) (listed, but gone) or V(unseen) (not visible from here).
      type: list
      elements: dict
    holders:
      description: Who has C(/dev/nvidia<minor>) open, each with C(pid), C(name), C(user) and C(start_time).
      type: list
      elements: dict
    verdict:
      description:
        - One of V(free), V(in_use), V(protected_only), V(unowned_memory), V(other_namespace), V(dead_pid),
          V(ghost_latch), V(unkillable), V(lost), V(unknown).
      type: str
    cure:
      description: What to type or do, in one sentence; empty for V(free) and V(protected_only).
      type: str
    detail:
      description: What the verdict rests on.
      type: str
    pids:
      description: The processes that the verdict is about.
      type: list
      elements: int
    errors:
      description: The driver's own words for each field that could not be read; key C(gpu) for the GPU as a whole.
      type: dict
"""

from ansible.module_utils.gpu_host import arguments, memory_report, ordinary_module


def main() -> None:
    ordinary_module.main(arguments.GPU_MEMORY, memory_report.run, arguments.problems)


if __name__ == "__main__":
    main()
