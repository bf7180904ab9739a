#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Measures a running server with SGLang's own benchmark client."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: serving_benchmark
short_description: Measure a running SGLang server with SGLang's own benchmark client
description:
  - Sends a prompt set to a server at a given concurrency with C(sglang.benchmark.serving) (C(sglang.bench_serving) in
    older versions) of the server's own Python, and returns one measurement. GPU memory and power are sampled meanwhile.
  - Each measurement asks the same prompts in the same order. A warm-up comes first, then the server's cache is flushed.
  - Goes on in a process of its own on the host, so a connection that is lost costs nothing. Its action plugin shows a
    line of progress at least every 15 s, and reads O(prompts) on the control node.
  - What can't be measured is null and has its reason in C(not_measured); it is never 0.
  - Fails where the server dies or is busy with other requests, where a request fails, or where fewer are completed than
    were asked for.
options:
  name:
    description: Name of the server's record.
    type: str
    default: sglang
  python:
    description: The Python on the host that has SGLang.
    type: str
    default: /opt/sglang/venv/bin/python
  prompts:
    description:
      - A file in ShareGPT's format on the control node, absolute or relative to the repository. Conversations without a
        first question and an answer are passed over, each question is taken once.
    type: str
    default: ""
  dataset:
    description: The prompts themselves, as JSON in that format; the action plugin's.
    type: str
    default: ""
  num_prompts:
    description: The first so many prompts of the file. 0 for all.
    type: int
    default: 0
  concurrency:
    description: Requests at a time.
    type: int
    default: 1
  input_length:
    description: Most tokens of a prompt, longer ones are left out. 0 for any.
    type: int
    default: 0
  output_length:
    description: Tokens of each answer.
    type: int
    default: 256
  chat_template:
    description: Apply the model's chat template. Acceptance is higher without it, and not that of chats.
    type: bool
    default: true
  ignore_eos:
    description: Let the model go on until the answer has its length.
    type: bool
    default: true
  temperature:
    description: Of the sampling. 0 is greedy.
    type: float
    default: 0
  seed:
    description: Decides the order of the prompts.
    type: int
    default: 1
  warmup:
    description: Requests before the measurement. 0 for as many as O(concurrency).
    type: int
    default: 0
  flush:
    description: Flush the server's cache between the warm-up and the measurement.
    type: bool
    default: true
  environment:
    description: Variables for the client, for example PYTHONPATH.
    type: dict
    default: {}
  sample_seconds:
    description: Seconds between two looks at the GPUs.
    type: float
    default: 0.5
  timeout:
    description: Seconds for the measurement, its client's start included.
    type: float
    default: 1800
  patience:
    description: Seconds after which a call returns C(unfinished) instead of waiting on. 0 waits until the end.
    type: float
    default: 0
  task:
    description: Name of this measurement, by which a further call follows it; the action plugin makes one.
    type: str
    default: ""
  state_folder:
    description: Folder on the host that holds the records.
    type: str
    default: /var/lib/gpu-host
attributes:
  check_mode:
    description: Looks whether it could be measured.
    support: full
  diff_mode:
    description: There is nothing to show.
    support: none
seealso:
  - module: server_health
author:
  - The authors of this repository
"""

EXAMPLES = r"""
- name: Measure 64 prompts, 4 at a time
  serving_benchmark:
    name: kimi
    prompts: data/prompts/mixed.json
    num_prompts: 64
    concurrency: 4
"""

RETURN = r"""
measurement:
  description:
    - The figures, in the units that their names say.
    - C(output_tokens_per_s_per_request) is the mean over the requests of the tokens after the first one by the time
      that they took; C(step_ms) the time of a verification with speculation, else of a decode step.
    - C(accept_length_source) is C(requests) (told with each answer), C(server_counters) (the server's average since the
      flush), C(log) or null. C(output_sha256) is of all answers' texts.
    - C(command) is the client's, C(server_command) and C(environment) the server's, secrets masked.
  type: dict
  returned: always, null where there is none
  sample:
    schema: 1
    completed: 64
    output_tokens_per_s: 331.2
    ttft_ms: {p50: 61.0, p99: 190.1, mean: 70.4}
    accept_length: 2.43
    step_ms: 17.9
problems:
  description: What a reader must know of the figures, one sentence each.
  type: list
  elements: str
  returned: always
server_alive:
  description: Whether the server lived to the end; null where nothing was begun.
  type: bool
  returned: always
diagnosis:
  description: What the catalogue of failures says of a server that died.
  type: dict
  returned: when it died
unfinished:
  description: Whether it still goes on; then C(progress) is a line about it, and the same call follows it.
  type: bool
  returned: with O(patience)
"""

from ansible.module_utils.gpu_host import arguments, ordinary_module, serving_benchmark


def main() -> None:
    judges = arguments.problems, arguments.benchmark_problems
    ordinary_module.main(arguments.SERVING_BENCHMARK, serving_benchmark.run, *judges)


if __name__ == "__main__":
    main()
