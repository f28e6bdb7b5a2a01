"""Colours a streamed conversation: each tag of the agent's format has its own style."""

from __future__ import annotations

from rich.console import Console

STYLES = {
    "reason": "dim",
    "tool_call": "cyan",
    "tool_response": "yellow",
    "answer": "bold green",
}
TAGS = {f"<{name}>": name for name in STYLES} | {f"</{name}>": "" for name in STYLES}
LONGEST = max(map(len, TAGS))


class ColouredOutput:
    """Writes text as it arrives; holds back only what may be the beginning of a tag."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._held = ""
        self._style = ""

    def feed(self, text: str) -> None:
        """Add text, and write all that cannot be the beginning of a tag."""
        self._held += text
        while self._held:
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

    def _write(self, text: str, style: str) -> None:
        if text:
            self._console.print(
                text, style=style or None, end="", markup=False, highlight=False, soft_wrap=True
            )
