"""Entries of scratch that belong to an installed interpreter are the same after every call."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rstar2.codeenv.jail.scratch import ScratchDirectory


def replaced_link(link: Path) -> None:
    link.unlink()
    link.symlink_to("/nowhere")


def directory_instead(link: Path) -> None:
    link.unlink()
    link.mkdir()


@pytest.mark.parametrize("change", [replaced_link, directory_instead, Path.unlink])
def test_replaced_entry_needs_a_new_worker(tmp_path: Path, change: Callable[[Path], None]) -> None:
    link = tmp_path / "prefix"
    link.symlink_to("/usr")
    before = tmp_path.stat()
    scratch = ScratchDirectory(str(tmp_path), on_tmpfs=False)
    change(link)
    os.utime(tmp_path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not scratch.restore(time.monotonic() + 60)


def test_entries_of_a_call_are_removed_and_others_stay(tmp_path: Path) -> None:
    link = tmp_path / "prefix"
    link.symlink_to("/usr")
    scratch = ScratchDirectory(str(tmp_path), on_tmpfs=False)
    (tmp_path / "left").mkdir()
    assert scratch.restore(time.monotonic() + 60)
    assert [entry.name for entry in tmp_path.iterdir()] == ["prefix"]
