"""Atomic writes: old content or new content, never a part, and the mode of ordinary files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rstar2.files import remove_unfinished, replacing_directory, replacing_file, write_file


def test_a_file_is_replaced_and_nothing_else_stays(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_file(path, "old")
    write_file(path, b"new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_has_the_mode_that_open_gives(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_file(tmp_path / "file", "")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_an_exception_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_file(path, "old")
    with pytest.raises(TypeError), replacing_file(path) as file:
        file.writelines((b"half", None))  # type: ignore[arg-type]
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_is_replaced_and_nothing_else_stays(tmp_path: Path) -> None:
    path = tmp_path / "parent" / "model"
    for content in ("old", "new"):
        with replacing_directory(path) as temporary:
            (temporary / content).write_text(content)
            assert temporary.parent == path.parent
    assert [part.name for part in path.iterdir()] == ["new"]
    assert list(path.parent.iterdir()) == [path]


def test_an_exception_leaves_the_old_directory(tmp_path: Path) -> None:
    path = tmp_path / "model"
    with replacing_directory(path) as temporary:
        (temporary / "old").touch()
    with pytest.raises(FileNotFoundError), replacing_directory(path) as temporary:
        (temporary / "half" / "file").touch()
    assert [part.name for part in path.iterdir()] == ["old"]
    assert list(tmp_path.iterdir()) == [path]


def test_the_leftovers_of_killed_writers_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".a.writing" / "part").mkdir(parents=True)
    with replacing_directory(tmp_path / "a") as temporary:
        assert list(temporary.iterdir()) == []
    (tmp_path / ".b.writing").mkdir()
    (tmp_path / ".c.replaced").mkdir()
    remove_unfinished(tmp_path)
    assert [part.name for part in tmp_path.iterdir()] == ["a"]
