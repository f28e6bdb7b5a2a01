"""Following a run that is being written: nothing twice, nothing missed, nothing torn."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rstar2.record import RunDirectory, read_groups
from rstar2.viewer.catalog import Catalog
from rstar2.viewer.run import Run
from rstar2.viewer.tails import Records, Tail
from tests.viewer.nasty import recipe, write_plain, write_step


def all_of(catalog: Catalog) -> Catalog:
    while catalog.refresh():
        pass
    return catalog


def rows(catalog: Catalog) -> list[tuple[object, ...]]:
    return [tuple(row) for row in catalog.rollouts.rows.tolist()]


def comparable(catalog: Catalog) -> list[str]:
    """Everything but nan, which is not equal to itself."""
    return [repr(row) for row in rows(catalog)]


def test_index_and_lines_give_the_same_columns(runs: dict[str, Path]) -> None:
    for stage in ("short", "hard", "eval-sft-sampled", "filter-hard"):
        indexed = all_of(Catalog(runs["real"], stage))
        scanned = all_of(Catalog(runs["bare"], stage))
        assert comparable(indexed) == comparable(scanned)
        assert [g.id for g in indexed.groups] == [g.id for g in scanned.groups]
        assert all(g.index_at >= 0 for g in indexed.groups)
        assert all(g.index_at < 0 for g in scanned.groups)
        group = indexed.groups[-1]
        assert indexed.entry(group) == scanned.entry(scanned.groups[-1])


def test_columns_are_what_the_groups_say(runs: dict[str, Path]) -> None:
    catalog = all_of(Catalog(runs["real"], "short"))
    number = 0
    for line in read_groups(runs["real"], "short"):
        for trajectory in line.group.trajectories:
            row = catalog.rollouts.rows[number]
            assert catalog.name_of(number) == trajectory.id
            assert row["reward"] == trajectory.reward.value  # type: ignore[union-attr]
            assert row["tokens"] == len(trajectory.completion_ids)
            assert row["failed"] == trajectory.failed_calls
            assert row["calls"] == trajectory.calls
            assert row["turns"] == len(trajectory.turns)
            number += 1
    assert number == catalog.rollouts.count


def test_a_growing_run_is_followed_through_a_rewind(tmp_path: Path) -> None:
    with RunDirectory.create_or_resume(tmp_path / "run", recipe()) as run:
        write_step(run, 1)
        catalog = all_of(Catalog(tmp_path / "run", "stage1"))
        assert catalog.steps() == [1]
        write_step(run, 2)
        assert all_of(catalog).steps() == [1, 2]
        run.rewind("stage1", 1)
        write_step(run, 2, groups=3)
        assert all_of(catalog).steps() == [1, 2]
        assert len(catalog.of_step(2)) == 3
    assert comparable(catalog) == comparable(all_of(Catalog(tmp_path / "run", "stage1")))


def test_half_an_index_is_completed_from_the_lines(tmp_path: Path) -> None:
    whole = write_plain(tmp_path / "whole", steps=4)
    expected = comparable(all_of(Catalog(whole, "stage1")))
    index = (whole / "index" / "stage1.jsonl").read_bytes().splitlines(keepends=True)
    for kept in (index[:3], index[3:], [*index[:2], *index[5:]], [b"{broken}\n", *index[1:]]):
        part = shutil.copytree(whole, tmp_path / "part")
        (part / "index" / "stage1.jsonl").write_bytes(b"".join(kept))
        assert comparable(all_of(Catalog(part, "stage1"))) == expected
        shutil.rmtree(part)


def test_an_index_that_lies_is_not_believed(tmp_path: Path) -> None:
    """Lines were rewritten under it: offsets point somewhere else."""
    path = write_plain(tmp_path / "run", steps=2)
    lines = path / "trajectories" / "stage1.jsonl"
    first, *rest = lines.read_bytes().splitlines(keepends=True)
    lines.write_bytes(b"".join([*rest, first]))
    catalog = all_of(Catalog(path, "stage1"))
    assert [g.id for g in catalog.groups] == [
        *("stage1/1/1", "stage1/2/0", "stage1/2/1", "stage1/1/0"),
    ]
    for group in catalog.groups:
        assert f'"id":"{group.id}"'.encode() in catalog.line(group)


def test_a_broken_line_is_counted_and_left_out(tmp_path: Path) -> None:
    path = write_plain(tmp_path / "run", steps=2)
    shutil.rmtree(path / "index")
    lines = path / "trajectories" / "stage1.jsonl"
    parts = lines.read_bytes().splitlines(keepends=True)
    lines.write_bytes(b"".join([parts[0], b'{"stage": 1}\n', *parts[1:]]))
    catalog = all_of(Catalog(path, "stage1"))
    assert len(catalog.groups) == 4
    assert catalog.unreadable == 1
    assert catalog.progress == 1.0


def test_a_tail_reads_whole_lines_of_any_length_once(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path)
    assert not tail.restarted()
    path.write_bytes(b"one\n" + b"x" * 5000 + b"\ntor")
    tail.restarted()
    found = []
    while lines := tail.read(limit=16):
        found += [line.data for line in lines]
    assert found == [b"one\n", b"x" * 5000 + b"\n"]
    with path.open("ab") as file:
        file.write(b"n\n")
    tail.restarted()
    assert [line.data for line in tail.read()] == [b"torn\n"]
    path.write_bytes(b"new\n")
    assert tail.restarted()
    assert [line.data for line in tail.read()] == [b"new\n"]
    path.unlink()
    assert tail.restarted()


def test_records_leave_out_what_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\nnonsense\n[1]\n{"step": 2}\n{"st')
    records = Records(path)
    assert records.refresh()
    assert records.values == [{"step": 1}, {"step": 2}]
    assert records.unreadable == 2
    assert not records.refresh()


def test_status_is_that_of_the_writer(tmp_path: Path, read_run: Callable[[Path], Run]) -> None:
    with RunDirectory.create_or_resume(tmp_path / "run", recipe()) as run:
        write_step(run, 1)
        run.flush()
        assert read_run(tmp_path / "run").status == "running"
        with pytest.raises(Exception, match="in use"):  # looking took no lock from anyone
            RunDirectory.create_or_resume(tmp_path / "run", recipe())
    assert read_run(tmp_path / "run").status == "stopped"
    with RunDirectory.create_or_resume(tmp_path / "run", recipe()) as run:
        run.event("finished")
    assert read_run(tmp_path / "run").status == "finished"
