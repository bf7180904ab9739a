# SPDX-License-Identifier: Apache-2.0
"""What is alike for modules that work on the control node alone."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options: {}
attributes:
  diff_mode:
    description: There is nothing to compare.
    support: none
notes:
  - Works on the control node alone (an action plugin); the host is not contacted and needs nothing.
"""
