#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Does the compiled kernel package work on this host: imported, with code for its GPU."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: kernel_package_info
short_description: Import a compiled kernel package and list the GPU code in it
description:
  - Imports the package in the server's own Python, torch first, and names the inner cause where that fails.
  - Lists the GPU architectures that its libraries hold code for, by C(cuobjdump) where there is one (the CUDA
    toolkit's, or the PyPI package nvidia-cuda-cuobjdump), else by a reader of its own.
  - Changes nothing.
extends_documentation_fragment:
  - changes_nothing
options:
  python:
    description: The server's Python on the host.
    type: str
    default: /opt/sglang/venv/bin/python
  package:
    description: Import name of the package.
    type: str
    default: sgl_kernel
  compute_capability:
    description: The GPU that it is to run on, for example V(12.0). Empty takes the host's own.
    type: str
    default: ""
  cuobjdump:
    description: The tool, if it is not where it is looked for.
    type: str
    default: ""
  environment:
    description: The server's environment.
    type: dict
    default: {}
  timeout:
    description: Seconds for the whole call.
    type: float
    default: 120
seealso:
  - module: kernel_build
author:
  - The authors of this repository
"""

EXAMPLES = r"""
- name: See whether the kernels run on this host's GPUs
  kernel_package_info:
  register: kernel
  failed_when: not kernel.usable
"""

RETURN = r"""
usable:
  description: Whether it was imported and has code for the GPU.
  type: bool
  returned: always
cause:
  description: >-
    Why it is not usable: V(other_torch), V(libnuma_missing), V(driver_library_missing), V(cuda_library_missing),
    V(library_missing), V(old_libc), V(undefined_symbol), V(no_cubin), V(not_installed), V(not_compiled),
    V(import_failed), V(python_unusable); empty when it is.
  type: str
  returned: always
architectures:
  description: Architectures with machine code in the libraries that are loaded on this GPU.
  type: list
  elements: str
  returned: always
  sample: [120a]
ptx:
  description: Architectures with PTX, which the driver compiles at the first use.
  type: list
  elements: str
  returned: always
tool:
  description: What listed the code.
  type: str
  returned: always
import_error:
  description: The end of the failed import's text.
  type: str
  returned: always
findings:
  description: What is wrong, each with C(severity), C(code), C(found), C(expected) and C(cure).
  type: list
  elements: dict
  returned: always
"""

from ansible.module_utils.gpu_host import arguments, kernel_package, ordinary_module


def main() -> None:
    ordinary_module.main(arguments.KERNEL_PACKAGE_INFO, kernel_package.run, arguments.problems)


if __name__ == "__main__":
    main()
