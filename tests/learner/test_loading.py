"""Reading and gathering weights: one rank holds the whole model, the others only their shard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rstar2.config import LearnerConfig, OptimizerConfig
from rstar2.errors import RecipeError
from rstar2.learner import attention, model
from rstar2.learner.group import LearnerGroup
from rstar2.learner.learner import Learner
from rstar2.learner.weights import write_safetensors
from tests.learner.conftest import SHAPE
from tests.learner.flash import install_flash_attention
from tests.learner.learner_helpers import local_ranks, make_group

MEGABYTE = 2**20


def test_flash_attention_never_sees_float32(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner in bfloat16 starts, trains and scores with a kernel that refuses float32."""
    install_flash_attention(monkeypatch)
    assert model.attention_for("cuda:0", torch.bfloat16) == "flash_attention_2"
    assert model.attention_for("cuda:0", torch.float32) == attention.NAME
    monkeypatch.setattr(model, "attention_for", lambda device, dtype: "flash_attention_2")
    learner = Learner(
        model_dir,
        LearnerConfig(dtype="bfloat16"),
        OptimizerConfig(lr=1e-3),
        total_steps=1,
        seed=0,
    )
    assert learner.policy.model.config._attn_implementation == "flash_attention_2"
    rows = [(tuple(range(1, 40)), (0,) + (1,) * 38), ((5, 6, 7), (0, 1, 1))]
    assert learner.sft_step(rows)["loss"] > 0
    flash = learner.logprobs([[1, 2, 3, 4]])[0]
    learner.policy.model.set_attn_implementation(attention.NAME)
    assert learner.logprobs([[1, 2, 3, 4]])[0] == pytest.approx(flash, abs=1e-2)
    learner.dtype = torch.float32
    learner.policy.model.set_attn_implementation("flash_attention_2")
    with pytest.raises(RuntimeError, match="only support fp16 and bf16"):
        learner.logprobs([[1, 2, 3, 4]])


def test_loaded_weights_are_those_of_transformers(qwen_dir: Path, model_dir: Path) -> None:
    """Also those that no file has: tied heads and the frequencies of rotary embeddings."""
    for directory in (qwen_dir, model_dir):
        policy = model.load_policy(directory, "cpu")
        expected = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        for part in ("named_parameters", "named_buffers"):
            ours = dict(getattr(policy.model, part)())
            theirs = dict(getattr(expected, part)())
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert policy.model.generation_config.to_dict() == expected.generation_config.to_dict()


def test_two_ranks_have_the_weights_of_one(qwen_dir: Path) -> None:
    with make_group(qwen_dir, 1) as one, make_group(qwen_dir, 2) as two:
        expected, several = one.state(), two.state()
        assert list(expected) == list(several)
        assert all(torch.equal(expected[name], several[name]) for name in expected)


@pytest.mark.slow
def test_an_unknown_head_is_refused_by_all_ranks(tmp_path: Path) -> None:
    config = LlamaConfig(**SHAPE | {"tie_word_embeddings": True, "logits_scaling": 3.0})
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match="computes its logits in a way"):
        make_group(tmp_path, 2)


def largest_megabytes(group: LearnerGroup) -> list[float]:
    """Largest memory so far of each rank's process."""
    sizes = []
    for process in local_ranks(group)._processes:
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        sizes.append(int(peak.split()[1]) / 1024)
    return sizes


@pytest.mark.slow
def test_only_rank_0_holds_the_whole_model(tmp_path: Path) -> None:
    """Rank 1 gathers tensors without keeping them (before: it grew by 1.5 times the model)."""
    shape = SHAPE | {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 4000}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**shape | {"num_hidden_layers": 10})).save_pretrained(tmp_path)
    learner = LearnerConfig(ranks=2, threads=1)
    with LearnerGroup(tmp_path, learner, OptimizerConfig(), total_steps=1, seed=0) as group:
        before = largest_megabytes(group)
        state = group.state()
        after = largest_megabytes(group)
    whole = sum({v.data_ptr(): v.nbytes for v in state.values()}.values()) / MEGABYTE
    assert whole > 100
    assert after[1] - before[1] < whole / 2
    assert after[0] - before[0] > whole


def test_an_export_of_several_files_is_read_by_transformers(qwen_dir: Path, tmp_path: Path) -> None:
    source = AutoModelForCausalLM.from_pretrained(qwen_dir)
    source.config.save_pretrained(tmp_path)
    write_safetensors(source.state_dict().items(), tmp_path, shard_bytes=20_000)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert files == sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, value in source.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
