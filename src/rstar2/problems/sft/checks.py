"""Filters for converted conversations, each with its own count. Pure.

Calls fit their signatures, turns are in order, text has no control tokens and no math reasoning
(the paper's SFT teaches format and tools, not how to solve), and there is no overlap with
evaluation sets and no duplicate. A filter returns None, or the reason for dropping a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from rstar2.problems.overlap import Contamination, Decontaminated, HashTable, Names
from rstar2.problems.sft.calls import BadCall, check_call
from rstar2.problems.sft.converters import ParsedConversation, ParsedMessage
from rstar2.types import Problem

CALLS = "calls parse and fit their signatures"

_CONTROL = re.compile(
    r"<\|(?:im_start|im_end|im_sep|endoftext|end_of_text|begin_of_text|eot_id|eom_id|python_tag"
    r"|start_header_id|end_header_id)\|>|</?(?:tool_call|tool_response|tools|functioncall)>"
)
_FOLLOWS = {
    "system": ("",),
    "user": ("", "system", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
"""Roles that may come before each role."""


@dataclass(frozen=True, slots=True)
class ValidCalls:
    """Every call names a listed function and its arguments fit the signature."""

    name: str = CALLS

    def drop(self, talk: ParsedConversation) -> str | None:
        try:
            for said in talk.messages:
                for call in said.calls:
                    check_call(call, talk.tools)
        except BadCall as error:
            return str(error)
        return None


@dataclass(frozen=True, slots=True)
class OrderedTurns:
    """Turns alternate, every call has a response, no message is empty or has control tokens."""

    name: str = "turns in order, no control tokens"

    def drop(self, talk: ParsedConversation) -> str | None:
        if not any(said.role == "assistant" for said in talk.messages):
            return "there is no assistant message to learn from"
        before = ParsedMessage("", "")
        for number, said in enumerate(talk.messages, start=1):
            if before.role not in _FOLLOWS[said.role]:
                return f"message {number} is by {said.role} after {before.role or 'nobody'}"
            if before.calls and said.role != "tool":
                return f"the call before message {number} has no response"
            if said.role == "tool" and before.role == "assistant" and not before.calls:
                return f"message {number} is a response to no call"
            if not said.text and not said.calls:
                return f"message {number} is empty"
            if match := _CONTROL.search(said.text):
                return f"message {number} holds the control token {match[0]}"
            before = said
        return None


# --------------------------------------------------------------------------- mathematics

_CODE = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_THOUGHT = re.compile(r"<(think|thinking|reason|reasoning)>", re.IGNORECASE)
_FINAL = re.compile(r"\\boxed\b|^####\s*-?[$\d]|<<[^<>\n]*=[^<>\n]*>>|\bQ\.?E\.?D\b", re.MULTILINE)
_NUMBER = r"[$€£]?\s?-?\d[\d,]*+(?:\.\d+)?\s?%?"
_UNIT = r"(?:\s?[A-Za-z/]++){0,5}"
_STEP = re.compile(
    rf"{_NUMBER}{_UNIT}\s*(?:[-+*/×÷·^−–]|\bx\b|\btimes\b|\bplus\b|\bminus\b)\s*\(?{_NUMBER}{_UNIT}"
    rf"\)?\s*(?:=|\bequals\b)\s*{_NUMBER}"
)
_LATEX = re.compile(
    r"\\(?:d?frac|sqrt|sum|prod|int|lim|cdot|times|div|pm|leq?|geq?|neq|equiv|implies|binom|pmod"
    r"|mathbb|angle|triangle|circ|overline|alpha|beta|theta|pi|infty|ldots|begin\{(?:align|cases"
    r"|equation|[pbv]matrix)\*?\})"
)
_INLINE = re.compile(r"\$(?=\S)[^$\n]*[=+*/^<>\\_{}(-][^$\n]*(?<=[\w.)}\]])\$(?!\d)")
"""Mathematics between dollar signs; $5-$10 is a price."""
_SOLVE = re.compile(
    r"\b(?:solve (?:for|the (?:equation|inequality|system|following))|find (?:the|all) "
    r"(?:\w+ ){0,3}(?:values?|sum|number|solutions?|roots?|area|perimeter|probability|integers?"
    r"|remainder|minimum|maximum)|evaluate|simplify|factor(?:ize|ise)?|prove that|derivative of"
    r"|integral of|how many|how much|what is the (?:sum|product|value|area|probability|remainder"
    r"|average|total)|what(?:'s| is) \d|calculate|compute)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class NoMathReasoning:
    """Drop worked mathematics; code, tool calls and tool responses are ignored.

    A heuristic with high recall: final-answer marks, reasoning tags, two worked computations (one
    is enough after a question that asks for it), and LaTeX beyond an occasional symbol.
    docs/data.md has its measured recall.
    """

    name: str = "no math reasoning"

    def drop(self, talk: ParsedConversation) -> str | None:
        asked = ""
        for said in talk.messages:
            if said.role == "user":
                asked = said.text
            elif said.role == "assistant" and (why := math_reasoning(asked, said.text)):
                return why
        return None


def math_reasoning(asked: str, answered: str) -> str | None:
    """Why an answer counts as worked mathematics, or None."""
    text = _CODE.sub(" ", answered)
    if match := _THOUGHT.search(text):
        return f"a reasoning trace: {match[0]}"
    if match := _FINAL.search(text):
        return f"a final answer to a math problem: {match[0][:40]!r}"
    steps = _STEP.findall(text)
    wanted = _SOLVE.search(asked)
    if len(steps) >= 2 or (steps and wanted):
        return f"worked computations, as {steps[0][:60]!r}"
    symbols = len(_LATEX.findall(text)) + len(_INLINE.findall(text))
    if symbols >= 3 or (symbols and (_LATEX.search(asked) or _INLINE.search(asked))):
        return f"{symbols} pieces of LaTeX mathematics"
    return None


# --------------------------------------------------------------------------- against other data


def decontaminated(evaluation_sets: Iterable[Problem]) -> Decontaminated[ParsedConversation]:
    """A filter that drops conversations that share 8 user words in a row with an evaluation set."""
    return Decontaminated(Contamination.of(evaluation_sets), _user_texts)


def _user_texts(talk: ParsedConversation) -> Iterator[str]:
    return (message.text for message in talk.messages if message.role == "user")


@dataclass(slots=True)
class UniqueConversations:
    """Drop equal conversations; the first one is kept. Signatures and system text are ignored."""

    name: str = "no duplicates"
    _seen: HashTable = field(default_factory=HashTable)
    _ids: Names = field(default_factory=Names)

    def drop(self, talk: ParsedConversation) -> str | None:
        row = len(self._ids)
        self._ids.append(talk.id)
        first = self._seen.first(_digest(talk.messages), row)
        return None if first == row else f"equal to {self._ids[first]}"


def _digest(messages: Sequence[ParsedMessage]) -> int:
    text = "\x1e".join(
        f"{said.role}\x1f{' '.join(said.text.split())}\x1f{[c.text() for c in said.calls]}"
        for said in messages
        if said.role != "system"
    )
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
