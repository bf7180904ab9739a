#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Installs the watch of a server."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: server_watch
short_description: Watch an SGLang server from its own host
description:
  - Installs a systemd timer that looks at the server every few minutes, tells a hook when it has become a zombie or
    hangs, and resets and restarts it where that is allowed.
  - Needs its action plugin, which gives it the program that the timer runs.
extends_documentation_fragment:
  - servers
  - servers.patterns
options:
  name:
    description: Name of the server's record.
    type: str
    default: sglang
  state:
    description: Whether there is a watch.
    type: str
    choices: [present, absent]
    default: present
  every:
    description: Seconds between two looks.
    type: float
    default: 300
  hook:
    description: Command on the host that gets the event as JSON on its standard input.
    type: list
    elements: str
    default: []
  restart:
    description: In which states the server is reset and started again.
    type: list
    elements: str
    choices: [zombie, hung]
    default: []
  restarts_a_day:
    description: Most restarts within a day.
    type: int
    default: 3
  confirm_seconds:
    description: Seconds after which a bad look is repeated before it counts.
    type: float
    default: 10
  timeout:
    description: Seconds for one look.
    type: float
    default: 15
  grace:
    description: Seconds from SIGTERM to SIGKILL in a restart.
    type: float
    default: 30
  unit_folder:
    description: Where units are written.
    type: str
    default: /etc/systemd/system
  interpreter:
    description: Python of the host that runs the look.
    type: str
    default: /usr/bin/python3
  bootstrap:
    description: The action plugin's.
    type: str
    default: ""
  program:
    description: The action plugin's.
    type: str
    default: ""
attributes:
  check_mode:
    description: Says what would change.
    support: full
  diff_mode:
    description: Shows the units.
    support: full
seealso:
  - module: server_info
author:
  - The authors of this repository
"""

EXAMPLES = r"""
- name: Have a zombie restarted and somebody told
  server_watch:
    name: kimi
    hook: [/usr/local/bin/page-somebody]
    restart: [zombie]
"""

RETURN = r"""
files:
  description: Files that differ.
  type: list
  elements: str
  returned: always
"""

from ansible.module_utils.gpu_host import arguments, ordinary_module, server_watch


def main() -> None:
    ordinary_module.main(arguments.SERVER_WATCH, server_watch.run, arguments.problems)


if __name__ == "__main__":
    main()
