"""The token ids of a rollout that reaches us as chat requests. Pure: no I/O, no HTTP.

A program sends messages; we render them to token ids, sample a reply and send it back as a
message. The program returns that message in its next request. To render it as text and tokenise it
again could give other ids than those that were sampled, and training would then use tokens the
model never produced. So the ids of every sampled reply are kept, by conversation and by message,
and spliced into later prompts.

    request 1   [user]                           -> ids P            sampled A    segment 0: P A
    request 2   [user, A, tool]                  -> ids P A R        sampled B    segment 0: P A R B
    request 3   [summary, user]  (compaction)    -> ids Q            sampled C    segment 1: Q C
    request 4   [user, A, other] (a second branch) -> ids P A S      sampled D    segment 2: P A S D

A request that continues the newest reply of a segment, with the same tools, extends the segment.
Any other request starts a new one: an edited or shortened history, a sub-agent, a request that runs
beside another, other tools. Such a prompt may contain replies of earlier segments.

Invariants
- A prompt contains every sampled reply as its sampled ids, in whichever segment it was sampled.
- Every sampled token is in exactly one segment with mask 1. Repeated in another segment, it is a
  part of the prompt or of a response, where the mask is 0.
- The sampled ids of a turn decode to the reply that the program received, followed by the token
  that ended the turn or by the stop string, if there was one.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rstar2.errors import InvariantError
from rstar2.types import Generation, Message, TokenSegment, Turn

Ids = tuple[int, ...]
ToolSignature = Mapping[str, Any]
"""One entry of a request's `tools`, as the chat template renders it."""


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A tool call in an assistant message; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a request."""

    role: str
    content: str = ""
    calls: tuple[ChatCall, ...] = ()

    @property
    def key(self) -> str:
        """Equal for messages that are the same to the model: ids of calls are not rendered, and
        arguments are compared as JSON values."""
        calls = [[call.name, _canonical(call.arguments)] for call in self.calls]
        return json.dumps([self.role, self.content, calls])

    @property
    def text(self) -> str:
        """The message as the model would have written it; only used for foreign messages."""
        blocks = [
            f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}\n'
            "</tool_call>"
            for call in self.calls
        ]
        return "\n".join(filter(None, [self.content, *blocks]))


class ChatTemplate(Protocol):
    """The methods of agent.template.Template that rendering a request needs."""

    def chat_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSignature],
        *,
        sampled: Mapping[int, Ids],
        prefix: Ids = (),
        skip: int = 0,
    ) -> Ids: ...


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The prompt of one request; `RolloutTokens.record` or `abandon` ends it, once."""

    messages: tuple[ChatMessage, ...]
    ids: Ids
    session: int
    """Requests with the same number extend one segment, one after another."""
    history: bytes
    """Identifies the messages and the tools."""
    parent: _SampledReply | None
    """The reply that the request continues; None if it continues none."""
    extends: bool


@dataclass(slots=True)
class _SampledReply:
    """A sampled reply, with everything before it."""

    ids: Ids
    segment: int
    turn: int
    session: int
    claimed: bool = False
    """A request that continues this reply is running, or has extended its segment."""


@dataclass(slots=True)
class _GrowingSegment:
    prompt_ids: Ids
    turns: list[Turn] = field(default_factory=list)


