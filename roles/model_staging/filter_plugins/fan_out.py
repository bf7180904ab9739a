"""Who passes which model on to whom: decided on the control node, from what each host has said of its models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def fan_out(
    models: Sequence[Mapping[str, Any]],
    hostvars: Mapping[str, Mapping[str, Any]],
    hosts: Sequence[str],
    enabled: bool = True,
    origin: str = "",
    port: int = 6881,
) -> list[dict[str, Any]]:
    """One entry for each model that is to be passed on between hosts.

    `hosts` are those of the play; each has its look at the models in the variable model_staging_result, in the order of
    `models`. A model whose source is another host (host:name) comes from there. Any other is passed on where more than
    one host lacks it: from `origin`, from the first host that has it, or from the first that lacks it, which brings it
    from its source first. `addresses` maps each host that takes part to where the others reach it.
    """
    plan = []
    for number, model in enumerate(models):
        source = str(model.get("source") or "")
        states = {host: _look(hostvars, host, number) for host in hosts}
        lacking = [host for host, row in states.items() if row and row.get("state") != "present"]
        having = [host for host, row in states.items() if row and row.get("state") == "present"]
        given_host, given_path = "", ""
        if source.startswith("host:"):
            given_host, _, given_path = source[len("host:") :].partition(":")
        elif not enabled or len(lacking) < 2 or not source:
            continue
        first = given_host or next(iter(([origin] if origin in states else []) + having + lacking), "")
        takers = [host for host in lacking if host != first]
        if not takers:
            continue
        own = states.get(first) or {}
        plan.append(
            {
                "number": number,
                "origin": first,
                "path": given_path or own.get("path") or str(model["path"]),
                "brings_first": first in lacking and not given_host,
                "takers": takers,
                "addresses": {host: [_address(hostvars, host), int(port)] for host in [first, *takers]},
            }
        )
    return plan


def seen_from(models: Sequence[Mapping[str, Any]], host: str) -> list[dict[str, Any]]:
    """The models as the host itself has to see them: one whose source is this very host lies on its own disk."""
    seen = []
    for model in models:
        name, _, path = str(model.get("source") or "").partition(":")[2].partition(":")
        if str(model.get("source") or "").startswith("host:") and name == host:
            model = {**model, "source": "" if path in ("", model["path"]) else path}
        seen.append(dict(model))
    return seen


def fetched_by(
    models: Sequence[Mapping[str, Any]], plan: Sequence[Mapping[str, Any]], host: str
) -> list[Mapping[str, Any]]:
    """The models that the host does not take from others by that plan."""
    taken = {entry["number"] for entry in plan if host in entry["takers"]}
    return [model for number, model in enumerate(models) if number not in taken]


def _look(hostvars: Mapping[str, Mapping[str, Any]], host: str, number: int) -> Mapping[str, Any]:
    """What the host said of the model, {} when it said nothing."""
    result = _variable(hostvars, host, "model_staging_result") or {}
    rows = result.get("models") or []
    return rows[number] if number < len(rows) else {}


def _address(hostvars: Mapping[str, Mapping[str, Any]], host: str) -> str:
    return str(_variable(hostvars, host, "model_staging_address") or _variable(hostvars, host, "ansible_host") or host)


def _variable(hostvars: Mapping[str, Mapping[str, Any]], host: str, name: str) -> Any:
    if host not in hostvars:  # hostvars answers get() for a host that isn't there with an error
        return None
    return hostvars[host].get(name)


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"fan_out": fan_out, "fetched_by": fetched_by, "seen_from": seen_from}
