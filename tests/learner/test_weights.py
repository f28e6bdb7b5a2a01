"""Publishing to engines, proven by the probe; the lr=0 self-test; exports."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rstar2.config import LossConfig, OptimizerConfig
from rstar2.engine.base import WeightTransfer, WeightUpdate
from rstar2.engine.checksums import HeldWeights
from rstar2.engine.embedded import EmbeddedEngine
from rstar2.errors import DeadlineError, EngineError, WeightUpdateError
from rstar2.learner.learner import Learner
from rstar2.learner.tolerance import FIRST_TOLERANCE, MeasuredTolerance, probe_tolerance
from rstar2.learner.weights import publish
from rstar2.types import Batch, EngineLoad, Sample, Sampling
from tests.learner.learner_helpers import make_learner

PROBE = tuple(range(1, 40))
PUBLISHES = int(os.environ.get("RSTAR2_PUBLISHES", "8"))
"""How often right weights are published in a row."""


class FileEngine:
    """An engine that reads weights from files, as a server in another process would."""

    weight_transfer: WeightTransfer = "files"

    def __init__(self, name: str = "files", ignores: bool = False) -> None:
        self.name, self.version, self._ignores = name, 0, ignores
        self._learner: Learner | None = None
        self.path: Path | None = None

    async def update_weights(self, update: WeightUpdate) -> None:
        assert update.state is None
        assert update.path is not None
        self.path = update.path
        self.version = update.version
        if not (self._ignores and self._learner):
            self._learner = make_learner(update.path)

    async def resume(self) -> None: ...

    async def held_weights(self) -> HeldWeights:
        assert self._learner is not None
        return HeldWeights("float32", self._learner.weight_sums("float32", exported=True))

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def load(self) -> EngineLoad:
        return EngineLoad(0, 0, 0, 0, self.version)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        assert self._learner is not None
        return self._learner.logprobs([token_ids])[0]


@pytest.fixture
async def embedded(model_dir: Path) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(
        model_dir, kv_tokens=4096, max_sequences=16, max_length=256, process=False
    )
    await engine.start()
    yield engine
    await engine.close()


def train(learner: Learner, batch: Batch) -> None:
    learner.rl_step(batch, LossConfig(), 2)


async def test_publish_to_memory_and_files(
    model_dir: Path, batch: Batch, embedded: EmbeddedEngine
) -> None:
    learner, files = make_learner(model_dir, OptimizerConfig(lr=1e-2)), FileEngine()
    for version in (1, 2):
        train(learner, batch)
        made = await publish(learner, [embedded, files], version, PROBE)  # type: ignore[list-item]
        metrics = made.metrics
        assert [engine.name for engine in made.proven] == ["embedded-0", "files"]
        assert metrics["weights/version"] == version
        assert metrics["weights/probe_gap"] < 1e-4
        assert (await embedded.load()).version == version
    assert files.path is not None
    assert not files.path.exists(), "the directory of a finished update is removed"


async def test_engine_that_keeps_old_weights_is_found_by_its_checksums(
    model_dir: Path, batch: Batch
) -> None:
    learner, stale = make_learner(model_dir, OptimizerConfig(lr=1e-2)), FileEngine("old", True)
    await publish(learner, [stale], 1, PROBE)  # type: ignore[list-item]
    train(learner, batch)
    with pytest.raises(WeightUpdateError, match=r"version 2: old holds other weights.*checksums"):
        await publish(learner, [stale], 2, PROBE)  # type: ignore[list-item]


async def test_engine_that_computes_with_other_weights_is_found_by_the_probe(
    model_dir: Path, batch: Batch
) -> None:
    class Packed(FileEngine):
        """Holds the new tensors but computes with packed copies of the first ones."""

        async def score(self, token_ids: Sequence[int]) -> list[float]:
            return first

    learner = make_learner(model_dir, OptimizerConfig(lr=1e-2))
    first = learner.logprobs([PROBE])[0]
    await publish(learner, [Packed("packed")], 1, PROBE)  # type: ignore[list-item]
    train(learner, batch)
    with pytest.raises(WeightUpdateError, match=r"version 2: logprobs of the probe.*packed"):
        await publish(learner, [Packed("packed")], 2, PROBE)  # type: ignore[list-item]


async def test_slow_dead_and_wrong_engines_are_named(model_dir: Path) -> None:
    class Slow(FileEngine):
        async def update_weights(self, update: WeightUpdate) -> None:
            await asyncio.sleep(3600)

    class Dead(FileEngine):
        async def update_weights(self, update: WeightUpdate) -> None:
            raise EngineError("dead: its worker has ended")

    class Behind(FileEngine):
        async def load(self) -> EngineLoad:
            return EngineLoad(0, 0, 0, 0, self.version - 1)

    learner, good = make_learner(model_dir), FileEngine("good")
    engines = [good, Slow("slow"), Dead("dead")]
    made = await publish(learner, engines, 1, PROBE, straggler_s=0.05)  # type: ignore[arg-type]
    assert [engine.name for engine in made.proven] == ["good"]
    assert {name: type(error) for name, error in made.lost.items()} == {
        "slow": DeadlineError,
        "dead": EngineError,
    }
    made = await publish(learner, [Slow("slow")], 1, PROBE, deadline_s=0.05)  # type: ignore[list-item]
    assert not made.proven
    assert "slow had not taken the weights" in str(made.lost["slow"])
    behind = Behind("behind")
    with pytest.raises(WeightUpdateError, match="behind serves version 0, not 1"):
        await publish(learner, [behind], 1, PROBE)  # type: ignore[list-item]
    made = await publish(learner, [good, behind], 1, PROBE)  # type: ignore[list-item]
    assert [engine.name for engine in made.proven] == ["good"], "it is refused alone"
    assert isinstance(made.lost["behind"], WeightUpdateError)


async def test_the_state_is_gathered_only_for_engines_that_take_it(model_dir: Path) -> None:
    class Counting(Learner):
        gathered = 0

        def state(self) -> dict[str, torch.Tensor]:
            self.gathered += 1
            return super().state()

    learner = make_learner(model_dir)
    learner.__class__ = Counting
    assert isinstance(learner, Counting)
    made = await publish(learner, [FileEngine()], 1, PROBE)  # type: ignore[list-item]
    assert learner.gathered == 0, "an export takes one tensor after the other"
    written = sum(value.nbytes for value in _once(learner.state()))
    assert made.metrics["weights/megabytes"] == pytest.approx(written / 1e6)


def _once(state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return list({value.data_ptr(): value for value in state.values()}.values())


class TestBfloat16:
    """An engine in bfloat16: one optimizer step at lr 1e-6 is far below what the probe sees."""

    @pytest.fixture
    async def coarse(self, model_dir: Path) -> AsyncIterator[EmbeddedEngine]:
        engine = EmbeddedEngine(
            model_dir,
            kv_tokens=1024,
            max_sequences=4,
            max_length=256,
            process=False,
            dtype="bfloat16",
        )
        await engine.start()
        yield engine
        await engine.close()

    async def test_weights_of_one_small_step_earlier_are_refused(
        self, model_dir: Path, batch: Batch, coarse: EmbeddedEngine
    ) -> None:
        learner = make_learner(model_dir, OptimizerConfig(lr=1e-6))
        made = await publish(learner, [coarse], 1, PROBE, tolerance=FIRST_TOLERANCE)
        right = made.metrics["weights/probe_gap"]
        before = learner.state()
        train(learner, batch)

        class Earlier(Learner):
            """Sends the weights of the step before; says the truth about its own."""

            def state(self) -> dict[str, torch.Tensor]:
                return before

        learner.__class__ = Earlier
        with pytest.raises(WeightUpdateError, match=r"embedded-0 holds other weights"):
            await publish(learner, [coarse], 2, PROBE, tolerance=FIRST_TOLERANCE)
        expected = learner.logprobs([PROBE])[0]
        wrong = max(abs(a - b) for a, b in zip(await coarse.score(PROBE), expected, strict=True))
        assert wrong < probe_tolerance("bfloat16", measured=right), "the probe alone accepts them"

    async def test_right_weights_are_accepted_every_time(
        self, model_dir: Path, batch: Batch, coarse: EmbeddedEngine
    ) -> None:
        learner = make_learner(model_dir, OptimizerConfig(lr=1e-3))
        tolerance = MeasuredTolerance("bfloat16", "float32")
        rng = random.Random(0)
        texts = [[rng.randrange(3, 97) for _ in range(40)] for _ in range(16)]
        allowed = []
        for version in range(1, PUBLISHES + 1):
            train(learner, batch)
            made = await publish(learner, [coarse], version, PROBE, tolerance=tolerance.value)
            metrics = await tolerance.observe(made, learner, texts, asyncio.to_thread)
            allowed.append(metrics["weights/tolerance"])
        assert allowed[0] == FIRST_TOLERANCE
        assert 1e-3 < allowed[1] <= allowed[-1] <= tolerance.value < FIRST_TOLERANCE
        tolerance.forget()
        assert tolerance.value == FIRST_TOLERANCE


async def test_float32_has_a_fixed_tolerance_and_measures_nothing(
    model_dir: Path, embedded: EmbeddedEngine
) -> None:
    learner, tolerance = make_learner(model_dir), MeasuredTolerance("float32", "float32")
    made = await publish(learner, [embedded], 1, PROBE, tolerance=tolerance.value)
    assert await tolerance.observe(made, learner, [PROBE], asyncio.to_thread) == {}
    assert tolerance.value == 1e-3


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_rollout_logprobs_match_the_learner_at_lr_zero(
    model_dir: Path,
    embedded: EmbeddedEngine,
    capsys: pytest.CaptureFixture[str],
    temperature: float,
) -> None:
    """Sampled by the engine in two turns with tool tokens between, scored by the learner."""
    rng = random.Random(0)
    samples = []
    for i in range(8):
        ids = [rng.randrange(3, 97) for _ in range(rng.randint(3, 20))]
        mask, logprobs = [0] * len(ids), [0.0] * len(ids)
        for turn in range(2):
            sampling = Sampling(
                max_new_tokens=rng.randint(5, 40), seed=10 * i + turn, temperature=temperature
            )
            made = await embedded.generate(ids, sampling, session=str(i), deadline_s=60)
            ids += made.token_ids
            mask += [1] * len(made.token_ids)
            logprobs += made.logprobs
            if turn == 0:
                ids, mask, logprobs = [*ids, 7, 8, 9], [*mask, 0, 0, 0], [*logprobs, 0, 0, 0]
        await embedded.release(str(i))
        samples.append(
            Sample(tuple(ids), tuple(mask), tuple(logprobs), float(2 * (i % 2) - 1), "g", str(i), 0)
        )
    learner = make_learner(model_dir, OptimizerConfig(lr=0.0))
    metrics = learner.rl_step(Batch(0, tuple(samples)), LossConfig(), 1, temperature)
    with capsys.disabled():
        print(
            f"\nlr=0 self-test at temperature {temperature}: {metrics['tokens']:.0f} tokens, "
            f"largest logprob difference "
            f"{metrics['mismatch/abs_max']:.2g}, k3 {metrics['mismatch/k3']:.2g}"
        )
    assert metrics["mismatch/abs_max"] < 1e-4
    assert metrics["mismatch/ess"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["mismatch/capped"] == 0.0


class TestExport:
    def test_is_loaded_by_transformers_as_it_is(
        self, qwen_dir: Path, batch: Batch, tmp_path: Path
    ) -> None:
        learner = make_learner(qwen_dir, OptimizerConfig(lr=1e-2))
        train(learner, batch)
        learner.export(tmp_path / "m")
        train(learner, batch)
        learner.export(tmp_path / "m")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
        state = learner.state()
        assert model.state_dict().keys() == state.keys()
        assert all(torch.equal(v, state[n]) for n, v in model.state_dict().items())
        assert [p.name for p in tmp_path.iterdir()] == ["m"]

    def test_tied_weights_are_written_once(self, model_dir: Path, tmp_path: Path) -> None:
        from safetensors import safe_open

        make_learner(model_dir).export(tmp_path / "m")
        with safe_open(tmp_path / "m" / "model.safetensors", "pt") as file:
            assert "lm_head.weight" not in set(file.keys())

    def test_state_is_a_copy(self, model_dir: Path, batch: Batch) -> None:
        learner = make_learner(model_dir, OptimizerConfig(lr=1e-2))
        state = learner.state()
        before = {n: v.clone() for n, v in state.items()}
        train(learner, batch)
        assert all(torch.equal(v, before[n]) for n, v in state.items())
        moved = [n for n, v in learner.state().items() if not torch.equal(v, before[n])]
        assert moved


def test_advantage_zero_moves_nothing(model_dir: Path, batch: Batch) -> None:
    learner = make_learner(model_dir, OptimizerConfig(lr=1e-2))
    before = learner.state()
    flat = Batch(0, tuple(replace(s, advantage=0.0) for s in batch.samples))
    assert learner.rl_step(flat, LossConfig(), 1)["grad_norm"] == 0.0
    assert all(torch.equal(v, before[n]) for n, v in learner.state().items())
