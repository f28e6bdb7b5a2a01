"""Messages -> token ids; the tokens of a trajectory stay the model's own (Invariant 1).

A prompt is tokenised once; after that ids are only appended: the sampled ids unchanged, then
the `response` (everything between the end-of-turn token and the next sampled token). Sampled ids
are never decoded and encoded again. For turns that the tokenizer would itself have produced, the
concatenation equals the tokenised rendering of the whole conversation; where they differ (the model
sampled other tokens for the same text), the sampled ids are kept.

Any chat template works: it is rendered once with markers in place of the contents, and the text
between the markers becomes the frame of a prompt and of a continuation. Tokenizers with the ChatML
tokens always get CHAT_TEMPLATE (their own may drop reasoning from the history); others keep their
own template, with the tool signatures in the system text.

If a turn has no end-of-turn token (the engine stopped for another reason), the token is put in
front of the response, masked out like the rest of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rstar2.agent.prompts import CHAT_TEMPLATE, shown_to_model, system_text
from rstar2.config import TemplateConfig
from rstar2.environments.base import ToolSpec
from rstar2.errors import InvariantError, UserError
from rstar2.token_arrays import TokenArray, id_array
from rstar2.tool_text import tool_text
from rstar2.types import Conversation, Message, ToolCall, ToolResult

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["CHAT_TEMPLATE", "Continuation", "Template", "settings_of"]

CHATML = ("<|im_start|>", "<|im_end|>")
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>")
"""Base models end a text with these tokens even if there is a separate end-of-turn token."""
RESPONSE_TAGS = ("<tool_response>", "</tool_response>")
SETTINGS = "rstar2_template"
"""Key of tokenizer_config.json under which a checkpoint keeps its TemplateConfig."""
OWN_TEMPLATE = "rstar2_own_template"
"""Key of tokenizer_config.json under which an export keeps a chat template that is not ours."""
MARKER = "@@rstar2-content-"
"""Takes the place of a message's content while a chat template is rendered."""
CHARS_PER_TOKEN = 16
"""Tool output beyond this many characters per allowed token is cut before it is tokenised."""
KEPT_PROMPTS = 256
"""Prompts whose ids are kept: the rollouts of a group start from the same one."""
KEPT_OPENINGS = 64
"""Rendered openings of prompts (system text and tool signatures) that are kept."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """What is appended after a turn, as ids and as text."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Frames:
    """The text that a chat template puts around the contents."""

    end_of_turn: str
    between: str
    """From the end-of-turn token to the content of the next user message."""
    after_response: str
    before_reply: str
    """What follows the header of a turn before its content, such as the space in "[/INST] reply".
    It belongs to the turn: a rollout samples it."""
    after_reply: str
    """From the content of a turn to its end-of-turn token."""


