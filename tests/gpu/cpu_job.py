"""A data job that uses no GPU: counts in a file. With --orphan it does so in a multiprocessing.spawn child whose
parent has ended, which is how such jobs are found under pid 1 after a lost connection. Must survive every reset.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path


def count(path: str) -> None:
    """Counts up five times a second; the first line of `<path>.pid` is who does."""
    Path(path + ".pid").write_text(str(os.getpid()))
    beats = 0
    while True:
        beats += 1
        Path(path).write_text(str(beats))
        time.sleep(0.2)


if __name__ == "__main__":
    if sys.argv[1] == "--orphan":
        multiprocessing.get_context("spawn").Process(target=count, args=(sys.argv[2],)).start()
        while not Path(sys.argv[2]).exists():
            time.sleep(0.05)
        os._exit(0)
    count(sys.argv[1])
