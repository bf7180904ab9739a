#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""The state of each server on the host, with the evidence for it."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: server_info
short_description: Report the state of each SGLang or vLLM server on a host
description:
  - Finds the servers of a host by their processes and by their server records, and says of each whether it is
    V(starting), V(idle), V(busy), V(hung), a V(zombie) or V(absent), and why.
  - V(starting) is a server whose start-up has not finished. Loading for 25 minutes is not hung.
  - V(busy) has requests that run or wait, or computes. A long prefill is busy, though C(/health) says 503 meanwhile.
  - V(hung) has finished its start-up, its main process answers, and between two looks nothing shows progress (no report
    of its schedulers, no counter, no batch line in its log, no answer of the schedulers to a question), while it uses
    no CPU time or has been silent for O(hung_after).
  - V(zombie) is what is left of a server, or a server that is deaf, while it holds GPU memory or may still take it.
  - V(absent) is a server with a record and no process.
  - Changes nothing, and sends no request to the model. All servers are asked in parallel.
extends_documentation_fragment:
  - servers
  - servers.patterns
  - changes_nothing
options:
  servers:
    description: Names of servers to report, all of the host when empty. One that does not exist is V(absent).
    type: list
    elements: str
    default: []
  timeout:
    description: Seconds for the whole call. A server that is well answers at once; a deaf one takes most of it.
    type: float
    default: 10
  hung_after:
    description:
      - Seconds without a report of a scheduler after which a server with requests is hung although it uses CPU time.
      - SGLang's own watchdog ends a batch after 300 s.
    type: float
    default: 300
notes:
  - A server's API key is taken from its command line, its C(--config) file or its environment, sent to the socket that
    the server's own process has open on this host, and never returned.
  - A server of another user can be judged fully as root only.
seealso:
  - module: gpu_reset
  - module: server_start
author:
  - The authors of this repository
"""

EXAMPLES = r"""
- name: Look at all servers of the host
  server_info:
  register: found

- name: Say what is wrong with those that do not serve
  ansible.builtin.debug:
    msg: "{{ item.name }} is {{ item.state }}: {{ item.why }}"
  loop: "{{ found.servers | selectattr('state', 'in', ['hung', 'zombie']) }}"

- name: Look at one server
  server_info:
    servers: [kimi]
  register: kimi

- name: Go on only where no request would be cut
  ansible.builtin.assert:
    that: kimi.states.kimi != 'busy'
"""

RETURN = r"""
servers:
  description: One entry a server, by name.
  type: list
  elements: dict
  returned: always
  contains:
    name:
      description: Name of the server's record, else of its unit, else V(port-<port>) or V(orphans-<pid>).
      type: str
    state:
      description: V(starting), V(idle), V(busy), V(hung), V(zombie) or V(absent).
      type: str
    why:
      description: The evidence, in one sentence.
      type: str
      sample: 2 requests run and 0 wait, and its schedulers reported 0.1 s ago.
    main_pid:
      description: The main process, null when it is gone.
      type: int
    pids:
      description: All processes of the server.
      type: list
      elements: int
    port:
      description: The port that it serves on.
      type: int
    unit:
      description: The systemd unit that keeps it, empty without one.
      type: str
    gpus:
      description: UUIDs of the GPUs on which the driver lists it.
      type: list
      elements: str
    memory_mib:
      description: GPU memory that it holds (MiB), null when that can't be known.
      type: int
    versions:
      description: Versions that are known, by program.
      type: dict
      sample: {sglang: 0.5.23}
    model:
      description: The model that it was started with.
      type: str
    running:
      description: Requests that run, by the server's own account; null when it does not tell.
      type: int
    waiting:
      description: Requests that wait, likewise.
      type: int
    silent_seconds:
      description: Seconds since its schedulers last reported, null when that is not known.
      type: float
    log:
      description: The file that its output goes to, empty when it goes elsewhere.
      type: str
    run_id:
      description: The run id that SGLang gave its processes.
      type: str
    started:
      description: When its main process started (ISO 8601, UTC).
      type: str
    recorded:
      description: Whether a server record exists.
      type: bool
    draining:
      description: Whether it was told to end and finishes what it accepted.
      type: bool
states:
  description: State by name.
  type: dict
  returned: always
  sample: {kimi: busy}
problems:
  description: One sentence for each thing that could not be read (a record, the GPUs).
  type: list
  elements: str
  returned: always
source:
  description: Where the GPU readings come from, V(nvml), V(nvidia-smi) or V(none).
  type: str
  returned: always
simulated:
  description: Whether this is a simulated host.
  type: bool
  returned: always
"""

from ansible.module_utils.gpu_host import arguments, ordinary_module, server_state


def main() -> None:
    ordinary_module.main(arguments.SERVER_INFO, server_state.run, arguments.problems)


if __name__ == "__main__":
    main()
