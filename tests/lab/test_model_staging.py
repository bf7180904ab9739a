"""Models between hosts: passed on from one to many, by rsync, with peers that die or send garbage."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pip
import pytest

from tests.lab.command import wait_for
from tests.lab.host import Host
from tests.lab.image import CACHE, REPOSITORY, SYSTEM_PYTHON
from tests.lab.models import make_model, put, shape, stage_models, sums

MODEL = "/models/tiny"
SHARD = "model-00001-of-00004.safetensors"
Start = Callable[..., Host]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny", mib=64)


def job(host: Host) -> dict[str, Any]:
    found = host.exec("cat /var/lib/gpu-host/staging/*/status.json", check=False).stdout
    return dict(json.loads(found)) if found else {}


def is_bad(host: Host, wanted: str) -> bool:
    """Whether a server would find a model there that is not the wanted one."""
    return host.exec(["test", "-e", MODEL], check=False).returncode == 0 and sums(host, MODEL) != wanted


def test_eight_hosts_get_a_model_that_its_origin_sends_about_once(start_gpu_host: Start, model: Path) -> None:
    hosts = [start_gpu_host(f"gpu-{number}") for number in range(1, 9)]
    put(hosts[0], model, "/srv/origin")
    variables = {"sglang_model_path": MODEL, "sglang_model_source": "/srv/origin"}
    done = stage_models(hosts, variables)
    assert done.returncode == 0, done.stdout[-3000:]
    wanted = sums(hosts[0], "/srv/origin")
    assert [sums(host, MODEL) == wanted for host in hosts] == [True] * 8
    # Without limits the two cores that all hosts share decide who sends; over links that are shaped: tests/bench.
    assert 64 << 20 <= job(hosts[0])["sent_bytes"] <= 2 * (64 << 20)
    assert [host.name for host in hosts if host.find("swarm_client")] == []
    again = stage_models(hosts, variables)
    assert again.returncode == 0
    assert re.findall(r"ok=(\d+) +changed=(\d+)", again.stdout) == [("1", "0")] * 8, again.stdout


def test_check_mode_says_who_would_take_it_from_whom_and_starts_nothing(start_gpu_host: Start, model: Path) -> None:
    hosts = [start_gpu_host(f"gpu-{number}") for number in (1, 2)]
    put(hosts[0], model, "/srv/origin")
    variables = {"sglang_model_path": MODEL, "sglang_model_source": "/srv/origin"}
    done = stage_models(hosts, variables, "--check", "--diff")
    assert done.returncode == 0, done.stdout
    assert "/models/tiny: missing" in done.stdout and "/models/tiny from gpu-1" in done.stdout
    assert [host.exec("ls /models", check=False).returncode for host in hosts] != [0, 0]
    assert [host.name for host in hosts if host.find("swarm_client")] == []


def test_a_host_of_the_inventory_can_be_the_source(start_gpu_host: Start, model: Path) -> None:
    origin, taker = start_gpu_host("gpu-1"), start_gpu_host("gpu-2")
    put(origin, model, "/srv/by-hand")
    variables = {"sglang_model_path": MODEL, "sglang_model_source": "host:gpu-1:/srv/by-hand"}
    done = stage_models([taker], variables)
    assert done.returncode == 0, done.stdout
    assert sums(taker, MODEL) == sums(origin, "/srv/by-hand")
    assert "ok=1 " in stage_models([taker], variables).stdout


def test_an_origin_that_dies_half_way_spoils_nothing_and_a_second_run_completes(
    start_gpu_host: Start, model: Path
) -> None:
    hosts = [start_gpu_host(f"gpu-{number}") for number in range(1, 5)]
    put(hosts[0], model, MODEL)
    wanted = sums(hosts[0], MODEL)
    shape(hosts[0], 60)
    variables = {
        "sglang_model_path": MODEL,
        "sglang_model_source": f"host:gpu-1:{MODEL}",
        "model_staging_stall": 8,
        "model_staging_attempts": 1,
    }

    def kill_the_origin() -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if job(hosts[0]).get("sent_bytes", 0) > 10 << 20:
                for process in hosts[0].find("swarm_client-seed"):
                    hosts[0].kill(process.pid)
                return
            time.sleep(0.1)

    killer = threading.Thread(target=kill_the_origin)
    killer.start()
    done = stage_models(hosts[1:], variables)
    killer.join()
    assert done.returncode != 0 and "run again to go on" in done.stdout, done.stdout
    assert not [host.name for host in hosts[1:] if is_bad(host, wanted)]
    there = [job(host).get("bytes", 0) for host in hosts[1:]]
    assert all(there), there
    done = stage_models(hosts[1:], variables)
    assert done.returncode == 0, done.stdout
    assert [sums(host, MODEL) == wanted for host in hosts[1:]] == [True] * 3


def test_a_peer_that_sends_garbage_never_makes_a_bad_shard(start_gpu_host: Start, model: Path) -> None:
    origin, liar, taker = (start_gpu_host(f"gpu-{number}") for number in (1, 2, 3))
    put(origin, model, MODEL)
    put(liar, model, MODEL)
    wanted = sums(origin, MODEL)
    swarm = {"peers": [[liar.address, 6881], [taker.address, 6881]], "port": 6881, "idle": 120}
    models = [{"path": MODEL}]
    offer = origin.ansible("model_staging", {"models": models, "phase": "seed", "swarm": swarm})
    assert "torrent" in offer, offer
    # It takes part as a host whose copy is whole, and then its disk goes bad.
    put(liar, Path(__file__).parents[2] / "module_utils" / "gpu_host", "/root/programs")
    liar.write("/root/torrent.b64", str(offer["torrent"]))
    liar.exec("base64 -d /root/torrent.b64 > /root/torrent")
    request = {
        "do": "fetch", "folder": MODEL, "torrent": "/root/torrent", "answer": "/root/answer", "port": 6881, "idle": 120,
        "stop": "/root/stop", "rank": 0, "of": 1, "peers": [[taker.address, 6881]],
    }  # fmt: skip
    liar.write("/root/request.json", json.dumps(request))
    liar.start("python3 /root/programs/swarm_client.py /root/request.json")
    end = time.monotonic() + 30
    while '"complete": true' not in liar.exec("cat /root/answer", check=False).stdout:
        assert time.monotonic() < end
        time.sleep(0.2)
    # Every second megabyte of its shards is garbage now, in place.
    liar.exec(
        f"for f in {MODEL}/*.safetensors; do for at in 1 3 5 7 9 11 13 15; do "
        'dd if=/dev/urandom of="$f" bs=1M seek=$at count=1 conv=notrunc status=none; done; done'
    )
    shape(origin, 40)
    swarm = {"peers": [[origin.address, 6881], [liar.address, 6881]], "port": 6881, "idle": 120}
    swarm |= {"torrent": offer["torrent"], "listing": offer["listing"]}
    given = {"models": [{"path": MODEL, "source": "host:gpu-1"}], "swarm": swarm, "reserve_mib": 0}
    result = taker.ansible("model_staging", given, timeout=200)
    assert not result.get("failed"), result
    assert job(taker)["pieces_refused"] > 0
    assert sums(taker, MODEL) == wanted != sums(liar, MODEL)


def test_rsync_over_ssh_brings_a_model_from_another_host(start_gpu_host: Start, model: Path) -> None:
    origin, taker = start_gpu_host("gpu-1"), start_gpu_host("gpu-2")
    put(origin, model, "/srv/origin")
    taker.write("/root/.ssh/id_ed25519", (taker.lab.folder / "key").read_text(), mode="0600")
    variables = {
        "sglang_model_path": MODEL,
        "sglang_model_source": f"rsync:root@{origin.address}:/srv/origin",
        "model_staging_rsync_shell": "ssh -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null",
    }
    done = stage_models([taker], variables)
    assert done.returncode == 0, done.stdout
    assert sums(taker, MODEL) == sums(origin, "/srv/origin")


def test_a_play_that_is_killed_leaves_the_staging_going_and_the_next_run_follows_it(
    start_gpu_host: Start, model: Path
) -> None:
    origin, taker = start_gpu_host("gpu-1"), start_gpu_host("gpu-2")
    put(origin, model, "/srv/origin")
    shape(origin, 60)
    taker.write("/root/.ssh/id_ed25519", (taker.lab.folder / "key").read_text(), mode="0600")
    shell = "ssh -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    source = f"rsync:root@{origin.address}:/srv/origin"
    given = {"models": [{"path": MODEL, "source": source}], "rsync_shell": shell, "reserve_mib": 0}
    inventory = taker.lab.write_inventory()
    words = ["ansible", "gpu-2", "-i", str(inventory), "-m", "model_staging", "-a", json.dumps(given)]
    taker.lab.check_no_way_out(taker.address)
    play = subprocess.Popen(
        taker.lab.enter(words), env={**taker.lab.ansible_environment(), "HOME": "/root"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    end = time.monotonic() + 40
    while job(taker).get("phase") != "fetching":
        assert time.monotonic() < end and play.poll() is None
        time.sleep(0.1)
    play.kill()
    play.wait()
    pid = job(taker)["pid"]
    result = taker.ansible("model_staging", given)
    assert result["changed"] and not result.get("failed"), result
    assert job(taker)["pid"] == pid
    assert sums(taker, MODEL) == sums(origin, "/srv/origin")


# ---- a hub, and what fetches from it ----

SERVER_PYTHON = "/opt/sglang/venv/bin/python"
HUB = """
import sys, time
sys.path.insert(0, "/srv/hub")
from pathlib import Path
from hub_double import Hub
with Hub(Path("/srv/origin"), xet="works") as hub:
    Path("/srv/hub/url").write_text(hub.url)
    time.sleep(3600)
