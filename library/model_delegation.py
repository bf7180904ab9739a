#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Methods that speculative decoding asks a wrapper class for, passed on to its language model."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: model_delegation
short_description: Add the methods that EAGLE-3 asks for to a wrapper class of SGLang
description:
  - A multimodal wrapper (Kimi-K2.5's in older trees of SGLang, others) without C(set_eagle3_layers_to_capture),
    C(get_embed_and_head) or C(set_embed_and_head) fails with an AttributeError after 25 minutes of loading. This adds
    what is missing of them, each passing the call on to the wrapped language model.
  - The class and its language model are found by syntax tree, inherited methods count, the text around stays as it is,
    and the outcome is checked by syntax tree before the file is replaced. The added lines stand between two marks.
  - Refuses when the class or the language model is ambiguous, or when the language model lacks the methods too.
options:
  path:
    description: The file of the wrapper class, for example C(.../sglang/srt/models/kimi_k25.py).
    type: str
    default: ""
  sglang_folder:
    description: Instead of O(path), SGLang's package folder or the one above it; O(class_name) is looked for there.
    type: str
    default: ""
  class_name:
    description: The wrapper class. The only one that the file offers as EntryClass when empty.
    type: str
    default: ""
  attribute:
    description: The attribute that holds the language model. Found by itself when empty.
    type: str
    default: ""
  methods:
    description: The methods to see to.
    type: list
    elements: str
    choices: [get_embed_and_head, set_embed_and_head, set_eagle3_layers_to_capture]
    default: [get_embed_and_head, set_embed_and_head, set_eagle3_layers_to_capture]
  state:
    description: V(absent) takes the added lines out again.
    type: str
    choices: [present, absent]
    default: present
attributes:
  check_mode:
    description: Tells what would change and changes nothing.
    support: full
  diff_mode:
    description: Shows the change of the source.
    support: full
notes:
  - The file as it came is kept beside it with the suffix C(.before-delegation), and the module's bytecode is removed.
  - The source is parsed by the Python that runs the module; a source that needs a newer one is refused.
author:
  - The authors of this repository
"""

EXAMPLES = r"""
- name: Let Kimi-K2.5 speculate in this tree
  model_delegation:
    sglang_folder: /opt/sglang/venv/lib/python3.12/site-packages/sglang
    class_name: KimiK25ForConditionalGeneration
  register: delegation

- name: Take it out again
  model_delegation:
    path: /opt/sglang/venv/lib/python3.12/site-packages/sglang/srt/models/kimi_k25.py
    state: absent
"""

RETURN = r"""
path:
  description: The file, links followed.
  type: str
  returned: always
class_name:
  description: The wrapper class.
  type: str
  returned: unless refused
attribute:
  description: The attribute that holds the language model; empty where nothing had to be added.
  type: str
  returned: unless refused
added:
  description: Methods that are delegated in the file, by this run or an earlier one.
  type: list
  elements: str
  returned: always
present:
  description: Methods that the class or a base of it has itself.
  type: list
  elements: str
  returned: always
unverified:
  description: Classes of the language model that could not be looked up, so it is not known that they have the methods.
  type: list
  elements: str
  returned: unless refused
backup:
  description: Where the file as it came is kept, empty for none.
  type: str
  returned: always
bytecode:
  description: Compiled forms of the module that were (in check mode, would be) removed.
  type: list
  elements: str
  returned: always
msg:
  description: What was done, or why nothing was.
  type: str
  returned: always
"""

from ansible.module_utils.gpu_host import arguments, delegation, ordinary_module


def main() -> None:
    ordinary_module.main(arguments.MODEL_DELEGATION, delegation.run, arguments.model_problems)


if __name__ == "__main__":
    main()
