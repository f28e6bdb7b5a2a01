"""The words that the agent reads before a problem, and the tool it is offered."""

from __future__ import annotations

from typing import Any

from rstar2.agent.parser import TOOL_NAME

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
