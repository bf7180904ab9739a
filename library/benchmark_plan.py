#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Plans a benchmark and tells its next step."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: benchmark_plan
short_description: Plan a benchmark of server variants and tell what to measure next
description:
  - V(begin) judges everything that can be wrong before a host changes, each in one sentence that names the variable,
    and makes the folder of the run in C(artifacts/benchmarks), or reopens it. Hosts of one play share one run.
  - V(next) tells the next start of a server (variant, round, what to measure), or that nothing more is to be done and
    why. It goes by what is recorded (M(benchmark_record)), so an interrupted run goes on where it was.
  - In each round every variant is started once, in an order that changes. After O(rounds) rounds more are made only
    for variants whose outcome is open, up to O(max_rounds).
  - An option that is left out is the host's variable of the same name with C(benchmark_) before it. A variable with
    that beginning that does not exist is refused.
extends_documentation_fragment:
  - control_node
options:
  state:
    description: What to do.
    type: str
    choices: [begin, next]
    default: begin
  host:
    description: Whose plan it is. The host of the task when empty, the first of O(nodes) where there are several.
    type: str
    default: ""
  variants:
    description: >-
      The variants, each with a name and what differs: steps or speculation, drafter, nccl_profile, arguments,
      environment. Empty: a baseline and EAGLE-3 with each number of steps, for each drafter and NCCL profile.
    type: list
    elements: dict
    default: []
  drafters:
    description: >-
      Folders of EAGLE-3 drafters on the host. Empty: sglang_drafter_path.
    type: list
    elements: str
    default: []
  nccl_profiles:
    description: >-
      NCCL profiles, each with its own baseline. Empty: nccl_env_profile.
    type: list
    elements: str
    default: []
  steps:
    description: >-
      Numbers of draft steps, each a variant.
    type: list
    elements: int
    default: [1, 2, 3]
  adaptive:
    description: >-
      Also measure SGLang's adaptive speculation (0.5.17 and later).
    type: bool
    default: false
  concurrencies:
    description: >-
      How many requests run at a time, each measured.
    type: list
    elements: int
    default: [1, 4, 16]
  output_lengths:
    description: >-
      Tokens that each request generates.
    type: list
    elements: int
    default: [256]
  input_lengths:
    description: >-
      Longest prompt in tokens. 0: as the prompts are.
    type: list
    elements: int
    default: [0]
  prompts:
    description: >-
      Prompt files on the control node in ShareGPT's format, relative to the repository or absolute.
    type: list
    elements: str
    default: ["data/prompts/mixed.json"]
  num_prompts:
    description: >-
      Requests of one measurement. 0: 4 times the concurrency, at least 16, at most what the file has.
    type: int
    default: 0
  repeats_per_start:
    description: >-
      Measurements of each concurrency in one start of the server.
    type: int
    default: 3
  max_running_requests:
    description: >-
      SGLang's max_running_requests, the same for every variant. 0: that of sglang_arguments, else 48, and at
      least the largest concurrency.
    type: int
    default: 0
  seed:
    description: >-
      Decides the order of the variants in each round.
    type: int
    default: 1
  rounds:
    description: >-
      Rounds at least. In a round each variant is started once.
    type: int
    default: 3
  max_rounds:
    description: >-
      Rounds at most, where the verdict is not certain earlier.
    type: int
    default: 8
  certainty:
    description: >-
      How certain the verdict has to be.
    type: float
    default: 0.95
  smallest_effect:
    description: >-
      The smallest change of the tokens per second that matters; 0.05 is 5 %.
    type: float
    default: 0.05
  run:
    description: >-
      Name of the run. An earlier name resumes that run, latest the newest one.
    type: str
    default: ""
  compare_to:
    description: >-
      Name of an earlier run that the report compares this one with.
    type: str
    default: ""
  afterwards:
    description: >-
      What the host ends with: restore starts the server that ran before, clean leaves none.
    type: str
    choices: [restore, clean]
    default: restore
  speculation:
    description: The host's speculation; its algorithm and what is not a count hold for all variants that speculate.
      Without it, C(sglang_speculation).
    type: dict
    default: {}
  drafter:
    description: The host's drafter. Without it, C(sglang_drafter_path).
    type: str
    default: ""
  arguments:
    description: SGLang's arguments, the same for all variants. Without it, C(sglang_arguments).
    type: dict
    default: {}
  environment:
    description: The server's environment. Without it, C(sglang_environment).
    type: dict
    default: {}
  nccl_profile:
    description: The host's NCCL profile. Without it, C(nccl_env_profile).
    type: str
    default: latency
  asked:
    description: The host's variables of the role C(serving_benchmark). The action plugin fills it in.
    type: dict
    default: {}
  nodes:
    description: >-
      The hosts of one server, its first one first. The results are kept under the name of the first, and V(next) tells
      all of them the same steps. Without it, C(sglang_nodes).
    type: raw
    default: []
  nodes_of_others:
    description: What those hosts have as O(nodes) themselves, by host. The action plugin fills it in.
    type: dict
    default: {}
  known_variables:
    description: Further variables that begin with C(benchmark_) and are right.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    description: Judges everything and writes nothing; V(next) says that it is done.
    support: full
