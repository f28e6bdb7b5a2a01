"""Shows a streamed conversation: a style for each tag, and tool calls as what they run.

The text of a tool call is JSON. It is held back until the call is complete and then shown as a
program, with its line ends; a call that is not valid JSON is shown as it is.
"""

from __future__ import annotations

import json

from rich.console import Console
from rich.syntax import Syntax

STYLES = {
    "reason": "dim",
    "tool_call": "cyan",
    "tool_response": "yellow",
    "answer": "bold green",
}
TAGS = {f"<{name}>": name for name in STYLES} | {f"</{name}>": "" for name in STYLES}
CALL, CALL_END = "<tool_call>", "</tool_call>"
CODE = "code"
"""The argument of a call that is shown as a program."""


class ColouredOutput:
    """Writes text as it arrives; holds back tool calls and what may be the beginning of a tag."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._held = ""
        self._style = ""

    def feed(self, text: str) -> None:
        """Add text, and write all that is neither an open call nor the beginning of a tag."""
        self._held += text
        while self._held:
            if self._held.startswith(CALL):
                end = self._held.find(CALL_END)
                if end < 0:
                    return
                end += len(CALL_END)
                self._call(self._held[:end])
                self._held, self._style = self._held[end:], ""
                continue
            position = self._held.find("<")
            if position != 0:
                plain = self._held if position < 0 else self._held[:position]
                self._write(plain, self._style)
                self._held = self._held[len(plain) :]
                continue
            tag = next((tag for tag in TAGS if self._held.startswith(tag)), None)
            if tag is not None:
                part = TAGS[tag]
                self._write(tag, STYLES[tag.strip("</>")])
                self._style = STYLES[part] if part else ""
                self._held = self._held[len(tag) :]
            elif any(tag.startswith(self._held) for tag in TAGS):
                return
            else:
                self._write("<", self._style)
                self._held = self._held[1:]

    def end(self) -> None:
        """Write the text held back, and end the line."""
        self._write(self._held, self._style)
        self._held, self._style = "", ""
        self._console.print()

    def _call(self, text: str) -> None:
        """A complete call: its program if it has one, else the text itself."""
        try:
            call = json.loads(text.removeprefix(CALL).removesuffix(CALL_END))
            arguments = dict(call["arguments"])
            code = str(arguments.pop(CODE))
        except (ValueError, KeyError, TypeError):
            self._write(text, STYLES["tool_call"])
            return
        self._write(CALL + "\n", STYLES["tool_call"])
        if self._console.color_system is None:
            self._write(code.rstrip("\n") + "\n", "")
        else:
            highlighted = Syntax(
                "", "python", theme="ansi_dark", background_color="default"
            ).highlight(code.rstrip())
            self._console.print(highlighted, soft_wrap=True, end="")
        for name, value in arguments.items():
            if value not in ("", None):
                self._write(f"{name}: {value}\n", "dim cyan")
        self._write(CALL_END, STYLES["tool_call"])

    def _write(self, text: str, style: str) -> None:
        if text:
            self._console.print(
                text, style=style or None, end="", markup=False, highlight=False, soft_wrap=True
            )
