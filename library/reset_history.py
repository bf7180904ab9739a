#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""The documentation of the action of the same name, which does the work on the control node."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: reset_history
short_description: Report the history of resets
description:
  - Reads the run records that resets left on the control node, and reports for each host and GPU the resets, verdicts,
    orphans, Xids and seconds, and which hosts get worse.
  - Prints a summary, writes one HTML file, and metrics for node_exporter's textfile collector where asked for.
  - The records are only read. A broken or half line is named with its file and number and passed over.
extends_documentation_fragment:
  - control_node
options:
  files:
    description:
      - Files or patterns, relative ones in the artifacts folder (E(GPU_ARTIFACTS)); C(.gz) is read as well. A run that
        is in several of them counts once.
    type: list
    elements: str
    default: [resets.jsonl]
  hosts:
    description: Hosts to report, names or patterns with C(*). All when empty.
    type: list
    elements: str
    default: []
  since:
    description: Only resets since then, as a span (V(36h), V(7d), V(2w)), a date or an ISO time. All when empty.
    type: str
    default: ""
  limit:
    description: Only so many newest resets of each host; 0 for all.
    type: int
    default: 0
  recent:
    description: So many newest resets of a host are held against those before to say whether it gets worse.
    type: int
    default: 10
  html:
    description: Where the HTML file is written, relative to the artifacts folder. None when empty.
    type: str
    default: resets.html
  metrics:
    description:
      - Where metrics are written, a C(.prom) file in the folder of node_exporter's textfile collector. None when empty.
      - They cover everything that is in O(files), whatever the filters say.
    type: str
    default: ""
attributes:
  check_mode:
    description: Prints the summary and writes nothing.
    support: full
seealso:
  - module: gpu_reset
author:
  - The authors of this repository
"""

EXAMPLES = r"""
- name: Report the resets of a week
  reset_history:
    since: 7d

- name: Report old records as well, and write metrics
  reset_history:
    files: [resets.jsonl, resets.jsonl.*]
    metrics: /var/lib/prometheus/node-exporter/gpu_resets.prom
"""

RETURN = r"""
hosts:
  description: One entry a host, with counts, the newest verdict, and C(worse), in what ways it gets worse.
  type: list
  elements: dict
  returned: success
worse:
  description: The hosts that get worse.
  type: list
  elements: str
  returned: success
broken_lines:
  description: Lines that were passed over, with file, number and why.
  type: list
  elements: str
  returned: success
written:
  description: The files that were written.
  type: list
  elements: str
  returned: success
"""

from ansible.module_utils.gpu_host import ordinary_module


def main() -> None:
    ordinary_module.without_action_plugin("reset_history")


if __name__ == "__main__":
    main()
