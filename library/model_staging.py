#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Brings models to a host."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: model_staging
short_description: Bring models to a path, resumed, watched, checked, and switched in as a whole
description:
  - Brings each model from a Hugging Face hub, a mount, rsync, rclone or other hosts into
    C(<path>.staging-<revision>), checks every shard against the index and its own header, and makes it
    O(models[].path) by one rename. A server finds the old model or the new one, never a half.
  - A model is unchanged when the record in it (C(.model-staging.json)) names the same source and its files, headers and
    index are as recorded. That is looked at offline, by small reads.
  - The work is done by a process that outlives the connection. The call follows it, and so does another call that finds
    it. Where it was killed, the next call goes on with what has come.
  - Before anything is changed it is refused, in one sentence, where the source is missing, space is short, the token
    file may be read by others, or a folder that was not staged here is in the way.
options:
  models:
    description: The models, brought one after the other.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description: Where the model is to be on the host.
        type: str
        required: true
      source:
        description:
          - C(hf:owner/name@revision), an absolute path (a mount), C(rsync://host/module/path),
            C(rsync:user@host:/path) or C(rclone:remote:path). Empty means that it is there already; it is checked then.
          - A revision is a commit, a tag or a branch. What a branch was when the model was staged is kept until
            O(refresh).
        type: str
        default: ""
      tokenizer:
        description: The model has a tokenizer of its own. A drafter uses the target's.
        type: bool
        default: true
  phase:
    description:
      - V(look) says what is there, V(stage) brings what is missing.
      - V(seed) offers a model to other hosts and returns its torrent, V(stop) ends that.
    type: str
    choices: [look, stage, seed, stop]
    default: stage
  pythons:
    description: >-
      Interpreters on the host among which one with huggingface_hub and one with libtorrent is looked for, before the
      one that runs this module.
    type: list
    elements: str
    default: []
  endpoint:
    description: The hub, or a mirror of it. Empty leaves it to huggingface_hub.
    type: str
    default: ""
  token_file:
    description: File on the host with the hub's token, mode 0600.
    type: str
    default: ""
  xet:
    description: >-
      Use the hub's fast transfer where it offers that. After a stall or an error, plain HTTP goes on, which resumes
      within a file.
    type: bool
    default: true
  exclude:
    description: >-
      Files that are left out, as in a .gitignore. Where a model has safetensors, the same weights in other formats are
      left out as well.
    type: list
    elements: str
    default: [training_state.pt, optimizer.pt, scheduler.pt, 'rng_state*.pth', training_args.bin, trainer_state.json,
              'consolidated*', original, onnx, openvino, runs, '*.gguf', '*.ggml', '.git*', .cache, .no_exist, '*.part',
              '*.incomplete', .model-staging.json]
  sha256:
    description: >-
      Compare every file with its published SHA-256 (the hub's, or a file SHA256SUMS of the source) before the switch.
    type: bool
    default: false
  refresh:
    description: Ask the source whether it has changed, also where the record matches.
    type: bool
    default: false
  replace:
    description: Replace a folder at the path that was not staged by this module.
    type: bool
    default: false
  keep_previous:
    description: Keep the model that was replaced, as C(<path>.previous).
    type: bool
    default: false
  parallel:
    description: Files at a time.
    type: int
    default: 4
  stall:
    description: Seconds without a new byte after which the downloader is ended and started again.
    type: float
    default: 60
  attempts:
    description: Attempts in a row that bring nothing new before it fails.
    type: int
    default: 3
  reserve_mib:
    description: Space (MiB) that must stay free on the file system.
    type: int
    default: 1024
  rsync_shell:
    description: The remote shell of rsync.
    type: str
    default: ssh -o BatchMode=yes -o ConnectTimeout=10
  rclone_config:
    description: rclone's configuration file on the host. Empty leaves it to rclone.
    type: str
    default: ""
  fan_out:
    description: With O(phase=look), say also whether libtorrent is missing.
    type: bool
    default: false
  swarm:
    description: >-
      For hosts that pass a model on: C(peers) (pairs of address and port, the origin first), C(port), C(idle)
      (seconds), and for O(phase=stage) C(rank) and C(of) (the hosts that fetch, numbered from 0) and C(torrent) and
      C(listing) as O(phase=seed) has returned them.
    type: dict
    default: {}
  timeout:
    description: Seconds that a call without O(patience) follows the work.
    type: float
    default: 86400
  patience:
    description: Seconds after which a call returns with RV(unfinished); 0 follows to the end. Set by the action plugin.
    type: float
    default: 0
  task:
    description: Name of the task whose calls belong together. Set by the action plugin.
    type: str
    default: ""
  state_folder:
    description: Where the host keeps status, log and lock of a staging, below C(staging/).
    type: str
    default: /var/lib/gpu-host
attributes:
  check_mode:
    description: Asks the source, checks the space, and says what would be brought.
    support: full
  diff_mode:
    description: Shows each model's state and source.
    support: full
notes:
  - Needs huggingface_hub on the host for a hub, rsync or rclone for those, libtorrent for passing models on.
seealso:
  - module: checkpoint_info
author:
  - The authors of this repository
"""

EXAMPLES = r"""
- name: Bring target and drafter
  model_staging:
    models:
      - path: /models/Kimi-K2.5
        source: hf:moonshotai/Kimi-K2.5@main
      - path: /models/kimi-k2.5-eagle3
        source: hf:lightseekorg/kimi-k2.5-eagle3@main
        tokenizer: false
    pythons: [/opt/sglang/venv/bin/python]
    token_file: /root/.hub-token
"""

RETURN = r"""
models:
  description: What is there of each model.
  type: list
  elements: dict
  returned: success
  contains:
    path:
      description: The model's path.
      type: str
    source:
      description: The model's source.
      type: str
    state:
      description: >-
        V(present), V(missing), V(damaged), V(other) (from another source) or V(unrecorded) (not staged here).
      type: str
    reason:
      description: Why it is not present, one sentence.
      type: str
    commit:
      description: The commit that a hub's revision stood for.
      type: str
    bytes:
      description: Bytes of its shards.
      type: int
    seconds:
      description: How long the staging took.
      type: float
    sent_bytes:
      description: Bytes sent to other hosts meanwhile.
      type: int
    need_bytes:
      description: Bytes that would be fetched.
      type: int
missing:
  description: Paths of models that are not there yet.
  type: list
  elements: str
  returned: success
staged:
  description: Paths of models that were brought, in check mode those that would be.
  type: list
  elements: str
  returned: with O(phase=stage)
needs:
  description: Python packages that the host lacks for what is missing.
  type: list
  elements: str
  returned: with O(phase=look)
torrent:
  description: The model's torrent, base64.
  type: str
  returned: with O(phase=seed)
listing:
  description: The model's files for the hosts that fetch them.
  type: dict
  returned: with O(phase=seed)
unfinished:
  description: The work goes on; call again with the same parameters.
  type: bool
  returned: after O(patience)
progress:
  description: How far it is, one line.
  type: str
  returned: with RV(unfinished)
"""

from ansible.module_utils.gpu_host import arguments, ordinary_module, staging, staging_sources


def main() -> None:
    ordinary_module.main(arguments.MODEL_STAGING, staging.run, arguments.problems, staging_sources.problems)


if __name__ == "__main__":
    main()
