#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Carries JIT caches (torch inductor, Triton, tvm-ffi, FlashInfer) to a host that is like the one that built them."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: jit_cache
short_description: Describe, pack or unpack what a server's JIT compilers have built
description:
  - A start with kernels in the caches takes 28 to 44 s where one without takes 71 to 93 (measured).
  - Caches are carried only between hosts whose key is equal in every field. Locks and builds in progress are left out,
    caches on file systems of other machines too, and what is there already is never replaced.
options:
  state:
    description: V(described) only looks, V(packed) writes O(archive), V(unpacked) puts its files in place.
    type: str
    choices: [described, packed, unpacked]
    default: described
  python:
    description: The server's Python on the host.
    type: str
    default: /opt/sglang/venv/bin/python
  user:
    description: The user that the server runs as, if not root.
    type: str
    default: ""
  compute_capability:
    description: The GPUs' compute capability. Empty takes the host's own.
    type: str
    default: ""
  environment:
    description: The server's environment, which may say where its caches are.
    type: dict
    default: {}
  archive:
    description: The archive on the host.
    type: str
    default: ""
  timeout:
    description: Seconds for asking the server's Python and the driver.
    type: float
    default: 600
attributes:
  check_mode:
    description: Says what would be packed or unpacked.
    support: full
  diff_mode:
    description: There is never a difference.
    support: none
author:
  - The authors of this repository
"""

EXAMPLES = r"""
- name: Are there kernels in the caches?
  jit_cache:
  register: caches

- name: Pack them
  jit_cache:
    state: packed
    archive: /var/cache/gpu-host/jit-caches.tar.gz
"""

RETURN = r"""
bare:
  description: Whether no kernels are cached on the host.
  type: bool
  returned: always
key:
  description: What must be equal for caches to be carried, by field.
  type: dict
  returned: always
caches:
  description: Each cache with C(name), C(path) and number of C(files).
  type: list
  elements: dict
  returned: always
files:
  description: Files in all caches, without locks.
  type: int
  returned: always
mib:
  description: Their size (MiB).
  type: int
  returned: always
left_out:
  description: Caches on file systems that other machines use too.
  type: list
  elements: str
  returned: always
new:
  description: Files that were put in place.
  type: int
  returned: with V(unpacked)
"""

from ansible.module_utils.gpu_host import arguments, jit_cache, ordinary_module


def main() -> None:
    ordinary_module.main(arguments.JIT_CACHE, jit_cache.run, arguments.problems)


if __name__ == "__main__":
    main()
