"""SFT data: batch n is the same wherever the stream starts, and bad lines are named."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from rstar2.config import SftConfig
from rstar2.environments.python_math import PythonMath
from rstar2.errors import DataError
from rstar2.problems.conversations import batches, held_out, read_conversations, sft_steps


@pytest.fixture
def talk(tmp_path: Path) -> Path:
    path = tmp_path / "talk.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a"}]}
        for i in range(10)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def asked(config: SftConfig, first: int, count: int) -> list[list[str]]:
    stream = batches(config, seed=1, first=first, demonstrations=PythonMath().demonstrations)
    return [[c.messages[0].content for c in batch] for batch in itertools.islice(stream, count)]


def test_a_stream_that_starts_later_continues_as_the_first_would(talk: Path) -> None:
    config = SftConfig(data=str(talk), steps=20, batch=4)
    whole = asked(config, 0, 20)
    for first in (1, 2, 3, 7, 13):
        assert asked(config, first, 20 - first) == whole[first:]
    flat = [q for batch in whole for q in batch]
    for epoch in range(8):
        assert sorted(flat[10 * epoch : 10 * epoch + 10]) == [f"q{i}" for i in range(10)]
    assert flat[:10] != flat[10:20]


def test_the_embedded_stream_starts_later_too_and_ends() -> None:
    config = SftConfig(data="arithmetic", steps=6, batch=4)
    whole = asked(config, 0, 99)
    assert len(whole) == 6
    assert asked(config, 4, 99) == whole[4:]
    assert asked(SftConfig(steps=6, batch=4), 0, 99) == whole, "python-math demonstrates the same"


def test_steps_from_epochs(talk: Path) -> None:
    assert sft_steps(SftConfig(data=str(talk), steps=0, epochs=3, batch=4)) == 8
    assert sft_steps(SftConfig(steps=7)) == 7
    with pytest.raises(DataError, match="without end"):
        sft_steps(SftConfig(steps=0, epochs=1))


def test_held_out_conversations_use_the_tool() -> None:
    conversations = held_out(SftConfig(), 8, demonstrations=PythonMath().demonstrations)
    assert len(conversations) == 8
    assert all("<tool_call>" in c.messages[1].content for c in conversations)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"messages": [{"role": "user"}]}', r"talk\.jsonl:1: .*content"),
        ('{"messages": [{"role": "bot", "content": "x"}]}', r"role 'bot' is not one of"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no assistant message"),
        ("", "contains no conversation"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "talk.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_conversations(path)
