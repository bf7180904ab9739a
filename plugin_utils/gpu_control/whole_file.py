"""Files of the control node that are there as a whole or not at all."""

from __future__ import annotations

from pathlib import Path

from gpu_host import storage

FOR_ALL = 0o644
"""The mode of what another user reads, such as Prometheus' node exporter, whatever the umask is."""


def write(file: Path, content: str | bytes, mode: int | None = None) -> None:
    """Replace the file, whose folder is made where it is missing. OSError: it is as it was."""
    file.parent.mkdir(parents=True, exist_ok=True)
    storage.replace_file(str(file), content, mode)
