#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""The checks before a deployment: what would fail after 25 minutes of loading, said in two seconds."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_host_info
short_description: Check a GPU host, or what is planned for it, before anything is staged, built or launched
description:
  - Part V(host) looks at the GPUs, driver, CUDA compiler, memory, disks, JIT caches, peer-to-peer, ports and secrets.
  - Part V(plan) looks at what is installed for the server, and holds it and the arguments against each other and
    against the GPUs. It loads nothing and imports neither torch nor SGLang.
  - Changes nothing. Run through the action plugin it keeps its report on the control node as well.
extends_documentation_fragment:
  - changes_nothing
options:
  part:
    description: What to check.
    type: str
    choices: [host, plan]
    required: true
  gpus:
    description: The GPUs that are meant, by NVML index, UUID or PCI id. All GPUs of the host when empty.
    type: list
    elements: str
    default: []
  compute_capability:
    description: What the GPUs are said to be, for example V(12.0). Empty means whatever they are.
    type: str
    default: ""
  model_path:
    description: Folder of the model on the host.
    type: str
    default: ""
  model_mib:
    description: Size of the model (MiB). 0 takes what lies in O(model_path).
    type: int
    default: 0
  drafter_path:
    description: Folder of the drafter on the host.
    type: str
    default: ""
  build:
    description: Whether the kernel package is to be built here. Then a missing compiler is an error.
    type: bool
    default: false
  build_folder:
    description: Where it is built.
    type: str
    default: ""
  python:
    description: The server's Python on the host.
    type: str
    default: /opt/sglang/venv/bin/python
  user:
    description: The user that the server runs as, if not root.
    type: str
    default: ""
  server_name:
    description: Name of the server that is to be replaced. Ports that it holds are not in use.
    type: str
    default: ""
  host:
    description: Address that the server is to listen on.
    type: str
    default: ""
  port:
    description: Port that the server is to listen on.
    type: int
    default: 0
  ports:
    description: Further ports that the server takes.
    type: list
    elements: int
    default: []
  arguments:
    description: SGLang's arguments, by their own names with underscores.
    type: dict
    default: {}
  speculation:
    description: The speculation, as sglang_speculation.
    type: dict
    default: {}
  environment:
    description: The server's environment.
    type: dict
    default: {}
  environment_file:
    description: File on the host with more of it, as role nccl_env writes it.
    type: str
    default: ""
  secret_files:
    description: Files on the host that hold secrets. Only their modes and owners are looked at.
    type: list
    elements: str
    default: []
  key:
    description: Whether the server asks for an API key.
    type: bool
    default: false
  shm_folder:
    description: Where shared memory is mounted.
    type: str
    default: /dev/shm
  min_shm_free_mib:
    description: Free shared memory that is needed (MiB). 0 means 64 for each GPU, and a warning below 1024 for each.
    type: int
    default: 0
  min_ram_mib:
    description: Memory that the host needs (MiB). 0 means 4096 for each GPU.
    type: int
    default: 0
  all_reduce:
    description: Do a real all-reduce among the GPUs with the server's own Python. They must be free.
    type: bool
    default: false
  all_reduce_timeout:
    description: Seconds after which an all-reduce counts as hanging.
    type: float
    default: 120
  skip:
    description: Codes of findings that are not to count.
    type: list
    elements: str
    default: []
  fail:
    description: Whether an error among the findings fails the task.
    type: bool
    default: true
  state_folder:
    description: Where the host keeps its server records.
    type: str
    default: /var/lib/gpu-host
  timeout:
    description: Seconds for everything but the all-reduce.
    type: float
    default: 90
author:
  - The authors of this repository
"""

EXAMPLES = r"""
- name: Check the host before 600 GB are staged on it
  gpu_host_info:
    part: host
    model_path: /models/kimi-k2.5
    model_mib: 610000
    port: 30000

- name: Check the launch
  gpu_host_info:
    part: plan
    model_path: /models/kimi-k2.5
    drafter_path: /models/kimi-k2.5-eagle3
    speculation: {algorithm: EAGLE3, num_steps: 3, eagle_topk: 1, num_draft_tokens: 4}
    skip: [torch_not_pinned]
"""

RETURN = r"""
passed:
  description: Whether no finding that counts is an error.
  type: bool
  returned: always
findings:
  description: What counts, errors first.
  type: list
  elements: dict
  returned: always
  contains:
    severity:
      description: V(error) (it would not work), V(warning) (it may not), V(info).
      type: str
    code:
      description: Name of the finding; the same over versions.
      type: str
    found:
      description: What is the case.
      type: str
    expected:
      description: What was expected.
      type: str
    cure:
      description: What to do about it.
      type: str
    switch:
      description: The variable that makes it count no more.
      type: str
switched_off:
  description: Findings that O(skip) names.
  type: list
  elements: dict
  returned: always
facts:
  description: What was gathered.
  type: dict
  returned: when anything was
all_reduce:
  description: Verdict (V(ok), V(hangs), V(wrong), V(impossible)), detail, phase of each rank, milliseconds by MiB.
  type: dict
  returned: with O(all_reduce)
report:
  description: File on the control node that holds this report.
  type: str
  returned: through the action plugin
seconds:
  description: How long it took on the host.
  type: float
  returned: always
"""

from ansible.module_utils.gpu_host import arguments, host_info, ordinary_module


def main() -> None:
    ordinary_module.main(arguments.GPU_HOST_INFO, host_info.run, arguments.problems)


if __name__ == "__main__":
    main()
