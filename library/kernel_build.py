#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Builds SGLang's kernel package for a host's GPUs, installs it for the server's Python and checks it."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: kernel_build
short_description: Build and install a compiled kernel package (SGLang's) for this host's GPUs
description:
  - Builds a wheel, never an editable install, without build isolation (torch is the server's own), in a process that
    outlives the connection. A wheel is kept under a key of the source's commit, CUDA, torch, Python and architecture,
    so that an unchanged host builds nothing.
  - Or installs a wheel, a file or a published one, unless what is installed fits already.
  - Afterwards it is imported and its GPU code listed, as M(kernel_package_info) does.
options:
  state:
    description: V(installed), or V(built), which stops at the wheel.
    type: str
    choices: [built, installed]
    default: installed
  python:
    description: The server's Python on the host.
    type: str
    default: /opt/sglang/venv/bin/python
  package:
    description: Import name of the package.
    type: str
    default: sgl_kernel
  source:
    description: A git repository, an archive or a folder on the host. Empty installs O(wheel).
    type: str
    default: ""
  source_ref:
    description: Commit, tag or branch of a git repository.
    type: str
    default: ""
  source_folder:
    description: Folder of the package in the source. Found by itself in SGLang's repository.
    type: str
    default: ""
  wheel:
    description:
      - Without a source, what to install. A file on the host, or a requirement such as sglang-kernel==0.4.10.
      - Empty takes what the metadata of the SGLang in O(python) requires. Where there is no pip, another version that
        works is then left alone.
    type: str
    default: ""
  compute_capability:
    description: What to build for, for example V(12.0). Empty takes the host's own GPUs.
    type: str
    default: ""
  offline:
    description: Fetch nothing. What CMake would fetch must be in O(dependencies), what pip would fetch in O(wheels).
    type: bool
    default: false
  dependencies:
    description: Folder on the host with one folder for each name that CMake fetches (repo-cutlass, ...).
    type: str
    default: ""
  wheels:
    description: Folder on the host with wheels for pip, the build tools' among them.
    type: str
    default: ""
  build_isolation:
    description: Let pip make an environment of its own for the build. It then builds for the torch that it finds.
    type: bool
    default: false
  jobs:
    description: Compilers at once. 0 derives it from free memory (4 GiB each) and cores.
    type: int
    default: 0
  compile_threads:
    description: Threads of each compiler. 0 means one.
    type: int
    default: 0
  cmake_options:
    description: Further CMake variables.
    type: dict
    default: {}
  environment:
    description: Environment of the build and of the import, for example CUDA_HOME.
    type: dict
    default: {}
  cuobjdump:
    description: The tool that lists the code, if it is not where it is looked for.
    type: str
    default: ""
  build_folder:
    description: Where sources, objects and wheels are kept on the host.
    type: str
    default: /var/cache/sgl-kernel
  timeout:
    description: Seconds for everything.
    type: float
    default: 10800
  patience:
    description: Seconds after which a call returns V(unfinished) instead of waiting on. 0 waits until the end.
    type: float
    default: 0
attributes:
  check_mode:
    description: Says whether it would build or install.
    support: full
  diff_mode:
    description: There is never a difference.
    support: none
seealso:
  - module: kernel_package_info
author:
  - The authors of this repository
"""

EXAMPLES = r"""
- name: Build and install the kernels for RTX PRO 6000 Blackwell
  kernel_build:
    source: https://github.com/sgl-project/sglang
    source_ref: v0.5.23
    compute_capability: "12.0"

- name: Install the published wheel unless it is there and works
  kernel_build:
    wheel: sglang-kernel==0.4.10
"""

RETURN = r"""
built:
  description: Whether a wheel was built.
  type: bool
  returned: always
installed:
  description: Whether the package is installed as asked for.
  type: bool
  returned: always
key:
  description: What the wheel is kept under.
  type: str
  returned: always
wheel:
  description: The wheel on the host.
  type: str
  returned: always
commit:
  description: The source's commit, or a digest of its content.
  type: str
  returned: always
architecture:
  description: What it is built for.
  type: str
  returned: always
  sample: sm_120a
dependencies:
  description: What CMake fetches, each with C(name), C(repository) and C(tag).
  type: list
  elements: dict
  returned: when built
jobs:
  description: How many compilers at once, with how many threads.
  type: dict
  returned: with a source
needs_wheel:
  description: Whether O(wheel) is a file that is not on the host yet.
  type: bool
  returned: always
check:
  description: What M(kernel_package_info) says about the installed package.
  type: dict
  returned: when installed
log:
  description: The newest step's log on the host.
  type: str
  returned: always
unfinished:
  description: Whether it still goes on; then C(progress) is a line about it, and the same call follows it.
  type: bool
  returned: with O(patience)
"""

from ansible.module_utils.gpu_host import arguments, kernel_build, ordinary_module


def main() -> None:
    ordinary_module.main(arguments.KERNEL_BUILD, kernel_build.run, arguments.problems)


if __name__ == "__main__":
    main()
