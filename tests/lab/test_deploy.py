"""Deployments on hosts with a real systemd and the stand-in: to ready, to the right name of a failure, back again."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.lab.host import Host
from tests.lab.lab import Lab
from tests.lab.server import STANDIN

KEY = "s3cret-k3y-of-ours"
MODEL = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "num_attention_heads": 64,
    "max_position_embeddings": 262144,
}
DRAFTER = {"architectures": ["LlamaForCausalLMEagle3"], "max_position_embeddings": 262144}


@dataclass(frozen=True)
class Deployed:
    """What a run of a playbook ended with."""

    status: int
    output: str
    seconds: float

    @property
    def changed(self) -> int:
        return int(self._recap("changed"))

    @property
    def tasks(self) -> int:
        return int(self._recap("ok"))

    def _recap(self, what: str) -> str:
        found = re.search(rf"^\S+ +: .*\b{what}=(\d+)", self.output, re.MULTILINE)
        assert found, self.output
        return found.group(1)

    def says(self, words: str) -> bool:
        """Whether the sentence is in the output, however it was wrapped."""
        return words in " ".join(self.output.split())


class Target:
    """A host with a model and a drafter on it."""

    def __init__(self, host: Host) -> None:
        self.host = host
        host.write("/models/kimi-k2.5/config.json", json.dumps(MODEL))
        host.write("/models/drafter/config.json", json.dumps(DRAFTER))

    def variables(self, settings: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        standin = {f"SGLANG_STANDIN_{name}": value for name, value in {"SPEED": 5, **(settings or {})}.items()}
        return {
            "sglang_python": "/usr/bin/python3",
            "sglang_model_path": "/models/kimi-k2.5",
            "sglang_drafter_path": "/models/drafter",
            "sglang_arguments": {"tp_size": 4},
            "sglang_environment": {"PYTHONPATH": STANDIN, "PYTHONDONTWRITEBYTECODE": 1, **standin},
            "server_health_chat_expect": "model",
            "server_health_stall": 4,
            "gpu_reset_grace": 5,
            "deploy_soak": 20,
            # The stand-in has neither torch nor kernels; these have tests of their own.
            "deploy_preflight": False,
            "deploy_sgl_kernel": False,
            "deploy_model_staging": False,
            **more,
        }

    def deploy(
        self, which: str = "eagle3", *words: str, settings: dict[str, Any] | None = None, **more: Any
    ) -> Deployed:
        began = time.monotonic()
        done = self.host.playbook(f"playbooks/deploy-{which}.yml", self.variables(settings, **more), *words)
        return Deployed(done.returncode, done.stdout + done.stderr, time.monotonic() - began)

    def main_pid(self, unit: str = "sglang") -> int:
        return int(self.host.exec(["systemctl", "show", "--property=MainPID", "--value", unit]).stdout)

    def active(self, unit: str = "sglang") -> str:
        return self.host.exec(["systemctl", "is-active", unit], check=False).stdout.strip()

    def deployment(self, name: str = "sglang") -> dict[str, Any]:
        return dict(json.loads(self.host.read(f"/var/lib/gpu-host/deployments/{name}.json")))


@pytest.fixture
def target(gpu_host: Host) -> Target:
    return Target(gpu_host)


@pytest.fixture(scope="module")
def failing(lab: Lab) -> Iterator[Target]:
    """One host for all tests in which nothing gets ready."""
    yield Target(lab.start_host("failing"))
    lab.stop_hosts(["failing"])


@pytest.fixture(autouse=True)
def artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPU_ARTIFACTS", str(tmp_path))
    return tmp_path


def test_a_bare_host_gets_ready_a_second_run_changes_nothing_and_a_changed_argument_restarts_once(
    target: Target,
) -> None:
    first = target.deploy()
    assert first.status == 0, first.output
    pid = target.main_pid()
    again = target.deploy()
    assert (again.status, again.changed, target.main_pid()) == (0, 0, pid), again.output
    assert again.tasks <= 8 - 4  # which preflight (twice), sgl_kernel and model_staging take of the 8
    changed = target.deploy(sglang_arguments={"tp_size": 4, "max_running_requests": 64})
    assert changed.status == 0, changed.output
    assert target.main_pid() not in (0, pid)
    assert target.host.exec(["systemctl", "show", "--property=NRestarts", "--value", "sglang"]).stdout.strip() == "0"
    assert target.deployment()["verdict"] == "ready"


def test_check_mode_shows_unit_and_command_and_changes_nothing(target: Target) -> None:
    shown = target.deploy("eagle3", "--check", "--diff", sglang_api_key=KEY)
    assert shown.status == 0, shown.output
    assert (
        "KillMode=mixed" in shown.output and "-m sglang.launch_server --config /etc/sglang/sglang.yaml" in shown.output
    )
    assert KEY not in shown.output
    assert target.host.exec("ls /etc/sglang /etc/systemd/system/sglang.service", check=False).returncode != 0
    assert target.deploy().status == 0
    pid = target.main_pid()
    predicted = target.deploy("eagle3", "--check", "--diff", sglang_arguments={"tp_size": 2})
    assert predicted.status == 0, predicted.output
    assert "+ExecStart=" in predicted.output and "--tp-size 2" in predicted.output
    assert (target.main_pid(), predicted.changed) == (pid, 1)


def test_each_playbook_replaces_the_others_server(target: Target) -> None:
    for which, algorithm in (("eagle3", "EAGLE3"), ("baseline", None), ("eagle3", "EAGLE3")):
        done = target.deploy(which)
        assert done.status == 0, done.output
        answer = target.host.exec(["python3", "-c", ASK, "http://127.0.0.1:30000/server_info", ""]).stdout
        assert json.loads(answer)["speculative_algorithm"] == algorithm


ASK = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], headers={"Authorization": "Bearer " + sys.argv[2]})
print(urllib.request.urlopen(request, timeout=10).read().decode())
"""