class RolloutTokens:
    """All requests of one rollout, as segments of token ids."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._segments: list[_GrowingSegment] = []
        self._histories: dict[bytes, list[_SampledReply]] = {}
        """Sampled replies by the conversation up to and including the reply."""
        self._messages: dict[str, Ids] = {}
        """The newest sampled ids of every reply, by message."""
        self._sessions = 0

    @property
    def segments(self) -> tuple[TokenSegment, ...]:
        """The segments, in the order of their first reply."""
        return tuple(TokenSegment(s.prompt_ids, tuple(s.turns)) for s in self._segments)

    def prompt(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSignature] = ()
    ) -> ChatPrompt:
        """Render a request. What was sampled earlier is spliced in as it was sampled."""
        histories = _histories(messages, tools)
        replies = [i for i, message in enumerate(messages) if message.role == "assistant"]
        parent, skip = None, 0
        for count in range(len(replies), 0, -1):
            known = self._histories.get(histories[replies[count - 1]])
            if known:
                parent = next((reply for reply in known if not reply.claimed), known[0])
                skip = count
                break
        known_ids = {n: self._messages.get(messages[i].key) for n, i in enumerate(replies)}
        ids = self._template.chat_ids(
            [Message(m.role, m.text) for m in messages],
            tools,
            sampled={n: sampled for n, sampled in known_ids.items() if sampled is not None},
            prefix=() if parent is None else parent.ids,
            skip=skip,
        )
        extends = parent is not None and not parent.claimed
        if parent is not None and extends:
            parent.claimed = True
            session = parent.session
        else:
            session, self._sessions = self._sessions, self._sessions + 1
        return ChatPrompt(tuple(messages), ids, session, histories[-1], parent, extends)

    def record(self, prompt: ChatPrompt, reply: ChatMessage, turn: Turn) -> None:
        """Add a sampled turn; `reply` is the message that the program receives for it."""
        if not turn.sampled_ids:
            raise InvariantError("a recorded turn must have sampled tokens")
        parent = prompt.parent
        if parent is not None and prompt.extends:
            number, segment = parent.segment, self._segments[parent.segment]
            if parent.turn != len(segment.turns) - 1:
                raise InvariantError("a request extends a segment that another has extended")
            added = prompt.ids[len(parent.ids) :]
            if prompt.ids != parent.ids + added or not added:
                raise InvariantError("the prompt of a turn does not extend the sampled tokens")
            segment.turns[-1] = replace(segment.turns[-1], response_ids=added)
        else:
            number, segment = len(self._segments), _GrowingSegment(prompt.ids)
            self._segments.append(segment)
        segment.turns.append(turn)
        sampled = _SampledReply(
            ids=(*prompt.ids, *turn.sampled_ids),
            segment=number,
            turn=len(segment.turns) - 1,
            session=prompt.session,
        )
        history = _extend(prompt.history, reply)
        self._histories.setdefault(history, []).append(sampled)
        self._messages[reply.key] = tuple(turn.sampled_ids)

    def abandon(self, prompt: ChatPrompt) -> None:
        """Nothing was sampled, or the program never received it: the request leaves no trace."""
        if prompt.parent is not None and prompt.extends:
            prompt.parent.claimed = False


def cut_at_stop(
    generation: Generation, decode: Callable[[Sequence[int]], str], stops: Sequence[str]
) -> tuple[Generation, str, bool]:
    """End a generation with the token that completes the first stop string.

    Returns the generation, its text before the stop string, and whether there was one. Tokens
    after the stop string are dropped: the program never sees them, and what is left is exactly
    what the model sampled.
    """

    def stopped(count: int) -> bool:
        text = decode(generation.token_ids[:count])
        return any(stop in text for stop in stops)

    total = len(generation.token_ids)
    if not stopped(total):
        return generation, decode(generation.token_ids), False
    count = bisect_left(range(total), True, key=stopped)
    text = decode(generation.token_ids[:count])
    place = min(place for stop in stops if (place := text.find(stop)) >= 0)
    return _cut(generation, count), text[:place], True


def _cut(generation: Generation, count: int) -> Generation:
    """The first `count` tokens of a generation."""
    versions, left = [], count
    for version, tokens in generation.versions:
        if left > 0:
            versions.append((version, min(tokens, left)))
            left -= tokens
    return replace(
        generation,
        token_ids=generation.token_ids[:count],
        logprobs=generation.logprobs[:count],
        versions=tuple(versions),
        entropies=None if generation.entropies is None else generation.entropies[:count],
    )


def _histories(messages: Sequence[ChatMessage], tools: Sequence[ToolSignature]) -> list[bytes]:
    """One digest per message, of the tools and all messages up to it."""
    digest = hashlib.blake2b(json.dumps(list(tools)).encode(), digest_size=16).digest()
    digests = []
    for message in messages:
        digest = _extend(digest, message)
        digests.append(digest)
    return digests


def _extend(history: bytes, message: ChatMessage) -> bytes:
    return hashlib.blake2b(history + message.key.encode(), digest_size=16).digest()


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
