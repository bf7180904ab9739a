"""A misspelt variable is refused by its name, before anything is done on a host."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from gpu_control import reports, role_variables, rolling
from gpu_host import host_info

from .control_project import ROOT, Project

ROLES = sorted(path.name for path in (ROOT / "roles").iterdir())


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path)
    # Each module of a host, run there, would end like this.
    for name in ("host_info", "staging", "data_jobs"):
        file = tmp_path / f"module_utils/gpu_host/{name}.py"
        file.write_text(file.read_text() + "\n\ndef run(*_):\n    raise RuntimeError('the host was touched')\n")
    return made


def told(project: Project, playbook: str, variables: dict, *arguments: str) -> str:
    """What a play says that is refused."""
    done = project.play("-e", json.dumps(variables), *arguments, playbook=f"playbooks/{playbook}.yml")
    assert done.status != 0, done.output
    assert "the host was touched" not in done.output
    return " ".join(done.output.split())


@pytest.mark.parametrize(
    ("playbook", "variables", "sentence"),
    [
        ("deploy-eagle3", {"deploy_serail": 2}, "There is no variable deploy_serail; did you mean deploy_serial?"),
        ("deploy-baseline", {"deploy_rolback": True}, "no variable deploy_rolback; did you mean deploy_rollback?"),
        ("deploy-eagle3", {"server_health_soack": 1}, "did you mean server_health_soak?"),
        ("deploy-eagle3", {"deploy_serial": 0}, "deploy_serial is 0: give the hosts of a batch as a number"),
        (
            "check-host",
            {"preflight_nosuch": 1},
            "There is no variable preflight_nosuch; these are known: preflight_all_",
        ),
        ("check-host", {"preflight_skip": ["ram_smal"]}, "no check 'ram_smal'; did you mean ram_small?"),
        ("stage-models", {"sglang_model_path": "/m", "model_staging_nosuch": 1}, "no variable model_staging_nosuch;"),
        ("stage-models", {}, "Nothing was done: no model is named. Set sglang_model_path"),
        ("run-jobs", {"run_jobs_wiat": True}, "There is no variable run_jobs_wiat; did you mean run_jobs_wait?"),
        ("run-jobs", {"run_jobs_state": "foo"}, "value of run_jobs_state must be one of: started, stopped, status"),
    ],
)
def test_a_play_names_the_variable_that_it_does_not_know_or_that_makes_no_sense(project, playbook, variables, sentence):
    project.host("a")
    assert sentence in told(project, playbook, variables)


@pytest.mark.parametrize(
    ("playbook", "variable"),
    [("run-jobs", "run_jobs_grace"), ("check-host", "sglang_environment"), ("benchmark", "sglang_arguments")],
)
def test_a_value_of_the_wrong_type_is_told_by_the_name_of_its_variable(project, playbook, variable):
    project.host("a")
    assert re.search(rf"Nothing was done\. (argument ')?{variable}'? is ", told(project, playbook, {variable: "x"}))


def test_a_deployment_finds_what_only_its_second_host_misspells(project):
    project.host("a")
    project.host("b", server_launch_nosuch=1)
    assert "There is no variable server_launch_nosuch;" in told(project, "deploy-eagle3", {})


def test_variables_that_plays_and_roles_set_themselves_are_known():
    for role in ROLES:
        known = set(role_variables.options(role))
        texts = [file.read_text() for file in (ROOT / "roles" / role / "tasks").glob("*.yml")]
        registered = {name for text in texts for name in re.findall(r"register: (\w+)", text)}
        assert role_variables.unknown(known | registered, f"{role}_", known) == []
    task = yaml.safe_load((ROOT / "playbooks/tasks/prepare-deploy.yml").read_text())[0]["known_variables"]
    files = [
        *(ROOT / "playbooks/tasks").glob("*.yml"),
        *(ROOT / "playbooks").glob("deploy-*.yml"),
        ROOT / "docs/deploy.md",
    ]
    used = {name for file in files for name in re.findall(r"(?<![\w/])deploy_[a-z]\w*", file.read_text())}
    assert used == {*task["variables"], *task["noted"]}


def test_a_code_of_the_model_or_drafter_is_never_taken_for_a_misspelt_check():
    sources = [
        (ROOT / f"module_utils/gpu_host/{name}.py").read_text() for name in ("eagle3", "speculation", "checkpoint")
    ]
    codes = {code for text in sources for code in re.findall(r'"([a-z0-9]+(?:_[a-z0-9]+)+)"', text)}
    assert {"drafter_missing", "aux_layers_misplaced", "draft_tokens"} <= codes
    assert reports.misspelt_codes([*codes, *host_info.CHECKS]) == []


@pytest.mark.parametrize("value", [1, "30%", [1, "50%"], "2"])
def test_sizes_of_batches_that_ansible_takes_are_taken(value):
    assert rolling.sizes(value, 4, "deploy_serial")
