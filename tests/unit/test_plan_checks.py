"""Findings about what is installed and planned; the cases are data (cases/plan_facts.yml)."""

from __future__ import annotations

import copy
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from gpu_host import plan_checks, ports
from gpu_host.procfs import Proc

DATA = yaml.safe_load((Path(__file__).parent / "cases/plan_facts.yml").read_text())


def packages_of(change: dict[str, Any]) -> dict[str, Any]:
    packages = copy.deepcopy(DATA["good"])
    for path, value in change.items():
        *way, last = path.split(".")
        place = packages
        for part in way:
            place = place[part]
        place[last] = value
    return packages


@pytest.mark.parametrize("case", DATA["cases"], ids=lambda case: case["name"])
def test_what_is_installed_is_judged_as_the_case_says(case):
    plan = plan_checks.Plan(**{**DATA["plan"], **case.get("plan", {})})
    found = plan_checks.check(packages_of(case.get("change", {})), plan)
    assert [f"{one.severity} {one.code}" for one in found] == case["finds"]
    if "says" in case:
        assert any(case["says"] in one.sentence for one in found), [one.sentence for one in found]


def test_every_code_has_a_case():
    proved = {line.split()[1] for case in DATA["cases"] for line in case["finds"]}
    assert set(plan_checks.CODES) - proved == {"port_in_use"}


def test_a_port_that_is_held_names_its_holder():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        holders = ports.port_holders(Proc(), [port])
        (one,) = plan_checks.check_ports(holders)
        assert (one.code, one.severity) == ("port_in_use", "error")
        assert f"Port {port} is held by" in one.found and f"(pid {holders[0]['pid']})" in one.found
        assert plan_checks.check_ports(holders, own=[holders[0]["pid"]]) == []
