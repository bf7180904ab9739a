# SPDX-License-Identifier: Apache-2.0
"""What check mode and diff mode are to a module that only looks."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options: {}
attributes:
  check_mode:
    description: Changes nothing, so check mode is the same.
    support: full
  diff_mode:
    description: There is never a difference.
    support: none
"""
