"""The action plugin of each module, found by the name of this file: the other names are links to it.

What they do is in plugin_utils/, by the tables of gpu_control/actions.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
for _folder in (REPOSITORY / "module_utils", REPOSITORY / "plugin_utils"):
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))

from gpu_control import actions  # noqa: E402

ActionModule = actions.named(Path(__file__).stem)
