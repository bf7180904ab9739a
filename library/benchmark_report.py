#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Writes the report of a benchmark and prints its verdict."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: benchmark_report
short_description: Write the report of a benchmark and print its table and verdict
description:
  - Writes report.html (self-contained), report.md, charts as PNG, results.json and results.csv into the folder of the
    run, for all of its hosts, from what is recorded so far. An unfinished run gets a report as well.
  - Prints a short table and one verdict a host.
extends_documentation_fragment:
  - control_node
options:
  run:
    description: Name of the run, or latest.
    type: str
    default: latest
  compare_to:
    description: An earlier run to compare with. When empty, C(compare_to) of the run's settings.
    type: str
    default: ""
attributes:
  check_mode:
    description: Computes everything and writes nothing.
    support: full
author:
  - The authors of this repository
"""

EXAMPLES = r"""
- name: Write the report
  benchmark_report:
    run: "{{ __benchmark_plan.run }}"
  run_once: true
"""

RETURN = r"""
folder:
  description: The run's folder.
  returned: always
  type: str
report:
  description: Path of report.html, empty in check mode.
  returned: always
  type: str
verdicts:
  description: >-
    By host: kind (V(enable), V(do_not_enable), V(not_certain), V(no_result)), sentence, variant, steps,
    up_to_concurrency, more_repeats.
  returned: always
  type: dict
"""

from ansible.module_utils.gpu_host import ordinary_module


def main() -> None:
    ordinary_module.without_action_plugin("benchmark_report")


if __name__ == "__main__":
    main()
