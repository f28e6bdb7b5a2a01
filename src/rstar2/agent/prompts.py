"""The chat template, and the system message as it writes it.

The template becomes recorded tokens: changing it changes what a policy was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

from rstar2.config import TemplateConfig
from rstar2.environments.base import ToolSpec
from rstar2.types import Conversation, Message

CHAT_TEMPLATE: str = (
    resources.files("rstar2.agent").joinpath("chat_template.jinja").read_text(encoding="utf-8")
)
"""Exported with every checkpoint, so that transformers and vLLM render the same tokens."""


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


def shown_to_model(
    messages: Sequence[Message], tools: Sequence[ToolSpec], config: TemplateConfig
) -> tuple[list[Message], list[dict[str, Any]]]:
    """The messages and tool signatures of a prompt: `system: none` leaves both descriptions out."""
    if config.system == "none":
        return [message for message in messages if message.role != "system"], []
    return list(messages), [tool.signature for tool in tools]


def shown_conversation(conversation: Conversation, config: TemplateConfig) -> Conversation:
    """A demonstration with the same descriptions as the prompts of rollouts."""
    if config.system == "none":
        messages = tuple(m for m in conversation.messages if m.role != "system")
        return replace(conversation, messages=messages, tools=())
    return conversation
