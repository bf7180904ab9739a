"""A deployment with every part on: host and plan checked, models brought, the server followed until it is ready."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lab.host import Host
from tests.lab.image import REPOSITORY
from tests.lab.models import put, sums
from tests.lab.server import STANDIN
from tests.lab.test_deploy import Deployed, Target
from tests.unit.model_folders import MODELS, write_drafter, write_target

PYTHON = "/opt/sglang/venv/bin/python"
PACKAGES = {
    "sglang": "0.5.23",
    "torch": "2.14.1+cu130",
    "sglang-kernel": "0.4.10",
    "flashinfer-python": "0.7.2",
    "flashinfer-cubin": "0.7.2",
}
NVCC = "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n"
# What a lab host lacks: 4 GiB of memory and 64 MiB of /dev/shm for each of 8 GPUs, and compiled kernels.
LACKING = ["ram_small", "shm_small", "kernel_missing"]
SHARD = "target/model-00002-of-00003.safetensors"


class Whole(Target):
    """A host with a Python for the server, and with the models where they come from, not yet where they go."""

    def __init__(self, host: Host, models: Path) -> None:
        self.host = host
        program = REPOSITORY / "molecule/shared/files/make_server_python.py"
        host.write("/root/make_server_python.py", program.read_text(encoding="utf-8"))
        host.exec(["python3", "/root/make_server_python.py", "/opt/sglang/venv", json.dumps(PACKAGES)])
        host.write("/usr/local/cuda/bin/nvcc", NVCC, "0755")
        put(host, models, "/srv/models")

    def variables(self, settings: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        given = super().variables(settings)
        del given["deploy_preflight"], given["deploy_model_staging"]
        # The stand-in's own packages, and setproctitle, which the host has for its system's Python alone.
        imports = f"{STANDIN}:/usr/local/lib/python3.11/dist-packages"
        return {
            **given,
            "sglang_python": PYTHON,
            "sglang_model_path": "/models/target",
            "sglang_model_source": "/srv/models/target",
            "sglang_drafter_path": "/models/drafter",
            "sglang_drafter_source": "/srv/models/drafter",
            "sglang_environment": given["sglang_environment"] | {"PYTHONPATH": imports},
            "nccl_env_profile": "latency",
            "preflight_skip": LACKING,
            **more,
        }

    def play(self, playbook: str, **more: Any) -> Deployed:
        done = self.host.playbook(f"playbooks/{playbook}.yml", self.variables(**more))
        return Deployed(done.returncode, done.stdout + done.stderr, 0)

    def starts(self) -> tuple[int, str]:
        """The server's main process, and when its unit was started last."""
        words = ["systemctl", "show", "--property=ActiveEnterTimestampMonotonic", "--value", "sglang"]
        return self.main_pid(), self.host.exec(words).stdout.strip()

    def is_untouched(self) -> bool:
        """Whether no server was installed or started."""
        unit = self.host.exec("ls /etc/systemd/system/sglang.service", check=False)
        return unit.returncode != 0 and not self.host.find("sglang.launch_server")

    def has_model(self) -> bool:
        return self.host.exec(["test", "-e", "/models/target"], check=False).returncode == 0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    target = MODELS["tiny_target"]
    write_target(folder / "target", config=target)
    length = {"max_position_embeddings": target["max_position_embeddings"]}
    write_drafter(folder / "drafter", MODELS["tiny_drafter"] | length)
    return folder


@pytest.fixture(autouse=True)
def artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPU_ARTIFACTS", str(tmp_path))
    return tmp_path


@pytest.fixture
def whole(gpu_host: Host, models: Path) -> Whole:
    return Whole(gpu_host, models)


def reports(artifacts: Path) -> dict[str, dict[str, Any]]:
    """What preflight reported, by part."""
    found = (artifacts / "preflight").glob("*.json")
    return {path.stem.rpartition("-")[2]: json.loads(path.read_text(encoding="utf-8")) for path in found}


