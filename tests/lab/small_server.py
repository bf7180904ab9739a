"""A server of one process, for tests that need many: it takes memory of a GPU and waits. Started, it costs 0.1 s."""

from __future__ import annotations

from tests.lab.command import run
from tests.lab.host import SIMULATOR, STATE, Host
from tests.lab.resets import until

FOLDER = "/opt/small"
PROGRAM = f"""\
import signal, sys
sys.path.insert(0, {SIMULATOR.rpartition("/")[0]!r})
from simulator.gpu_state import GpuState
if "--ignore-term" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
held = GpuState({STATE!r}).allocate(int(sys.argv[1]), 9000)
while True:
    signal.pause()
"""


def install(host: Host) -> None:
    host.write(f"{FOLDER}/sglang/launch_server.py", PROGRAM)


def start(host: Host, *options: str, gpu: int = 0) -> int:
    """Start one and return its pid once it holds its memory. A reset knows it by `-m sglang.launch_server`."""
    words = " ".join(["python3", "-m", "sglang.launch_server", str(gpu), *options])
    command = f"cd {FOLDER} && setsid nohup {words} > /dev/null 2>&1 < /dev/null & echo $!"
    run(host.enter(["sh", "-c", command]))
    until(lambda: host.state.used_mib(gpu) >= 9000, "the small server's memory")
    (server,) = [one.pid for one in host.find("-m sglang.launch_server") if one.line.startswith("python3 ")]
    return server
