"""Readers: how a row of each public data set becomes a Problem.

A reader is a pure function from a row's fields to (prompt, answer, kind, extra); it raises
`MalformedRow` naming the field where a row does not have its publisher's shape, and never guesses.
`mapped` reads any other data set by field names: {"prompt": "question", "answer": "label"}.

| name              | published as                    | fields                                |
|-------------------|---------------------------------|---------------------------------------|
| dapo              | BytedTsinghua-SIA/DAPO-Math-17k | prompt[0].content, reward_model       |
| openmathreasoning | nvidia/OpenMathReasoning        | problem, expected_answer              |
| euler             | Project Euler-style             | problem, answer                       |
| gsm8k             | openai/gsm8k                    | question, answer after ####           |
| math              | HuggingFaceH4/MATH-500, MATH    | problem, answer or boxed in solution  |
| svamp             | ChilleD/SVAMP, SVAMP.json       | Body + Question, Answer               |
| mawps             | MAWPS.json; ports of it         | sQuestion, lSolutions; input, target  |
| rstar2            | what rstar2 writes              | prompt, answer, kind                  |

If a publisher gives rows an id, it is kept as `meta["origin"]`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rstar2.errors import UserError
from rstar2.paper_format import boxed_content
from rstar2.problems.rows import DataRow
from rstar2.types import Problem


class MalformedRow(ValueError):
    """A row without its publisher's shape; the message names the field."""


@dataclass(frozen=True, slots=True)
class Draft:
    """The part of a problem that a reader takes from a row."""

    prompt: str
    answer: str
    kind: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)


Reader = Callable[[Mapping[str, Any]], Draft]

_DAPO_HEAD = re.compile(
    r"^Solve the following math problem step by step\..*?answer to the problem\.\s*\n+", re.DOTALL
)
_POINT_ZERO = re.compile(r"(?<=\d)\.0+$")
_DAPO_TAIL = re.compile(r"\n+Remember to put your answer on its own line.*$", re.DOTALL)


def _text(fields: Mapping[str, Any], name: str) -> str:
    """A non-empty string or number as text; integral floats lose their decimal point."""
    if name not in fields:
        raise MalformedRow(f"field {name!r} is missing; the row has {sorted(map(str, fields))}")
    return _scalar(fields[name], name)


def _scalar(value: Any, name: str) -> str:
    if value is None:
        raise MalformedRow(f"field {name!r} is null")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise MalformedRow(f"field {name!r} is a {type(value).__name__}, not text or a number")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise MalformedRow(f"field {name!r} is {value}")
        value = int(value) if value.is_integer() else value
    text = str(value).strip()
    if not text:
        raise MalformedRow(f"field {name!r} is empty")
    return text


def _number(fields: Mapping[str, Any], name: str) -> str:
    """Like `_text`, for publishers that write every answer as a decimal: "145.0" is 145."""
    return _POINT_ZERO.sub("", _text(fields, name))


def _kind(fields: Mapping[str, Any], *names: str) -> str:
    return next((str(fields[name]) for name in names if fields.get(name)), "")


