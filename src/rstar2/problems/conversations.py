"""SFT conversations: the environment's demonstrations, or by name `arithmetic` (the embedded task),
`toolformat` (tool-call format for pre-trained models), `answerformat` (the same requests, answered
without a tool) or a JSONL file in messages form.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}],
     "tools": [...], "id": "...", "source": "..."}

`batches` is an endless, seeded stream that can start at any batch: batch n does not depend on
which batches were drawn before, so a resumed run sees the same data.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rstar2.config import SftConfig
from rstar2.errors import DataError
from rstar2.problems.load import ARITHMETIC
from rstar2.seeds import derive_seed
from rstar2.types import Conversation, Message

ROLES = ("system", "user", "assistant", "tool")
TOOLFORMAT, ANSWERFORMAT = "toolformat", "answerformat"
MADE = (ARITHMETIC, TOOLFORMAT, ANSWERFORMAT)
"""Names of conversations that are generated from a seed."""

MakeConversations = Callable[[int, int], Iterator[Conversation]]
"""(count, seed) -> that many conversations, such as an environment's demonstrations."""


class _ConversationLine(msgspec.Struct, forbid_unknown_fields=True):
    messages: list[Message]
    tools: list[dict[str, Any]] = []
    id: str = ""
    source: str = ""


def sft_steps(config: SftConfig) -> int:
    """Optimizer steps of the SFT stage: as given, or from the number of epochs."""
    if config.steps or not config.epochs:
        return config.steps
    if config.data is None or config.data in MADE:
        what = config.data or "what the environment demonstrates"
        raise DataError(f"sft.epochs: {what} is generated without end; set sft.steps")
    return max(1, round(config.epochs * len(read_conversations(Path(config.data))) / config.batch))


def batches(
    config: SftConfig, seed: int, first: int = 0, *, demonstrations: MakeConversations
) -> Iterator[Sequence[Conversation]]:
    """Batches from number `first`; a generated stream ends, a file repeats."""
    if config.data is None or config.data in MADE:
        make = maker(config.data, demonstrations)
        stream = make(sft_steps(config) * config.batch, derive_seed("sft", seed))
        stream = itertools.islice(stream, first * config.batch, None)
        while batch := list(itertools.islice(stream, config.batch)):
            yield batch
        return
    conversations = read_conversations(Path(config.data))
    count = len(conversations)
    order: dict[int, list[int]] = {}
    for number in itertools.count(first):
        batch = []
        for position in range(number * config.batch, (number + 1) * config.batch):
            epoch, offset = divmod(position, count)
            if epoch not in order:
                order = {
                    epoch: list(range(count)),
                    **{e: o for e, o in order.items() if e == epoch - 1},
                }
                random.Random(derive_seed("sft", seed, epoch)).shuffle(order[epoch])
            batch.append(conversations[order[epoch][offset]])
        yield batch


def held_out(
    config: SftConfig, count: int, *, demonstrations: MakeConversations
) -> list[Conversation]:
    """Conversations for the held-out loss, unseen in training; empty for files."""
    if config.data is not None and config.data not in MADE:
        return []
    stream = maker(config.data, demonstrations)(4 * count, derive_seed("sft", "heldout"))
    return [c for c in stream if not c.source.endswith("copy")][:count]


def maker(name: str | None, demonstrations: MakeConversations) -> MakeConversations:
    """The function that generates `count` conversations from a seed."""
    if name is None:
        return demonstrations
    if name == ARITHMETIC:
        from rstar2.problems.arithmetic import sft_conversations

        return sft_conversations
    from rstar2.problems.toolformat import answers, conversations

    return answers if name == ANSWERFORMAT else conversations


def read_conversations(path: Path) -> list[Conversation]:
    """Read a JSONL file; a bad line is a DataError with its number."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"sft.data {str(path)!r} cannot be read: {error.strerror} "
            f"(give {' or '.join(MADE)}, or the path of a JSONL file)"
        ) from error
    conversations = []
    for number, line in enumerate(data.splitlines(), start=1):
        if line.strip():
            conversations.append(_parse(line, f"{path}:{number}", number))
    if not conversations:
        raise DataError(f"{path}: contains no conversation")
    return conversations


def _parse(line: bytes, where: str, number: int) -> Conversation:
    try:
        read = msgspec.json.decode(line, type=_ConversationLine)
    except msgspec.MsgspecError as error:
        raise DataError(f"{where}: {error}") from error
    for message in read.messages:
        if message.role not in ROLES:
            raise DataError(f"{where}: role {message.role!r} is not one of {', '.join(ROLES)}")
    if not any(m.role == "assistant" and m.train for m in read.messages):
        raise DataError(f"{where}: no assistant message to learn from")
    return Conversation(
        read.id or str(number), tuple(read.messages), tuple(read.tools), read.source
    )
