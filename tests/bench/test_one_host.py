"""How long a reset of one host takes, against the one-liner it replaces. Run by `make bench`; asserts no timing.

The one-liner runs in the lab host alone, with patterns that match nothing there.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from tests.bench.ratios import alternate, report
from tests.lab.conftest import gpu_host, lab, start_gpu_host  # noqa: F401  (fixtures)
from tests.lab.host import Host
from tests.lab.resets import FAST, reset

pytestmark = pytest.mark.bench
ROUNDS = 7
# In brackets, or pkill ends the very shell that runs this line: its command line holds the pattern.
ONE_LINER = (
    "pkill -f '[n]o-such-server'; sleep 2; pkill -9 -f '[n]o-such-python'; sleep 3;"
    " fuser -k /dev/no-such-device* 2>/dev/null; nvidia-smi | head -2"
)


def test_a_reset_of_a_host_without_a_server(gpu_host: Host, tmp_path: Path) -> None:  # noqa: F811
    def playbook() -> None:
        done = gpu_host.playbook("playbooks/reset.yml", environment={"GPU_ARTIFACTS": str(tmp_path)})
        assert done.returncode == 0, done.stdout + done.stderr

    def warm() -> None:
        gpu_host.ssh("true")

    warm()
    playbook()
    records = []
    seconds = alternate(
        {
            "the one-liner over ssh": lambda: gpu_host.ssh(ONE_LINER, check=False),
            "ansible-playbook playbooks/reset.yml": playbook,
            "the same code over one ssh exec": lambda: records.append(reset(gpu_host)),
            "ssh true": warm,
        },
        ROUNDS,
    )
    phases = {
        phase: round(statistics.median(record["seconds"][phase] for record in records), 4)
        for phase in records[0]["seconds"]
    }
    report("one-host-no-server", seconds, "the one-liner over ssh", seconds_on_the_host=json.dumps(phases))


def test_the_time_from_the_last_exit_to_the_verdict(gpu_host: Host) -> None:  # noqa: F811
    waits = []
    for _ in range(5):
        gpu_host.start_server("--tp-size", "8", settings=FAST).wait_until_ready()
        record = reset(gpu_host, grace=20.0)
        assert record["verdict"] == "clean", record["reason"]
        waits.append(record["seconds"]["last_exit_to_verdict"])
    print(f"\nlast exit to verdict, seconds (the simulated driver's release is 0.15 of them): {sorted(waits)}")
