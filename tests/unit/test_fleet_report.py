"""The fleet's memory now: every host in the report, whatever became of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gpu_control import fleet

from .control_project import Project

NOTHING = dict.fromkeys(("free_mib", "reserved_mib", "power_watts", "mig"))


def process(
    pid: int, mib: int | None, name: str | None = "python -m train", user: str | None = "ada"
) -> dict[str, Any]:
    return {"pid": pid, "name": name, "user": user, "used_mib": mib, "kind": "compute", "state": "live"}


def gpu(index: int, used: int | None, processes: list[dict[str, Any]] | None, **more: Any) -> dict[str, Any]:
    return {
        **NOTHING,
        "index": index,
        "uuid": f"GPU-{index}",
        "name": "NVIDIA RTX PRO 6000",
        "total_mib": 97_887,
        "used_mib": used,
        "utilization_percent": 0,
        "processes": processes,
        "errors": {},
        "verdict": "in_use",
        "cure": "Stop it.",
        **more,
    }


READ = {"gpus": [gpu(0, 90_000, [process(7, 200), process(8, 89_000)]), gpu(1, 3, [])], "driver_version": "580"}
LOST = {"gpus": [gpu(0, None, None, total_mib=None, utilization_percent=None, errors={"gpu": "GPU is lost"})]}


def test_every_host_is_in_the_report_and_told_by_what_became_of_it():
    found = fleet.report(
        {
            "read": READ,
            "lost": LOST,
            "gone": {"unreachable": True, "msg": "Task failed: ssh:\nno route"},
            "driverless": {"gpus": [], "error": "No driver is loaded"},
            "held": {"refused": True, "failed": True, "msg": "Held out until its riser is replaced."},
            "never": None,
            "empty": {"gpus": []},
        },
        "now",
    )
    assert {one["host"]: (one["state"], one["why"]) for one in found["hosts"]} == {
        "read": ("read", ""),
        "lost": ("read", ""),
        "gone": ("unreachable", "ssh: no route"),
        "driverless": ("not read", "No driver is loaded"),
        "held": ("not read", "Held out until its riser is replaced."),
        "never": ("not read", "it was not asked"),
        "empty": ("read", ""),
    }
    text = fleet.text(found)
    assert "90 000  97 887       0  NVIDIA RTX PRO 6000  python -m train (pid 8, ada, 89 000 MiB); python" in text
    assert "? (GPU is lost)" in text and "empty       no GPU" in text
    assert text.splitlines()[-1] == (
        "7 hosts (3 read, 1 unreachable, 3 not read) - 3 GPUs, 1 with processes, 1 can't be read; "
        "90 003 of 195 774 MiB used"
    )


def test_the_report_judges_nothing():
    assert "verdict" not in json.dumps(fleet.report({"a": READ}, "now"))
    assert "in_use" not in fleet.text(fleet.report({"a": READ}, "now"))


def test_many_processes_are_counted_and_those_of_another_namespace_are_told():
    holders = [process(n, n, None, None) for n in range(1, 6)] + [process(9, None)]
    (row,) = [
        line
        for line in fleet.text(fleet.report({"a": {"gpus": [gpu(0, 1, holders)]}}, "")).splitlines()
        if "pid" in line
    ]
    assert row.endswith("a process that is not visible (pid 3, 3 MiB); 3 more")


# ---- the play ----

MEMORY = """
import base64, json, os

def run(params, check_mode=False, diff=False):
    return json.loads(base64.b64decode(os.environ["STUB_RESULT"]))
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path)
    (tmp_path / "module_utils/gpu_host/memory_report.py").write_text(MEMORY)
    return made


def test_the_play_reads_each_host_once_and_writes_what_it_shows(project):
    project.host("good", READ)
    project.host("broken", {"failed": True, "msg": "The code failed on this host"})
    project.host("a-gone", ansible_connection="ssh", ansible_host="127.0.0.1", ansible_port=1)
    outcome = project.play(playbook="playbooks/report-gpus.yml")
    assert outcome.status == 0, outcome.output
    assert "3 hosts (1 read, 1 unreachable, 1 not read) - 2 GPUs" in outcome.output
    written = json.loads((project.folder / "artifacts/gpus.json").read_text())
    assert {one["host"]: one["state"] for one in written["hosts"]} == {
        "good": "read",
        "broken": "not read",
        "a-gone": "unreachable",
    }
    assert written["hosts"][2]["gpus"][0]["processes"][0]["pid"] == 7
    checked = project.play("--check", "-e", "report_gpus_json=other.json", playbook="playbooks/report-gpus.yml")
    assert checked.status == 0 and not (project.folder / "artifacts/other.json").exists()


def test_where_no_host_can_be_read_the_play_fails(project):
    project.host("gone", ansible_connection="ssh", ansible_host="127.0.0.1", ansible_port=1)
    outcome = project.play(playbook="playbooks/report-gpus.yml")
    assert outcome.status == 2 and "No host could be read." in outcome.output
