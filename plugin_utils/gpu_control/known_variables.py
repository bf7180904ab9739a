"""The module known_variables: a play's own switches, judged before any host is touched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from . import role_variables, rolling
from .control_module import ControlModule


class KnownVariables(ControlModule):
    """Refuses variables that begin like those of the play or of its roles, and that nothing knows."""

    spec: ClassVar[Mapping[str, dict[str, Any]]] = {
        "prefix": {"type": "str", "required": True},
        "variables": {"type": "list", "elements": "str", "default": []},
        "noted": {"type": "list", "elements": "str", "default": []},
        "roles": {"type": "list", "elements": "str", "default": []},
        "batches": {"type": "dict", "default": {}},
    }

    def judge(self, params: dict[str, Any]) -> list[str]:
        hosts, hostvars = self.task_vars["ansible_play_hosts_all"], self.task_vars["hostvars"]
        names = {str(name) for name in self.task_vars}.union(*(map(str, hostvars[host]) for host in hosts))
        names -= set(params["noted"])
        found = role_variables.unknown(names, params["prefix"], params["variables"])
        for role in params["roles"]:
            found += role_variables.unknown(names, f"{role}_", role_variables.options(role))
        for name, value in params["batches"].items():
            try:
                rolling.sizes(value, len(hosts), name)
            except rolling.Problem as problem:
                found.append(str(problem))
        return found

    def act(self, params: dict[str, Any]) -> dict[str, Any]:
        return {"msg": "All variables are known."}
