"""Puts the code under test on the path, as Ansible would find it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hypothesis

ROOT = Path(__file__).resolve().parent.parent

for folder in (ROOT / "module_utils", ROOT / "plugin_utils", ROOT):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

# Tests start ansible-playbook, molecule and pythons of the environment they run in, also when it is not activated.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
# A caller's own settings (another inventory, another callback) must not reach the tests.
for name in [name for name in os.environ if name.startswith("ANSIBLE_")]:
    del os.environ[name]

# How long an example takes is decided by what else the machine does.
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")
