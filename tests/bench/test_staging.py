"""Staging over links of 100 Mbit/s: one pair against iperf3, eight hosts against one pair. Run by `make bench`.

The links are shaped with tc in both directions, on each host and on its side of the bridge. Prints ratios, and fails
beyond the bounds that the project has set itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.bench.ratios import RESULTS
from tests.lab.conftest import lab, start_gpu_host  # noqa: F401  (fixtures)
from tests.lab.host import Host
from tests.lab.models import make_model, put, shape, stage_models, sums

pytestmark = pytest.mark.bench
MBIT = 100
MIB = int(os.environ.get("BENCH_MODEL_MIB", "512"))
MODEL = "/models/tiny"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny", mib=MIB, shards=8)


def shaped(start_gpu_host: Any, number: int) -> list[Host]:  # noqa: F811
    hosts = [start_gpu_host(f"gpu-{count}") for count in range(1, number + 1)]
    for host in hosts:
        shape(host, MBIT)
    return hosts


def job(host: Host) -> dict[str, Any]:
    return dict(json.loads(host.exec("cat /var/lib/gpu-host/staging/*/status.json").stdout))


def iperf3(receiver: Host, sender: Host) -> float:
    """MiB/s that arrive over ten seconds."""
    receiver.start("iperf3 --server --one-off")
    said = sender.exec(["iperf3", "--client", receiver.address, "--time", "10", "--json"], timeout=40).stdout
    return float(json.loads(said)["end"]["sum_received"]["bits_per_second"]) / 8 / (1 << 20)


def keep(name: str, **facts: object) -> None:
    print(f"\n{name}: " + ", ".join(f"{key} {value}" for key, value in facts.items()))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({"name": name, **facts}, indent=1) + "\n")


def passed_on(origin: Host, takers: Sequence[Host]) -> tuple[float, float]:
    """Seconds until the last of the takers has the model, and how many models the origin has sent."""
    source = {"sglang_model_path": MODEL, "sglang_model_source": f"host:{origin.name}:{MODEL}"}
    done = stage_models(takers, source)
    assert done.returncode == 0, done.stdout
    assert {sums(taker, MODEL) for taker in takers} == {sums(origin, MODEL)}
    return max(job(taker)["seconds"] for taker in takers), job(origin)["sent_bytes"] / (MIB << 20)


def test_one_pair_against_iperf3(start_gpu_host: Any, model: Path) -> None:  # noqa: F811
    origin, taker, other = shaped(start_gpu_host, 3)
    put(origin, model, MODEL)
    link = iperf3(taker, origin)
    taker.write("/root/.ssh/id_ed25519", (taker.lab.folder / "key").read_text(), mode="0600")
    shell = "ssh -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    given = {"models": [{"path": MODEL, "source": f"rsync:root@{origin.address}:{MODEL}"}], "rsync_shell": shell}
    result = taker.ansible("model_staging", {**given, "reserve_mib": 0}, timeout=300)
    assert result["changed"], result
    by_rsync = MIB / job(taker)["seconds"]
    by_swarm = MIB / passed_on(origin, [other])[0]
    rounded = {"rsync_ratio": round(by_rsync / link, 3), "swarm_ratio": round(by_swarm / link, 3)}
    keep("staging-one-pair", iperf3_mib_s=round(link, 2), rsync_mib_s=round(by_rsync, 2), **rounded)
    assert max(rounded.values()) >= 0.9


def test_eight_hosts_against_one_pair(start_gpu_host: Any, model: Path) -> None:  # noqa: F811
    origin, *takers = shaped(start_gpu_host, 8)
    put(origin, model, MODEL)
    single = start_gpu_host("single")
    shape(single, MBIT)
    one, _ = passed_on(origin, [single])
    eight, sent = passed_on(origin, takers)
    keep("staging-eight-hosts", one_s=one, eight_s=eight, ratio=round(eight / one, 3), sent=round(sent, 3), mib=MIB)
    assert sent <= 1.1
    assert eight <= 1.3 * one
