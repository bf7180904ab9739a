#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Starts, follows and stops named CPU jobs beside a server."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: data_jobs
short_description: Start, follow and stop named CPU jobs (dataset preparation, prompt generation) as systemd units
description:
  - Starts each job as a transient systemd unit in a slice of its own, all of them at once, so that they outlive the
    connection. Each has a log file, and its output is in the journal as well (C(journalctl -t datajob-NAME)).
  - A job that succeeded is not run again unless O(again) names it. One that failed, was stopped or was lost with its
    host runs again, by its resume command where it has one.
  - A reset of the host spares the jobs, since none of them is a server; one whose command starts a server is refused.
  - Jobs see no GPU unless their own environment sets E(CUDA_VISIBLE_DEVICES).
extends_documentation_fragment:
  - servers.patterns
options:
  jobs:
    description: The jobs. With O(state=status) an empty list means all that are on record on the host.
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: Name of the job, its unit (C(datajob-NAME)) and its log.
        type: str
        required: true
      command:
        description: Program and arguments, as a list of words; no shell is involved.
        type: list
        elements: str
        default: []
      resume_command:
        description: What runs instead after a run that failed, was stopped or was lost. The command itself when empty.
        type: list
        elements: str
        default: []
      user:
        description: User that it runs as; empty is the one that the module runs as.
        type: str
        default: ""
      folder:
        description: Folder that it runs in; the root folder when empty.
        type: str
        default: ""
      environment:
        description: Environment variables, in a file of mode 0600. Secrets belong into O(jobs[].environment_file).
        type: dict
        default: {}
      environment_file:
        description: A further file of NAME=value lines on the host, read last.
        type: str
        default: ""
      cpus:
        description: At most so many CPUs, fractions too; 0 for no limit.
        type: float
        default: 0
      memory_mib:
        description: At most so much memory (MiB), beyond which it is killed; 0 for no limit.
        type: int
        default: 0
      max_seconds:
        description: It is ended after so many seconds; 0 for no limit.
        type: float
        default: 0
      after:
        description: Names of jobs that have to succeed before this one begins.
        type: list
        elements: str
        default: []
  state:
    description: V(status) changes nothing.
    type: str
    choices: [started, stopped, status]
    default: started
  only:
    description: Only these of the jobs. All when empty.
    type: list
    elements: str
    default: []
  again:
    description: Jobs to run from the beginning though they succeeded; V(all) for all of them.
    type: list
    elements: str
    default: []
  wait:
    description: Whether to wait until all of them have ended.
    type: bool
    default: false
  slice:
    description: The slice of the units, whose limits hold for all jobs together (C(systemctl set-property)).
    type: str
    default: datajobs.slice
  log_folder:
    description: Where the logs are.
    type: str
    default: /var/log/data-jobs
  grace:
    description: Seconds that a stop waits before it kills.
    type: float
    default: 30
  patience:
    description: Seconds that one call waits; the action plugin fills it in.
    type: float
    default: 0
  task:
    description: Which task calls, for calls that are repeated; the action plugin fills it in.
    type: str
    default: ""
  state_folder:
    description: Folder on the host that holds what is known of the jobs.
    type: str
    default: /var/lib/gpu-host
attributes:
  check_mode:
    description: Says which jobs would be started, resumed or stopped.
    support: full
  diff_mode:
    description: Shows the state of each job before and after.
    support: full
seealso:
  - module: gpu_reset
author:
  - The authors of this repository
"""

EXAMPLES = r"""
- name: Prepare two shards at once, and merge them when both are done
  data_jobs:
    jobs:
      - {name: shard-0, command: [/opt/prep/venv/bin/python, prepare.py, --shard, "0"], folder: /opt/prep, user: prep}
      - {name: shard-1, command: [/opt/prep/venv/bin/python, prepare.py, --shard, "1"], folder: /opt/prep, user: prep}
      - {name: merge, command: [/opt/prep/venv/bin/python, merge.py], folder: /opt/prep, after: [shard-0, shard-1]}
    wait: true

- name: Look how far the jobs of this host are
  data_jobs:
    state: status
"""

RETURN = r"""
jobs:
  description:
    - Each job with C(name), C(state), C(why), C(rc), C(started), C(ended), C(seconds), C(attempt), C(resumed), C(pid),
      C(last_line), C(log), C(unit), C(differs) (it was started with another definition) and C(command).
    - C(state) is V(absent), V(waiting) (for another job), V(running), V(succeeded), V(failed), V(stopped), V(lost) (its
      host went away under it) or V(blocked) (a job that it was to follow did not succeed).
  type: list
  elements: dict
  returned: success
would:
  description: What would be started or stopped, one line a job.
  type: list
  elements: str
  returned: in check mode
"""

from ansible.module_utils.gpu_host import arguments, data_jobs, ordinary_module


def main() -> None:
    ordinary_module.main(arguments.DATA_JOBS, data_jobs.run, arguments.problems, data_jobs.problems)


if __name__ == "__main__":
    main()
