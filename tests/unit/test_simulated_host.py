"""The simulated host stands as its scenario says, and `stop` ends what it started and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from simulator import scenarios
from simulator.__main__ import main
from simulator.host import HostError, SimulatedHost, start_ticks, wait_gone


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedHost]:
    host = SimulatedHost(tmp_path_factory.mktemp("hung"))
    scenarios.start(host, "hung")
    yield host
    host.stop()


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[SimulatedHost]:
    with SimulatedHost(tmp_path / "bare") as host:
        yield host


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_the_hung_scenario_has_a_stopped_scheduler_and_orphans_of_both_kinds(hung: SimulatedHost) -> None:
    lines = hung.processes()
    assert [line for pid, line in lines.items() if state_of(pid) == "T"] == ["sglang::scheduler_TP3"]
    orphans = [line for pid, line in lines.items() if parent_of(pid) not in lines and " -m sglang" not in line]
    assert sum("multiprocessing.spawn import" in line for line in orphans) == 3
    assert sorted(line for line in orphans if line.startswith("sglang::")) == [
        "sglang::detokenizer",
        "sglang::scheduler_TP0",
        "sglang::scheduler_TP1",
    ]
    assert len([line for line in lines.values() if " -m sglang.launch_server" in line]) == 1


def test_the_hung_scenario_holds_all_eight_gpus_by_nobody_but_schedulers(hung: SimulatedHost) -> None:
    lines = hung.processes()
    holders = [hung.gpus.owners(index) for index in range(8)]
    assert [len(found) for found in holders] == [2, 2, 1, 1, 1, 1, 1, 1]
    assert all(lines[pid].startswith("sglang::scheduler") for found in holders for pid in found)


def test_the_hung_scenario_has_stale_files_of_a_dead_process_and_bystanders(hung: SimulatedHost) -> None:
    (lock,) = (hung.folder / "home" / ".cache" / "torch_extensions").rglob("lock")
    assert lock.stat().st_size == 0
    (segment,) = (hung.folder / "shm").glob("sgl_shm_mm_*")
    assert start_ticks(int(segment.name.split("_")[3])) is None
    lines = " ".join(hung.processes().values())
    for wanted in ("/bin/nvidia-persistenced", "data_job.py", "-m sglang.bench_serving"):
        assert wanted in lines


def test_every_process_is_in_the_folder_and_nobodys_child_here(hung: SimulatedHost) -> None:
    for pid in hung.processes():
        assert Path(os.readlink(f"/proc/{pid}/cwd")).is_relative_to(hung.folder)
        assert parent_of(pid) != os.getpid()


def test_stop_ends_all_of_its_own_and_no_other_process_in_its_folder(hung: SimulatedHost) -> None:
    other = subprocess.Popen(["sleep", "60"], cwd=hung.folder / "home")
    ours = {pid: start_ticks(pid) for pid in hung.processes()}
    assert len(ours) > 30
    hung.stop()
    assert [pid for pid, ticks in ours.items() if ticks is not None and start_ticks(pid) == ticks] == []
    assert hung.processes() == {}
    assert other.poll() is None
    other.kill()
    other.wait()


def test_stop_leaves_a_process_whose_pid_was_ours_once(bare: SimulatedHost) -> None:
    other = subprocess.Popen(["sleep", "60"])
    ticks = start_ticks(other.pid)
    assert ticks is not None
    (bare.folder / "started.tsv").write_text(f"{other.pid}\t{ticks - 1}\tsglang\n")
    assert bare.stop() == []
    assert other.poll() is None
    other.kill()
    other.wait()


def test_a_folder_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(HostError, match="is not empty and no simulated host"):
        SimulatedHost(tmp_path).create()
    assert (tmp_path / "thesis.tex").exists()


def test_the_monitor_has_the_protected_executable_the_nodes_and_its_memory(bare: SimulatedHost) -> None:
    monitor = bare.start_monitor("dcgm-exporter", gpu=1, mib=300)
    assert os.readlink(f"/proc/{monitor.pid}/exe") == str(bare.folder / "bin" / "dcgm-exporter")
    opened = {os.readlink(f"/proc/{monitor.pid}/fd/{name}") for name in os.listdir(f"/proc/{monitor.pid}/fd")}
    assert {str(bare.folder / "dev" / f"nvidia{number}") for number in range(8)} <= opened
    assert bare.gpus.owners(1) == {monitor.pid: 300}


def test_a_training_job_holds_its_gpu_and_has_an_engine_with_a_schedulers_title(bare: SimulatedHost) -> None:
    job = bare.start_training_job(gpu=5, mib=20000, engine=True)
    assert bare.gpus.owners(5) == {job.pid: 20000}
    assert [line for pid, line in bare.processes().items() if parent_of(pid) == job.pid] == ["sglang::scheduler"]


def test_the_data_jobs_child_can_be_orphaned(bare: SimulatedHost) -> None:
    child = bare.start_data_job(orphan_child=True)
    wait_gone([started.pid for started in bare.started()], 5)
    assert child.alive()
    assert "multiprocessing.spawn" in bare.processes()[child.pid]
    assert parent_of(child.pid) not in bare.processes()


def test_a_server_without_a_session_of_its_own_shares_its_shells(bare: SimulatedHost) -> None:
    server = bare.start_server(gpus=[0], memory_mib=1000, own_session=False, speed=20)
    assert os.getsid(server.main_pid) not in (server.main_pid, os.getsid(0))
    server.main.send(signal.SIGKILL)


def test_the_command_line_starts_a_scenario_tells_its_state_and_stops_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ["--folder", str(tmp_path / "host")]
    assert main(["status", *folder]) == 1
    assert "There is no simulated host" in capsys.readouterr().err
    assert main(["start", *folder, "--scenario", "clean"]) == 0
    assert main(["status", *folder]) == 0
    told = capsys.readouterr().out
    assert "scenario clean" in told
    assert told.count("held by nobody") == 8
    assert main(["restart-scenario", *folder]) == 0
    assert main(["stop", *folder]) == 0
    assert main(["status", *folder]) == 3


def test_nvidia_smi_of_the_host_lists_its_gpus(bare: SimulatedHost) -> None:
    environment = {**os.environ, **bare.reset_environment()}
    environment["PATH"] += f"{os.pathsep}{Path(sys.executable).parent}"
    done = subprocess.run(["nvidia-smi", "-L"], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.count("NVIDIA RTX PRO 6000 Blackwell Server Edition") == 8


def test_vllms_engine_and_workers_have_their_titles_end_by_sigterm_and_outlive_a_killed_main(
    bare: SimulatedHost,
) -> None:
    servers = [bare.start_vllm(gpus, memory_mib=1000) for gpus in ([1, 2], [3, 4])]
    titles = ["VLLM::EngineCore", "VLLM::Worker_TP0", "VLLM::Worker_TP1"]
    for server in servers:
        assert sorted(line for line in server.processes().values() if line.startswith("VLLM::")) == titles
    servers[0].main.send(signal.SIGTERM)
    servers[1].main.send(signal.SIGKILL)
    wait_gone([server.main_pid for server in servers], 10)
    assert bare.gpus.owners(1) == {}
    assert set(bare.gpus.owners(3)) == set(servers[1].titled("VLLM::Worker_TP0"))
