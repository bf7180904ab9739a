"""A monitor that a reset must spare: a process whose executable has a protected name and that holds device nodes.

    python monitor.py nvidia-persistenced --tools FOLDER [--gpu 0 --mib 300]

It becomes a copy of `sleep` of that name in FOLDER, keeping the nodes and its GPU memory, if any.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

SIMULATOR = Path(__file__).resolve().parents[1]


def main() -> None:
    """Open, take, become."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--tools", type=Path, required=True)
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--mib", type=int, default=0)
    options = parser.parse_args()
    sys.path.insert(0, str(SIMULATOR / "sglang_standin"))
    from sglang.standin import device
    from sglang.standin.scheduler import copied_executable

    folder = os.environ.get("SGLANG_STANDIN_DEVICE_FOLDER", "/dev")
    device.open_nodes(folder)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(f"{folder}/nvidia"):
                os.set_inheritable(int(name), True)
    if options.mib:
        state = device.gpu_state(os.environ.get("GPU_SIMULATOR_STATE", "/run/simulated-gpu"))
        # A record lock stays with the process through exec as long as its descriptor stays open.
        os.set_inheritable(state.allocate(options.gpu, options.mib)._descriptor, True)
    program = copied_executable("sleep", options.tools / options.name)
    os.execv(program, [program, "1000000"])


if __name__ == "__main__":
    main()
