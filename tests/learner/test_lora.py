"""LoRA: what is trained, merged, saved and exported, and the proof that an engine applies it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rstar2.config import LearnerConfig, LoraConfig, LossConfig, OptimizerConfig
from rstar2.engine.base import WeightUpdate
from rstar2.engine.embedded import EmbeddedEngine
from rstar2.errors import CheckpointError, RecipeError, WeightUpdateError
from rstar2.learner.group import LearnerGroup
from rstar2.learner.learner import Learner
from rstar2.learner.lora import REHEARSAL, plant, rehearse
from rstar2.learner.weights import publish
from rstar2.model_config import read_model_config
from rstar2.types import Batch

LORA = LoraConfig(rank=4, alpha=8)
ADAMW = OptimizerConfig(lr=1e-2, clip_norm=1e9)
PROBE = tuple(range(1, 40))
ROWS = [((1, 2, 3, 4) * 6, (0, 1, 1, 1) * 6), ((5, 6, 7) * 8, (0, 1, 1) * 8)]


def adapted(model_dir: Path, lora: LoraConfig = LORA, *, seed: int = 0, **learner: Any) -> Learner:
    config = LearnerConfig(tokens_per_microbatch=4096, lora=lora, **learner)
    return Learner(model_dir, config, ADAMW, total_steps=10, seed=seed)


def largest_gap(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def test_only_adapters_are_trained_and_the_rest_stays(qwen_dir: Path, batch: Batch) -> None:
    learner = adapted(qwen_dir)
    named = learner._named()
    assert len(named) == 2 * 2 * 7  # A and B of the seven linear layers of two decoder layers
    assert all(".lora_" in name for name in named)
    frozen = {
        name: p.clone() for name, p in learner.policy.model.named_parameters() if name not in named
    }
    learner.rl_step(batch, LossConfig(), 2)
    moments = [name for name in learner._optimizers.state() if name.endswith("exp_avg")]
    assert len(moments) == len(named)
    for name, parameter in learner.policy.model.named_parameters():
        if name in frozen:
            assert torch.equal(parameter, frozen[name]), name
        if "lora_B" in name:
            assert parameter.abs().max() > 0, name


def test_the_planner_counts_the_adapters_of_this_model(qwen_dir: Path) -> None:
    shape = read_model_config(qwen_dir).shape
    for lora in (LORA, LoraConfig(rank=2, targets=("k_proj", "down_proj"))):
        counted = sum(p.numel() for p in adapted(qwen_dir, lora)._named().values())
        assert shape.adapter_parameters(lora.rank, lora.targets) == counted


def test_named_targets_only_and_unknown_ones_are_refused(model_dir: Path) -> None:
    learner = adapted(model_dir, LoraConfig(rank=2, targets=("q_proj", "v_proj")))
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in learner._named()}
    assert layers == {"q_proj", "v_proj"}
    with pytest.raises(RecipeError, match=r"targets = \['query'\].*down_proj, gate_proj, k_proj"):
        adapted(model_dir, LoraConfig(targets=("query",)))


def test_a_new_adapter_changes_nothing_and_a_seed_gives_one_adapter(model_dir: Path) -> None:
    plain = Learner(model_dir, LearnerConfig(), ADAMW, total_steps=1, seed=0)
    first, again, other = adapted(model_dir), adapted(model_dir), adapted(model_dir, seed=1)
    assert first.logprobs([PROBE]) == plain.logprobs([PROBE])
    name = next(name for name in first._named() if "lora_A" in name)
    assert torch.equal(first._named()[name], again._named()[name])
    assert not torch.equal(first._named()[name], other._named()[name])


def test_sft_and_rl_learn(model_dir: Path, batch: Batch) -> None:
    learner = adapted(model_dir)
    losses = [learner.sft_step(ROWS)["loss"] for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]
    learner.reset_optimizer()
    assert learner.rl_step(batch, LossConfig(kl=0.1), 2)["updates"] == 2


def test_the_reference_of_a_first_phase_is_the_model_without_adapter(
    model_dir: Path, batch: Batch
) -> None:
    learner = adapted(model_dir)
    without = learner.logprobs([PROBE])[0]
    learner.rl_step(batch, LossConfig(kl=0.1), 2)
    assert learner._reference is not None
    assert largest_gap(learner.logprobs([PROBE])[0], without) > 1e-3
    with learner._weights_of(learner._reference):
        assert largest_gap(learner.logprobs([PROBE])[0], without) < 1e-6


@pytest.fixture
def trained(model_dir: Path) -> Learner:
    learner = adapted(model_dir)
    for _ in range(5):
        learner.sft_step(ROWS)
    return learner


def test_merged_export_equals_adapter_and_base(
    trained: Learner, model_dir: Path, tmp_path: Path
) -> None:
    """transformers with the merged directory, peft with base and adapter, and the learner."""
    from peft import PeftModel

    trained.export(tmp_path / "merged")
    trained.export_adapter(tmp_path / "adapter")
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"]) == (4, 8)
    assert described["base_model_name_or_path"] == str(model_dir)
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    beside = PeftModel.from_pretrained(base, tmp_path / "adapter")
    ids = torch.tensor([PROBE])

    def logprobs(model: Any) -> list[float]:
        with torch.no_grad():
            every = model(ids).logits[0, :-1].log_softmax(-1)
        values: list[float] = every.gather(1, ids[0, 1:, None])[:, 0].tolist()
        return values

    own = trained.logprobs([PROBE])[0]
    with beside.disable_adapter():
        assert largest_gap(logprobs(beside), own) > 0.1
    assert largest_gap(logprobs(merged), own) < 1e-5
    assert largest_gap(logprobs(merged), logprobs(beside)) < 1e-5


def test_weights_are_merged_exactly(trained: Learner) -> None:
    state, model = trained.state(), trained.policy.model
    parameters = dict(model.named_parameters())
    layer = "model.layers.1.mlp.down_proj"
    frozen = parameters[f"{layer}.base_layer.weight"]
    a = parameters[f"{layer}.lora_A.default.weight"]
    b = parameters[f"{layer}.lora_B.default.weight"]
    expected = frozen.double() + 2.0 * b.double() @ a.double()
    assert torch.allclose(state[f"{layer}.weight"].double(), expected, atol=1e-6)
    plain = AutoModelForCausalLM.from_pretrained(trained.model_dir)
    assert state.keys() == plain.state_dict().keys()


class TestCheckpoint:
    def test_has_adapters_only_and_resumes_exactly(
        self, model_dir: Path, batch: Batch, tmp_path: Path
    ) -> None:
        straight, first, second = (adapted(model_dir) for _ in range(3))
        loss = LossConfig(kl=0.01)
        expected = [straight.rl_step(batch, loss, 2) for _ in range(3)]
        first.rl_step(batch, loss, 2)
        first.save(tmp_path / "one")
        second.load(tmp_path / "one")
        assert [second.rl_step(batch, loss, 2) for _ in range(2)] == expected[1:]
        assert all(
            ".lora_" in name for name in first.checkpoint_tensors() if not name.endswith(".step")
        )

    def test_another_base_and_another_rank_are_refused(
        self, model_dir: Path, tmp_path: Path, trained: Learner
    ) -> None:
        trained.save(tmp_path / "one")
        with pytest.raises(CheckpointError, match="another model"):
            adapted(model_dir, LoraConfig(rank=8)).load(tmp_path / "one")
        model = AutoModelForCausalLM.from_pretrained(model_dir)
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(1.1)
        model.save_pretrained(tmp_path / "other")
        with pytest.raises(CheckpointError, match=r"adapter of another model than .*other"):
            adapted(tmp_path / "other").load(tmp_path / "one")


def test_the_frozen_weights_have_the_learners_dtype(model_dir: Path, batch: Batch) -> None:
    learner = adapted(model_dir, dtype="bfloat16")
    for name, parameter in learner.policy.model.named_parameters():
        assert parameter.dtype == (torch.float32 if ".lora_" in name else torch.bfloat16), name
    buffers = dict(learner.policy.model.named_buffers())
    assert all(b.dtype == torch.float32 for name, b in buffers.items() if "inv_freq" in name)
    before = learner.sft_loss(ROWS)
    for _ in range(10):
        learner.sft_step(ROWS)
    assert learner.sft_loss(ROWS) < 0.8 * before


# --------------------------------------------------------------------------- ranks


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_equal_one(model_dir: Path, batch: Batch, tmp_path: Path, dtype: Any) -> None:
    loss = LossConfig(kl=0.02)
    one = adapted(model_dir, dtype=dtype)
    config = LearnerConfig(tokens_per_microbatch=4096, lora=LORA, ranks=2, dtype=dtype)
    near = 1e-4 if dtype == "float32" else 0.2
    with LearnerGroup(model_dir, config, ADAMW, total_steps=10, seed=0) as two:
        for _ in range(2):
            alone, together = one.rl_step(batch, loss, 2), two.rl_step(batch, loss, 2)
            assert together["loss"] == pytest.approx(alone["loss"], abs=near)
        gap = largest_gap(two.logprobs([PROBE])[0], one.logprobs([PROBE])[0])
        assert gap < near
        states = two.state(), one.state()
        assert states[0].keys() == states[1].keys()
        _, moved = plant(two, PROBE, near)
        assert moved >= 4 * near
        assert largest_gap(two.logprobs([PROBE])[0], one.logprobs([PROBE])[0]) == gap, "own again"
        two.save(tmp_path / "two")
        two.export_adapter(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(saved) == len(one._named())
    again = adapted(model_dir, dtype=dtype)
    again.load(tmp_path / "two")
    assert largest_gap(again.logprobs([PROBE])[0], one.logprobs([PROBE])[0]) < near


# --------------------------------------------------------------------------- engines


class DropsAdapter(EmbeddedEngine):
    """An engine whose updates arrive, but without the adapter: the field's silent failure."""

    base: dict[str, torch.Tensor]

    async def update_weights(self, update: WeightUpdate) -> None:
        await super().update_weights(WeightUpdate(update.version, state=self.base, hold=True))


