"""SFT text that teaches calls: well-formed, as the tool would answer, and free of word problems."""

from __future__ import annotations

import json
import re

from rstar2.agent.parser import CallParser
from rstar2.environments.python_tool import python_spec
from rstar2.paper_format import answer_of
from rstar2.problems.toolformat import SLIP_SHARE, answers, conversations

PARSER = CallParser((python_spec(),), 4)


def test_every_turn_is_what_the_parser_reads() -> None:
    for conversation in conversations(300, 0):
        *calls, answer = [m.content for m in conversation.messages if m.role == "assistant"]
        for text in calls:
            (call,) = PARSER.parse(text, "t")
            assert call.error is None
            assert call.shown
        outputs = [m.content for m in conversation.messages if m.role == "tool"]
        assert len(outputs) == len(calls)
        assert answer_of(answer) == outputs[-1]


def test_slips_are_mended() -> None:
    made = list(conversations(600, 1))
    slipped = [c for c in made if len(c.messages) > 4]
    assert 0.6 * SLIP_SHARE < len(slipped) / len(made) < 1.4 * SLIP_SHARE
    assert all("Error" in c.messages[2].content for c in slipped)
    assert not any("Error" in c.messages[-2].content for c in made)


SIGNS = {
    "+": r"[Aa]dd|plus|sum",
    "-": r"[Ss]ubtract|minus|difference",
    "*": r"[Mm]ultiply|times",
    "/": r"[Dd]ivide",
}


def test_what_to_compute_is_always_said() -> None:
    """The last sentence has an expression's numbers and its operations: there is none to choose."""
    seen = 0
    for conversation in conversations(600, 2):
        request, call = conversation.messages[0].content, conversation.messages[1].content
        code = PARSER.parse(call, "t")[0].shown
        numbers = re.findall(r"\d+", code)
        signs = re.findall(r"(?<=[\d)] )[-+*/](?= \d)", code)
        if not signs:
            continue
        seen += 1
        asked = re.split(r"(?<=\.) ", request)[-1]
        assert set(re.findall(r"\d+", asked)) == set(numbers)
        for sign in signs:
            assert f" {sign} " in asked or re.search(SIGNS[sign], asked), (asked, code)
    assert seen > 300


def test_stories_have_numbers_that_are_not_for_the_call() -> None:
    """Otherwise SFT would teach to use whatever numbers a text has."""
    stories = [c for c in conversations(600, 4) if ". " in c.messages[0].content]
    distracted = 0
    for conversation in stories:
        story = re.split(r"(?<=\.) ", conversation.messages[0].content)[:-1]
        code = PARSER.parse(conversation.messages[1].content, "t")[0].shown
        distracted += bool(set(re.findall(r"\d+", " ".join(story))) - {*re.findall(r"\d+", code)})
    assert len(stories) > 200
    assert distracted > len(stories) / 2


def test_equal_seeds_give_equal_text() -> None:
    one, other = (json.dumps([m.content for c in conversations(50, 5) for m in c.messages])
                  for _ in range(2))  # fmt: skip
    assert one == other
    assert one != json.dumps([m.content for c in conversations(50, 6) for m in c.messages])


def test_answers_are_to_the_same_requests_without_calls() -> None:
    """The control without a tool sees the same requests and values, and no call."""
    for called, answered in zip(conversations(100, 3), answers(100, 3), strict=True):
        request, reply = (message.content for message in answered.messages)
        assert request == called.messages[0].content
        assert PARSER.parse(reply, "t") == ()
        value = answer_of(called.messages[-1].content)
        assert answer_of(reply) == value
        assert reply.startswith("<reason>")
        assert f"= {value}</reason>" in reply
