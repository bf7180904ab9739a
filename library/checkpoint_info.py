#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Whether a model folder is whole, by the headers of its shards; SHA-256 on demand."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: checkpoint_info
short_description: Tell whether a model folder is complete
description:
  - Reads C(config.json), the index and the header of each safetensors shard of a Hugging Face model folder, and names
    what is missing, truncated, of another revision, or only half staged. Takes seconds for hundreds of GB, offline.
  - A shard is whole when 8 + its header's length + the largest offset in it equals the file's size.
  - Folders of a hub cache (C(snapshots/<revision>)) are read through their links.
  - Changes nothing, and an incomplete model is no failure of the module. Look at C(complete).
extends_documentation_fragment:
  - changes_nothing
options:
  path:
    description: The model's folder on the host.
    type: str
    required: true
  tokenizer:
    description: Whether the model needs a tokenizer of its own; a drafter does not.
    type: bool
    default: true
  sha256:
    description:
      - SHA-256 by file name. These files are read whole, several at a time, and compared.
      - Outranks O(sha256_manifest), which outranks O(verify_hub).
    type: dict
    default: {}
  sha256_manifest:
    description:
      - File on the host with published sums, as lines of C(sha256sum), BSD lines, or a JSON object of name to sum.
      - Files in it that are not there and no shards are warnings.
    type: str
    default: ""
  verify_hub:
    description: Also compare with the SHA-256 that C(hf download) left beside the files or in the names of the blobs.
    type: bool
    default: false
  threads:
    description: Files hashed at a time, by the host's cores (16 at most) when 0.
    type: int
    default: 0
seealso:
  - module: eagle3_drafter
author:
  - The authors of this repository
"""

EXAMPLES = r"""
- name: Look at the target
  checkpoint_info:
    path: /models/Kimi-K2.5
  register: target

- name: Stop when it is not whole
  ansible.builtin.assert:
    that: target.complete
    fail_msg: "{{ target.msg }}"

- name: Compare the drafter with the published sums
  checkpoint_info:
    path: /models/Kimi-K25-eagle3
    tokenizer: false
    sha256_manifest: /models/Kimi-K25-eagle3/SHA256SUMS
"""

RETURN = r"""
complete:
  description: Whether nothing is wrong; warnings may be left.
  type: bool
  returned: always
path:
  description: The model's folder.
  type: str
  returned: always
exists:
  description: Whether the folder is there.
  type: bool
  returned: always
msg:
  description: What is wrong and what to do, or that the model is whole.
  type: str
  returned: always
findings:
  description:
    - What was found, the worst first, each with C(severity) (V(error), V(warning), V(info)), C(code), C(found),
      C(expected) and C(cure).
  type: list
  elements: dict
  returned: always
architectures:
  description: The architectures that C(config.json) names.
  type: list
  elements: str
  returned: always
model_type:
  description: The model type that C(config.json) names.
  type: str
  returned: always
dtype:
  description: The dtype that C(config.json) names at its top, empty for none.
  type: str
  returned: always
index:
  description: File name of the index, empty for none.
  type: str
  returned: always
shards:
  description: The shards that belong to the model, each with C(name), C(bytes), C(tensors) and C(problem).
  type: list
  elements: dict
  returned: always
bytes:
  description: Size of these shards on disk (bytes).
  type: int
  returned: always
tensors:
  description: Number of tensors in them.
  type: int
  returned: always
missing:
  description: Shards that are missing, by name.
  type: list
  elements: str
  returned: always
damaged:
  description: Shards that are truncated, too long or otherwise not whole, by name.
  type: list
  elements: str
  returned: always
extra:
  description: Shards in the folder that the index does not name.
  type: list
  elements: str
  returned: always
partial:
  description: Unfinished downloads in or beside the folder.
  type: list
  elements: str
  returned: always
tokenizer_files:
  description: The tokenizer's files in the folder.
  type: list
  elements: str
  returned: always
chat_template:
  description: Whether a chat template comes with the tokenizer.
  type: bool
  returned: always
checked_sha256:
  description: Number of files whose SHA-256 was compared.
  type: int
  returned: always
seconds:
  description: How long it took.
  type: float
  returned: always
"""

from ansible.module_utils.gpu_host import arguments, checkpoint, ordinary_module


def main() -> None:
    ordinary_module.main(arguments.CHECKPOINT_INFO, checkpoint.run, arguments.model_problems)


if __name__ == "__main__":
    main()
