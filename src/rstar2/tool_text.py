"""The text of a tool result that the model reads.

These strings become recorded tokens: changing one changes what a policy was trained on.
"""

from __future__ import annotations

from rstar2.errors import InvariantError
from rstar2.types import Outcome, ToolResult

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
