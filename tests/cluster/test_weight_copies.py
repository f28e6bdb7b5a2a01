"""The weight files of one node: pieces, a full disk, and what a killed store left behind.

Copies between nodes are tested on a two-node cluster (test_ray.py).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rstar2.cluster import weight_copies
from rstar2.cluster.weight_copies import FileStore, remove_abandoned


def test_files_arrive_in_pieces_and_in_any_order(tmp_path: Path) -> None:
    store, source, target = FileStore(), tmp_path / "source", tmp_path / "target"
    (source / "model" / "sub").mkdir(parents=True)
    content = os.urandom(1000)
    (source / "model" / "weights").write_bytes(content)
    (source / "model" / "sub" / "empty").write_bytes(b"")
    files = store.files(str(source))
    assert files == [("model/sub/empty", 0), ("model/weights", 1000)]
    for name, size in files:
        for offset in reversed(range(0, max(1, size), 300)):
            piece = store.read(str(source), name, offset, 300)
            store.write(str(target), name, offset, piece)
    assert (target / "model" / "weights").read_bytes() == content
    assert store.files(str(target)) == files
    store.clear(str(target))
    assert not target.exists()


def test_directories_of_killed_stores_are_removed_and_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_copies, "FAST_DIRECTORY", tmp_path)
    mine = Path(FileStore().prepare(10))
    assert mine.parent == tmp_path
    dead = tmp_path / mine.name.replace(str(os.getpid()), str(2**22 + 1), 1)
    elsewhere = tmp_path / "rstar2-weights-1-4194305-x"
    dead.mkdir()
    elsewhere.mkdir()
    remove_abandoned(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([mine, elsewhere])