Make = Callable[[type[EmbeddedEngine]], Any]


@pytest.fixture
async def make(model_dir: Path) -> AsyncIterator[Make]:
    made: list[EmbeddedEngine] = []

    async def start(kind: type[EmbeddedEngine]) -> EmbeddedEngine:
        engine = kind(model_dir, kv_tokens=4096, max_sequences=4, max_length=256, process=False)
        await engine.start()
        made.append(engine)
        return engine

    yield start
    for engine in made:
        await engine.close()


async def test_an_engine_serves_the_merged_weights(trained: Learner, make: Make) -> None:
    engine = await make(EmbeddedEngine)
    made = await rehearse(trained, [engine], PROBE, tolerance=1e-3, in_thread=asyncio.to_thread)
    assert made.metrics["weights/rehearsal_gap"] >= 4e-3
    assert (await engine.load()).version == REHEARSAL
    made = await publish(trained, [engine], 1, PROBE)
    assert made.metrics["weights/probe_gap"] < 1e-4


async def test_an_unapplied_adapter_is_refused(model_dir: Path, make: Make) -> None:
    """A new adapter has no effect, so that the probe alone cannot see that it was dropped."""
    learner, engine = adapted(model_dir), await make(DropsAdapter)
    engine.base = learner.state()
    await publish(learner, [engine], 1, PROBE)  # nothing to see: B is zero
    with pytest.raises(WeightUpdateError, match=r"does not apply LoRA adapters.*embedded"):
        await rehearse(learner, [engine], PROBE, tolerance=1e-3, in_thread=asyncio.to_thread)


async def test_a_trained_adapter_that_is_not_applied_has_other_checksums(
    trained: Learner, model_dir: Path, make: Make
) -> None:
    engine = await make(DropsAdapter)
    engine.base = adapted(model_dir).state()
    with pytest.raises(WeightUpdateError, match="holds other weights than the learner"):
        await publish(trained, [engine], 1, PROBE)


def test_a_learner_that_ignores_its_adapter_is_refused(model_dir: Path) -> None:
    learner = adapted(model_dir)
    for module in learner.policy.model.modules():
        if hasattr(module, "lora_A"):
            module._disable_adapters = True  # type: ignore[assignment]
    with pytest.raises(WeightUpdateError, match="the learner does not apply its adapter"):
        plant(learner, PROBE, 1e-3)
