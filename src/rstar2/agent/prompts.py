"""The words that the agent reads before a problem, the tool it is offered, and the template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from rstar2.agent.parser import TOOL_NAME

CHAT_TEMPLATE: str = (
    resources.files("rstar2.agent").joinpath("chat_template.jinja").read_text(encoding="utf-8")
)
"""Exported with every checkpoint; gives the same tokens in transformers and vLLM."""

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
