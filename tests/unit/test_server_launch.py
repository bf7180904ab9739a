"""From variables to a unit and a command line, and when a server is restarted."""

from __future__ import annotations

import json
import os
import shlex
import stat
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpu_host import arguments, deployment, server_health, server_launch, server_start, server_unit, serving_command
from gpu_host.deployment import Deployment
from gpu_host.server_state import ServerState
from gpu_host.serving_command import Serving

from simulator.host import SimulatedHost

KIMI = {
    "tp_size": 8,
    "mem_fraction_static": 0.88,
    "disable_custom_all_reduce": True,
    "trust_remote_code": True,
    "enable_metrics": False,
    "cuda_graph_bs": [1, 2, 4],
    "json_model_override_args": {"a": 1},
}


def serving(**more: Any) -> Serving:
    return Serving(**{"python": "/v/bin/python", "model_path": "/m", "arguments": KIMI, **more})


# ---- the command ----


def test_arguments_become_words_by_their_types() -> None:
    words = serving_command.argv(serving(), "/etc/sglang/s.yaml")
    assert shlex.join(words) == (
        "/v/bin/python -m sglang.launch_server --model-path /m --host 127.0.0.1 --port 30000 --tp-size 8"
        " --mem-fraction-static 0.88 --disable-custom-all-reduce --trust-remote-code --cuda-graph-bs 1 2 4"
        " --json-model-override-args '{\"a\":1}'"
    )


def test_speculation_names_its_drafter_and_none_leaves_it_out() -> None:
    asked = {"algorithm": "EAGLE3", "num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4}
    words = serving_command.argv(serving(drafter_path="/d", speculation=asked), "")
    assert words[-10:] == (
        *("--speculative-draft-model-path", "/d", "--speculative-algorithm", "EAGLE3"),
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
    )
    assert "--speculative-draft-model-path" not in serving_command.argv(serving(drafter_path="/d"), "")


def test_ranks_of_a_server_over_two_hosts_differ_in_one_number() -> None:
    shared = {"nodes": 2, "dist_init_addr": "gpu01:20000"}
    first, second = (serving_command.argv(serving(**shared, node_rank=rank), "") for rank in (0, 1))
    assert first[-6:] == ("--nnodes", "2", "--node-rank", "0", "--dist-init-addr", "gpu01:20000")
    assert [(one, other) for one, other in zip(first, second, strict=True) if one != other] == [("0", "1")]


def test_secrets_go_by_the_config_file_alone() -> None:
    made = serving(api_key="k3y-of-ours", arguments={**KIMI, "admin_api_key": "4dmin-k3y"})
    words = serving_command.argv(made, "/etc/sglang/s.yaml")
    assert words[3:5] == ("--config", "/etc/sglang/s.yaml")
    assert "k3y" not in " ".join(words) + repr(made).replace("4dmin-k3y", "")
    assert serving_command.config_text(made) == 'api-key: "k3y-of-ours"\nadmin-api-key: "4dmin-k3y"\n'
    assert "--config" not in serving_command.argv(serving(), "/etc/sglang/s.yaml")


FIELDS = "class ServerArgs:\n" + "".join(f'    field_{number}: A[int, "help"] = 1\n' for number in range(60))


def test_a_misspelt_argument_is_refused_with_what_is_near_where_the_installed_sglang_tells(tmp_path: Path) -> None:
    fields = FIELDS + '    tp_size: A[int, Arg(aliases=["--tensor-parallel-size"])] = 1\n    plain: int = 1\n'
    (tmp_path / "srt/arg_groups/fields").mkdir(parents=True)
    (tmp_path / "srt/server_args.py").write_text('parser.add_argument("--disable-cuda-graph")\n')
    (tmp_path / "srt/arg_groups/fields/a.py").write_text(fields)
    known = serving_command.known_options(str(tmp_path))
    assert {"--tp-size", "--tensor-parallel-size", "--disable-cuda-graph"} <= known and "--plain" not in known
    wrong = serving(arguments={"tp_sise": 8, "tp": 8, "disable_cuda_graph": True})
    assert serving_command.problems(wrong, known) == [
        "sglang_arguments: the installed SGLang has no argument tp_sise; near it: tp_size."
    ]
    assert serving_command.problems(wrong, serving_command.known_options("/none")) == []


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"arguments": {"port": 1}}, "port is set by the variable sglang_port"),
        ({"arguments": {"tp-size": 1}}, "write it with underscores, as tp_size"),
        ({"arguments": {"chat_template": "a\nb"}}, "a value of several lines"),
        ({"host": "0.0.0.0"}, "would serve the whole network without a key"),
        ({"host": "gpu01"}, "would serve the whole network without a key"),
        ({"port": 70000}, "is no port"),
        ({"api_key": "with blanks in it"}, "The api-key can't be used"),
        ({"api_key": "-dash-in-front"}, "The api-key can't be used"),
        ({"nodes": 2}, "sglang_dist_init_addr: '' is no address and port"),
        ({"nodes": 2, "dist_init_addr": "gpu01"}, "sglang_dist_init_addr: 'gpu01' is no address and port"),
        ({"nodes": 2, "dist_init_addr": "[::1]:20000"}, "is reached from one host alone"),
    ],
)
def test_what_can_not_be_meant_is_said_in_one_sentence(more: dict[str, Any], sentence: str) -> None:
    (problem,) = serving_command.problems(serving(**more))
    assert sentence in problem


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert serving_command.problems(serving(host=host)) == []


