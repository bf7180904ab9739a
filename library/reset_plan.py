#!/usr/bin/python
"""Judges the switches of a run of resets."""

from __future__ import annotations

DOCUMENTATION = """
module: reset_plan
short_description: Judges the switches of a run of resets, and decides its order
description:
  - Runs on the control node and touches no host. Refuses variables that nothing knows, a role's variables that make no
    sense, a window that is over, hosts to hold out that the inventory does not have, and a run over hosts for which the
    breaker was tripped and not cleared.
  - What it returns is what M(gpu_reset) asks right before it contacts a host, in a play that has the variable
    C(__reset_gate).
  - It takes no parameters. The switches are variables, described in docs/rolling-resets.md.
options: {}
author: The maintainers
"""

EXAMPLES = """
- name: Judge the switches, once for all hosts
  reset_plan:
  run_once: true
  register: __reset_plan
"""

RETURN = """
id:
  description: Names this run among others.
  type: str
  returned: success
hosts:
  description: The pattern of the play that resets, or its hosts in the order of the batches.
  type: raw
  returned: success
sizes:
  description: Hosts of each batch; empty for all at once.
  type: list
  elements: int
  returned: success
in_batches:
  description: Whether there is more than one batch.
  type: bool
  returned: success
count:
  description: Hosts that are not held out.
  type: int
  returned: success
held_out:
  description: Hosts that are skipped without being contacted.
  type: list
  elements: str
  returned: success
not_after:
  description: The moment after which no further host is begun, in seconds since the epoch.
  type: float
  returned: success
share:
  description: More newly dirty hosts than this share stop the run.
  type: float
  returned: success
fleet:
  description: The inventory, for which the breaker holds.
  type: str
  returned: success
schedule:
  description: The schedule that runs this, empty for a person.
  type: str
  returned: success
"""

from ansible.module_utils.gpu_host import ordinary_module


def main() -> None:
    ordinary_module.without_action_plugin("reset_plan")


if __name__ == "__main__":
    main()
