#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Notes which servers a host had before a benchmark."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: benchmark_before
short_description: Note which servers a host had before a benchmark took its GPUs
description:
  - Keeps the names with the run, so that a benchmark that was interrupted gives the host back what it had when it is
    resumed.
extends_documentation_fragment:
  - control_node
options:
  run:
    description: Name of the run.
    type: str
    required: true
  state:
    description: V(noted) before the first server is ended, V(given_back) when the host has again what it had.
    type: str
    choices: [noted, given_back]
    default: noted
  servers:
    description: Names of the servers that run now.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    description: Writes nothing.
    support: full
author:
  - The authors of this repository
"""

EXAMPLES = r"""
- name: Note what is to run again afterwards
  benchmark_before:
    run: "{{ __benchmark_plan.run }}"
    servers: [kimi]
"""

RETURN = r"""
servers:
  description: The names that were noted, with those that an interrupted play of this run still owes the host.
  returned: with state noted
  type: list
  elements: str
"""

from ansible.module_utils.gpu_host import ordinary_module


def main() -> None:
    ordinary_module.without_action_plugin("benchmark_before")


if __name__ == "__main__":
    main()
