"""All text that the model reads besides the problem: prompts, tool signature, tool results.

These strings become recorded tokens: changing one changes what a policy was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from rstar2.agent.parser import TOOL_NAME
from rstar2.errors import InvariantError
from rstar2.types import Outcome, ToolResult

CHAT_TEMPLATE: str = (
    resources.files("rstar2.agent").joinpath("chat_template.jinja").read_text(encoding="utf-8")
)
"""Exported with every checkpoint, so that transformers and vLLM render the same tokens."""

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

REASON_OPEN = "<reason>"


def system_text(system: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """The system message with the tool signatures, as CHAT_TEMPLATE writes it into ChatML."""
    messages = [{"role": "system", "content": system}] if system else []
    text = _compiled().render(messages=messages, tools=list(tools))
    return str(text).removeprefix("<|im_start|>system\n").removesuffix("<|im_end|>\n")


@cache
def _compiled() -> Any:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(CHAT_TEMPLATE)


# --------------------------------------------------------------------------- tool results

NO_OUTPUT_TEXT = "(no output)"

ERROR_TEXTS = {
    Outcome.EXCEPTION: "The code raised an exception.",
    Outcome.SYNTAX_ERROR: "The code is not valid Python.",
    Outcome.TIMEOUT: "The code took too long and was stopped.",
    Outcome.MEMORY: "The code used too much memory and was stopped.",
    Outcome.OUTPUT_LIMIT: "The code printed too much and was stopped.",
    Outcome.KILLED: "The code was stopped by a signal.",
    Outcome.BAD_JSON: "The tool call is not valid JSON.",
    Outcome.UNKNOWN_TOOL: "There is no such tool.",
    Outcome.BAD_ARGUMENTS: "The arguments of the tool call are wrong.",
}


def tool_text(result: ToolResult) -> str:
    """The output, or the last value, followed by the error; never empty.

    An infrastructure failure is never shown to the model and raises.
    """
    if result.outcome is Outcome.INFRASTRUCTURE:
        raise InvariantError("an infrastructure failure must not be shown to the model")
    parts = [result.stdout.rstrip()]
    if not parts[0] and result.value is not None:
        parts = [result.value.rstrip()]
    if result.outcome.succeeded:
        parts.append(result.stderr.rstrip())
        return "\n".join(filter(None, parts)) or NO_OUTPUT_TEXT
    if result.traceback:
        parts.append(result.traceback.rstrip())
    else:
        parts.append(result.stderr.rstrip())
        parts.append(result.message.rstrip() or ERROR_TEXTS[result.outcome])
    return "\n".join(filter(None, parts))
