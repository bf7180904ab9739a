"""The detokenizer: between the schedulers and main. It never leaves by itself."""

from __future__ import annotations

from multiprocessing.connection import wait

from . import child, device
from .settings import Settings


def run_detokenizer_process(inputs: list, output) -> None:
    """The target of the detokenizer's process: forwards each scheduler's outputs to main."""
    settings = Settings()
    child.begin(settings, "sglang::detokenizer")
    nodes = [] if settings.no_gpu else device.open_nodes(settings.device_folder)
    while inputs:
        for source in wait(inputs):
            try:
                output.send_bytes(source.recv_bytes())
            except (EOFError, OSError):
                inputs.remove(source)
    child.hang()
    del nodes


def run_controller_process() -> None:
    """With more than one data-parallel replica: sglang::data_parallel_controller."""
    settings = Settings()
    child.begin(settings, "sglang::data_parallel_controller")
    child.hang()