author:
  - The authors of this repository
"""

EXAMPLES = r"""
- name: Plan the benchmark
  benchmark_plan:
    state: begin
  register: __benchmark_plan

- name: Find what to measure next
  benchmark_plan:
    state: next
    run: "{{ __benchmark_plan.run }}"
  register: __benchmark_next

- name: Start the variant
  ansible.builtin.include_role:
    name: server_launch
  vars:
    sglang_speculation: "{{ __benchmark_next.step.variables.sglang_speculation }}"
    sglang_drafter_path: "{{ __benchmark_next.step.variables.sglang_drafter_path }}"
    sglang_arguments: "{{ __benchmark_next.step.variables.sglang_arguments }}"
    sglang_environment: "{{ __benchmark_next.step.variables.sglang_environment }}"
    nccl_env_profile: "{{ __benchmark_next.step.variables.nccl_env_profile }}"
  when: not __benchmark_next.done
"""

RETURN = r"""
run:
  description: Name of the run, empty in check mode.
  returned: with state begin
  type: str
  sample: 20260102-030405
folder:
  description: The run's folder on the control node.
  returned: with state begin
  type: str
resumed:
  description: Whether the run was there already.
  returned: with state begin
  type: bool
variants:
  description: Names of the variants.
  returned: with state begin
  type: list
  elements: str
  sample: [baseline, eagle3-1-step, eagle3-2-step, eagle3-3-step]
servers:
  description: Each variant by its name, C(variant), and with all that makes its server, C(variables) as in RV(step).
  returned: with state begin
  type: list
  elements: dict
cells:
  description: >-
    The loads, each with name, concurrency, input_length (0 is as the prompts are), output_length, prompts (absolute
    path on the control node), prompt_set (its short name) and num_prompts.
  returned: with state begin
  type: list
  elements: dict
steps:
  description: Starts of a server that are certain to come; more may follow.
  returned: with state begin
  type: int
rounds:
  description: Rounds at least.
  returned: with state begin
  type: int
max_rounds:
  description: Rounds at most.
  returned: with state begin
  type: int
afterwards:
  description: What the host is to end with, V(restore) or V(clean).
  returned: with state begin
  type: str
settings:
  description: All settings by name, as they hold for this run.
  returned: with state begin
  type: dict
done:
  description: Nothing more is to be measured.
  returned: with state next
  type: bool
reason:
  description: Why nothing more is to be measured, empty otherwise.
  returned: with state next
  type: str
progress:
  description: The line that was shown.
  returned: with state next
  type: str
  sample: "step 5 of 12: eagle3-2-step, round 2; about 14 min left"
step:
  description: The next start of a server, empty when done.
  returned: with state next
  type: dict
  contains:
    number:
      description: Counts the starts, from 1.
      type: int
    of:
      description: Starts that are certain to come, this and earlier ones included.
      type: int
    round:
      description: Number of the round, from 1.
      type: int
    variant:
      description: Name of the variant.
      type: str
    speculates:
      description: Whether the variant speculates.
      type: bool
    seconds_left:
      description: By what earlier steps took; null before the first has ended.
      type: float
    variables:
      description: >-
        sglang_speculation, sglang_drafter_path, sglang_arguments (max_running_requests included), sglang_environment
        and nccl_env_profile of this variant, each complete.
      type: dict
    measure:
      description: >-
        What is missing of this start, in the order in which it is to be measured. Each as one of RV(cells), and besides
        cell (the name) and repeat, for M(benchmark_record).
      type: list
      elements: dict
"""

from ansible.module_utils.gpu_host import ordinary_module


def main() -> None:
    ordinary_module.without_action_plugin("benchmark_plan")


if __name__ == "__main__":
    main()
