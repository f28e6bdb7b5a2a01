"""The tokenizer of an export: its chat template renders what the model was trained on.

`apply_chat_template(messages, add_generation_prompt=True)` of the export, without any other
argument, gives the token ids that the agent loop gives to an engine: system text and tool
signatures, the environment's text around the question, the prefill of the first turn, calls and
results in their tags, control tokens in untrusted text split. vLLM and other servers use the same
template.

- A system message of the caller replaces the trained system text and its tool signatures; `tools`
  of the caller replaces the signatures. A model that was trained without both (`system: none`)
  never reads them.
- The prefill is part of the prompt, so servers do not return it. The template puts it back in front
  of the first turn of a conversation.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from rstar2.agent.prompts import CHAT_TEMPLATE, system_text
from rstar2.agent.template import OWN_TEMPLATE, RESPONSE_TAGS, SETTINGS, Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FRAME = (
    resources.files("rstar2.agent").joinpath("exported_template.jinja").read_text(encoding="utf-8")
)
_HEADER = _FRAME.partition("@@constants@@")[0]
_TOOL_MARK = {"name": "@@rstar2-tool@@"}


@dataclass(frozen=True, slots=True)
class TrainedPrompt:
    """What an environment puts around a question, the same for all of its problems."""

    system: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Signatures, as chat templates render them."""
    before_user: str = ""
    after_user: str = ""
    prefill: str = ""
    varying: tuple[str, ...] = ()
    """What differs between problems and is therefore not part of an export."""


def exported_tokenizer(template: Template, prompt: TrainedPrompt) -> PreTrainedTokenizerFast:
    """A copy of the tokenizer whose chat template renders this prompt."""
    tokenizer = copy.deepcopy(template.tokenizer)
    tokenizer.init_kwargs[SETTINGS] = template.config.model_dump()
    if not template.chatml:
        tokenizer.init_kwargs[OWN_TEMPLATE] = tokenizer.chat_template
    tokenizer.chat_template = exported_template(template, prompt)
    return tokenizer


def exported_template(template: Template, prompt: TrainedPrompt) -> str:
    """The chat template of an export, as Jinja text."""
    body = CHAT_TEMPLATE if template.chatml else str(template.tokenizer.chat_template)
    signatures = list(prompt.tools)
    before_tools, after_tools = system_text("", [_TOOL_MARK]).split("\n" + json.dumps(_TOOL_MARK))
    constants: dict[str, str | bool | list[str]] = {
        "hide_system": template.config.system == "none",
        "system": prompt.system,
        "system_and_tools": system_text(prompt.system, signatures) if signatures else prompt.system,
        "before_tools": before_tools,
        "after_tools": after_tools,
        "system_role": template.system_role,
        "before_user": prompt.before_user,
        "after_user": prompt.after_user,
        "before_reply": template.before_reply,
        "after_reply": template.after_reply,
        "prefill": prompt.prefill,
        "control": sorted({*template.control_tokens, *RESPONSE_TAGS}, key=lambda t: (-len(t), t)),
    }
    lines = [f"{{%- set rstar2_{name} = {_literal(value)} %}}" for name, value in constants.items()]
    body = body.removesuffix("\n")  # Jinja drops one line break at the end of a template
    frame = _FRAME.removesuffix("\n").replace("@@constants@@", "\n".join(lines))
    return frame.replace("@@body@@", body)


def is_exported(chat_template: str | None) -> bool:
    """Whether `exported_template` wrote a chat template."""
    return bool(chat_template) and str(chat_template).startswith(_HEADER)


def _literal(value: str | bool | list[str]) -> str:
    """A value as Jinja reads it; Jinja does not know JSON's surrogate pairs."""
    return json.dumps(value, ensure_ascii=False)
