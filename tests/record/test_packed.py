"""Packed lines: their JSON text comes back byte for byte, they are short, damage is noticed."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rstar2.config import Recipe, RlConfig, StageConfig
from rstar2.record import RunDirectory, plain_line, read_groups
from rstar2.record.packed import PackedLine, line_text, pack
from rstar2.record.read import GroupLine, TokenValuesLine
from rstar2.types import (
    Group,
    Problem,
    StopReason,
    TokenSegment,
    TokenValues,
    Trajectory,
    Turn,
    encode,
)

RECIPE = Recipe(name="test", rl=RlConfig(stages=(StageConfig(name="a", steps=9, max_length=64),)))
DRAW = random.Random(0)


def logprobs(count: int) -> list[float]:
    """As engines give them: float32."""
    return [float(np.float32(-DRAW.expovariate(3))) for _ in range(count)]


def turn(count: int) -> Turn:
    ids = [DRAW.randrange(150_000) for _ in range(count)]
    return Turn(ids, logprobs(count), ((1, count),))


def group(name: str, turns: tuple[Turn, ...], prompt: str = "1 + 1?") -> Group:
    more = (TokenSegment((9, 8), turns[:1]),)
    rollout = Trajectory(
        f"{name}/0", "p", name, 0, (1, 2), turns, StopReason.ANSWERED, text=prompt,
        more_segments=more,
    )  # fmt: skip
    return Group(name, Problem("p", prompt, "2"), 1, (rollout, rollout))


def line_of(made: Group) -> GroupLine:
    return GroupLine("a", 1, 2.5, made)


def same(value: object) -> bytes:
    """Check that the text comes back; returns the packed line."""
    packed = pack(value, "a", 1, "g")
    assert plain_line(packed) == encode(value)
    assert b"\n" not in packed
    return packed


def test_a_group_comes_back_byte_for_byte() -> None:
    doubles = Turn((1, 2), (-0.1, -1 / 3), ((1, 2),), response_ids=(7,), entropies=(0.0, -0.0))
    empty = Turn((), (), ())
    nul = 'a "\0" b [1,2] \\u0000 é'
    same(line_of(group("g", (turn(40), doubles, empty), nul)))
    same(line_of(group("g", ())))


@pytest.mark.parametrize(
    "values",
    [
        (-0.123456, -0.0, 0.0, -12.000001, -0.000001),
        (-2147.483647, 1e-7),
        (-3000.5, -0.1),
        (float("nan"), -0.1),
        (float("-inf"), -0.1),
        (1 / 3, -0.1),
    ],
)
def test_token_values_come_back_byte_for_byte(values: tuple[float, ...]) -> None:
    same(TokenValuesLine("a", 1, (TokenValues("g/0", values, values[::-1]),)))


def test_random_values_come_back_byte_for_byte() -> None:
    for _ in range(50):
        old = [round(-DRAW.expovariate(DRAW.choice((0.01, 1, 1000))), 6) for _ in range(20)]
        same(TokenValuesLine("a", 1, (TokenValues("g/0", old, logprobs(20)),)))


def test_a_packed_line_is_short() -> None:
    line = line_of(group("g", (turn(2000),)))
    assert len(same(line)) < 0.4 * len(encode(line))  # random ids and logprobs: the worst case


def test_readers_choose_lines_without_unpacking_them() -> None:
    head = msgspec.json.decode(same(line_of(group("g", (turn(3),)))), type=dict)
    assert (head["stage"], head["step"], head["group"]) == ("a", 1, {"id": "g"})


def test_only_one_field_may_have_its_numbers() -> None:
    some = Turn((1, 2), (-0.5, -0.25), ((1, 2),), response_ids=(7,), entropies=(0.5, 1.0))
    line = plain_line(pack(line_of(group("g", (some,))), "a", 1, "g"), values_of="entropies")
    shown = msgspec.json.decode(line)["group"]["trajectories"][0]["turns"][0]
    arrays = [shown[name] for name in ("sampled_ids", "logprobs", "response_ids", "entropies")]
    assert arrays == [[0, 0], [0, 0], [0], [0.5, 1.0]]


@pytest.mark.parametrize("size", [1, 50, 300, 70_000])  # lengths of one, one, two and four bytes
def test_text_without_arrays_has_any_length(size: int) -> None:
    line = same(TokenValuesLine("a" * size, 1, (TokenValues("g/0", (1.5,), (2.5,)),)))
    values = b'[{"trajectory_id":"g/0","old":\0,"current":\0}]'
    assert line_text(line) == b'{"stage":"%b","step":1,"values":%b}' % (b"a" * size, values)


def test_a_file_may_hold_plain_and_packed_lines(tmp_path: Path) -> None:
    made = [group(f"a/1/{number}", (turn(5),)) for number in range(2)]
    file = tmp_path / "run" / "trajectories" / "a.jsonl"
    with RunDirectory.create_or_resume(tmp_path / "run", RECIPE):
        pass
    file.parent.mkdir()
    file.write_bytes(encode(line_of(made[0])) + b"\n")  # as version 0.2 wrote it
    with RunDirectory.create_or_resume(tmp_path / "run", RECIPE) as run:
        run.trajectories("a", 1, made[1])
    assert [line.group for line in read_groups(tmp_path / "run", "a")] == made
    assert file.read_bytes().count(b'{"form":"packed"') == 1


def test_damage_is_noticed() -> None:
    packed = pack(line_of(group("g", (turn(50),))), "a", 1, "g")
    middle = len(packed) // 2
    other = b"B" if packed[middle : middle + 1] == b"A" else b"A"
    with pytest.raises(msgspec.DecodeError, match="damaged"):
        plain_line(packed[:middle] + other + packed[middle + 1 :])
    with pytest.raises(msgspec.DecodeError, match="damaged: its text is too short"):
        line_text(with_data(packed, lambda data: data[: len(data) // 4]))
    with pytest.raises(msgspec.DecodeError, match="damaged"):
        line_text(with_data(packed, lambda data: data[:2] + data[3:]))
    with pytest.raises(msgspec.DecodeError, match="damaged"):
        line_text(with_data(packed, lambda _: zlib.compress(b"{}")))


def with_data(line: bytes, change: Callable[[bytes], bytes]) -> bytes:
    packed = msgspec.json.decode(line, type=PackedLine)
    return msgspec.json.encode(msgspec.structs.replace(packed, data=change(packed.data)))