def _origin(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = fields.get(name)
    return {"origin": str(value)} if isinstance(value, str | int) and str(value) else {}


def _nested(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    value = fields.get(name)
    if not isinstance(value, kind) or not value:
        raise MalformedRow(f"field {name!r} should be a non-empty {kind.__name__}")
    return value


def _dapo(fields: Mapping[str, Any]) -> Draft:
    message = _nested(fields, "prompt", list)[0]
    if not isinstance(message, Mapping):
        raise MalformedRow("field 'prompt' should hold messages")
    prompt = _DAPO_TAIL.sub("", _DAPO_HEAD.sub("", _text(message, "content")))
    truth = _text(_nested(fields, "reward_model", dict), "ground_truth")
    extra = fields.get("extra_info")
    return Draft(prompt, truth, meta=_origin(extra, "index") if isinstance(extra, Mapping) else {})


def _openmathreasoning(fields: Mapping[str, Any]) -> Draft:
    kind = _text(fields, "problem_type")
    if kind != "has_answer_extracted":
        raise MalformedRow(f"problem_type is {kind!r}: it has no extracted answer")
    source = _kind(fields, "problem_source")
    return Draft(_text(fields, "problem"), _text(fields, "expected_answer"), source)


def _euler(fields: Mapping[str, Any]) -> Draft:
    return Draft(_text(fields, "problem"), _text(fields, "answer"), meta=_origin(fields, "id"))


def _gsm8k(fields: Mapping[str, Any]) -> Draft:
    _, mark, answer = _text(fields, "answer").rpartition("####")
    if not mark or not answer.strip():
        raise MalformedRow("field 'answer' has no final answer after ####")
    return Draft(_text(fields, "question"), answer.strip().replace(",", ""))


def _math(fields: Mapping[str, Any]) -> Draft:
    kind = _kind(fields, "subject", "type")
    origin = _origin(fields, "unique_id") or _origin(fields, "id")
    if "answer" in fields:
        return Draft(_text(fields, "problem"), _text(fields, "answer"), kind, origin)
    answer = boxed_content(_text(fields, "solution"))
    if answer is None:
        raise MalformedRow("field 'solution' has no \\boxed answer")
    return Draft(_text(fields, "problem"), answer, kind, origin)


def _svamp(fields: Mapping[str, Any]) -> Draft:
    body = _text(fields, "Body")
    stop = "" if body.endswith((".", "?", "!", ",")) else "."
    prompt = f"{body}{stop} {_text(fields, 'Question')}"
    return Draft(prompt, _number(fields, "Answer"), _kind(fields, "Type"), _origin(fields, "ID"))


def _mawps(fields: Mapping[str, Any]) -> Draft:
    if "sQuestion" not in fields:
        return Draft(_text(fields, "input"), _number(fields, "target"), _kind(fields, "type"))
    solutions = _nested(fields, "lSolutions", list)
    if len(solutions) != 1:
        raise MalformedRow(f"field 'lSolutions' has {len(solutions)} answers, not one")
    answer = _POINT_ZERO.sub("", _scalar(solutions[0], "lSolutions"))
    return Draft(_text(fields, "sQuestion"), answer, meta=_origin(fields, "iIndex"))


def _rstar2(fields: Mapping[str, Any]) -> Draft:
    origin = _origin(fields, "id")
    return Draft(_text(fields, "prompt"), _text(fields, "answer"), _kind(fields, "kind"), origin)


READERS: dict[str, Reader] = {
    "dapo": _dapo,
    "openmathreasoning": _openmathreasoning,
    "euler": _euler,
    "gsm8k": _gsm8k,
    "math": _math,
    "svamp": _svamp,
    "mawps": _mawps,
    "rstar2": _rstar2,
}


def mapped(fields_map: Mapping[str, str]) -> Reader:
    """A reader for any data set, from the names of its prompt and answer fields."""
    missing = {"prompt", "answer"} - fields_map.keys()
    unknown = fields_map.keys() - {"prompt", "answer", "kind"}
    if missing or unknown:
        raise UserError(
            f"field map {dict(fields_map)}: needs prompt and answer, may have kind"
            + (f"; unknown: {sorted(unknown)}" if unknown else "")
        )

    def read(fields: Mapping[str, Any]) -> Draft:
        kind = _kind(fields, fields_map["kind"]) if "kind" in fields_map else ""
        return Draft(_text(fields, fields_map["prompt"]), _text(fields, fields_map["answer"]), kind)

    return read


_MARKS: tuple[tuple[str, set[str]], ...] = (
    ("rstar2", {"prompt", "answer"}),
    ("dapo", {"prompt", "reward_model"}),
    ("openmathreasoning", {"problem", "expected_answer", "problem_type"}),
    ("gsm8k", {"question", "answer"}),
    ("svamp", {"Body", "Question", "Answer"}),
    ("mawps", {"input", "target"}),
    ("mawps", {"sQuestion", "lSolutions"}),
    ("math", {"problem", "solution"}),
    ("euler", {"problem", "answer"}),
)


def recognise(fields: Mapping[str, Any]) -> str:
    """The name of the reader for a row's fields; a UserError lists the choices."""
    if {"problem", "answer"} <= fields.keys():  # some publishers repeat the problem as `question`
        fields = {name: value for name, value in fields.items() if name != "question"}
    for name, wanted in _MARKS:
        if wanted <= fields.keys():
            return name
    raise UserError(
        f"no reader knows a row with the fields {sorted(map(str, fields))}; "
        f"name one of {sorted(READERS)} (READER:FILE) or map the fields (--prompt-field, ...)"
    )


def to_problem(row: DataRow, reader: Reader, source: str) -> Problem:
    """Read one row; the id is the source and the row number, so the row can be looked up."""
    draft = reader(row.fields)
    grader = "integer" if re.fullmatch(r"[+-]?\d+", draft.answer) else "math"
    return Problem(
        id=f"{source}-{row.number}",
        prompt=draft.prompt,
        answer=draft.answer,
        grader=grader,
        kind=draft.kind,
        source=source,
        meta=dict(draft.meta),
    )
