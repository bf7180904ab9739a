#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Writes the environment file with a host's NCCL profile."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: nccl_environment
short_description: Write one environment file with a named NCCL profile
description:
  - Renders a profile with overrides into one file (mode 0644) that a systemd unit reads as C(EnvironmentFile).
  - Names, values and known conflicts are checked before anything is changed. NCCL itself ignores a name that it does
    not know.
  - The file is replaced as a whole, and only when it differs; what was there is kept beside it.
options:
  profile:
    description:
      - V(latency) is for few requests at a time (low-latency protocol, one ring), V(throughput) for many (through host
        memory, many channels), V(plain) leaves everything to NCCL.
    type: str
    choices: [latency, throughput, plain]
    default: latency
  variables:
    description: Variables over the profile's. A null takes one away.
    type: dict
    default: {}
  group_variables:
    description: The same for a group of hosts, over O(variables).
    type: dict
    default: {}
  host_variables:
    description: The same for one host, over O(group_variables).
    type: dict
    default: {}
  unchecked:
    description: Names of variables that are taken as they are, for an NCCL that has more of them than are known here.
    type: list
    elements: str
    default: []
  path:
    description: The file on the host. Its folder is made where it is missing.
    type: str
    default: /etc/sglang/nccl.env
  server_environment:
    description: The environment of the server besides this file. Only looked at, for what conflicts.
    type: dict
    default: {}
  server_arguments:
    description: The arguments of the server. Only looked at, for what conflicts.
    type: dict
    default: {}
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
author: The maintainers
"""

EXAMPLES = r"""
- name: Write the latency profile without its channel limit
  nccl_environment:
    profile: latency
    variables:
      NCCL_MAX_NCHANNELS: null
      NCCL_DEBUG: WARN
"""

RETURN = r"""
path:
  description: The file.
  returned: always
  type: str
profile:
  description: The profile.
  returned: always
  type: str
variables:
  description: The variables that the file holds, by name.
  returned: always
  type: dict
  sample: {NCCL_PROTO: LL}
backup:
  description: Where the former file lies, empty where there was none or it did not differ.
  returned: always
  type: str
"""

from ansible.module_utils.gpu_host import arguments, nccl_environment, ordinary_module


def main() -> None:
    ordinary_module.main(arguments.NCCL_ENVIRONMENT, nccl_environment.run, nccl_environment.problems)


if __name__ == "__main__":
    main()
