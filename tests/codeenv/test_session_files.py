"""Files of a session's members: what a branch copies, what a call that is killed leaves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rstar2.codeenv.jail.session_files import SessionFiles


@pytest.fixture
def files(tmp_path: Path) -> Iterator[SessionFiles]:
    """The files of a family whose first member is in place, in `tmp_path / "files"`."""
    (tmp_path / "files").mkdir()
    holder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    files = SessionFiles(holder, ["files"])
    files.show(1)
    yield files
    os.close(holder)


def tree(top: Path) -> dict[str, str]:
    """The regular files below a directory, and its directories with a slash."""
    return {
        str(path.relative_to(top)) + ("/" if path.is_dir() else ""): ""
        if path.is_dir()
        else path.read_text()
        for path in top.rglob("*")
    }


def test_only_what_was_written_since_the_snapshot_is_discarded(
    tmp_path: Path, files: SessionFiles
) -> None:
    here = tmp_path / "files"
    (here / "kept").mkdir()
    for name in ("old", "kept/inner", "kept/moved", "linked", "grown"):
        (here / name).write_text(name)
    before = files.snapshot()
    (here / "new").write_text("new")
    (here / "a/b/c").mkdir(parents=True)
    (here / "a/b/new").write_text("new")
    (here / "link").symlink_to("old")
    (here / "kept/moved").rename(here / "a/moved")
    for number in range(3):
        (here / f"name{number}").hardlink_to(here / "linked")
    (here / "grown").write_text("x" * 10_000)
    files.discard_changes(before)
    assert tree(here) == {
        "old": "old",
        "kept/": "",
        "kept/inner": "kept/inner",
        "a/": "",
        "a/moved": "kept/moved",
        "linked": "linked",
    }


def test_files_that_are_put_in_place_just_before_a_call_are_not_its_own(
    tmp_path: Path, files: SessionFiles
) -> None:
    """Putting them in place changes the times of their inodes."""
    (tmp_path / "files/old").write_text("old")
    files.show(2)
    files.show(1)
    before = files.snapshot()
    (tmp_path / "files/new").write_text("new")
    files.discard_changes(before)
    assert tree(tmp_path / "files") == {"old": "old"}


@pytest.mark.parametrize("parts", [(), (0,), (3 << 20,), (0, 5 << 20, (16 << 20) - 4)])
def test_copy_of_a_sparse_file_is_sparse(
    tmp_path: Path, files: SessionFiles, parts: tuple[int, ...]
) -> None:
    original, copy = tmp_path / "files/sparse", tmp_path / "store/2/files/sparse"
    with original.open("wb") as file:
        file.truncate(16 << 20)
        for start in parts:
            file.seek(start)
            file.write(b"data")
    files.copy(2)
    assert copy.read_bytes() == original.read_bytes()
    assert copy.stat().st_blocks * 512 <= max(original.stat().st_blocks * 512, 1 << 20)


def test_copy_of_a_file_without_holes_is_complete(tmp_path: Path, files: SessionFiles) -> None:
    data = os.urandom(3 << 20)
    (tmp_path / "files/full").write_bytes(data)
    (tmp_path / "files/empty").touch()
    files.copy(2)
    assert (tmp_path / "store/2/files/full").read_bytes() == data
    assert (tmp_path / "store/2/files/empty").read_bytes() == b""
