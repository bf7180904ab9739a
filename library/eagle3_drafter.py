#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""An EAGLE-3 drafter against its target, and the drafter's context length."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: eagle3_drafter
short_description: Check an EAGLE-3 drafter against its target and set its context length
description:
  - Compares the two C(config.json) and the drafter's tensors as SGLang will use them (architecture, hidden size,
    vocabulary, draft vocabulary and its d2t and t2d maps, auxiliary layers, dtype, context length). A wrong pairing
    fails here, before anything is loaded or changed.
  - SGLang refuses a drafter whose context length is smaller than the server's. O(context_length) says what to do.
options:
  drafter:
    description: The drafter's folder on the host.
    type: str
    required: true
  target:
    description: The target's folder on the host; only its C(config.json) is read.
    type: str
    required: true
  context_length:
    description:
      - V(raise) sets C(max_position_embeddings) in the drafter's C(config.json) to what the server needs, keeps the
        published file as C(config.json.before-context-length), and leaves everything else in it as it is.
      - V(override) changes nothing and returns the variable that lets SGLang start anyway in RV(environment).
      - V(keep) changes nothing and fails when the drafter's context length is too small.
      - V(revert) puts the published file back; findings then are reported, not failed on.
    type: str
    choices: [raise, override, keep, revert]
    default: keep
  served_context_length:
    description: The server's argument C(context_length) (tokens), 0 for the target's own.
    type: int
    default: 0
  weights:
    description: Whether the drafter's weights are looked at too.
    type: bool
    default: true
attributes:
  check_mode:
    description: Tells what would change and changes nothing.
    support: full
  diff_mode:
    description: Shows the change of C(config.json).
    support: full
notes:
  - A link in a hub cache is replaced by a file of its own, the blob stays as it is.
seealso:
  - module: checkpoint_info
author:
  - The authors of this repository
"""

EXAMPLES = r"""
- name: Fit the drafter's context length to the target's
  eagle3_drafter:
    drafter: /models/Kimi-K2-Instruct-eagle3
    target: /models/Kimi-K2.5
    context_length: raise
  register: drafter

- name: Put the published config.json back
  eagle3_drafter:
    drafter: /models/Kimi-K2-Instruct-eagle3
    target: /models/Kimi-K2.5
    context_length: revert
"""

RETURN = r"""
compatible:
  description: Whether nothing speaks against the pair.
  type: bool
  returned: always
findings:
  description:
    - What was found, the worst first, each with C(severity) (V(error), V(warning), V(info)), C(code), C(found),
      C(expected) and C(cure).
  type: list
  elements: dict
  returned: always
kind:
  description: What sort of drafter it is, V(EAGLE-3), V(EAGLE), V(MTP), V(DFLASH) or V(whole model).
  type: str
  returned: when both configs could be read
drafter:
  description: What matters of the drafter's C(config.json).
  type: dict
  returned: when both configs could be read
target:
  description: What matters of the target's C(config.json).
  type: dict
  returned: when both configs could be read
context_length:
  description: Tokens that the server will ask for (C(needed)), and that the drafter gives C(before) and C(after).
  type: dict
  returned: when both configs could be read
environment:
  description: Variables to set for the server.
  type: dict
  returned: when both configs could be read
  sample:
    SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN: "1"
backup:
  description: Where the published C(config.json) is kept, empty for none.
  type: str
  returned: when both configs could be read
msg:
  description: What was done, or what is wrong and what to do.
  type: str
  returned: always
"""

from ansible.module_utils.gpu_host import arguments, eagle3, ordinary_module


def main() -> None:
    ordinary_module.main(arguments.EAGLE3_DRAFTER, eagle3.run, arguments.model_problems)


if __name__ == "__main__":
    main()
