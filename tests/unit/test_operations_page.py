"""The page for the person on call has everything that may be asked at 3 a.m."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from gpu_control import history_report, hooks, table
from gpu_host import arguments, verdict

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs/operations.md").read_text()
PLAYBOOKS = sorted(path.name for path in ROOT.glob("playbooks/*.yml"))


def rows(heading: str) -> dict[str, list[str]]:
    """The rows of the table below a heading, by the name in their first cell."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:2] == "| "]
    return {row[0].strip("`"): row for row in cells[1:]}


def test_every_verdict_of_a_host_has_its_meaning_and_what_to_do():
    found = rows("The last line: one word for each host")
    assert set(found) == set(table.VERDICTS)
    assert all(len(row) == 3 and all(row) for row in found.values())


def test_every_verdict_of_a_gpu_has_its_meaning_and_what_to_type():
    found = rows("Each GPU")
    assert set(found) == set(verdict.VERDICTS)
    assert all(len(row) == 3 and all(row) for row in found.values())


@pytest.mark.parametrize("name", PLAYBOOKS)
def test_every_playbook_is_named(name):
    assert f"`{name}`" in PAGE or f"playbooks/{name}" in PAGE


def test_every_playbook_that_is_named_is_there():
    named = set(re.findall(r"[\w-]+\.yml", PAGE)) - {"jobs.yml", "schedules.yml"}
    assert named <= set(PLAYBOOKS)


def test_a_command_is_whole_and_names_its_inventory():
    commands = re.findall(r"(.*?)playbooks/([\w-]+\.yml) -", PAGE)
    without = [
        name
        for before, name in commands
        if not before.endswith((" F ", "`ansible-playbook F ", " -i inventory/fleet "))
    ]
    assert len(commands) > 5 and set(without) == {"schedule-resets.yml"}  # which is for the control node itself


def test_schedules_are_never_installed_without_the_file_that_has_them():
    assert set(re.findall(r"playbooks/schedule-resets\.yml(.{19})", PAGE)) == {" -e @schedules.yml "}


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target


@pytest.mark.parametrize("name", hooks.VARIABLES)
def test_every_variable_of_the_hook_is_explained(name):
    assert name in PAGE


def test_the_variables_of_the_report_are_those_of_its_play():
    play = yaml.safe_load((ROOT / "playbooks/report-resets.yml").read_text())[0]
    wanted = {f"report_resets_{name}" for name in play["tasks"][0]["reset_history"]}
    assert set(re.findall(r"report_resets_\w+", PAGE)) == wanted


def test_every_metric_that_an_alert_names_is_written():
    source = Path(str(history_report.__file__)).read_text()
    named = set(re.findall(r"gpu_reset_\w+", PAGE.split("Alerts that", 1)[1].split("\n\n", 1)[0]))
    assert named and all(f'"{name}"' in source for name in named)


def test_every_variable_of_the_reset_that_it_tells_to_type_exists():
    known = {f"gpu_reset_{name}" for name in arguments.GPU_RESET}
    typed = set(re.findall(r"gpu_reset_[a-z_]+", PAGE.split("## History", 1)[0]))
    assert typed and typed <= known
    assert set(re.findall(r"gpu_reset_policy=(\w+)", PAGE)) <= set(arguments.GPU_RESET["policy"]["choices"])
