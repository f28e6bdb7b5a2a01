"""Publishers' files to a mixture: every row is a conversation, dropped with why, or not drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rstar2.cli.data import app
from rstar2.errors import DataError, UserError
from rstar2.problems.conversations import read_conversations
from rstar2.problems.sft import checks
from rstar2.problems.sft.prepare import Mixture, SftSource, prepare_sft
from tests.problems.sft import sft_rows
from tests.tiny import tokenizer


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in rows))
    return str(path)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def chat(asked: str, answered: str = "Yes.") -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": answered},
        ]
    }


def test_nothing_is_lost_and_everything_is_counted(tmp_path: Path) -> None:
    broken = {"from": "assistant", "value": "[Market Trends API(trend_type=GAINERS)]"}
    unfit = {"from": "assistant", "value": "[Market Trends API(trend_type='SAME')]"}
    turns = sft_rows.TOOLACE["conversations"]
    toolace = write(
        tmp_path / "toolace.jsonl",
        sft_rows.TOOLACE,
        "{broken\n",
        {**sft_rows.TOOLACE, "conversations": [turns[0], broken]},
        {**sft_rows.TOOLACE, "conversations": [turns[0], unfit]},
        {**sft_rows.TOOLACE, "system": "Nothing here."},
        {**sft_rows.TOOLACE, "conversations": [turns[0], turns[0], turns[3]]},
        sft_rows.TOOLACE,
    )
    talk = write(
        tmp_path / "talk.jsonl",
        chat("What is tea?"),
        chat("What is 2 + 3?", "It is 2 + 3 = 5."),
        chat("Long?", "word " * 500),
    )
    out = tmp_path / "out"
    card = prepare_sft(
        [SftSource(toolace, "toolace"), SftSource(talk, "talk")],
        [checks.OrderedTurns(), checks.NoMathReasoning(), checks.UniqueConversations()],
        out,
        mixture=Mixture(max_length=2000),
    )
    kept, dropped = lines(out / "conversations.jsonl"), lines(out / "dropped.jsonl")
    assert sorted(row["id"] for row in kept) == ["talk-1", "toolace-1"]
    assert len(kept) + len(dropped) == 10
    assert {(row["step"], row["where"].rpartition("/")[2]) for row in dropped} == {
        ("read", "toolace.jsonl:2"),
        (checks.CALLS, "toolace.jsonl:3"),
        (checks.CALLS, "toolace.jsonl:4"),
        ("converted", "toolace.jsonl:5"),
        ("turns in order, no control tokens", "toolace.jsonl:6"),
        ("no duplicates", "toolace.jsonl:7"),
        ("no math reasoning", "talk.jsonl:2"),
        ("fits the length", "talk.jsonl:3"),
    }
    counts = [(step.entered, step.left) for step in card.steps]
    assert counts == [(10, 9), (9, 8), (8, 6), (6, 5), (5, 4), (4, 3), (3, 2)]
    assert card.steps[2].reasons == {
        "toolace: does not parse": 1,
        "toolace: does not fit its signature": 1,
    }
    assert card.steps[1].reasons == {"toolace: no functions": 1}
    assert sorted(path.name for path in out.iterdir()) == [
        *("card.json", "card.md", "conversations.jsonl", "dropped.jsonl")
    ]
    assert {c.source for c in read_conversations(out / "conversations.jsonl")} == {
        *("toolace", "talk")
    }


def test_weights_shares_and_lengths(tmp_path: Path) -> None:
    sources = []
    for name, count in (("a", 100), ("b", 40)):
        rows = [chat(f"{name} {i}?", "x" * i) for i in range(1, count + 1)]
        sources.append(SftSource(write(tmp_path / f"{name}.jsonl", *rows), name))
    mixture = Mixture({"a": 2, "b": 1}, seed=3)
    card = prepare_sft(sources, [], tmp_path / "out", mixture=mixture)
    rows = lines(tmp_path / "out" / "conversations.jsonl")
    assert card.kept_by_source == {"a": 80, "b": 40}
    assert len({row["id"] for row in rows}) == len(rows) == 120
    assert [row["source"] for row in rows[:60]].count("b") not in (0, 60)
    assert (card.steps[-1].name, card.steps[-1].entered, card.steps[-1].left) == (
        *("drawn by the mixture", 140, 120),
    )
    b = card.lengths["b"]
    sizes = sorted(len(f"b {i}?") + i for i in range(1, 41))
    assert (b.count, b.longest, b.p50) == (40, sizes[-1], sizes[20])
    assert b.mean == pytest.approx(sum(sizes) / 40)
    assert b.trained == pytest.approx(sum(range(1, 41)) / sum(sizes))
    assert card.lengths["all"].count == 120
    again = prepare_sft(sources, [], tmp_path / "again", mixture=mixture)
    assert (tmp_path / "again" / "conversations.jsonl").read_bytes() == (
        tmp_path / "out" / "conversations.jsonl"
    ).read_bytes()
    assert again == card


def test_what_is_left_out_on_purpose_is_noted(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", sft_rows.MAGICODER, sft_rows.EVOL)
    card = prepare_sft([SftSource(path, "m")], [], tmp_path / "out", mixture=Mixture())
    assert card.kept == 2
    assert card.notes == ["1 x m: text after the code left out"]


def test_an_error_leaves_nothing_half_made(tmp_path: Path) -> None:
    good = SftSource(write(tmp_path / "a.jsonl", chat("Hi")), "a")
    unknown = SftSource(write(tmp_path / "b.jsonl", {"text": "x"}), "b")
    empty = SftSource(write(tmp_path / "c.jsonl"), "c")
    for sources, error, message in (
        ([good, unknown], UserError, r"b\.jsonl:1: no converter knows"),
        ([good, empty], DataError, "contains no row"),
        ([good, good], DataError, "repeat"),
    ):
        with pytest.raises(error, match=message):
            prepare_sft(sources, [], tmp_path / "out", mixture=Mixture())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl", "c.jsonl"]


# --------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every publisher's file as it is published: arrays, lines and Parquet."""
    folder = tmp_path_factory.mktemp("published")
    (folder / "toolace.json").write_text(json.dumps([sft_rows.TOOLACE]))
    (folder / "apigen-mt_5k.json").write_text(json.dumps([sft_rows.APIGEN], indent=2))
    (folder / "glaive.json").write_text(json.dumps([sft_rows.GLAIVE], indent=4))
    write(folder / "magicoder.jsonl", sft_rows.MAGICODER)
    pq.write_table(pa.Table.from_pylist([sft_rows.TULU]), folder / "tulu.parquet")
    write(folder / "chat.jsonl", sft_rows.NEMOTRON)
    return folder


