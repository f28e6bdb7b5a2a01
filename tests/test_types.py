"""The nouns: derived views of a trajectory are exact, and JSON loses nothing."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2.types import (
    Choice,
    Failure,
    Finish,
    Group,
    Outcome,
    Problem,
    Reward,
    Selection,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    Truncation,
    Turn,
    decode,
    encode,
    spans,
)

ids = st.lists(st.integers(0, 1000), max_size=6).map(tuple)
finite = st.floats(-50, 0)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    sampled = draw(ids)
    versions = draw(st.lists(st.integers(0, 3), min_size=len(sampled), max_size=len(sampled)))
    result = ToolResult(
        "c", draw(st.sampled_from(Outcome)), stdout=draw(st.text()), truncated=Truncation(stdout=3)
    )
    return Turn(
        sampled_ids=sampled,
        logprobs=tuple(draw(finite) for _ in sampled),
        versions=spans(sorted(versions)),
        calls=(ToolCall("c", "tool", arguments={"code": draw(st.text())}),),
        results=(result,),
        response_ids=draw(ids),
        finish=draw(st.sampled_from(Finish)),
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    rewarded = draw(st.booleans())
    return Trajectory(
        id="t",
        problem_id="p",
        group_id="g",
        seed=draw(st.integers(0, 2**62)),
        prompt_ids=draw(ids),
        turns=tuple(draw(st.lists(turns(), max_size=3))),
        stop=draw(st.sampled_from(StopReason)),
        text=draw(st.text()),
        reward=Reward(1.0, "4", "math") if rewarded else None,
        failure=None if rewarded else Failure("engine", "gone"),
    )


@given(trajectories())
def test_json_round_trip_loses_nothing(trajectory: Trajectory) -> None:
    line = encode(trajectory)
    assert b"\n" not in line
    assert decode(line, Trajectory) == trajectory


@given(trajectories())
def test_derived_arrays_align_and_mask_marks_sampled_tokens_only(trajectory: Trajectory) -> None:
    token_ids, mask, logprobs = trajectory.token_ids, trajectory.mask, trajectory.logprobs
    assert len(token_ids) == len(mask) == len(logprobs)
    sampled = tuple(i for turn in trajectory.turns for i in turn.sampled_ids)
    assert tuple(i for i, m in zip(token_ids, mask, strict=True) if m) == sampled
    assert sum(mask) == trajectory.sampled_tokens
    assert all(lp == 0.0 for lp, m in zip(logprobs, mask, strict=True) if not m)


def test_a_trajectory_by_hand() -> None:
    trajectory = Trajectory(
        id="7.3",
        problem_id="7",
        group_id="g",
        seed=1,
        prompt_ids=(1, 2),
        turns=(
            Turn((40, 41), (-0.1, -0.7), ((4, 2),), response_ids=(50,)),
            Turn((60,), (-0.2,), ((5, 1),)),
        ),
        stop=StopReason.ANSWERED,
    )
    assert trajectory.token_ids == (1, 2, 40, 41, 50, 60)
    assert trajectory.mask == (0, 0, 1, 1, 0, 1)
    assert trajectory.logprobs == (0.0, 0.0, -0.1, -0.7, 0.0, -0.2)
    assert trajectory.segments[0].oldest_version == 4


def test_infrastructure_is_neither_success_nor_failure_of_the_model() -> None:
    assert not Outcome.INFRASTRUCTURE.succeeded
    assert not Outcome.INFRASTRUCTURE.failed
    failing = {o for o in Outcome if o.failed}
    assert failing == set(Outcome) - {Outcome.OK, Outcome.NO_OUTPUT, Outcome.INFRASTRUCTURE}


def test_infrastructure_results_do_not_count_as_calls() -> None:
    results = (
        ToolResult("a", Outcome.OK),
        ToolResult("b", Outcome.TIMEOUT),
        ToolResult("c", Outcome.INFRASTRUCTURE),
    )
    turn = Turn((1,), (-0.1,), ((0, 1),), results=results)
    trajectory = Trajectory("t", "p", "g", 0, (), (turn,), StopReason.ANSWERED)
    assert (trajectory.calls, trajectory.failed_calls) == (2, 1)


def test_a_group_of_equal_rewards_teaches_nothing() -> None:
    def rollout(name: str, value: float | None) -> Trajectory:
        reward = None if value is None else Reward(value, "1", "integer")
        return Trajectory(name, "p", "g", 0, (), (), StopReason.ANSWERED, reward=reward)

    problem = Problem("p", "1+1?", "2")
    equal = Group("g", problem, 0, (rollout("a", 1.0), rollout("b", 1.0), rollout("c", None)))
    mixed = Group("g", problem, 0, (rollout("a", 1.0), rollout("b", 0.0)))
    assert not equal.informative
    assert mixed.informative


def test_selection_lists_kept_indices() -> None:
    choices = tuple(Choice(str(i), i % 2 == 0, "r", 0.0, 0.0, 0.0, 1.0) for i in range(5))
    assert Selection("g", "roc", choices).kept == (0, 2, 4)


def test_spans_run_length_encode() -> None:
    assert spans([4, 4, 5]) == ((4, 2), (5, 1))
    assert spans([]) == ()


def test_a_wrong_field_is_named() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"outcome"):
        decode(b'{"call_id": "a", "outcome": "fine"}', ToolResult)


def test_calls_of_version_0_2_keep_their_code() -> None:
    """Version 0.2 recorded `code` and `stdin` instead of arguments, beside the call's text."""
    raw = '{"name": "python", "arguments": {"code": "1", "input": "x"}}'
    line = encode({"id": "c", "name": "python", "code": "1", "stdin": "x", "raw": raw})
    call = decode(line, ToolCall)
    assert call.arguments == {"code": "1", "input": "x"}
    assert call.shown == "1"


def test_a_call_is_shown_as_its_code_its_arguments_or_its_text() -> None:
    assert ToolCall("c", "t", {"city": "Rome"}).shown == '{"city":"Rome"}'
    assert ToolCall("c", "t", raw="{oops", error=Outcome.BAD_JSON).shown == "{oops"
    assert ToolCall("c", "t").shown == ""
