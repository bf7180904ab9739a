"""What is installed for a server: versions, commit, local changes, as its own Python would find them.

Asked in that Python, without importing anything large: a second at most, no GPU.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .child import run_command
from .deadline import Deadline

SECONDS = 20.0

# Runs in the server's Python. argv[1]: whether the files are to be compared with what was installed.
SOURCE = r"""
import base64, hashlib, importlib.metadata as metadata, importlib.util, json, os, sys

def found(name):
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return ''
    return (spec.origin or '') if spec else ''

names = ('sglang', 'sglang-kernel', 'sgl-kernel', 'torch', 'transformers', 'triton', 'flashinfer-python',
         'flashinfer-cubin', 'flashinfer-jit-cache', 'nvidia-nccl-cu12', 'nvidia-nccl-cu13', 'xgrammar')
versions, changed, direct = {}, [], {}
for name in names:
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
versions['python'] = '%d.%d.%d' % sys.version_info[:3]
package = os.path.dirname(found('sglang'))
if 'sglang' in versions:
    one = metadata.distribution('sglang')
    direct = json.loads(one.read_text('direct_url.json') or '{}')
    for file in (one.files or []) if sys.argv[1:] == ['compare'] else []:
        if file.hash is None or file.suffix != '.py':
            continue
        try:
            with open(file.locate(), 'rb') as opened:
                digest = hashlib.new(file.hash.mode, opened.read()).digest()
        except OSError:
            changed.append('%s (missing)' % file)
            continue
        if base64.urlsafe_b64encode(digest).rstrip(b'=').decode() != file.hash.value:
            changed.append(str(file))
vcs = direct.get('vcs_info') or {}
print(json.dumps({
    'versions': versions, 'package': package, 'commit': vcs.get('commit_id', ''),
    'source': direct.get('url', ''), 'changed': changed[:200], 'sitecustomize': found('sitecustomize'),
}))
"""


@dataclass(frozen=True)
class Installed:
    """`package` is sglang's folder, '' when it is not installed; `changed` the files that differ from the wheel."""

    versions: dict[str, str] = field(default_factory=dict)
    package: str = ""
    commit: str = ""
    source: str = ""
    changed: tuple[str, ...] = ()
    sitecustomize: str = ""
    trouble: str = ""


def look(python: str, environment: dict[str, str], user: str = "", compare: bool = False) -> Installed:
    """What this Python has, asked as the server's user; `trouble` is one sentence where it can't be asked."""
    become = ["runuser", "-u", user, "--"] if user and os.geteuid() == 0 and user != "root" else []
    command = [*become, python, "-B", "-c", SOURCE, *(["compare"] if compare else [])]
    answer = run_command(command, Deadline(SECONDS), env=environment)
    if answer.returncode != 0:
        last = (answer.stderr.strip().splitlines() or [answer.trouble or "no reason given"])[-1]
        return Installed(trouble=f"{python} can't be asked what is installed: {last}")
    try:
        facts: dict[str, Any] = json.loads(answer.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return Installed(trouble=f"{python} gave no answer about what is installed.")
    return Installed(
        versions=facts["versions"],
        package=facts["package"],
        commit=facts["commit"] or git_commit(facts["package"], become),
        source=facts["source"],
        changed=tuple(facts["changed"]) + (git_changes(facts["package"], become) if compare else ()),
        sitecustomize=facts["sitecustomize"],
    )


def git_commit(package: str, become: Sequence[str] = ()) -> str:
    """The commit of a package that runs from a source tree, '' where it does not."""
    if not _tracked(package, become):
        return ""
    answer = _git(package, become, "rev-parse", "HEAD")
    return answer.strip() if len(answer.strip()) == 40 else ""


def git_changes(package: str, become: Sequence[str] = ()) -> tuple[str, ...]:
    if not _tracked(package, become):
        return ()
    return tuple(line[3:] for line in _git(package, become, "status", "--porcelain", ".").splitlines()[:200])


def _tracked(package: str, become: Sequence[str]) -> bool:
    """Whether git knows the package itself: a virtual environment may lie inside the tree of something else."""
    return bool(_git(package, become, "ls-files", "__init__.py").strip())


def _git(folder: str, become: Sequence[str], *words: str) -> str:
    if not folder:
        return ""
    answer = run_command([*become, "git", "-C", folder, *words], Deadline(5.0))
    return answer.stdout if answer.returncode == 0 else ""
