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
  diff_mode:
    description: There is nothing to compare.
    support: none
notes:
  - Works on the control node alone (an action plugin); the host is not contacted and needs nothing.
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

import json


def main() -> None:
    """Only reached where the action plugin of the same name is not found."""
    text = "benchmark_before works on the control node: name this repository's action_plugins in ansible.cfg."
    print(json.dumps({"failed": True, "msg": text}))


if __name__ == "__main__":
    main()
