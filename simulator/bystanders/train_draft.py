"""A training job that holds a GPU: a stranger to the reset, whoever's virtual environment it runs in.

    python train_draft.py --gpu 5 --mib 20000 [--engine]

With --engine it has a child with the title of an SGLang scheduler, as training programs that embed an engine do.
Prints `ready` once it holds its memory. Its folders come from GPU_SIMULATOR_STATE and SGLANG_STANDIN_DEVICE_FOLDER.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

SIMULATOR = Path(__file__).resolve().parents[1]


def main() -> None:
    """Take the memory and keep it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpu", type=int, default=5)
    parser.add_argument("--mib", type=int, default=20000)
    parser.add_argument("--engine", action="store_true")
    options = parser.parse_args()
    sys.path.insert(0, str(SIMULATOR / "sglang_standin"))
    from sglang.standin import child, device

    state = device.gpu_state(os.environ.get("GPU_SIMULATOR_STATE", "/run/simulated-gpu"))
    if options.engine:
        reader, writer = os.pipe()
        if os.fork() == 0:
            child.set_title("sglang::scheduler", blank_environ=False)
            os.write(writer, b".")
            child.hang()
        os.read(reader, 1)
    mapped = device.open_nodes(os.environ.get("SGLANG_STANDIN_DEVICE_FOLDER", "/dev"), state.gpus()[options.gpu].minor)
    with state.allocate(options.gpu, options.mib):
        print("ready", flush=True)
        while mapped or True:  # noqa: SIM222 (what is mapped lives as long as it is named)
            signal.pause()


if __name__ == "__main__":
    main()
