#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Keeps one measurement, or why there is none."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: benchmark_record
short_description: Keep a measurement of a benchmark, or the cause of a failure
description:
  - Writes one file a measurement or failure into the folder of the run, as a whole or not at all. Keys and tokens are
    masked.
  - A measurement from which nothing can be concluded (no request completed, more than 5 % failed, no throughput) is
    kept as a failure; RV(usable) is then false.
  - After a failure M(benchmark_plan) goes on with the next variant; the failed one is tried again in the next round. A
    variant that fails twice is not started again in this play.
extends_documentation_fragment:
  - control_node
options:
  run:
    description: Name of the run.
    type: str
    required: true
  host:
    description: Whose measurement it is. The host of the task when empty.
    type: str
    default: ""
  round:
    description: As in C(step) of M(benchmark_plan).
    type: int
    required: true
  variant:
    description: As in C(step) of M(benchmark_plan).
    type: str
    required: true
  cell:
    description: As in C(step.measure) of M(benchmark_plan). Not needed for a failure.
    type: str
    default: ""
  repeat:
    description: As in C(step.measure) of M(benchmark_plan).
    type: int
    default: 1
  measurement:
    description: What M(serving_benchmark) returned as C(measurement). One of O(measurement) and O(failures) is needed.
    type: dict
  server:
    description: >-
      The server that was measured, for the report: command (list), environment (dict), versions (dict). What is left
      out is taken from O(measurement).
    type: dict
    default: {}
  failures:
    description: >-
      Why there is no measurement: cause (a sentence), cure (a sentence), phase (reset, launch, health or measure),
      evidence_line, log (a folder of the control node). Of a server over several hosts what each of them says, with its
      node and rank; the first that has a cause of its own is kept, an explained one before others.
    type: list
    elements: dict
attributes:
  check_mode:
    description: Judges the input and writes nothing.
    support: full
author:
  - The authors of this repository
"""

EXAMPLES = r"""
- name: Keep the measurement
  benchmark_record:
    run: "{{ __benchmark_plan.run }}"
    round: "{{ __benchmark_next.step.round }}"
    variant: "{{ __benchmark_next.step.variant }}"
    cell: "{{ item.cell }}"
    repeat: "{{ item.repeat }}"
    measurement: "{{ serving_benchmark_result.measurement }}"
    server:
      command: "{{ server_launch_result.command }}"

- name: Keep why the variant could not be measured
  benchmark_record:
    run: "{{ __benchmark_plan.run }}"
    round: "{{ __benchmark_next.step.round }}"
    variant: "{{ __benchmark_next.step.variant }}"
    failures:
      - phase: health
        cause: "{{ ansible_failed_result.msg }}"
"""

RETURN = r"""
path:
  description: The file on the control node, empty in check mode.
  returned: always
  type: str
usable:
  description: Whether it is a measurement that counts.
  returned: always
  type: bool
"""

from ansible.module_utils.gpu_host import ordinary_module


def main() -> None:
    ordinary_module.without_action_plugin("benchmark_record")


if __name__ == "__main__":
    main()