# ---- the unit ----


def plan(**more: Any) -> server_unit.UnitPlan:
    given = {
        "name": "kimi",
        "command": ("/v/bin/python", "-m", "sglang.launch_server"),
        "environment_files": ("/etc/sglang/kimi.env", "/etc/sglang/nccl.env"),
        "log": "/var/log/sglang/kimi.log",
        "user": "sglang",
        "folder": "/home/sglang",
        "grace": 30.0,
        "restart": True,
        "restart_seconds": 10.0,
        "burst": 3,
        "load_seconds": 1500.0,
        "journal": True,
    }
    return server_unit.UnitPlan(**{**given, **more})


def test_the_start_limit_outlasts_a_burst_of_the_slowest_starts() -> None:
    lines = server_unit.unit(plan()).splitlines()
    interval = next(float(line.partition("=")[2]) for line in lines if line.startswith("StartLimitIntervalSec="))
    assert "StartLimitBurst=3" in lines and interval > 3 * (1500 + 10)


def test_a_stop_drains_within_the_grace_and_what_gpu_work_needs_is_asked_for() -> None:
    lines = server_unit.unit(plan()).splitlines()
    for wanted in (
        *("KillMode=mixed", "TimeoutStopSec=30", "Restart=on-failure", "LimitMEMLOCK=infinity", "LimitNOFILE=1048576"),
        *("OOMScoreAdjust=-500", "User=sglang", "EnvironmentFile=/etc/sglang/nccl.env", "TasksMax=infinity"),
    ):
        assert wanted in lines
    assert lines.index("EnvironmentFile=/etc/sglang/kimi.env") < lines.index("EnvironmentFile=/etc/sglang/nccl.env")


@pytest.mark.parametrize(
    "directive",
    [
        "PrivateDevices",
        "DevicePolicy",
        "DeviceAllow",
        "ProtectKernelModules",
        "PrivateTmp",
        "MemoryMax",
        "ProtectSystem",
    ],
)
def test_no_sandbox_breaks_gpu_work(directive: str) -> None:
    assert directive not in server_unit.unit(plan())


def test_systemd_expands_nothing_in_the_command() -> None:
    command = ("/v/bin/python", "--x", 'a "b" $HOME %n {"k":1} back\\slash')
    line = next(line for line in server_unit.unit(plan(command=command)).splitlines() if line.startswith("ExecStart="))
    assert line == r'ExecStart=/v/bin/python --x "a \"b\" $$HOME %%n {\"k\":1} back\\slash"'


def test_the_environment_file_quotes_what_systemd_would_read_otherwise() -> None:
    text = server_unit.environment_text({"B": 'say "x" $y \\ z', "A": "1", "C": ""})
    assert text.splitlines()[1:] == ["A=1", r'B="say \"x\" \$y \\ z"', "C="]


# ---- when it is restarted ----


def state(state_: str = "idle") -> ServerState:
    return ServerState("s", state_, "", main_pid=7, pids=(7,))


GOOD = Deployment("s", argv=("p", "--tp-size", "8"), inputs={"version of sglang": "0.5.17", "/m/config.json": "aa"})


