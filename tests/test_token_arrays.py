"""Token arrays behave as tuples of the same values do, and take a tenth of their memory."""

from __future__ import annotations

import gc
import pickle
import random
import struct
import tracemalloc
from array import array
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2.token_arrays import TokenArray, float_array, id_array, mark_array
from rstar2.types import StopReason, Trajectory, Turn, decode, encode

ids = st.lists(st.integers(0, 2**31 - 1)).map(tuple)
floats = st.lists(st.floats(allow_nan=False)).map(tuple)
MOST_BYTES = 12


def single(value: float) -> float:
    """The value as float32 holds it, as engines report logprobs."""
    number: float = struct.unpack("f", struct.pack("f", value))[0]
    return number


@given(ids)
def test_ids_behave_as_a_tuple(values: tuple[int, ...]) -> None:
    packed = id_array(values)
    assert packed == values
    assert values == packed
    assert hash(packed) == hash(values)
    assert tuple(packed) == values
    assert packed[1:-1] == values[1:-1]
    assert bool(packed) == bool(values)
    assert packed + id_array((7,)) == (*values, 7)
    assert packed != (*values, 7)
    assert [*values, *packed] == [*values, *values]
    assert all(value in packed and packed.count(value) == values.count(value) for value in values)
    assert np.array_equal(np.asarray(packed, dtype=np.int64), np.array(values, dtype=np.int64))
    assert pickle.loads(pickle.dumps(packed)) == packed


@given(floats)
def test_no_float_changes(values: tuple[float, ...]) -> None:
    packed = float_array(values)
    assert [x.hex() for x in packed] == [x.hex() for x in values]
    assert packed + float_array((-0.1,)) == (*values, -0.1)
    assert float_array((-0.5,)) + packed == (-0.5, *values)


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_logprobs_of_engines_take_four_bytes(values: list[float]) -> None:
    assert float_array(values).nbytes == 4 * len(values)


def test_a_list_is_extended_in_place() -> None:
    """`list += array` must not turn the list into an array."""
    values = [1]
    values += id_array((2, 3))
    assert values == [1, 2, 3]
    assert type(values) is list


def test_marks_take_one_byte() -> None:
    assert mark_array((0, 1, 1)).nbytes == 3


def test_an_id_that_is_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="token ids"):
        id_array((2**31,))
    line = encode(Turn((1,), (-0.5,), ((0, 1),))).replace(b"[1]", b"[4294967296]")
    with pytest.raises(msgspec.ValidationError, match="token ids"):
        decode(line, Turn)


def test_a_record_reads_the_same_from_lists_and_arrays() -> None:
    turn = Turn([3, 4], [-0.1, -0.25], ((0, 2),), entropies=[0.5, 0.7])
    assert turn == Turn((3, 4), (-0.1, -0.25), ((0, 2),), entropies=(0.5, 0.7))
    assert b'"sampled_ids":[3,4],"logprobs":[-0.1,-0.25]' in encode(turn)
    assert isinstance(turn.sampled_ids, TokenArray)
    assert replace(turn, text="x").sampled_ids is turn.sampled_ids
    assert hash(decode(encode(turn), Turn)) == hash(turn)


def test_a_trajectory_takes_at_most_twelve_bytes_a_token() -> None:
    """Everything counts: the arrays, the turns and the trajectory, at 200 tokens a turn."""
    rng = random.Random(0)
    turns = [
        ([rng.randrange(150_000) for _ in range(200)], [single(-rng.random()) for _ in range(200)])
        for _ in range(64)
    ]
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        held_turns = tuple(Turn(sampled, logprobs, ((0, 200),)) for sampled, logprobs in turns)
        made = Trajectory("t", "p", "g", 0, (), held_turns, StopReason.ANSWERED)
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held / made.sampled_tokens <= MOST_BYTES


def test_bytes_of_an_engine_are_an_array() -> None:
    assert TokenArray(array("f", struct.pack("2f", -0.5, -1.25))) == (-0.5, -1.25)
