#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Installs and starts one SGLang server."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: server_launch
short_description: Install and start an SGLang server, and restart it only when something has changed
description:
  - Renders a systemd unit, an environment file (0600), a config file for the API key (0600) and a log file (0600),
    writes those that differ with a backup of what was there, reloads systemd only when a unit changed, and starts the
    server only when it does not run, is hung, is a zombie, or was started with something else.
  - Writes the record of the server and the record of the deployment (versions, commit, files changed since they were
    installed, arguments, environment, who) into O(state_folder).
  - A start is over when the process runs; M(server_health) follows it until it serves.
  - Where systemd is not pid 1, or without root, the server is a detached process with a pid file.
  - It never ends a server that runs outside of its own unit, and it refuses a port or GPUs that another one has. The
    module M(gpu_reset) ends what is in the way.
extends_documentation_fragment:
  - servers
  - servers.patterns
options:
  name:
    description: Name of the server, its unit and its files.
    type: str
    default: sglang
  state:
    description:
      - V(planned) changes nothing and says in RV(needed) whether V(started) would start the server, and why.
      - V(rolled_back) starts what the last deployment was that got ready.
      - V(stopped) stops the unit, and clears the failure that a stop of SGLang 0.5.17 leaves.
    type: str
    choices: [planned, started, rolled_back, stopped]
    default: started
  python:
    description: The interpreter that has SGLang installed.
    type: str
    default: /opt/sglang/venv/bin/python
  model_path:
    description: Folder of the model on the host.
    type: str
    default: ""
  drafter_path:
    description: Folder of the drafter on the host, for O(speculation).
    type: str
    default: ""
  host:
    description: Address to listen on; anything but loopback needs a key.
    type: str
    default: 127.0.0.1
  port:
    description: Port to listen on.
    type: int
    default: 30000
  api_key:
    description: The key that clients have to send. It goes into a config file of mode 0600.
    type: str
    default: ""
  api_key_file:
    description: A file on the host, mode 0600, that holds the key instead.
    type: str
    default: ""
  gpus:
    description: GPUs for the server (NVML index, UUID or PCI id); empty means all.
    type: list
    elements: str
    default: []
  arguments:
    description: >-
      SGLang's own arguments by name, with underscores. True is a flag, false leaves it out, a list is several values, a
      dictionary becomes JSON. A name that the installed SGLang does not have is refused. Secret ones go by the config
      file.
    type: dict
    default: {}
  speculation:
    description: SGLang's speculative arguments without that prefix (algorithm, num_steps, ...); {} for none.
    type: dict
    default: {}
  environment:
    description: Environment variables of the server.
    type: dict
    default: {}
  environment_file:
    description: A further environment file on the host, read last. The role nccl_env writes one.
    type: str
    default: ""
  watch_files:
    description: Files on the host whose change asks for a restart.
    type: list
    elements: str
    default: []
  nodes:
    description: How many hosts share the server.
    type: int
    default: 1
  node_rank:
    description: This host's number among them.
    type: int
    default: 0
  dist_init_addr:
    description: Address and port of the first of them.
    type: str
    default: ""
  user:
    description: User that the server runs as; empty is the one that the module runs as.
    type: str
    default: ""
  working_folder:
    description: Folder that the server runs in; empty is its user's home.
    type: str
    default: ""
  grace:
    description: Seconds that a stop waits for running requests before it kills.
    type: float
    default: 30
  restart:
    description: Whether systemd restarts the server when it fails.
    type: bool
    default: true
  restart_seconds:
    description: Seconds before such a restart.
    type: float
    default: 10
  restart_burst:
    description: So many failed starts in a row are given up.
    type: int
    default: 3
  load_seconds:
    description: Seconds that a start may take, for the start limit.
    type: float
    default: 2700
  enabled:
    description: Whether the server starts at boot.
    type: bool
    default: true
  journal:
    description: Copy the log into the journal, keys masked.
    type: bool
    default: true
  replaces_others:
    description: >-
      With O(state=planned), name a server that was deployed on the same GPUs under another name as something to be
      ended first, instead of refusing. A benchmark does so, which starts it again afterwards.
    type: bool
    default: false
  unit_folder:
    description: Where units are written.
    type: str
    default: /etc/systemd/system
  config_folder:
    description: Where the environment file and the config file are written.
    type: str
    default: /etc/sglang
  log_folder:
    description: Where the log is written.
    type: str
    default: /var/log/sglang
  logrotate_folder:
    description: Where a logrotate rule is written; none where there is no such folder.
    type: str
    default: /etc/logrotate.d
  who:
    description: Who deploys, for the record; the control node fills it in.
    type: str
    default: ""
attributes:
  check_mode:
    description: Says whether and why the server would be started.
    support: full
  diff_mode:
    description: Shows the unit, the environment file and the config file, secrets masked.
    support: full
seealso:
  - module: server_health
  - module: gpu_reset
author:
  - The authors of this repository
"""

EXAMPLES = r"""
- name: Start a server on the first four GPUs
  server_launch:
    name: kimi
    model_path: /models/kimi-k2.5
    gpus: [0, 1, 2, 3]
    arguments:
      tp_size: 4
      trust_remote_code: true

- name: Stop it
  server_launch:
    name: kimi
    state: stopped
"""

RETURN = r"""
needed:
  description: Whether the server had to be (or would have to be) started.
  type: bool
  returned: always
reasons:
  description: Why, one clause each.
  type: list
  elements: str
  returned: always
state:
  description: The server's state before, as M(server_info) names it.
  type: str
  returned: always
restarted:
  description: Whether it was started.
  type: bool
  returned: always
pid:
  description: The main process, where it is known.
  type: int
  returned: always
unit:
  description: The unit, empty for a detached process.
  type: str
  returned: always
command:
  description: The command line, secrets masked.
  type: list
  elements: str
  returned: always
log:
  description: The log file.
  type: str
  returned: always
gpus:
  description: UUIDs of the server's GPUs.
  type: list
  elements: str
  returned: always
files:
  description: Files that differ.
  type: list
  elements: str
  returned: always
"""

from ansible.module_utils.gpu_host import arguments, ordinary_module, server_launch


def main() -> None:
    ordinary_module.main(arguments.SERVER_LAUNCH, server_launch.run, arguments.problems)


if __name__ == "__main__":
    main()
