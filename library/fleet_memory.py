#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""The documentation of the action of the same name, which does the work on the control node."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: fleet_memory
short_description: Report the GPU memory of all hosts of a play
description:
  - Prints a table of what M(gpu_memory) returned on each host of the play, without a verdict, and writes it as JSON.
  - Hosts that are unreachable and hosts that could not be read are told apart. It fails when none could be read.
extends_documentation_fragment:
  - control_node
options:
  result:
    description: The variable in which each host's result of M(gpu_memory) is registered.
    type: str
    required: true
  json:
    description: Where the JSON is written, relative to the artifacts folder (E(GPU_ARTIFACTS)). None when empty.
    type: str
    default: gpus.json
attributes:
  check_mode:
    description: Prints the table and writes nothing.
    support: full
seealso:
  - module: gpu_memory
author:
  - The authors of this repository
"""

EXAMPLES = r"""
- name: Read the memory
  gpu_memory:
  register: memory
  ignore_unreachable: true

- name: Report it
  fleet_memory:
    result: memory
  run_once: true
"""

RETURN = r"""
written:
  description: The JSON file.
  type: str
  returned: always
"""

from ansible.module_utils.gpu_host import ordinary_module


def main() -> None:
    ordinary_module.without_action_plugin("fleet_memory")


if __name__ == "__main__":
    main()
