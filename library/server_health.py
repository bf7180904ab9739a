#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Follows a server until it is ready, has failed, or is stuck."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: server_health
short_description: Follow an SGLang server until it is proven ready, has failed, or is stuck
description:
  - Watches the start-up by the phases in its log and by signs of work, and then proves that it serves what was asked
    for. Fails unless the server is ready.
  - Changes nothing but its own notes in O(state_folder), the verdict in the record of the deployment among them.
  - Its action plugin shows a line of progress at least every 15 s, finds the cause of a failure in the catalogue
    C(data/failures.yml), and brings evidence to C(artifacts/health) on the control node.
options:
  name:
    description: Name of the server's record.
    type: str
    default: sglang
  main_pid:
    description: The main process that was just started; another one means that it died. 0 for the present one.
    type: int
    default: 0
  timeout:
    description: Seconds until a server that still works on its start-up is given up.
    type: float
    default: 2700
  stall:
    description: Seconds without a sign of work after which a start is stuck.
    type: float
    default: 60
  slice_seconds:
    description: Seconds of one call, of which the action plugin makes as many as it takes.
    type: float
    default: 10
  chat_prompt:
    description: What the chat completion asks.
    type: str
    default: What is the capital of France? Answer in one word.
  chat_expect:
    description: Regular expression for the answer; empty for any.
    type: str
    default: (?i)paris
  chat_tokens:
    description: The answer's most tokens.
    type: int
    default: 512
  speculation:
    description: What /server_info must show, as O(speculation) of M(server_launch); {} for none, left out for anything.
    type: dict
  accept_length:
    description: Least mean accept length with speculation; 0 asks for no proof.
    type: float
    default: 1.05
  accept_tokens:
    description: Over at least so many tokens.
    type: int
    default: 256
  environment_file:
    description: An environment file whose variables every worker must carry.
    type: str
    default: ""
  gpu_mib:
    description: MiB that the server must hold on each of its GPUs.
    type: int
    default: 1024
  soak:
    description: Short completions that must be answered.
    type: int
    default: 0
  lossless:
    description: Keep greedy answers without speculation, compare them with it.
    type: bool
    default: false
  lossless_tie:
    description: Lead of the baseline's best token (natural logarithm) up to which another one may be chosen.
    type: float
    default: 0.25
  request_seconds:
    description: Seconds for one request.
    type: float
    default: 120
  nodes:
    description:
      - The hosts that share the server, the one that serves first; [] where it has one. The action plugin lets them
        know of each other - a host that waits for a slower one is not stuck, one whose neighbour fails does not wait
        for ever, and all are ready together.
    type: list
    elements: str
    default: []
  run_id:
    description: Name for the evidence; the action plugin makes one.
    type: str
    default: ""
  carry:
    description: What an earlier call handed on; the action plugin's.
    type: dict
  one_slice:
    description: Return after one slice; the action plugin's.
    type: bool
    default: false
  state_folder:
    description: Folder on the host that holds the records.
    type: str
    default: /var/lib/gpu-host
attributes:
  check_mode:
    description: Does the same; it changes nothing.
    support: full
  diff_mode:
    description: There is nothing to show.
    support: none
seealso:
  - module: server_launch
  - module: server_info
author:
  - The authors of this repository
"""

EXAMPLES = r"""
- name: Wait for a baseline server
  server_health:
    name: kimi
    speculation: {}
"""

RETURN = r"""
verdict:
  description: V(ready), V(failed) or V(stuck).
  type: str
  returned: always
reason:
  description: Why, one sentence.
  type: str
  returned: always
phase:
  description: How far the start came.
  type: str
  returned: always
rank:
  description: The rank that is behind or stands elsewhere.
  type: str
  returned: when stuck
proof:
  description: The steps that passed, each with what it found.
  type: list
  elements: dict
  returned: when its start-up had finished
accept_length:
  description: Tokens a verification; null where it was not or could not be measured.
  type: float
  returned: when its start-up had finished
unreadable_workers:
  description: Pids of workers whose environment can't be read.
  type: list
  elements: int
  returned: when its start-up had finished
diagnosis:
  description: What the catalogue of failures says, with its source.
  type: dict
  returned: when it is not ready
artifacts:
  description: Folder on the control node with the log and the evidence.
  type: str
  returned: when it is not ready
seconds:
  description: From the first look to the verdict.
  type: float
  returned: always
"""

from ansible.module_utils.gpu_host import arguments, ordinary_module, server_health


def main() -> None:
    ordinary_module.main(arguments.SERVER_HEALTH, server_health.run, arguments.problems)


if __name__ == "__main__":
    main()
