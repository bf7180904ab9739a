"""A data job: Python, no GPU, with a ``multiprocessing.spawn`` child.

    python data_job.py [--orphan-child] --input FOLDER

Prints its child's pid. With --orphan-child it then dies at once, and the child goes on under pid 1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal


def tokenize(folder: str) -> None:
    """The child's work: none, for ever."""
    del folder
    while True:
        signal.pause()


def main() -> None:
    """Start the child and wait, or die."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--input", default="/data/eagle3/output_100k_sglang/4")
    parser.add_argument("--orphan-child", action="store_true")
    options = parser.parse_args()
    child = multiprocessing.get_context("spawn").Process(target=tokenize, args=(options.input,))
    child.start()
    print(child.pid, flush=True)
    if options.orphan_child:
        os.kill(os.getpid(), signal.SIGKILL)
    child.join()


if __name__ == "__main__":
    main()
