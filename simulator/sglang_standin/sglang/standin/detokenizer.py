"""The detokenizer: between the schedulers and main. It never leaves by itself."""

from __future__ import annotations

from multiprocessing.connection import Connection, wait
from typing import Any

from . import child, device
from .settings import Settings


def run_detokenizer_process(inputs: list[Any], output: Connection) -> None:
    """The target of the detokenizer's process: forwards each scheduler's outputs to main."""
    settings = Settings()
    child.begin(settings, "sglang::detokenizer")
    if not settings.no_gpu:
        device.open_nodes(settings.device_folder)
    while inputs:
        ready: list[Any] = wait(inputs)
        for source in ready:
            try:
                output.send_bytes(source.recv_bytes())
            except (EOFError, OSError):
                inputs.remove(source)
    child.hang()


def run_controller_process() -> None:
    """With more than one data-parallel replica: sglang::data_parallel_controller."""
    settings = Settings()
    child.begin(settings, "sglang::data_parallel_controller")
    child.hang()
