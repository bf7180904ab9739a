#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Installs the schedules of resets on a control node."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: reset_schedule
short_description: Have resets of GPU hosts run by themselves
description:
  - Installs, on a control node, a systemd timer and service (or a crontab) for each schedule, and removes those of its
    own that are no longer declared. A service runs C(playbooks/reset.yml) or C(restart.yml) by ansible-runner.
  - Everything is judged before the first file is written, calendars by systemd itself and hosts by the inventory.
  - A schedule can't end strangers.
options:
  schedules:
    description:
      - The schedules, a list of dictionaries; the README of the role P(reset_schedule#role) lists the keys.
      - V([]) removes all of them.
    type: raw
    required: true
  scheduler:
    description: V(systemd), V(cron), or V(auto), which takes systemd where it runs, else cron.
    type: str
    default: auto
  repository:
    description: This repository's folder on the control node, with C(make setup) done.
    type: str
    required: true
  python:
    description: The interpreter with ansible-core and ansible-runner; C(.venv/bin/python) of the repository when empty.
    type: str
    default: ""
  user:
    description: Who runs the resets; the owner of the repository's folder when empty.
    type: str
    default: ""
  artifacts:
    description: Where the run records go; C(artifacts) in the repository when empty.
    type: str
    default: ""
  folder:
    description: Where each schedule has a private folder for ansible-runner, its lock and its last run.
    type: str
    default: /var/lib/gpu-resets
  config_folder:
    description: Where each schedule's settings are.
    type: str
    default: /etc/gpu-resets
  unit_folder:
    description: Where units are written.
    type: str
    default: /etc/systemd/system
  cron_folder:
    description: Where crontabs are written.
    type: str
    default: /etc/cron.d
attributes:
  check_mode:
    description: Judges everything, tells when the schedules would fire and what would change, and changes nothing.
    support: full
  diff_mode:
    support: full
author: The maintainers
"""

EXAMPLES = r"""
- name: Reset the hosts of one rack on weekday nights, unless they have requests
  reset_schedule:
    repository: /opt/gpu-hosts
    schedules:
      - name: nightly
        calendar: Mon..Fri 03:00
        random_delay: 10min
        inventory: inventory/fleet
        limit: rack7
        policy: idle_only
        window: "05:00"
"""

RETURN = r"""
schedules:
  description: For each schedule its name, the next firings in local time, its hosts and its policy.
  returned: unless refused
  type: list
  elements: dict
  sample: [{name: nightly, next: [Mon 2026-11-30 03:00:00], hosts: [gpu01], by: systemd, policy: idle_only}]
removed:
  description: Names of schedules that are no longer declared.
  returned: unless refused
  type: list
  elements: str
files:
  description: Files that were (in check mode, would be) written or removed.
  returned: unless refused
  type: list
  elements: str
lines:
  description: The same for a person, one line a schedule.
  returned: unless refused
  type: list
  elements: str
"""

from ansible.module_utils.gpu_host import arguments, ordinary_module, reset_schedule


def main() -> None:
    ordinary_module.main(arguments.RESET_SCHEDULE, reset_schedule.run)


if __name__ == "__main__":
    main()
