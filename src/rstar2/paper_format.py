"""The conversation format of the paper: prompts, the Python tool's signature, tagged answers.

    <reason> ... </reason> <answer> \\boxed{42} </answer>

The strings become recorded tokens: changing one changes what a policy was trained on. The functions
are pure and linear in the length of the text.
"""

from __future__ import annotations

import re
from typing import Any

SYSTEM = (
    "A conversation between User and Assistant. The User asks a question and the Assistant solves "
    "it. The Assistant thinks first and then answers. The reasoning is enclosed in "
    "<reason> </reason> tags and the final answer in <answer> </answer> tags, as in: "
    "<reason> reasoning process here </reason> <answer> answer here </answer>. "
    "While reasoning, the Assistant may run Python code with the tool below, as often as needed, "
    "to compute, to test an idea or to check a result."
)

INSTRUCTION = (
    "Put your answer inside <answer> </answer> tags. "
    "The final answer will be extracted automatically from \\boxed{{}}.\n{problem}"
)

REASON_OPEN = "<reason>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"

TOOL_NAME = "execute_python_code_with_standard_io"

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": (
            "Execute Python code with standard input and return its standard output, or the value "
            "of its last expression if it prints nothing. NumPy, SciPy and SymPy are available. "
            "Every call starts afresh: variables are not kept."
        ),
        "parameters": {
            "type": "object",
            "properties": {
                "code": {"type": "string", "description": "The Python code to execute."},
                "input": {"type": "string", "description": "Text given to it as standard input."},
            },
            "required": ["code", "input"],
        },
    },
}

_BOXED = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or an escaped character, which may be a brace that does not count."""


def count_answer_tags(text: str) -> int:
    """The number of <answer> tags; p_format penalises none and more than one."""
    return text.count(ANSWER_OPEN)


def format_penalty(answer_tags: int, turns: int) -> float:
    """p_format: 1 without an answer tag, else the surplus of tags per turn, at most 1."""
    if answer_tags == 0:
        return 1.0
    return min(1.0, (answer_tags - 1) / max(turns, 1))


def last_answer(text: str) -> str | None:
    """Content of the last complete <answer>...</answer>."""
    end = text.rfind(ANSWER_CLOSE)
    start = text.rfind(ANSWER_OPEN, 0, end) if end >= 0 else -1
    if start < 0:
        return None
    content = text[start + len(ANSWER_OPEN) : end]
    # "<answer>a</answer> b</answer>": the content ends at the first closing tag.
    return content.split(ANSWER_CLOSE, 1)[0]


def answer_of(text: str) -> str | None:
    """Content of the last complete \\boxed{} of the last <answer>; None if there is none."""
    answer = last_answer(text)
    return None if answer is None else boxed_content(answer)


def boxed_content(text: str) -> str | None:
    """Content of the last \\boxed{} whose braces close; nested braces are kept.

    One pass over the text, so that thousands of unclosed boxes cost no more than their length.
    """
    boxes = {match.end() for match in _BOXED.finditer(text)}
    opened: list[int] = []
    """Where the content of each open brace starts."""
    last = (-1, -1)
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.end())
        elif match[0] == "}" and opened and (start := opened.pop()) in boxes:
            last = max(last, (start, match.start()))
    return text[slice(*last)].strip() if last[0] >= 0 else None