@pytest.mark.slow
def test_the_command_converts_all_publishers_in_tokens(published: Path, tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    names = ("toolace.json", "apigen-mt_5k.json", "glaive.json", "magicoder.jsonl", "tulu.parquet")
    sources = [*(str(published / n) for n in names), f"nemotron=nemotron:{published}/chat.jsonl"]
    evaluation = write(tmp_path / "eval.jsonl", {"problem": "Find x if x = 2.", "answer": "2"})
    result = CliRunner().invoke(
        app,
        [
            *("sft", *sources, "--out", str(tmp_path / "out"), "--against", evaluation),
            *("--tokenizer", str(tmp_path / "tokenizer"), "--json"),
        ],
        catch_exceptions=False,
    )
    card = json.loads(result.stdout)
    assert card["kept_by_source"] == {
        **{"toolace": 1, "apigen-mt_5k": 1, "glaive": 1, "magicoder": 1, "tulu": 1, "nemotron": 1}
    }
    assert card["lengths"]["all"]["unit"] == "tokens"
    assert 0 < card["lengths"]["all"]["trained"] < 1
    conversations = read_conversations(tmp_path / "out" / "conversations.jsonl")
    assert sum("<tool_call>" in m.content for c in conversations for m in c.messages) == 5


def test_the_command_explains_weights_it_cannot_read(published: Path, tmp_path: Path) -> None:
    arguments = ["sft", str(published / "glaive.json"), "--out", str(tmp_path / "out")]
    with pytest.raises(UserError, match="expected NAME=SHARE"):
        CliRunner().invoke(app, [*arguments, "--weight", "glaive"], catch_exceptions=False)