"""


@pytest.fixture(scope="module")
def hub_wheels() -> Path:
    """huggingface_hub and what it needs, as wheels for a lab host; a network is needed the first time only."""
    folder = CACHE / f"hub-wheels-{version('huggingface_hub')}"
    if not (folder / ".complete").exists():
        platforms = [f"--platform={name}_x86_64" for name in ("manylinux2014", "manylinux_2_17", "manylinux_2_28")]
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", str(folder)]
        words += [f"--python-version={SYSTEM_PYTHON}", *platforms, f"huggingface_hub=={version('huggingface_hub')}"]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"needs the wheels of huggingface_hub once: {done.stderr.strip().splitlines()[-1:]}")
        (folder / ".complete").touch()
    return folder


def test_a_bare_host_installs_its_downloader_from_a_folder_of_wheels_and_a_second_run_installs_nothing(
    start_gpu_host: Start, hub_wheels: Path, tmp_path: Path
) -> None:
    host = start_gpu_host("gpu-1")
    # A plain python3, without venv's pip; the server's Python has one, and there is no network.
    host.exec(["python3", "-m", "venv", "--without-pip", "/opt/sglang/venv"])
    put(host, Path(pip.__file__).parent, "/opt/sglang/venv/lib/python3.11/site-packages/pip")
    put(host, make_model(tmp_path / "tiny", mib=4), "/srv/origin")
    host.write("/srv/hub/hub_double.py", (REPOSITORY / "tests/hub_double.py").read_text(encoding="utf-8"))
    host.write("/srv/hub/serve.py", HUB)
    host.start("python3 /srv/hub/serve.py")
    wait_for(lambda: bool(host.exec("cat /srv/hub/url", check=False).stdout), "the hub", time.monotonic() + 20)
    variables = {
        "sglang_python": SERVER_PYTHON,
        "sglang_model_path": MODEL,
        "sglang_model_source": "hf:acme/tiny@main",
        "model_staging_endpoint": host.read("/srv/hub/url"),
        "model_staging_install": True,
    }
    refused = stage_models([host], {**variables, "model_staging_pip_options": ["--no-index"]})
    assert refused.returncode != 0
    said = " ".join(refused.stdout.split())
    assert "huggingface_hub>=1.0 can't be installed into /opt/gpu-host/staging on gpu-1: ERROR: No matching" in said
    put(host, hub_wheels, "/srv/wheels")
    # As a site without a network says it for every pip of the host.
    host.write("/etc/pip.conf", "[global]\nno-index = true\nfind-links = /srv/wheels\n")
    done = stage_models([host], variables)
    assert done.returncode == 0, done.stdout
    assert sums(host, MODEL) == sums(host, "/srv/origin")
    assert host.exec(["/opt/gpu-host/staging/bin/python", "-c", "import huggingface_hub, hf_xet"]).returncode == 0
    assert host.exec([SERVER_PYTHON, "-c", "import huggingface_hub"], check=False).returncode != 0
    when = host.exec("stat -c %Y /opt/gpu-host/staging/lib/python3.11/site-packages").stdout
    again = stage_models([host], variables)
    assert "ok=1 " in again.stdout and "changed=0" in again.stdout, again.stdout
    # Another model needs a downloader too, and finds it.
    host.exec(["rm", "-r", MODEL, "/srv/wheels"])
    another = stage_models([host], variables)
    assert another.returncode == 0, another.stdout
    assert sums(host, MODEL) == sums(host, "/srv/origin")
    assert host.exec("stat -c %Y /opt/gpu-host/staging/lib/python3.11/site-packages").stdout == when
