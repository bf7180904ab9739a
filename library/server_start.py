#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Starts a server again as its record says."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: server_start
short_description: Start an SGLang or vLLM server again as its record says, and wait for its port
description:
  - Reads the record of the server O(name) on the host. Where it names a unit, systemd starts that. Otherwise the
    recorded command line runs in the recorded folder, with the recorded environment, as the recorded user, and its
    output is appended to the recorded log (C(logs/<name>.log) in O(state_folder) where there was none).
  - As root on a host with systemd such a command becomes a transient unit, elsewhere a detached process with a pid file
    beside the record. Either outlives the connection.
  - Waits until a process of the server listens on its port, and fails with the end of its log as soon as it dies.
  - A server that runs already is left as it is. A port that somebody else holds is refused, by that process's name.
options:
  name:
    description: Name of the server's record, as P(server_info) and the run record of P(gpu_reset) show it.
    type: str
    required: true
  wait:
    description: Wait for the port. Without it, that the process was started is all that is known.
    type: bool
    default: true
  timeout:
    description: Seconds for the whole call; a large model loads for 25 minutes.
    type: float
    default: 1800
  grace:
    description: Seconds that a transient unit gives the server to end when it is stopped.
    type: float
    default: 30
  state_folder:
    description: Folder on the host that holds the server records.
    type: str
    default: /var/lib/gpu-host
attributes:
  check_mode:
    description: Says what would be started.
    support: full
  diff_mode:
    description: Shows the command that is started.
    support: full
notes:
  - Keys and tokens in what is returned are masked. The environment travels in a private file that the started process
    removes, never on a command line.
seealso:
  - module: gpu_reset
  - module: server_info
author:
  - The authors of this repository
"""

EXAMPLES = r"""
- name: Start what the reset has ended
  server_start:
    name: "{{ item }}"
  loop: "{{ gpu_reset_result.servers }}"

- name: Start a server and go on at once
  server_start:
    name: kimi
    wait: false
"""

RETURN = r"""
pid:
  description: The main process, null when nothing runs.
  type: int
  returned: always
port:
  description: The port that it was waited for on, null when the record names none.
  type: int
  returned: always
seconds:
  description: How long the call took.
  type: float
  returned: always
log:
  description: The file that its output goes to, empty for a unit with a journal alone.
  type: str
  returned: always
unit:
  description: The unit that keeps it, empty for a detached process.
  type: str
  returned: always
how:
  description: V(unit), V(transient unit), V(detached) or V(running).
  type: str
  returned: when it runs
command:
  description: What was (in check mode, would be) started, keys and tokens masked.
  type: list
  elements: str
  returned: always
"""

from ansible.module_utils.gpu_host import arguments, ordinary_module, server_start


def main() -> None:
    ordinary_module.main(arguments.SERVER_START, server_start.run, arguments.problems)


if __name__ == "__main__":
    main()