@pytest.mark.parametrize(
    ("wanted", "present", "own", "files", "reasons"),
    [
        (GOOD, GOOD, state(), [], []),
        (GOOD, GOOD, state("busy"), [], []),
        (GOOD, GOOD, state("starting"), [], []),
        (GOOD, GOOD, None, [], ["it does not run"]),
        (GOOD, GOOD, state("absent"), [], ["it does not run"]),
        (GOOD, GOOD, state("hung"), [], ["it is hung"]),
        (GOOD, GOOD, state("zombie"), [], ["it is a zombie server"]),
        (GOOD, replace(GOOD, verdict="ready"), state(), [], []),
        (GOOD, replace(GOOD, verdict="failed: chat: x"), state(), [], []),
        (GOOD, replace(GOOD, verdict="stuck: x"), state("starting"), [], ["its last start got stuck"]),
        (GOOD, None, state(), [], ["it was not deployed by this role before"]),
        (GOOD, GOOD, state(), ["/etc/sglang/s.env"], ["/etc/sglang/s.env changes"]),
        (Deployment("s", ("p",), inputs=GOOD.inputs), GOOD, state(), ["/u/s.service"], ["its command line changes"]),
        (
            Deployment("s", GOOD.argv, inputs={"version of sglang": "0.5.23", "/m/config.json": "bb"}),
            GOOD,
            state(),
            [],
            ["/m/config.json changed", "version of sglang changed from 0.5.17 to 0.5.23"],
        ),
    ],
)
def test_a_server_is_restarted_only_for_a_reason(
    wanted: Deployment, present: Deployment | None, own: ServerState | None, files: list[str], reasons: list[str]
) -> None:
    assert server_launch.why(wanted, present, own, files) == reasons


def test_only_a_ready_deployment_is_one_to_go_back_to(tmp_path: Path) -> None:
    folder = str(tmp_path)
    deployment.save(GOOD, folder)
    deployment.judge(folder, "s", "failed: x")
    assert deployment.load(folder, "s", good=True) is None
    deployment.judge(folder, "s", "ready")
    good = deployment.load(folder, "s", good=True)
    assert good is not None and (good.argv, good.verdict) == (GOOD.argv, "ready")
    newer = Deployment("s", argv=("other",))
    deployment.save(newer, folder)
    deployment.judge(folder, "s", "stuck: y")
    assert deployment.load(folder, "s", good=True) == good
    assert deployment.names(folder) == ["s"]
    assert stat.S_IMODE(os.stat(tmp_path / "deployments" / "s.json").st_mode) == 0o600


# ---- without systemd ----


@pytest.fixture
def host(tmp_path: Path) -> Iterator[SimulatedHost]:
    with SimulatedHost(tmp_path / "host") as made:
        yield made


def defaults(spec: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: facts.get("default") for name, facts in spec.items()}


def test_without_systemd_it_is_a_detached_process_that_gets_ready_and_is_left_alone(
    host: SimulatedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_start, "SYSTEMD", "/none")
    for name, value in host.reset_environment().items():
        monkeypatch.setenv(name, value)
    model = host.folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "num_attention_heads": 8}))
    own = {
        name: value
        for name, value in host.environment().items()
        if name.startswith(("SIMULATED", "SGLANG", "PYTHON", "GPU_", "HOME", "TMPDIR"))
    }
    params = {
        **defaults(arguments.SERVER_LAUNCH),
        "name": "detached",
        "python": sys.executable,
        "model_path": str(model),
        "port": 30321,
        "api_key": "k3y-of-ours",
        "arguments": {"tp_size": 2},
        "environment": {**own, "SGLANG_STANDIN_SPEED": "10"},
        "working_folder": str(host.folder),
        "scope_folder": str(host.folder),
        "state_folder": str(host.folder / "host-state"),
        "config_folder": str(host.folder / "etc"),
        "log_folder": str(host.folder / "logs"),
        "device_folder": str(host.folder / "dev"),
        "who": "me@here",
    }
    first = server_launch.run(params)
    assert first["restarted"] is True and first["unit"] == "", first
    try:
        health = {
            **defaults(arguments.SERVER_HEALTH),
            "name": "detached",
            "chat_expect": "model",
            "speculation": {},
            "state_folder": params["state_folder"],
            "timeout": 30.0,
        }
        found = server_health.run(health)
        assert found["verdict"] == "ready", found
        assert [step["name"] for step in found["proof"]] == ["health", "chat", "speculation", "memory"]
        again = server_launch.run(params)
        assert (again["changed"], again["pid"]) == (False, first["pid"]), again
        assert server_launch.run({**params, "arguments": {"tp_size": 1}}, check_mode=True)["changed"] is True
        refused = server_launch.run({**params, "arguments": {"tp_size": 1}})
        assert refused["failed"] and "runs outside of its unit" in refused["msg"], refused
        record = deployment.load(params["state_folder"], "detached")
        assert record is not None and (record.verdict, record.who) == ("ready", "me@here")
        assert "k3y" not in json.dumps(record.__dict__) and stat.S_IMODE(os.stat(record.log).st_mode) == 0o600
    finally:
        os.kill(first["pid"], 9)
