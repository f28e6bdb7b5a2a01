"""A small taskset with the settings of verifiers' reverse-text, for tests: spell letters backwards.

The reward is the share of letters in their places.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import verifiers.v1 as vf

__all__ = ["LettersTaskset"]

REPLY = re.compile("<reversed_text>(.*)</reversed_text>")


class LettersData(vf.TaskData):  # type: ignore[misc]  # verifiers is untyped
    word: str


class LettersTask(vf.Task[LettersData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    @vf.reward  # type: ignore[untyped-decorator]
    async def right_places(self, trace: vf.Trace) -> float:
        reply = REPLY.search(trace.last_reply)
        wanted = str(self.data.word)[::-1]
        if reply is None or len(reply[1]) != len(wanted):
            return 0.0
        right: int = sum(a == b for a, b in zip(reply[1], wanted, strict=True))
        return right / len(wanted)


class LettersConfig(vf.TasksetConfig):  # type: ignore[misc]
    dataset_name: str


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):  # type: ignore[misc]
    def load(self) -> Iterator[LettersTask]:
        rows = (Path(self.config.dataset_name) / "train.jsonl").read_text().splitlines()
        for row in rows:
            word = json.loads(row)["prompt"]
            yield LettersTask(LettersData(prompt=word, word=word), self.config.task)
