"""Following a run that is being written: every group once, and no incomplete line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rstar2.record import RunDirectory, read_groups
from rstar2.record.read import FileTail, FollowedRecords
from rstar2.types import TokenSegment, TokenValues
from rstar2.viewer.catalog import Catalog, StageReader
from rstar2.viewer.detail import rollout, tokens
from rstar2.viewer.run import ViewedRun
from tests.viewer.nasty import group_of, recipe, write_plain, write_step


def reader_of(catalog: Catalog, stage: str) -> StageReader:
    return next(reader for reader in catalog.readers.values() if reader.stage == stage)


def read_all(catalog: Catalog) -> Catalog:
    catalog.open_stages()
    for reader in catalog.readers.values():
        while reader.refresh():
            pass
    return catalog


def opened(run: Path) -> Catalog:
    return read_all(Catalog(run, ["stage1"]))


def rows(catalog: Catalog, stage: str = "stage1") -> list[dict[str, Any]]:
    """All rollouts of a stage in order, with the id and the problem of their group."""
    query = (
        "SELECT rollouts.*, id, problem, prompt, used FROM rollouts JOIN groups USING (stage, at) "
        "WHERE stage = ? ORDER BY at, member"
    )
    number = catalog.number_of(stage)
    return [{**dict(row), "stage": stage} for row in catalog.db.execute(query, [number])]


def group_ids(catalog: Catalog) -> list[str]:
    return list(dict.fromkeys(row["id"] for row in rows(catalog)))


@pytest.mark.slow
def test_index_and_lines_give_the_same_tables(runs: dict[str, Path]) -> None:
    indexed, scanned = opened(runs["real"]), opened(runs["bare"])
    for stage in ("short", "hard", "eval-sft-sampled", "filter-hard"):
        assert rows(indexed, stage) == rows(scanned, stage)
        step = indexed.steps(stage)[-1]
        with_index = indexed.groups_of_step(stage, step)
        without = scanned.groups_of_step(stage, step)
        assert all(group.index_at is not None for group in with_index)
        assert all(group.index_at is None for group in without)
        assert indexed.entry(with_index[-1]) == scanned.entry(without[-1])


@pytest.mark.slow
def test_tables_are_what_the_groups_say(runs: dict[str, Path]) -> None:
    table = iter(rows(opened(runs["real"]), "short"))
    for line in read_groups(runs["real"], "short"):
        for trajectory in line.group.trajectories:
            row = next(table)
            assert f"{row['id']}/{row['name']}" == trajectory.id
            assert trajectory.reward is not None
            assert row["reward"] == trajectory.reward.value
            assert row["tokens"] == trajectory.completion_tokens
            assert row["failed"] == trajectory.failed_calls
            assert row["calls"] == trajectory.calls
            assert row["turns"] == len(trajectory.turns)
    assert next(table, None) is None


def test_a_growing_run_is_followed_through_a_rewind(tmp_path: Path) -> None:
    with RunDirectory.create_or_resume(tmp_path / "run", recipe()) as run:
        write_step(run, 1)
        catalog = opened(tmp_path / "run")
        assert catalog.steps("stage1") == [1]
        write_step(run, 2)
        assert read_all(catalog).steps("stage1") == [1, 2]
        run.rewind("stage1", 1)
        write_step(run, 2, groups=3)
        assert read_all(catalog).steps("stage1") == [1, 2]
        assert len(catalog.groups_of_step("stage1", 2)) == 3
    assert rows(catalog) == rows(opened(tmp_path / "run"))


def test_half_an_index_is_completed_from_the_lines(tmp_path: Path) -> None:
    whole = write_plain(tmp_path / "whole", steps=4)
    expected = rows(opened(whole))
    index = (whole / "index" / "stage1.jsonl").read_bytes().splitlines(keepends=True)
    for kept in (index[:3], index[3:], [*index[:2], *index[5:]], [b"{broken}\n", *index[1:]]):
        part = shutil.copytree(whole, tmp_path / "part")
        (part / "index" / "stage1.jsonl").write_bytes(b"".join(kept))
        assert rows(opened(part)) == expected
        shutil.rmtree(part)


def test_an_index_that_does_not_match_the_file_is_not_used(tmp_path: Path) -> None:
    """The lines were rewritten after it: its offsets point somewhere else."""
    path = write_plain(tmp_path / "run", steps=2)
    lines = path / "trajectories" / "stage1.jsonl"
    first, *rest = lines.read_bytes().splitlines(keepends=True)
    lines.write_bytes(b"".join([*rest, first]))
    catalog = opened(path)
    assert group_ids(catalog) == [*("stage1/1/1", "stage1/2/0", "stage1/2/1", "stage1/1/0")]
    for name in group_ids(catalog):
        group = catalog.find_group(name)
        assert group is not None
        assert f'"id":"{name}"'.encode() in catalog.line(group)


def test_entries_of_lines_that_were_never_written_are_replaced(tmp_path: Path) -> None:
    """A run was killed after it flushed the index and before it flushed the groups, and resumed."""
    path = write_plain(tmp_path / "run", steps=1)
    lines = path / "trajectories" / "stage1.jsonl"
    recorded = lines.read_bytes()
    lines.write_bytes(recorded[: recorded.index(b"\n") + 1 + 40])  # half of the second line
    catalog = opened(path)
    assert group_ids(catalog) == ["stage1/1/0"]
    with RunDirectory.create_or_resume(path, recipe()) as run:
        write_step(run, 2)
    expected = ["stage1/1/0", "stage1/2/0", "stage1/2/1"]
    assert group_ids(opened(path)) == expected
    assert group_ids(read_all(catalog)) == expected


def test_a_run_directory_can_be_read_only_and_open_twice(tmp_path: Path) -> None:
    path = write_plain(tmp_path / "run", steps=1)
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    first, second = opened(path), opened(path)
    assert rows(first) == rows(second)
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before


def test_a_line_that_cannot_be_decoded_is_counted_and_left_out(tmp_path: Path) -> None:
    path = write_plain(tmp_path / "run", steps=2)
    shutil.rmtree(path / "index")
    lines = path / "trajectories" / "stage1.jsonl"
    parts = lines.read_bytes().splitlines(keepends=True)
    lines.write_bytes(b"".join([parts[0], b'{"stage": 1}\n', *parts[1:], b"{}\n"]))
    catalog = opened(path)
    reader = reader_of(catalog, "stage1")
    assert len(group_ids(catalog)) == 4
    assert reader.unreadable == 2
    assert reader.covered == reader.whole


def test_a_tail_reads_whole_lines_of_any_length_once(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = FileTail(path)
    assert not tail.restarted()
    path.write_bytes(b"one\n" + b"x" * 5000 + b"\ntor")
    tail.restarted()
    read = []
    while lines := tail.read(limit=16):
        read += [line.data for line in lines]
    assert read == [b"one\n", b"x" * 5000 + b"\n"]
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
    records = FollowedRecords(path)
    assert records.refresh()
    assert records.values == [{"step": 1}, {"step": 2}]
    assert records.unreadable == 2
    assert not records.refresh()


def test_status_is_that_of_the_writer(
    tmp_path: Path, read_run: Callable[[Path], ViewedRun]
) -> None:
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


def test_all_segments_of_a_rollout_are_shown(tmp_path: Path) -> None:
    name = "stage1/1/0"
    made, selection = group_of(name, 1)
    first, *others = made.trajectories
    more = (TokenSegment((3, 4, 5), first.turns[:1]), TokenSegment((6,), first.turns[1:]))
    made = replace(made, trajectories=(replace(first, more_segments=more), *others))
    values = [
        TokenValues(name + "/0" + suffix, (old,) * n, (old,) * n)
        for suffix, old, n in (("", -1.0, 5), ("#1", -2.0, 3), ("#2", -3.0, 2))
    ]
    with RunDirectory.create_or_resume(tmp_path / "run", recipe()) as run:
        run.trajectories("stage1", 1, made, selection)
        run.tokens("stage1", 1, values)
        run.metrics("stage1", 1, {"reward": 0.5})
    viewed = ViewedRun(tmp_path / "run", "run")
    viewed.refresh()
    shown = rollout(viewed, f"{name}/0")
    assert [turn["sampled"] for turn in shown["turns"]] == [3, 2, 3, 2]
    table = tokens(viewed, f"{name}/0")
    assert table["source"] == "pp" + "sss" + "tt" + "ss" + "ppp" + "sss" + "tt" + "p" + "ss"
    assert len(table["ids"]) == len(table["pieces"]) == len(table["source"])
    assert len(table["logprob"]) == len(table["kind"]) == 10
    assert table["turn"] == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]
    assert table["old"] == [-1.0] * 5 + [-2.0] * 3 + [-3.0] * 2