class Template:
    """Builds prompts and continuations for one tokenizer; cheap to call, safe to share.

    The chat template and these settings are stored in the tokenizer, so that a checkpoint saved
    with it records what the policy was trained with. `prefill` is the environment's: the text that
    every first turn starts with, as part of the prompt.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, config: TemplateConfig, prefill: str = ""
    ) -> None:
        self.tokenizer = tokenizer
        self.config, self.prefill = config, prefill
        if not tokenizer.is_fast:
            raise UserError("the tokenizer has no tokenizer.json: convert it to a fast tokenizer")
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        vocabulary = tokenizer.get_vocab()
        self.chatml = all(token in vocabulary for token in CHATML)
        if not self.chatml and not tokenizer.chat_template:
            raise UserError(
                "the tokenizer has neither ChatML's <|im_start|> and <|im_end|> nor a chat "
                "template of its own: add one of them (rstar2.agent.template.CHAT_TEMPLATE)"
            )
        if self.chatml:
            tokenizer.chat_template = CHAT_TEMPLATE
        elif OWN_TEMPLATE in tokenizer.init_kwargs:
            tokenizer.chat_template = tokenizer.init_kwargs[OWN_TEMPLATE]
        tokenizer.init_kwargs[SETTINGS] = config.model_dump()
        self._openings: dict[str, str] = {}
        self._prompts: dict[str, TokenArray[int]] = {}
        self.control_tokens = _control_tokens(tokenizer)
        """What is split in untrusted text, longest first."""
        self._specials = re.compile("|".join(map(re.escape, self.control_tokens)))
        self.system_role = self._renders_system()
        self._frames = self._find_frames()
        self._end_id = self._single_id(self._frames.end_of_turn)
        self._spaced = self._encode_after_end("a") != self.encode("a")
        ends = {self._end_id, *_as_ids(tokenizer.eos_token_id)}
        ends |= {vocabulary[token] for token in END_OF_TEXT if token in vocabulary}
        self.stop_ids: tuple[int, ...] = tuple(sorted(ends))

    @property
    def before_reply(self) -> str:
        """The text between the header of a turn and its content."""
        return self._frames.before_reply

    @property
    def after_reply(self) -> str:
        """The text between the content of a turn and its end-of-turn token."""
        return self._frames.after_reply

    # ----------------------------------------------------------------- prompts

    def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> TokenArray[int]:
        """The prompt of an episode: its messages, the header of the first turn and the prefill."""
        if not messages or messages[-1].role != "user":
            raise UserError("the messages of an episode must end with a message of role user")
        shown, signatures = shown_to_model(messages, tools, self.config)
        marked, contents = [], []
        for message in _merge_tool_messages(shown):
            content = message.content
            if message.role != "system":
                contents.append(self._neutral(content.strip()))
                content = _marker(len(contents))
            marked.append(Message(message.role, content))
        rest, text = self._opening(marked, signatures), ""
        for index, content in enumerate(contents, start=1):
            before, rest = _split(rest, _marker(index))
            text += before + content
        prefill = self._frames.before_reply + self.prefill if self.prefill else ""
        return self._prompt(text + rest + prefill)

    def _prompt(self, text: str) -> TokenArray[int]:
        """The ids of a whole prompt; the rollouts of a group share them."""
        if text not in self._prompts:
            if len(self._prompts) >= KEPT_PROMPTS:
                del self._prompts[next(iter(self._prompts))]
            self._prompts[text] = id_array(self.encode(text))
        return self._prompts[text]

    def _opening(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        """The rendered messages; the same for all rollouts of most environments, so it is kept."""
        key = json.dumps([[(m.role, m.content) for m in messages], list(tools)])
        if key not in self._openings:
            if len(self._openings) >= KEPT_OPENINGS:
                self._openings.clear()
            self._openings[key] = self._render(messages, tools, add_generation_prompt=True)
        return self._openings[key]

    # ----------------------------------------------------------------- continuations

    def response(
        self,
        results: Sequence[ToolResult],
        calls: Sequence[ToolCall],
        *,
        limit: int | None = None,
        closed: bool = True,
    ) -> Continuation:
        """Everything between the sampled stop token and the next sampled token.

        The tool results are a user turn; `limit` caps their tokens, divided evenly between them.
        """
        if [result.call_id for result in results] != [call.id for call in calls]:
            raise InvariantError("tool results do not belong to the calls of this turn")
        share = None if limit is None else max(1, limit // max(1, len(results)))
        blocks = [self._block(self.tool_text(result), share) for result in results]
        return self._continuation("\n".join(blocks), closed)

    def follow_up(
        self, text: str, *, limit: int | None = None, closed: bool = True
    ) -> Continuation:
        """The next user message and the header of the next turn; `limit` caps its tokens."""
        content = self._neutral(text.strip())
        return self._continuation(content if limit is None else self._cut(content, limit), closed)

    def tool_text(self, result: ToolResult) -> str:
        """The text of one result for the model, with control tokens in it neutralised."""
        return self._neutral(tool_text(result))

    def _block(self, text: str, limit: int | None) -> str:
        body = text if limit is None else self._cut(text, limit)
        return f"{RESPONSE_TAGS[0]}\n{body}\n{RESPONSE_TAGS[1]}"

    def _continuation(self, content: str, closed: bool) -> Continuation:
        text = f"{self._frames.between}{content}{self._frames.after_response}"
        if closed:
            return Continuation(text, self._encode_after_end(text))
        return Continuation(
            self._frames.end_of_turn + text, (self._end_id, *self._encode_after_end(text))
        )

    def _cut(self, text: str, limit: int) -> str:
        """Remove the middle of a text until it has at most `limit` tokens."""
        if len(text.encode("utf-8", "replace")) < limit:  # a token is a byte or more, or a space
            return text
        spare = limit * CHARS_PER_TOKEN
        if len(text) > spare:
            text = f"{text[: spare // 2]}\n[...]\n{text[len(text) - spare // 2 :]}"
        encoding = self._backend.encode(text, add_special_tokens=False)
        total, offsets = len(encoding.ids), encoding.offsets
        room = limit
        while total > limit and room >= 0:
            head, tail = room - room // 2, room // 2
            left = text[: offsets[head - 1][1]] if head else ""
            right = text[offsets[len(offsets) - tail][0] :] if tail else ""
            cut = f"{left}\n[...]\n{right}"
            total = len(self.encode(cut))
            if total <= limit:
                return cut
            room -= max(1, total - limit)
        return text if total <= limit else ""

    # ----------------------------------------------------------------- chats of other programs

    def chat_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        sampled: Mapping[int, tuple[int, ...]],
        prefix: tuple[int, ...] = (),
        skip: int = 0,
    ) -> tuple[int, ...]:
        """The prompt for the next turn of a chat whose messages another program wrote.

        `sampled` has the ids of assistant messages that the model sampled, by their number among
        the assistant messages; the others are tokenised. `prefix` has the ids of everything up to
        and including the first `skip` assistant messages, which is then not rendered again.
        """
        stem = MARKER
        while any(stem in message.content for message in messages):
            stem = f"@{stem}"
        prepared, replies = [], []
        for message in messages:
            content = self._neutral(message.content)
            if message.role == "assistant":
                replies.append(content)
                content = _marker(len(replies), stem)
            prepared.append(Message(message.role, content))
        text = self._render(_merge_tool_messages(prepared), tools, add_generation_prompt=True)
        ids = list(prefix)
        for number, content in enumerate(replies):
            before, text = _split(text, _marker(number + 1, stem))
            _, text = _split(text, self._frames.end_of_turn)
            if number >= skip:
                ids += self._after_turn(ids, before.removesuffix(self._frames.before_reply))
                ids += sampled[number] if number in sampled else self.encode_turn(content)
        return (*ids, *self._after_turn(ids, text))

    def _after_turn(self, ids: Sequence[int], text: str) -> tuple[int, ...]:
        """Encode what follows a turn, with the end-of-turn token if the turn lacks it."""
        if not ids:
            return self.encode(text)
        end = () if ids[-1] in self.stop_ids else (self._end_id,)
        return (*end, *self._encode_after_end(text))

    # ----------------------------------------------------------------- SFT

    def conversation_ids(
        self, conversation: Conversation
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids and mask of an SFT example: 1 on assistant tokens and their end-of-turn token.

        Encoded in the same parts as a rollout (header and prefilled tag separate from the
        assistant's text), so that SFT teaches exactly the tokens that sampling starts from.
        """
        messages, contents, trained = [], [], []
        for message in _merge_tool_messages(conversation.messages):
            content = message.content.strip()
            if message.role == "assistant":
                contents.append(content)
                trained.append(message.train)
                content = _marker(len(contents))
            messages.append(Message(message.role, content))
        text = self._render(messages, conversation.tools, add_generation_prompt=False)
        ids: list[int] = []
        mask: list[int] = []

        def append(piece: Sequence[int], mark: int) -> None:
            ids.extend(piece)
            mask.extend([mark] * len(piece))

        end, lead = self._frames.end_of_turn, self._frames.before_reply
        for index, content in enumerate(contents, start=1):
            before, text = _split(text, _marker(index))
            if index == 1 and self.prefill and content.startswith(self.prefill):
                before, content = before + self.prefill, content.removeprefix(self.prefill)
            elif before.endswith(lead):
                before, content = before.removesuffix(lead), lead + content
            gap, text = _split(text, end)
            append(self._encode_after_end(before) if ids else self.encode(before), 0)
            append(self._encode_reply(content + gap), int(trained[index - 1]))
        append(self._encode_after_end(text) if ids else self.encode(text), 0)
        return tuple(ids), tuple(mask)

    # ----------------------------------------------------------------- ids and text

    def encode(self, text: str) -> tuple[int, ...]:
        """Text to ids; control tokens in the text are recognised, none are added."""
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_turn(self, text: str) -> tuple[int, ...]:
        """An assistant turn as transformers renders it, with its end-of-turn token."""
        return self._encode_reply(self._frames.before_reply + text + self._frames.after_reply)

    def _encode_reply(self, text: str) -> tuple[int, ...]:
        # Some tokenizers add a space before the first word of a text; a turn is not its beginning.
        ids = self._encode_after_end(text) if self._spaced else self.encode(text)
        return (*ids, self._end_id)

    def _encode_after_end(self, text: str) -> tuple[int, ...]:
        """Encode text that follows an end-of-turn token, which may absorb white space."""
        return self.encode(self._frames.end_of_turn + text)[1:]

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text, control tokens included."""
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    def turn_text(self, ids: Sequence[int]) -> str:
        """Text of a sampled turn without the token that stopped it."""
        closed = bool(ids) and ids[-1] in self.stop_ids
        return self.decode(ids[:-1] if closed else ids)

    def _neutral(self, text: str) -> str:
        """Split control tokens in untrusted text, so that it cannot forge a turn."""
        return self._specials.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)

    # ----------------------------------------------------------------- rendering

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
    ) -> str:
        prepared = list(messages) if self.chatml else self._for_own_template(messages, tools)
        return str(
            self.tokenizer.apply_chat_template(
                [{"role": m.role, "content": m.content} for m in prepared],
                tools=[dict(tool) for tool in tools] if self.chatml and tools else None,
                chat_template=CHAT_TEMPLATE if self.chatml else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        )

    def _for_own_template(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> list[Message]:
        """Put tool signatures into the system text, or into the user text without a system role."""
        rest = list(messages)
        system = rest.pop(0).content if rest and rest[0].role == "system" else ""
        system = system_text(system, tools) if tools else system
        if not system:
            return rest
        if self.system_role or not rest:
            return [Message("system", system), *rest]
        return [Message(rest[0].role, f"{system}\n\n{rest[0].content}"), *rest[1:]]

    def _renders_system(self) -> bool:
        """Whether the template renders the system role (some reject it, some drop it)."""
        if self.chatml:
            return True
        from jinja2 import TemplateError

        messages = [
            {"role": "system", "content": _marker(0)},
            {"role": "user", "content": _marker(1)},
        ]
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        except TemplateError:
            return False
        return _marker(0) in str(text)

    def _find_frames(self) -> _Frames:
        user, reply, response = _marker(1), _marker(2), _marker(3)
        opening = (Message("user", user),)
        prompt = self._render(opening, (), add_generation_prompt=True)
        turns = (*opening, Message("assistant", reply), Message("user", response))
        whole = self._render(turns, (), add_generation_prompt=True)
        header, rest = _split(whole, reply)
        lead = header.removeprefix(prompt) if header.startswith(prompt) else ""
        between, after_response = _split(rest, response)
        end = self._specials.search(between)
        if end is None:
            raise UserError("the chat template does not end assistant turns with a special token")
        return _Frames(
            end_of_turn=end[0],
            between=between[end.end() :],
            after_response=after_response,
            before_reply=lead,
            after_reply=between[: end.start()],
        )

    def _single_id(self, token: str) -> int:
        ids = self.encode(token)
        if len(ids) != 1:
            raise UserError(f"the end-of-turn token {token!r} is not one id in this tokenizer")
        return ids[0]


def settings_of(tokenizer: PreTrainedTokenizerFast) -> TemplateConfig | None:
    """The settings saved with a checkpoint's tokenizer; None if rstar2 did not save it."""
    settings = tokenizer.init_kwargs.get(SETTINGS)
    return None if settings is None else TemplateConfig.model_validate(settings)


def _marker(index: int, stem: str = MARKER) -> str:
    return f"{stem}{index}@@"


def _split(text: str, marker: str) -> tuple[str, str]:
    before, separator, after = text.partition(marker)
    if not separator:
        raise UserError(f"the chat template does not render {marker!r} as it is given")
    return before, after


def _as_ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def _control_tokens(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    added = tokenizer.added_tokens_decoder.values()
    tokens = {str(token) for token in added if token.special}
    tokens |= set(tokenizer.all_special_tokens) | set(RESPONSE_TAGS)
    return sorted((t for t in tokens if len(t) > 1), key=lambda t: (-len(t), t))


def _merge_tool_messages(messages: Sequence[Message]) -> list[Message]:
    """Rewrite `tool` messages as they are rendered: a user turn with one block per message."""
    merged: list[Message] = []
    previous = ""
    for message in messages:
        if message.role == "tool":
            block = f"{RESPONSE_TAGS[0]}\n{message.content}\n{RESPONSE_TAGS[1]}"
            if previous == "tool":
                block = f"{merged.pop().content}\n{block}"
            merged.append(Message("user", block))
        else:
            merged.append(message)
        previous = message.role
    return merged