def test_a_bare_host_gets_all_parts_and_a_second_run_changes_and_restarts_nothing(
    whole: Whole, artifacts: Path
) -> None:
    first = whole.deploy()
    assert first.status == 0, first.output
    checked = reports(artifacts)
    assert set(checked) == {"host", "plan"}
    for report in checked.values():
        assert [row for row in report["findings"] if row["severity"] in ("error", "warning")] == []
    assert "kernel_missing" in [row["code"] for row in checked["plan"]["switched_off"]]
    for name in ("target", "drafter"):
        assert sums(whole.host, f"/models/{name}") == sums(whole.host, f"/srv/models/{name}")
    assert "NCCL_PROTO=LL" in whole.host.exec(["cat", f"/proc/{whole.main_pid()}/environ"]).stdout.split("\0")
    assert whole.deployment()["verdict"] == "ready"
    before = whole.starts()
    again = whole.deploy()
    assert (again.status, again.changed, whole.starts()) == (0, 0, before), again.output
    assert again.tasks == 7 - 1 + 1  # of the 7 that docs/deploy.md tells, not sgl_kernel; and the control node's own
    # A look at the host with its server on it: neither its port nor its memory is held against it.
    looked = whole.play("check-host", check_plan=True)
    assert (looked.status, looked.changed, whole.starts()) == (0, 0, before), looked.output
    staged = whole.play("stage-models")
    assert (staged.status, staged.changed, whole.starts()) == (0, 0, before), staged.output


def test_check_mode_on_a_bare_host_passes_and_stages_and_starts_nothing(whole: Whole) -> None:
    predicted = whole.deploy("eagle3", "--check", "--diff")
    assert predicted.status == 0, predicted.output
    assert whole.is_untouched() and not whole.has_model()


def test_the_kernel_package_of_the_default_is_refused_in_one_sentence_where_it_can_not_be_installed(
    whole: Whole,
) -> None:
    done = whole.deploy(deploy_sgl_kernel=True)
    assert done.status != 0
    assert done.says(f"{PYTHON} has no pip; install it: {PYTHON} -m ensurepip"), done.output
    assert whole.is_untouched() and not whole.has_model()


def test_a_truncated_shard_at_the_source_is_refused_before_anything_is_launched(whole: Whole) -> None:
    whole.host.exec(["truncate", "--size=-64", f"/srv/models/{SHARD}"])
    done = whole.deploy()
    assert done.status != 0
    sentence = "/srv/models/target was fetched twice and is damaged at its source: The shard"
    assert done.says(f"{sentence} {Path(SHARD).name} is truncated: 1369 of 1433 bytes."), done.output
    assert done.says("Mend it there, then stage it again."), done.output
    assert whole.is_untouched() and not whole.has_model()


def test_another_algorithm_than_the_drafters_is_refused_by_preflight_before_anything_is_launched(
    whole: Whole, artifacts: Path
) -> None:
    wrong = {"algorithm": "EAGLE", "num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4}
    done = whole.deploy(sglang_speculation=wrong)
    assert done.status != 0
    sentence = "The algorithm is EAGLE, the drafter is for EAGLE-3 (LlamaForCausalLMEagle3)"
    assert done.says(f"{sentence}: it would serve and accept nothing. Set the algorithm to EAGLE3."), done.output
    errors = [row["code"] for row in reports(artifacts)["plan"]["findings"] if row["severity"] == "error"]
    assert errors == ["algorithm_differs"]
    assert whole.is_untouched()


def test_models_are_staged_and_the_host_is_checked_without_a_deployment(whole: Whole) -> None:
    staged = whole.play("stage-models")
    assert staged.status == 0 and whole.has_model(), staged.output
    again = whole.play("stage-models")
    assert (again.status, again.changed) == (0, 0), again.output
    looked = whole.play("check-host", check_plan=True)
    assert (looked.status, looked.changed) == (0, 0), looked.output
    refused = whole.play("check-host", preflight_skip=[], preflight_min_shm_free_mib=2**20)
    assert refused.status != 0 and refused.says("/dev/shm has"), refused.output
    assert whole.is_untouched()
