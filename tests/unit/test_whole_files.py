"""Files that are replaced as a whole, on the control node and on a host."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_control import whole_file
from gpu_host import storage


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def mode(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


@pytest.fixture()
def strict_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def test_who_reads_the_old_file_reads_it_to_its_end(tmp_path: Path) -> None:
    file = tmp_path / "made/for/it/report.json"
    whole_file.write(file, "first\n")
    with file.open() as reader:
        whole_file.write(file, b"second\n")
        assert reader.read() == "first\n"
    assert file.read_text() == "second\n" and names(file.parent) == ["report.json"]


def test_the_mode_is_the_umasks_or_the_one_that_was_asked_for(tmp_path: Path, strict_umask: None) -> None:
    whole_file.write(tmp_path / "mine", "")
    whole_file.write(tmp_path / "metrics", "", whole_file.FOR_ALL)
    storage.write_private(str(tmp_path / "record"), "")
    assert [mode(tmp_path / name) for name in ("mine", "metrics", "record")] == [0o600, 0o644, 0o600]


@pytest.mark.parametrize("wanted", [None, 0o600, 0o644])
def test_nobody_reads_the_new_content_before_its_mode_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: int | None
) -> None:
    seen = []
    monkeypatch.setattr(storage, "write_all", lambda number, data: seen.append(os.fstat(number).st_mode & 0o777))
    file = tmp_path / "file"
    storage.replace_file(str(file), "secret", wanted)
    assert seen and not seen[0] & ~mode(file)


def test_a_file_that_can_not_be_replaced_stays_and_nothing_is_left_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    file = tmp_path / "file"
    file.write_text("first")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        storage.replace_file(str(file), "second")
    assert file.read_text() == "first" and names(tmp_path) == ["file"]


def test_an_edited_file_keeps_its_mode_and_another_name_of_it_its_content(tmp_path: Path) -> None:
    file, other = tmp_path / "config.json", tmp_path / "cache.json"
    file.write_text("{}")
    file.chmod(0o640)
    os.link(file, other)
    storage.replace_content(str(file), '{"a": 1}')
    assert mode(file) == 0o640
    assert (file.read_text(), other.read_text()) == ('{"a": 1}', "{}")
