"""The modules that work on the control node alone. action_plugins/ links here."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.loader import lookup_loader
from ansible.utils.display import Display
from gpu_host import arguments

from . import (
    breaker,
    fleet,
    history,
    history_report,
    hooks,
    records,
    role_variables,
    rolling,
    variables,
    whole_file,
    wrong_types,
)
from .control_module import ControlModule
from .known_variables import KnownVariables

ROLE = "gpu_reset"
CLEAR = "Look at those hosts, then say -e reset_breaker_clear=true with the next run"

display = Display()


class FleetMemory(ControlModule):
    """Reports what gpu_memory returned on each host of the play."""

    spec: ClassVar[Mapping[str, dict[str, Any]]] = {
        "result": {"type": "str", "required": True},
        "json": {"type": "str", "default": fleet.FILE_NAME},
    }

    def act(self, params: dict[str, Any]) -> dict[str, Any]:
        hostvars = self.task_vars["hostvars"]
        found = fleet.report(
            {name: hostvars[name].get(params["result"]) for name in self.task_vars["ansible_play_hosts_all"]},
            records.timestamp(),
        )
        display.display("\n" + fleet.text(found))
        file = records.artifacts_folder() / Path(params["json"]).expanduser()
        if params["json"] and not self.check_mode:
            try:
                whole_file.write(file, json.dumps(found, indent=1) + "\n", whole_file.FOR_ALL)
            except OSError as error:
                return {"failed": True, "msg": f"{file} could not be written: {error.strerror}."}
        none_read = not any(one["state"] == fleet.READ for one in found["hosts"])
        return {
            "failed": none_read,
            "msg": "No host could be read." if none_read else fleet.last_line(found),
            "written": str(file) if params["json"] else "",
        }


class ResetHistory(ControlModule):
    """Reports the history of resets."""

    spec: ClassVar[Mapping[str, dict[str, Any]]] = {
        "files": {"type": "list", "elements": "str", "default": [records.FILE_NAME]},
        "hosts": {"type": "list", "elements": "str", "default": []},
        "since": {"type": "str", "default": ""},
        "limit": {"type": "int", "default": 0},
        "recent": {"type": "int", "default": history.RECENT},
        "html": {"type": "str", "default": "resets.html"},
        "metrics": {"type": "str", "default": ""},
    }

    def judge(self, params: dict[str, Any]) -> list[str]:
        known = [f"report_resets_{name}" for name in self.spec]
        found = role_variables.unknown(map(str, self.task_vars), "report_reset", known)
        if params["limit"] < 0:
            found.append(f"report_resets_limit: {params['limit']} is no number of resets; give 0 (all) or more.")
        if params["recent"] < history.LEAST:
            found.append(
                f"report_resets_recent: {params['recent']} is too few to compare; give {history.LEAST} or more."
            )
        if not params["files"]:
            found.append("report_resets_files: no file is named; leave it out or name at least one.")
        if trouble := history_report.problems_of(params["metrics"]):
            found.append(trouble)
        return found

    def act(self, params: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._report(params)
        except history.HistoryError as reason:
            return {"failed": True, "msg": str(reason)}
        except OSError as error:
            return {"failed": True, "msg": f"{error.filename} could not be written: {error.strerror}."}

    def _report(self, params: dict[str, Any]) -> dict[str, Any]:
        now = time.time()
        folder = records.artifacts_folder()
        since = history.since(params["since"], now) if params["since"] else 0.0
        filters = history.Filters(since, params["limit"], tuple(params["hosts"]))
        found = history.read(history.find_files(params["files"], folder))
        summary = history.summarise(found, filters, params["recent"])
        display.display("\n" + history_report.text(summary))
        written = []
        # Counters must not go back because a person looked at one week.
        everything = history.Filters()
        for name, render in (
            ("html", lambda: history_report.html(summary, records.timestamp(now))),
            ("metrics", lambda: history_report.metrics(history.summarise(found, everything, params["recent"]))),
        ):
            if params[name]:
                file = folder / Path(params[name]).expanduser()
                if not self.check_mode:
                    whole_file.write(file, render(), whole_file.FOR_ALL)
                written.append(str(file))
        return {
            "written": written,
            "hosts": history_report.rows(summary),
            "worse": [host.host for host in summary.worse],
            "broken_lines": [str(problem) for problem in found.problems],
            "msg": f"{'Would write' if self.check_mode else 'Written'}: {', '.join(written) or 'nothing'}",
        }


class Refused(Exception):
    """The run is not begun; the text is one sentence. ``kept``: it belongs into the history of its hosts."""

    def __init__(self, sentence: str, kept: bool = False) -> None:
        super().__init__(sentence)
        self.kept = kept


class ResetPlan(ControlModule):
    """Judges the switches of a run of resets, which are variables of the play, before any host is touched."""

    def act(self, params: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._plan(self.task_vars)
        except (Refused, rolling.Problem) as reason:
            kept = isinstance(reason, Refused) and reason.kept
            return {"failed": True, "refused": True, "kept": kept, "msg": f"Nothing was done: {reason}"}

    def _plan(self, task_vars: dict[str, Any]) -> dict[str, Any]:
        options = role_variables.options(ROLE)
        self._refuse_unknown(task_vars, options)
        spec = rolling.SWITCHES | {name: _without_description(one) for name, one in options.items()}
        given = {name: variables.read(self._templar, task_vars, name) for name in spec if name in task_vars}
        validated = ArgumentSpecValidator(spec).validate(given)
        if validated.error_messages:
            raise Refused(" ".join(wrong_types.reworded(validated.error_messages, spec, given)))
        switches = {name: validated.validated_parameters.get(name) for name in rolling.SWITCHES}
        if not isinstance(given.get("restart_servers", []), list):
            raise Refused('restart_servers is no list; name servers with -e \'{"restart_servers": ["name"]}\'.')
        self._refuse_senseless(validated.validated_parameters, given, task_vars)
        values = {name: variables.read(self._templar, task_vars, name) for name in hooks.VARIABLES if name in task_vars}
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
            "in_batches": False,
        }
        plan["count"] = len(hosts) - len(plan["held_out"])
        if switches["reset_serial"] not in (None, ""):
            most = rolling.sizes(switches["reset_serial"], len(hosts))
            batches = rolling.batches(rolling.units(hosts, self._nodes(task_vars["hostvars"])), most)
            plan["hosts"] = [host for batch in batches for host in batch]
            plan["sizes"] = [len(batch) for batch in batches]
            plan["in_batches"] = len(batches) > 1
        self._ask_breaker(plan, clear=bool(switches["reset_breaker_clear"]))
        return plan

    def _refuse_unknown(self, task_vars: Mapping[str, Any], options: Collection[str]) -> None:
        # A misspelt gpu_reset_gpus would reset the whole host.
        unknown = [
            name
            for name in task_vars
            if name.startswith(f"{ROLE}_") and name not in options and not name.endswith("_result")
        ]
        if unknown:
            names, known = ", ".join(sorted(unknown)), ", ".join(sorted(options))
            raise Refused(f"the role {ROLE} has no variable {names}. It knows {known}.")
        switches = [*rolling.SWITCHES, *hooks.VARIABLES]
        if wrong := rolling.unknown_switches(task_vars, switches):
            raise Refused(f"there is no variable {', '.join(wrong)}. The plays know {', '.join(sorted(switches))}.")

    def _refuse_senseless(
        self, params: Mapping[str, Any], given: Mapping[str, Any], task_vars: Mapping[str, Any]
    ) -> None:
        """Refuse what makes no sense on any host. What only some hosts say is judged when their turn comes."""
        prefix = f"{ROLE}_"
        options = {
            option: facts["default"] if (value := params.get(prefix + option)) is None else value
            for option, facts in arguments.GPU_RESET.items()
        }
        options["worker_url"] = options["worker_url"] or "http://host:{port}"  # each host has its own
        hostvars, hosts = task_vars["hostvars"], task_vars["ansible_play_hosts_all"]

        def everywhere(name: str) -> bool:
            return all(hostvars[host].get(name) == given[name] for host in hosts)

        sentences = [f"{prefix}{sentence}" for sentence in arguments.problems(options)]
        if found := [one for one in sentences if (name := one.partition(":")[0]) in given and everywhere(name)]:
            raise Refused(" ".join(found))

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
        if self.check_mode:
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


def _without_description(option: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in option.items() if key != "description"}


MODULES: dict[str, type[ControlModule]] = {
    "fleet_memory": FleetMemory,
    "known_variables": KnownVariables,
    "reset_history": ResetHistory,
    "reset_plan": ResetPlan,
}
"""By the name of the module and of its action plugin."""
