"""A torch inductor compile worker: a parent and its forks, which end within a second of their parent's death."""

import contextlib
import os
import re
import signal
import sys
import time


def main() -> None:
    options = dict(re.findall(r"--([\w-]+)=(\S*)", "\n".join(sys.argv[1:])))
    folder = os.environ.get("SGLANG_STANDIN_DEVICE_FOLDER") or "/dev"
    parent = int(options["parent"])
    if os.environ.get("SGLANG_STANDIN_NO_GPU") in (None, "", "0"):
        for name in os.listdir(folder):
            if re.fullmatch(r"nvidia(\d+|ctl)", name):
                with contextlib.suppress(OSError):
                    os.open(os.path.join(folder, name), os.O_RDWR | os.O_CLOEXEC)
    for _ in range(int(options["workers"])):
        mine = os.getpid()
        if os.fork() == 0:
            parent = mine
            break
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)


main()
