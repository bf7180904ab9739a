# SPDX-License-Identifier: Apache-2.0
"""How a host's servers are found: options of every module that looks for them (arguments.py has them likewise)."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options:
  scope_cgroup:
    description: Only processes of this control group and those below it are seen at all, for example C(/lxc/101).
    type: str
    default: ""
  scope_folder:
    description: Only processes whose working folder is this or below it are seen at all.
    type: str
    default: ""
  state_folder:
    description: Where the host keeps its lock, journal, evidence and server records.
    type: str
    default: /var/lib/gpu-host
  device_folder:
    description: Where the nvidia device nodes are.
    type: str
    default: /dev
"""

    PATTERNS = r"""
options:
  server_modules:
    description: A process that Python runs as one of these modules (C(python -m)) is a server.
    type: list
    elements: str
    default: [sglang.launch_server, vllm.entrypoints.openai.api_server]
  server_commands:
    description: A process started as one of these console scripts with this subcommand is a server.
    type: list
    elements: str
    default: [sglang serve, vllm serve]
  server_titles:
    description: Titles that a server's workers give themselves.
    type: list
    elements: str
    default: ["sglang::*", "VLLM::*"]
"""