def test_the_key_is_in_one_private_file_and_nowhere_else(target: Target, artifacts: Path) -> None:
    done = target.deploy("eagle3", "-vvv", "--diff", sglang_api_key=KEY, sglang_host="0.0.0.0")
    assert done.status == 0, done.output
    assert KEY not in done.output.replace(f'"sglang_api_key": "{KEY}"', "").partition("PLAYBOOK:")[2]
    host = target.host
    assert host.exec(["stat", "-c", "%a", "/etc/sglang/sglang.yaml", "/var/log/sglang/sglang.log"]).stdout.split() == [
        "600",
        "600",
    ]
    assert KEY not in host.exec("cat /proc/*/cmdline", check=False).stdout
    assert KEY in host.read("/etc/sglang/sglang.yaml")
    found = host.exec(f"grep -rl {KEY} /etc /var/lib /run /root", check=False).stdout.split()
    assert found == ["/etc/sglang/sglang.yaml"]
    journal = host.exec(["journalctl", "--no-pager", "--output=cat"]).stdout
    assert "fired up and ready to roll" in journal and KEY not in journal
    assert "ready" in host.exec(["python3", "-c", ASK, "http://127.0.0.1:30000/server_info", KEY]).stdout


def test_a_killed_scheduler_restarts_the_unit_and_the_next_deployment_leaves_it_alone(target: Target) -> None:
    assert target.deploy(server_launch_restart_seconds=1).status == 0
    pid = target.main_pid()
    scheduler = next(one for one in target.host.processes() if one.line.startswith("sglang::scheduler_TP1"))
    target.host.kill(scheduler.pid)
    deadline = time.monotonic() + 30
    while target.main_pid() in (0, pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    restarted = target.main_pid()
    assert restarted not in (0, pid)
    done = target.deploy(server_launch_restart_seconds=1)
    assert (done.status, target.main_pid()) == (0, restarted), done.output


def test_a_stop_that_was_asked_for_leaves_no_failed_unit(target: Target) -> None:
    assert target.deploy().status == 0
    done = target.host.ansible("server_launch", {"state": "stopped"})
    assert done["changed"] is True, done
    assert target.active() == "inactive"
    assert "Main process exited, code=killed" in target.host.exec(["journalctl", "--unit=sglang", "--no-pager"]).stdout


def test_a_failed_launch_goes_back_to_the_last_good_one(target: Target) -> None:
    assert target.deploy("baseline").status == 0
    done = target.deploy(settings={"FAIL": "eagle3-missing-module-in-draft"}, deploy_rollback=True)
    assert done.status != 0
    assert done.says("needs the package deep_gemm") and done.says("The last good deployment runs again.")
    assert target.active() == "active"
    answer = target.host.exec(["python3", "-c", ASK, "http://127.0.0.1:30000/server_info", ""]).stdout
    assert json.loads(answer)["speculative_algorithm"] is None


def test_the_next_host_is_not_touched_before_the_last_one_is_ready(start_gpu_host: Callable[..., Host]) -> None:
    first, second = Target(start_gpu_host()), Target(start_gpu_host())
    both = f"--limit={first.host.name},{second.host.name}"
    failed = first.deploy("eagle3", both, settings={"FAIL": "kernel-package-missing"})
    assert failed.status != 0 and "Follow it until it is ready" in failed.output
    assert second.host.exec("ls /etc/systemd/system/sglang.service", check=False).returncode != 0
    assert first.deploy("eagle3", both).status == 0
    assert first.main_pid() > 0 and second.main_pid() > 0


def test_two_servers_share_a_host_by_their_gpus_and_neither_touches_the_other(target: Target) -> None:
    one = {"sglang_server_name": "one", "sglang_gpus": [0, 1, 2, 3]}
    two = {"sglang_server_name": "two", "sglang_gpus": [4, 5, 6, 7], "sglang_port": 30001}
    assert target.deploy(**one).status == 0
    pid = target.main_pid("one")
    done = target.deploy(**two)
    assert done.status == 0, done.output
    assert target.main_pid("one") == pid and target.main_pid("two") > 0
    clash = target.deploy(**{**two, "sglang_gpus": [3, 4, 5, 6]})
    assert clash.status != 0 and clash.says("The server one, deployed on this host, runs on the same GPUs"), (
        clash.output
    )
    assert target.main_pid("one") == pid


def test_a_server_started_by_hand_is_replaced_and_its_zombie_too(target: Target) -> None:
    server = target.host.start_server(tp=4, settings={"SPEED": 5, "OUTLIVE_MAIN": 1})
    target.host.kill(server.pid)
    done = target.deploy()
    assert done.status == 0, done.output
    assert target.main_pid() > 0


# ---- failures ----

RECORDED = {
    "eagle3-missing-module-in-draft": "deep-gemm-missing",
    "draft-context-length-mismatch": "draft-context-length",
    "eagle3-unsupported-attention-backend": "triton-without-gpu",
    "kernel-package-missing": "kernel-package-missing",
    "common-ops-cannot-load-libcuda": "kernel-libcuda-missing",
    "topk-missing": "speculation-topk-missing",
    "steps-missing-topk-given": "speculation-steps-missing",
}


@pytest.mark.parametrize(("failure", "name"), RECORDED.items())
def test_a_recorded_failure_ends_at_once_in_its_name_and_does_not_come_back(
    failing: Target, failure: str, name: str
) -> None:
    done = failing.deploy(settings={"FAIL": failure})
    assert done.status != 0
    assert re.search(rf"^ +id: {name}$", done.output, re.MULTILINE), done.output
    assert [float(found) for found in re.findall(r"^ +seconds: ([\d.]+)$", done.output, re.MULTILINE)][-1] < 15
    assert failing.active() == "inactive"


@pytest.mark.parametrize(("phase", "named"), [("import", "arguments"), ("weights", "weights"), ("capture", "capture")])
def test_a_start_without_a_sign_of_work_is_stuck_in_a_named_phase_and_leaves_evidence(
    failing: Target, artifacts: Path, phase: str, named: str
) -> None:
    done = failing.deploy(settings={"HANG_AFTER": phase})
    assert done.status != 0
    assert re.search(r"verdict: stuck$", done.output, re.MULTILINE), done.output
    assert done.says(f"in the phase {named}"), done.output
    (folder,) = (artifacts / "health").iterdir()
    stacks = (folder / "stacks.txt").read_text()
    assert "MainThread" in stacks and stacks.count("==== ") >= 6
    assert {"processes.json", "gpus.json", "log.txt"} <= {file.name for file in folder.iterdir()}


def test_drafts_that_are_never_accepted_are_no_success(failing: Target) -> None:
    done = failing.deploy(settings={"ACCEPT_LENGTH": 1.0})
    assert done.status != 0
    assert done.says("acceptance: the accept length is 1.01"), done.output


def test_an_answer_that_makes_no_sense_is_no_success(failing: Target) -> None:
    done = failing.deploy(server_health_chat_expect="(?i)paris")
    assert done.status != 0
    assert done.says("chat: the answer does not match '(?i)paris'"), done.output


BAD: list[tuple[dict[str, Any], str]] = [
    ({"sglang_model_path": "/models/none"}, "there is no model in /models/none on this host"),
    ({"sglang_arguments": {"tp_size": 7}}, "can't be shared by tp_size 7"),
    ({"sglang_arguments": {"tp_size": 16}}, "needs 16 GPUs a host, 8 are there"),
    ({"sglang_arguments": {"port": 1}}, "port is set by the variable sglang_port"),
    ({"sglang_speculation": {"algorithm": "EAGLE3", "num_steps": 3}}, "num_steps is set without eagle_topk"),
    ({"sglang_speculation": {"algorithm": "EAGLE", "num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4}},
     "it would serve and accept nothing"),
    ({"sglang_host": "0.0.0.0"}, "would serve the whole network without a key"),
    ({"sglang_gpus": ["9"]}, "GPU 9 is not on this host"),
    ({"sglang_python": "/opt/none/bin/python"}, "there is no program /opt/none/bin/python"),
    ({"sglang_server_name": "ssh"}, "ssh.service is a unit of something else"),
    ({"sglang_environment": {"A-B": 1}}, "'A-B' is no name of a variable"),
    ({"sglang_api_key_file": "/etc/hostname"}, "chmod 600 /etc/hostname"),
    ({"sglang_api_key": "short"}, "The api-key can't be used"),
    ({"server_launch_environment_file": "/etc/none.env"}, "The environment file /etc/none.env is not there"),
    ({"server_launch_user": "nobody-here"}, "There is no user nobody-here"),
]  # fmt: skip


@pytest.fixture(scope="module")
def idle(lab: Lab) -> Iterator[Target]:
    """A host on which nothing is ever started."""
    target = Target(lab.start_host("idle"))
    target.host.write("/models/broken/config.json", '{"architectures": [')
    target.host.start("python3 -m http.server 30007 --bind 127.0.0.1")
    yield target
    lab.stop_hosts(["idle"])


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        *BAD,
        ({"sglang_model_path": "/models/broken"}, "sglang_model_path: /models/broken/config.json"),
        ({"sglang_port": 30007}, "Port 30007 is in use by python3 -m http.server (pid"),
    ],
)
def test_bad_input_is_refused_in_one_sentence_before_anything_is_changed(
    idle: Target, bad: dict[str, Any], sentence: str
) -> None:
    given = {
        "name": "sglang_server_name", "python": "sglang_python", "model_path": "sglang_model_path",
        "drafter_path": "sglang_drafter_path", "host": "sglang_host", "port": "sglang_port", "gpus": "sglang_gpus",
        "api_key": "sglang_api_key", "api_key_file": "sglang_api_key_file", "arguments": "sglang_arguments",
        "speculation": "sglang_speculation", "environment": "sglang_environment",
        "environment_file": "server_launch_environment_file", "user": "server_launch_user",
    }  # fmt: skip
    variables = {**idle.variables(), **bad}
    arguments = {option: variables[name] for option, name in given.items() if name in variables}
    done = idle.host.ansible("server_launch", arguments)
    assert done.get("refused") is True and str(done["msg"]).startswith("Nothing was done."), done
    assert sentence in str(done["msg"]), done["msg"]
    assert idle.host.exec("ls -d /etc/sglang /var/lib/gpu-host/deployments", check=False).stdout == ""


# ---- the watch ----


def test_the_watch_restarts_a_zombie_tells_its_hook_once_and_leaves_a_healthy_server_alone(target: Target) -> None:
    host = target.host
    host.write("/usr/local/bin/hook", "#!/bin/sh\ncat >> /root/hook.jsonl; echo >> /root/hook.jsonl\n", "0755")
    watch = {
        "deploy_watch": True,
        "server_launch_restart": False,
        "server_watch_hook": ["/usr/local/bin/hook"],
        "server_watch_restart": ["zombie"],
        "server_watch_every": 3600,
        "server_watch_confirm_seconds": 1,
    }
    assert target.deploy(settings={"OUTLIVE_MAIN": 1}, **watch).status == 0
    again = target.deploy(settings={"OUTLIVE_MAIN": 1}, **watch)
    assert (again.status, again.changed) == (0, 0), again.output
    look = ["systemctl", "start", "sglang-watch.service"]
    pid = target.main_pid()
    host.exec(look)
    assert target.main_pid() == pid and host.exec("cat /root/hook.jsonl", check=False).stdout == ""
    host.exec(["systemctl", "kill", "--kill-whom=main", "--signal=STOP", "sglang"])  # deaf, its memory held
    host.exec(look, timeout=120)
    events = [json.loads(line) for line in host.read("/root/hook.jsonl").splitlines() if line]
    assert [event["state"] for event in events] == ["zombie"], events
    assert "was started" in events[0]["action"], events
    assert target.main_pid() not in (0, pid)
    assert '"state": "zombie"' in host.exec(["journalctl", "--unit=sglang-watch", "--no-pager"]).stdout
    gone = target.deploy(settings={"OUTLIVE_MAIN": 1}, **watch, server_watch_state="absent")
    assert gone.status == 0, gone.output
    assert host.exec(["systemctl", "is-active", "sglang-watch.timer"], check=False).stdout.strip() == "inactive"
