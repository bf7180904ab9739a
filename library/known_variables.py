#!/usr/bin/python
"""Refuses misspelt variables of a play."""

from __future__ import annotations

DOCUMENTATION = """
module: known_variables
short_description: Refuses variables that look like a play's own and that nothing knows
description:
  - Runs on the control node and touches no host. A misspelt switch would be passed over in silence.
  - Names that end in C(_result) are taken for results.
options:
  prefix:
    description: What the play's own variables begin with.
    type: str
    required: true
  variables:
    description: The play's own variables.
    type: list
    elements: str
    default: []
  noted:
    description: Variables with this prefix that the play sets itself.
    type: list
    elements: str
    default: []
  roles:
    description: Roles whose variables, which begin with the role's name, are judged by their argument specs.
    type: list
    elements: str
    default: []
  batches:
    description: Sizes of batches by the name of their variable, each a number, a share, or a list of those.
    type: dict
    default: {}
author: The maintainers
"""

EXAMPLES = """
- name: Refuse what nothing knows, once for all hosts
  known_variables:
    prefix: deploy_
    variables: [deploy_serial, deploy_rollback]
    roles: [server_launch]
    batches:
      deploy_serial: "{{ deploy_serial | default(1) }}"
  run_once: true
"""

RETURN = """
msg:
  description: What is wrong, one sentence each.
  type: str
  returned: always
"""

from ansible.module_utils.gpu_host import ordinary_module


def main() -> None:
    ordinary_module.without_action_plugin("known_variables")


if __name__ == "__main__":
    main()
