#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Puts this host's servers back into the router that a reset took them out of."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: router_worker
short_description: Put this host's servers back into the router that a reset took them out of
description:
  - A reset with a router takes the host's servers out of it first, and notes on the host what is out. This module
    reads that note, waits until each of those servers takes requests, and puts it back as it was registered, with the
    key that the server wants.
  - Where nothing is out it does nothing. A server that does not come up in time stays out and is named.
extends_documentation_fragment:
  - servers
  - servers.patterns
options:
  timeout:
    description:
      - Seconds to wait until the servers take requests.
    type: float
    default: 600
  lock_timeout:
    description:
      - Seconds to wait for a reset of the same host to end.
    type: float
    default: 60
attributes:
  check_mode:
    support: full
    description: Says what would be put back.
  diff_mode:
    support: none
    description: There is nothing to compare.
notes:
  - The router's key is read from the file that the reset was given, on the host. No key stands in the note, on a
    command line or in what is returned.
seealso:
  - module: gpu_reset
  - module: server_start
author:
  - The authors of this repository
"""

EXAMPLES = r"""
- name: Put the host back into its router
  router_worker:
"""

RETURN = r"""
put_back:
  description: The addresses that the router has again.
  type: list
  elements: str
  returned: always
out:
  description: The addresses that are still out.
  type: list
  elements: str
  returned: always
"""

from ansible.module_utils.gpu_host import arguments, ordinary_module, router_worker


def main() -> None:
    ordinary_module.main(arguments.ROUTER_WORKER, router_worker.run, arguments.problems)


if __name__ == "__main__":
    main()
