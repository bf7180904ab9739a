"""The NCCL profiles: what is refused before anything is changed, and what is written."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from gpu_host import arguments, nccl_environment

from .test_control_arguments import without_description

ROOT = Path(__file__).resolve().parent.parent.parent
ROLE = ROOT / "roles/nccl_env"


def params(path: str | Path = "/etc/sglang/nccl.env", **given) -> dict:
    defaults = {name: option["default"] for name, option in arguments.NCCL_ENVIRONMENT.items()}
    return {**defaults, "path": str(path), **given}


def problems(variables: dict | None = None, **given) -> list[str]:
    return nccl_environment.problems(params(profile=given.pop("profile", "plain"), variables=variables or {}, **given))


# ---------------------------------------------------------------- profiles


@pytest.mark.parametrize("profile", nccl_environment.PROFILES)
def test_every_profile_passes_its_own_checks(profile):
    assert problems(profile=profile) == []


def test_the_latency_profile_is_that_of_the_original_host():
    assert nccl_environment.rendered("latency", nccl_environment.merged(params(profile="latency"))).splitlines()[
        1:
    ] == [
        "NCCL_ALGO=Ring",
        "NCCL_BUFFSIZE=16777216",
        "NCCL_MAX_NCHANNELS=16",
        "NCCL_NTHREADS=512",
        "NCCL_P2P_LEVEL=SYS",
        "NCCL_PROTO=LL",
    ]


def test_a_host_goes_over_its_group_and_both_over_all_and_a_null_takes_away():
    given = params(
        profile="latency",
        variables={"NCCL_DEBUG": "WARN", "NCCL_NTHREADS": 256, "NCCL_IB_DISABLE": True},
        group_variables={"NCCL_NTHREADS": 128, "NCCL_PROTO": None},
        host_variables={"NCCL_NTHREADS": 64, "NCCL_DEBUG": None},
    )
    merged = nccl_environment.merged(given)
    assert merged["NCCL_NTHREADS"] == "64" and merged["NCCL_IB_DISABLE"] == "1"
    assert "NCCL_PROTO" not in merged and "NCCL_DEBUG" not in merged
    assert nccl_environment.problems(given) == []


# ---------------------------------------------------------------- names and values


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"NCCL_P2P_LEVL": "SYS"}, "NCCL knows no NCCL_P2P_LEVL and would ignore it; was NCCL_P2P_LEVEL"),
        ({"NCCL_MAX_NCHANELS": 16}, "was NCCL_MAX_NCHANNELS or"),
        ({"NCCL_ZZZZZZ": 1}, "NCCL knows no NCCL_ZZZZZZ and would ignore it."),
        ({"OMP_NUM_THREADS": 8}, "OMP_NUM_THREADS is no NCCL variable; give it in sglang_environment."),
        ({"NCLL_PROTO": "LL"}, "(or was NCCL_PROTO meant?)"),
        ({"NCCL_P2P_LEVEL": "NODE"}, "'NODE' must be one of LOC, NVL, PIX, PXB, PHB, SYS (or 0 to 9)"),
        ({"NCCL_P2P_LEVEL": "sys"}, "must be one of LOC"),
        ({"NCCL_P2P_LEVEL": -1}, "must be one of LOC"),
        ({"NCCL_NET_GDR_LEVEL": "NVL"}, "must be one of LOC, PIX"),
        ({"NCCL_NTHREADS": 500}, "'500' must be one of 64, 128, 256, 512"),
        ({"NCCL_BUFFSIZE": 16000000}, "must be a power of two, in bytes"),
        ({"NCCL_BUFFSIZE": "16M"}, "must be a power of two, in bytes"),
        ({"NCCL_BUFFSIZE": 0}, "must be a power of two, in bytes"),
        ({"NCCL_MAX_NCHANNELS": 0}, "must be an integer from 1 on"),
        ({"NCCL_MIN_CTAS": 65}, "must be an integer from 1 to 64"),
        ({"NCCL_MAX_CTAS": "many"}, "must be an integer from 1 to 64"),
        ({"NCCL_IB_TIMEOUT": 32}, "must be an integer from 0 to 31"),
        ({"NCCL_P2P_DISABLE": "yes"}, "must be one of 0, 1"),
        ({"NCCL_ALGO": "Rings"}, "must be a list of Ring, Tree"),
        ({"NCCL_ALGO": "ring;tree"}, "must be a list of Ring, Tree"),
        ({"NCCL_ALGO": "allsum:ring"}, "lists by function (allgather, allreduce"),
        ({"NCCL_ALGO": "ring,^tree"}, "must be a list of Ring, Tree"),
        ({"NCCL_PROTO": "LL,Fast"}, "must be a list of LL, LL128, Simple"),
        ({"NCCL_DEBUG": "DEBUG"}, "must be one of VERSION, WARN"),
        ({"NCCL_DEBUG_SUBSYS": "INIT,EVERYTHING"}, "must be a list of INIT"),
        ({"NCCL_DEBUG_FILE": "nccl.log"}, "must be an absolute path"),
        ({"NCCL_RAS_ADDR": "localhost"}, "must be host:port"),
        ({"NCCL_RAS_TIMEOUT_FACTOR": "0.0"}, "must be a number above 0"),
        ({"NCCL_LL_THRESHOLD": 1}, "NCCL_LL_THRESHOLD does nothing since NCCL 2.5; use NCCL_PROTO."),
        ({"NCCL_PSK": "x" * 32}, "is a secret and this file is readable by all"),
        ({"NCCL_DEBUG": "WARN\nLD_PRELOAD=/tmp/x.so"}, "can't stand in an environment file"),
        ({"NCCL_SOCKET_IFNAME": "$(id)"}, "can't stand in an environment file"),
        ({"NCCL_SOCKET_IFNAME": ""}, "can't stand in an environment file"),
        ({"NCCL ALGO": "Ring"}, "'NCCL ALGO' is no name of an environment variable."),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else "",
)
def test_a_wrong_name_or_value_is_refused_in_one_sentence(variables, sentence):
    found = problems(variables)
    assert len(found) == 1 and sentence in found[0], found


@pytest.mark.parametrize(
    "variables",
    [
        {"NCCL_P2P_LEVEL": 4},
        {"NCCL_ALGO": "ring,collnetdirect;allreduce:tree,collnetdirect;broadcast:ring"},
        {"NCCL_ALGO": "allreduce:^tree"},
        {"NCCL_ALGO": "allreduce:tree"},
        {"NCCL_ALGO": "^NVLS,NVLSTree"},
        {"NCCL_PROTO": "^LL128"},
        {"NCCL_PROTO": "LL,Simple;allgather:simple"},
        {"NCCL_SOCKET_IFNAME": "=eth0,eth1", "NCCL_IB_HCA": "^=mlx5_1,mlx5_4"},
        {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "^COLL", "NCCL_DEBUG_FILE": "/var/log/nccl.%h.%p"},
        {"NCCL_DEBUG_TIMESTAMP_FORMAT": "[%F_%T]"},
        {"NCCL_RAS_ADDR": "[::1]:28028", "NCCL_RAS_TIMEOUT_FACTOR": "0.5"},
        {"NCCL_GRAPH_FILE": "/etc/sglang/nccl_graph_opt.xml", "NCCL_MIN_NCHANNELS": 8},
        {"NCCL_CTA_POLICY": "EFFICIENCY|ZERO", "NCCL_NETDEVS_POLICY": "MAX:2"},
        {"NCCL_MIN_NCHANNELS": 16, "NCCL_MAX_NCHANNELS": 16},
    ],
    ids=str,
)
def test_what_nccls_documentation_shows_is_accepted(variables):
    assert problems(variables) == []


def test_a_variable_of_a_newer_nccl_is_taken_when_it_is_named_as_unchecked():
    assert "nccl_env_unchecked" in problems({"NCCL_NEW_THING": "x"})[0]
    assert problems({"NCCL_NEW_THING": "x"}, unchecked=["NCCL_NEW_THING"]) == []
    assert problems({"NCCL_NEW_THING": "a b"}, unchecked=["NCCL_NEW_THING"]) != []


def test_the_path_is_an_absolute_file():
    for path in ("nccl.env", "/etc/../nccl.env", "/etc/sglang/", ""):
        assert "is no absolute path of a file" in problems(path=path)[0]


# ---------------------------------------------------------------- conflicts


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"variables": {"NCCL_P2P_DISABLE": 1}, "profile": "latency"}, "switches off what NCCL_P2P_LEVEL=SYS asks for"),
        ({"variables": {"NCCL_P2P_DISABLE": 1, "NCCL_SHM_DISABLE": 1}}, "would talk over the network"),
        ({"variables": {"NCCL_P2P_LEVEL": "LOC", "NCCL_SHM_DISABLE": 1}}, "would talk over the network"),
        ({"variables": {"NCCL_MIN_NCHANNELS": 32}, "profile": "latency"}, "NCCL_MIN_NCHANNELS=32 is above"),
        ({"variables": {"NCCL_MIN_CTAS": 8, "NCCL_MAX_CTAS": 4}}, "NCCL_MIN_CTAS=8 is above NCCL_MAX_CTAS=4"),
        ({"variables": {"NCCL_SOCKET_NTHREADS": 16, "NCCL_NSOCKS_PERTHREAD": 8}}, "must not exceed 64"),
        (
            {"variables": {"NCCL_NVLS_ENABLE": 1, "NCCL_CUMEM_ENABLE": 0}},
            "NCCL_NVLS_ENABLE=1 needs NCCL_CUMEM_ENABLE=1",
        ),
        ({"variables": {"NCCL_MNNVL_ENABLE": 1, "NCCL_CUMEM_ENABLE": 0}}, "NCCL_MNNVL_ENABLE=1 needs"),
        (
            {"variables": {"NCCL_CUMEM_ENABLE": 0}, "server_arguments": {"enable_symm_mem": True}},
            "enable_symm_mem needs NCCL_CUMEM_ENABLE=1",
        ),
        (
            {"variables": {"NCCL_NVLS_ENABLE": 0}, "server_arguments": {"enable_nccl_nvls": True}},
            "enable_nccl_nvls makes SGLang set NCCL_NVLS_ENABLE=1",
        ),
        ({"variables": {"NCCL_ALGO": "Tree"}}, "leaves no algorithm for allgather, broadcast, reduce, reducescatter"),
        ({"variables": {"NCCL_ALGO": "allreduce:NVLS"}}, "asks for NVLS, which needs NVSwitch"),
        ({"variables": {"NCCL_PROTO": "LL,LL128,Simple"}}, "can corrupt data"),
        (
            {"profile": "latency", "server_arguments": {"enable_deterministic_inference": True}},
            "makes SGLang set NCCL_ALGO itself",
        ),
        (
            {"variables": {"NCCL_GRAPH_STREAM_ORDERING": 0, "NCCL_GRAPH_MIXING_SUPPORT": 1}},
            "is not supported together with",
        ),
        (
            {"server_environment": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True"}},
            "PYTORCH_CUDA_ALLOC_CONF has expandable_segments, whose memory the custom all-reduce can't share",
        ),
        (
            {"server_environment": {"PYTORCH_ALLOC_CONF": "expandable_segments:true"}},
            "PYTORCH_ALLOC_CONF has expandable",
        ),
        (
            {"profile": "latency", "server_environment": {"NCCL_PROTO": "Simple"}},
            "NCCL_PROTO is LL here and Simple in sglang_environment; say it once.",
        ),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together_are_refused_in_one_sentence(given, sentence):
    found = problems(**{"profile": "plain", **given})
    assert len(found) == 1 and sentence in found[0], found


@pytest.mark.parametrize(
    "given",
    [
        {"variables": {"NCCL_P2P_DISABLE": 1, "NCCL_P2P_LEVEL": None}, "profile": "latency"},
        {"variables": {"NCCL_P2P_DISABLE": 0}, "profile": "latency"},
        {"variables": {"NCCL_NVLS_ENABLE": 1}},
        {"variables": {"NCCL_ALGO": "allreduce:NVLS", "NCCL_NVLS_ENABLE": 1}},
        {"variables": {"NCCL_PROTO": "LL128"}, "unchecked": ["NCCL_PROTO"]},
        {
            "server_environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            "server_arguments": {"disable_custom_all_reduce": True},
        },
        {"server_environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}},
        {"profile": "latency", "server_environment": {"NCCL_PROTO": "LL"}},
    ],
    ids=str,
)
def test_what_only_looks_like_a_conflict_is_accepted(given):
    assert problems(**{"profile": "plain", **given}) == []


# ---------------------------------------------------------------- the file


def test_the_file_is_written_once_and_left_alone_after_that(tmp_path):
    path = tmp_path / "etc/sglang/nccl.env"
    first = nccl_environment.run(params(path, profile="latency"))
    assert first["changed"] and not first["backup"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644 and stat.S_IMODE(path.parent.stat().st_mode) == 0o755
    before = path.stat()
    second = nccl_environment.run(params(path, profile="latency"))
    assert (
        not second["changed"] and path.stat().st_mtime_ns == before.st_mtime_ns and path.stat().st_ino == before.st_ino
    )
    assert os.listdir(path.parent) == ["nccl.env"]


def test_a_change_keeps_what_was_there(tmp_path):
    path = tmp_path / "nccl.env"
    path.write_text("NCCL_PROTO=LL # by hand\n")
    result = nccl_environment.run(params(path, profile="throughput"), diff=True)
    assert result["changed"] and Path(result["backup"]).read_text() == "NCCL_PROTO=LL # by hand\n"
    assert result["backup"].startswith(f"{path}.20") and result["backup"].endswith("~")
    assert result["diff"]["before"] == "NCCL_PROTO=LL # by hand\n" and result["diff"]["after"] == path.read_text()


def test_a_closed_mode_alone_is_opened_without_a_backup(tmp_path):
    path = tmp_path / "nccl.env"
    nccl_environment.run(params(path))
    path.chmod(0o600)
    result = nccl_environment.run(params(path))
    assert result["changed"] and not result["backup"] and stat.S_IMODE(path.stat().st_mode) == 0o644


def test_check_mode_tells_the_truth_and_writes_nothing(tmp_path):
    path = tmp_path / "new/nccl.env"
    result = nccl_environment.run(params(path, profile="latency"), check_mode=True, diff=True)
    assert result["changed"] and "NCCL_PROTO=LL" in result["diff"]["after"] and not path.parent.exists()
    nccl_environment.run(params(path, profile="latency"))
    assert not nccl_environment.run(params(path, profile="latency"), check_mode=True)["changed"]


def test_a_link_in_its_place_is_refused_in_one_sentence(tmp_path):
    path = tmp_path / "nccl.env"
    path.symlink_to("/etc/passwd")
    result = nccl_environment.run(params(path))
    assert result["failed"] and not result["changed"]
    assert result["msg"] == f"{path} can't be written: it is no plain file; move it away."


def test_a_shell_reads_the_file_as_a_unit_does(tmp_path):
    path = tmp_path / "nccl.env"
    wanted = {
        "NCCL_ALGO": "ring,collnetdirect;allreduce:tree",
        "NCCL_IB_HCA": "^=mlx5_1",
        "NCCL_DEBUG_FILE": "/x/%h.%p",
    }
    nccl_environment.run(params(path, profile="plain", variables=wanted))
    # As systemd does: comments and NAME=VALUE lines, quotes and backslashes aside (there are none).
    lines = [line.partition("=") for line in path.read_text().splitlines() if not line.startswith("#")]
    assert {name: value for name, _, value in lines} == wanted
    assert not set("\"'\\$` ") & set("".join(value for _, _, value in lines))


# ---------------------------------------------------------------- the role


def test_the_role_is_one_task_that_hands_every_argument_on():
    tasks = yaml.safe_load((ROLE / "tasks/main.yml").read_text())
    assert len(tasks) == 1
    by_server = {"server_environment": "sglang_environment", "server_arguments": "sglang_arguments"}
    expected = {
        name: f"{{{{ {by_server[name]} | default({{}}) }}}}" if name in by_server else f"{{{{ nccl_env_{name} }}}}"
        for name in arguments.NCCL_ENVIRONMENT
    }
    assert tasks[0]["nccl_environment"] == expected
    specified = yaml.safe_load((ROLE / "meta/argument_specs.yml").read_text())["argument_specs"]["main"]["options"]
    assert {name: without_description(option) for name, option in specified.items()} == {
        f"nccl_env_{name}": without_description(option)
        for name, option in arguments.NCCL_ENVIRONMENT.items()
        if name not in by_server
    }


def play(tmp_path: Path, *more: str, **variables) -> subprocess.CompletedProcess:
    book = tmp_path / "play.yml"
    book.write_text(yaml.safe_dump([{"hosts": "all", "roles": ["nccl_env"]}]))
    settings = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "nccl_env_path": str(tmp_path / "nccl.env"),
        **variables,
    }
    command = ["ansible-playbook", "-i", "gpu01,", "-e", yaml.safe_dump(settings, default_flow_style=True, width=9999)]
    environment = {**os.environ, "GPU_ARTIFACTS": str(tmp_path / "artifacts"), "ANSIBLE_NOCOLOR": "1"}
    return subprocess.run(
        [*command, *more, str(book)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )


def test_a_play_writes_the_file_and_changes_nothing_the_second_time(tmp_path):
    first, second = play(tmp_path), play(tmp_path)
    assert "changed=1" in first.stdout, first.stdout + first.stderr
    assert "changed=0" in second.stdout and second.returncode == 0
    assert "NCCL_PROTO=LL" in (tmp_path / "nccl.env").read_text()


def test_a_play_shows_the_difference_and_writes_nothing_in_check_mode(tmp_path):
    done = play(tmp_path, "--check", "--diff", nccl_env_profile="throughput")
    assert "+NCCL_P2P_DISABLE=1" in done.stdout and "changed=1" in done.stdout
    assert not (tmp_path / "nccl.env").exists()


def test_a_play_with_an_unknown_variable_is_refused_before_the_host_is_touched(tmp_path):
    done = play(tmp_path, nccl_env_variables={"NCCL_P2P_LEVL": "SYS"}, ansible_python_interpreter="/nonexistent")
    assert done.returncode == 2
    assert "Nothing was done. NCCL knows no NCCL_P2P_LEVL and would ignore it; was NCCL_P2P_LEVEL" in done.stdout
    assert not (tmp_path / "nccl.env").exists()
