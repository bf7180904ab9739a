"""Judges the switches of a run of resets before any host is touched. Documentation: library/reset_plan.py."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase
from ansible.plugins.loader import lookup_loader

REPOSITORY = Path(__file__).resolve().parent.parent
if str(REPOSITORY / "plugin_utils") not in sys.path:
    sys.path.append(str(REPOSITORY / "plugin_utils"))

from gpu_control import breaker, hooks, records, rolling  # noqa: E402

ROLE = "gpu_reset"
CLEAR = "Look at those hosts, then say -e reset_breaker_clear=true with the next run"


class Refused(Exception):
    """The run is not begun; the text is one sentence. ``kept``: it belongs into the history of its hosts."""

    def __init__(self, sentence: str, kept: bool = False) -> None:
        super().__init__(sentence)
        self.kept = kept


class ActionModule(ActionBase):
    TRANSFERS_FILES = False
    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp: None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        task_vars = task_vars or {}
        result: dict[str, Any] = super().run(tmp, task_vars)
        try:
            return {**result, "changed": False, **self._plan(task_vars)}
        except (Refused, rolling.Problem) as reason:
            kept = isinstance(reason, Refused) and reason.kept
            return {**result, "failed": True, "refused": True, "kept": kept, "msg": f"Nothing was done: {reason}"}

    def _plan(self, task_vars: dict[str, Any]) -> dict[str, Any]:
        self._refuse_unknown(task_vars)
        spec = rolling.SWITCHES | _role_options()
        given = {name: self._templar.template(task_vars[name]) for name in spec if name in task_vars}
        validated = ArgumentSpecValidator(spec).validate(given)
        if validated.error_messages:
            raise Refused(" ".join(validated.error_messages))
        switches = {name: validated.validated_parameters.get(name) for name in rolling.SWITCHES}
        if not isinstance(given.get("restart_servers", []), list):
            raise Refused('restart_servers is no list; name servers with -e \'{"restart_servers": ["name"]}\'.')
        values = {name: self._templar.template(task_vars[name]) for name in hooks.VARIABLES if name in task_vars}
        if problems := hooks.problems(values):
            raise Refused(" ".join(problems))
        hosts = list(task_vars["ansible_play_hosts_all"])
        held_out = rolling.held_out(switches["reset_held_out"] or [], self._matcher(task_vars), task_vars["groups"])
        now = time.time()
        plan: dict[str, Any] = {
            "id": records.new_run_id(now),
            "not_after": rolling.not_after(switches["reset_not_after"], now),
            "share": rolling.share(switches["reset_breaker_share"]),
            "held_out": [host for host in held_out if host in set(hosts)],
            "fleet": breaker.fleet(task_vars.get("ansible_inventory_sources") or []),
            "schedule": switches["reset_schedule_name"] or "",
            "hosts": "gpu_hosts",
            "sizes": [],
        }
        plan["count"] = len(hosts) - len(plan["held_out"])
        if switches["reset_serial"] not in (None, ""):
            most = rolling.sizes(switches["reset_serial"], len(hosts))
            batches = rolling.batches(rolling.units(hosts, self._nodes(task_vars["hostvars"])), most)
            plan["hosts"] = [host for batch in batches for host in batch]
            plan["sizes"] = [len(batch) for batch in batches]
        self._ask_breaker(plan, clear=bool(switches["reset_breaker_clear"]))
        return plan

    def _refuse_unknown(self, task_vars: Mapping[str, Any]) -> None:
        options = _role_options()
        # A misspelt gpu_reset_gpus would reset the whole host.
        unknown = [
            name
            for name in task_vars
            if name.startswith(f"{ROLE}_") and name not in options and not name.endswith("_result")
        ]
        if unknown:
            raise Refused(
                f"the role {ROLE} has no variable {', '.join(sorted(unknown))}. It knows {', '.join(sorted(options))}."
            )
        known = [*rolling.SWITCHES, *hooks.VARIABLES]
        if wrong := rolling.unknown_switches(task_vars, known):
            raise Refused(f"there is no variable {', '.join(wrong)}. The plays know {', '.join(sorted(known))}.")

    def _matcher(self, task_vars: dict[str, Any]) -> Callable[[str], list[str]]:
        """The hosts of a pattern, as Ansible reads it."""
        lookup = lookup_loader.get("ansible.builtin.inventory_hostnames", loader=self._loader, templar=self._templar)
        return lambda pattern: list(lookup.run([pattern], variables=task_vars))

    def _nodes(self, hostvars: Mapping[str, Mapping[str, Any]]) -> Any:
        """The hosts that share a host's server."""

        def of(host: str) -> list[str]:
            nodes = hostvars[host].get("sglang_nodes") or []
            if not isinstance(nodes, list):
                raise Refused(f"sglang_nodes of {host} is {nodes!r}: give a list of inventory names.")
            return [str(node) for node in nodes]

        return of

    def _ask_breaker(self, plan: Mapping[str, Any], clear: bool) -> None:
        if self._task.check_mode:
            return
        file = records.artifacts_folder() / breaker.FILE_NAME
        try:
            if clear and plan["schedule"]:
                raise Refused("reset_breaker_clear is for people: a schedule must not clear the breaker.")
            if clear:
                breaker.clear(file, plan["fleet"])
            elif trip := breaker.tripped(file, plan["fleet"]):
                raise Refused(f"{trip.sentence}. {CLEAR}.", kept=True)
        except (OSError, breaker.Unreadable) as error:
            raise Refused(f"{error}.", kept=True) from error


def _role_options() -> dict[str, dict[str, Any]]:
    file = REPOSITORY / "roles" / ROLE / "meta" / "argument_specs.yml"
    options: dict[str, dict[str, Any]] = yaml.safe_load(file.read_text(encoding="utf-8"))["argument_specs"]["main"][
        "options"
    ]
    return {name: {key: value for key, value in one.items() if key != "description"} for name, one in options.items()}
