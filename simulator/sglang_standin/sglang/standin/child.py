"""What every child does first: import time, the kernel's promise to die with main, a title."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import NoReturn

from .settings import Settings

PR_SET_PDEATHSIG = 1


def begin(settings: Settings, title: str) -> None:
    """From a bare ``multiprocessing.spawn`` child to one with a title.

    A main that dies before this leaves an orphan: the kernel signals only deaths that come after the request.
    """
    time.sleep(settings.import_seconds)
    if settings.hang_after == "import":
        hang()
    if not settings.outlive_main:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    set_title(title, settings.blank_environ)


def set_title(title: str, blank_environ: bool) -> None:
    """setproctitle; it writes over the environment's memory unless SPT_NOENV is set when it is first used."""
    if blank_environ:
        os.environ.pop("SPT_NOENV", None)
    else:
        os.environ["SPT_NOENV"] = "1"
    import setproctitle

    setproctitle.setproctitle(title)


def hang() -> NoReturn:
    """Do nothing for ever, using no processor."""
    while True:
        signal.pause()
