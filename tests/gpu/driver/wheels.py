"""Wheels made again from what is installed, for a machine without a network whose Python has the build tools."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

# Runs in the Python that has them. argv: the folder for the wheels, then names; what they need comes along.
SOURCE = r"""
import configparser, importlib.metadata as metadata, os, sys, zipfile
from packaging.requirements import Requirement

def needs(name):
    for text in metadata.requires(name) or ():
        one = Requirement(text)
        if one.marker is None or one.marker.evaluate({'extra': ''}):
            yield one.name

folder, todo, done = sys.argv[1], sys.argv[2:], set()
while todo:
    one = metadata.distribution(todo.pop())
    name = one.metadata['Name'].replace('-', '_').replace('.', '_').lower()
    if name in done:
        continue
    done.add(name)
    todo += needs(one.metadata['Name'])
    tag = next(line.split(':')[1].strip() for line in one.read_text('WHEEL').splitlines() if line.startswith('Tag:'))
    made = {point.name for point in one.entry_points if point.group in ('console_scripts', 'gui_scripts')}
    with zipfile.ZipFile(f'{folder}/{name}-{one.version}-{tag}.whl', 'w') as wheel:
        for file in one.files or ():
            path, inside = str(one.locate_file(file)), str(file)
            if inside.endswith('.pyc') or '__pycache__' in inside or not os.path.isfile(path):
                continue
            if inside.startswith('..'):  # outside of site-packages: scripts and data of the environment
                parts = [part for part in inside.split('/') if part != '..']
                if parts[0] == 'bin':
                    if parts[-1] in made:
                        continue
                    parts = ['scripts', *parts[1:]]
                else:
                    parts = ['data', *parts]
                inside = '/'.join([f'{name}-{one.version}.data', *parts])
            wheel.write(path, inside)
print(' '.join(sorted(done)))
"""


def repack(python: str, names: Sequence[str], folder: Path, seconds: float = 60) -> str:
    """Put a wheel of each of these and of what they need into the folder; '' or why that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [python, "-c", SOURCE, str(folder), *names], capture_output=True, text=True, timeout=seconds, check=False
    )
    return "" if done.returncode == 0 else done.stderr[-400:]
