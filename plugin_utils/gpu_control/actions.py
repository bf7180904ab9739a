"""The action plugins by name. action_plugins/ has one file, which looks here by its own name, and links to it."""

from __future__ import annotations

from importlib import import_module

from ansible.plugins.action import ActionBase

# Each has a table MODULES. The first is the one whose imports a reset pays for anyway.
TABLES = (
    "gpu_control.host_modules",
    "gpu_control.control_modules",
    "gpu_benchmark.modules",
)


def named(name: str) -> type[ActionBase]:
    """The class of the action plugin, which has the name of its module. KeyError: no table has it."""
    for table in TABLES:
        found: type[ActionBase] | None = import_module(table).MODULES.get(name)
        if found is not None:
            return found
    raise KeyError(name)
