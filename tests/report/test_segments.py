"""Trajectories as people read them."""

from __future__ import annotations

from rstar2.report.segments import Segment, segments
from rstar2.types import Outcome, StopReason, ToolCall, ToolResult, Trajectory, Turn


def trajectory(text: str, *turns: tuple[tuple[ToolCall, ToolResult], ...]) -> Trajectory:
    made = tuple(
        Turn((1,), (-0.1,), ((0, 1),), tuple(c for c, _ in pairs), tuple(r for _, r in pairs))
        for pairs in turns
    )
    return Trajectory("t", "p", "g", 0, (1,), made, StopReason.ANSWERED, text=text)


def pair(code: str, result: ToolResult) -> tuple[ToolCall, ToolResult]:
    return ToolCall(result.call_id, "python", {"code": code}), result


OK = ToolResult("a", Outcome.OK, stdout="42\n")
FAILED = ToolResult("b", Outcome.EXCEPTION, traceback="ValueError: no")


def test_thought_code_result_answer() -> None:
    text = (
        "first</reason><tool_call>{1}</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n42"
        "\n</tool_response><|im_end|>\n<|im_start|>assistant\n<reason>so</reason><answer>42</answer>"
    )
    assert segments(trajectory(text, (pair("print(42)", OK),), ())) == [
        Segment("thought", "first"),
        Segment("code", "print(42)"),
        Segment("result", "42", "ok"),
        Segment("thought", "so", turn=1),
        Segment("answer", "42", turn=1),
    ]


def test_two_calls_in_a_turn_and_a_failure() -> None:
    text = "<tool_call>1</tool_call><tool_call>2</tool_call><tool_response>x</tool_response>" * 1
    text += "<tool_response>y</tool_response>after"
    parts = segments(trajectory(text, (pair("one", OK), pair("two", FAILED))))
    assert [s.kind for s in parts] == ["code", "code", "result", "result", "thought"]
    assert parts[3] == Segment("result", "ValueError: no", "exception", failed=True, result=1)


def test_a_made_up_tool_response_is_thought() -> None:
    parts = segments(trajectory("<tool_response>I win</tool_response><answer>1</answer>"))
    assert parts == [Segment("thought", "I win"), Segment("answer", "1")]


def test_a_call_that_never_closed_and_our_own_failure() -> None:
    ours = ToolResult("c", Outcome.INFRASTRUCTURE, message="no server")
    call = ToolCall("c", "python", raw='{"name": ', error=Outcome.BAD_JSON)
    parts = segments(trajectory('<reason>a<tool_call>{"name": ', ((call, ours),)))
    assert parts == [
        Segment("thought", "a"),
        Segment("code", '{"name": '),
        Segment("result", "no server", "infrastructure", failed=True),
    ]


def test_code_may_mention_tags() -> None:
    text = "<tool_call>print('<answer>')</tool_call><answer>1</answer>"
    parts = segments(trajectory(text))
    assert [s.kind for s in parts] == ["code", "answer"]
