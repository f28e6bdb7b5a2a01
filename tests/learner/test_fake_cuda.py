"""The learner's whole step on fake CUDA devices: devices, number formats, host reads, memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError

from rstar2.config import LearnerConfig, LoraConfig, LossConfig, OptimizerConfig
from rstar2.learner import learner as learner_module
from rstar2.learner.fake_cuda import DEVICE, DeviceTrace, HostRead, fake_cuda
from rstar2.learner.learner import Learner
from rstar2.learner.measure import full_batch, measure_memory, run_step, write_config
from rstar2.learner.model import PackedPolicy
from rstar2.model_config import ModelShape

SHAPE = ModelShape(64, 2, 4, 2, 16, 128, 50_000)
CONFIG = LearnerConfig(tokens_per_microbatch=256, dtype="bfloat16", activation_checkpointing=True)
LOSSES = (
    LossConfig(kl=0.1, entropy=0.01),
    LossConfig(kind="gspo", sequence_mask=(0.5, 2.0)),
)


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    write_config(SHAPE, tmp_path)
    return tmp_path


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    write_config(SHAPE, tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    other = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    file.write_text(json.dumps(fields | other | {"tie_word_embeddings": True}))
    return tmp_path


def whole_step(
    directory: Path, ranks: int, microbatches: int = 2, loss: LossConfig | None = None
) -> tuple[DeviceTrace, list[HostRead]]:
    """Build, train, describe the state and gather the weights, as a run does."""
    config = CONFIG.model_copy(update={"ranks": ranks})
    with fake_cuda(ranks) as trace:
        learner = Learner(
            directory,
            config,
            OptimizerConfig(matrix_optimizer="muon" if ranks == 1 else "adamw"),
            total_steps=1,
            seed=0,
            device=DEVICE,
            read=lambda path: None,
        )
        trace.matmuls.clear()
        learner._optimizers.step = _checked_step(learner)  # type: ignore[method-assign]
        metrics = learner.rl_step(full_batch(config, microbatches), loss or LossConfig(), 1)
        assert metrics["updates"] == 1
        reads = list(trace.host_reads)
        tensors = learner.checkpoint_tensors()
        assert all(tensor.device == torch.device(DEVICE) for tensor in tensors.values())
        state = learner.state()
        assert state.keys() == learner._names().keys()
        assert all(tensor.device.type == "cpu" for tensor in state.values())
    return trace, reads


def _checked_step(learner: Learner) -> Callable[[], None]:
    """The optimizer step, after a look at every gradient."""
    step = learner._optimizers.step

    def checked() -> None:
        for name, parameter in learner._named().items():
            assert parameter.grad is not None, name
            assert parameter.grad.dtype is torch.float32
            assert parameter.grad.device == parameter.device
        step()

    return checked


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_whole_step_of_qwen3_on_fake_devices(qwen3: Path, ranks: int) -> None:
    trace, _ = whole_step(qwen3, ranks)
    assert trace.matmuls[torch.bfloat16] > 20
    if ranks > 1:  # one rank uses Muon, which works in float32
        assert set(trace.matmuls) == {torch.bfloat16}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_whole_step_of_llama_on_fake_devices(llama: Path, loss: LossConfig) -> None:
    trace, _ = whole_step(llama, 8, loss=loss)
    assert set(trace.matmuls) == {torch.bfloat16}


@pytest.mark.parametrize("loss", LOSSES)
def test_the_host_never_waits_within_the_loop_of_microbatches(
    qwen3: Path, loss: LossConfig
) -> None:
    """One read per update (is the gradient finite?) and the metrics, whatever the batch."""
    few, many = (whole_step(qwen3, 1, n, loss)[1] for n in (1, 3))
    assert few == many
    assert {read.where for read in few} == {"learner.py:_update", "loss.py:metrics"}
    assert sum(read.where == "learner.py:_update" for read in few) == 1


def plant(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    """Change the last hidden states of the policy."""
    hidden = PackedPolicy.hidden

    def changed(self: PackedPolicy, pack: Any) -> Tensor:
        return change(hidden(self, pack))

    monkeypatch.setattr(PackedPolicy, "hidden", changed)


def test_a_planted_item_is_a_host_read(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda hidden: hidden * float(hidden.max().item() > 0))
    _, reads = whole_step(qwen3, 1)
    assert sum(read.operation == "item" and read.where == "model.py:forward" for read in reads) == 2


def test_a_planted_copy_to_the_host_is_found(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda hidden: hidden.cpu().to(DEVICE))
    _, reads = whole_step(qwen3, 1)
    assert sum(read.operation == "copy to the host" for read in reads) >= 2


def test_a_planted_wrong_device_fails(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda hidden: hidden + torch.zeros(hidden.shape[-1]))
    with pytest.raises((FakeTensorDeviceMismatchError, RuntimeError), match="devices"):
        whole_step(qwen3, 1)


def test_a_planted_float32_tensor_is_seen(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda hidden: hidden.float())
    assert whole_step(qwen3, 8)[0].matmuls[torch.float32] > 0


@pytest.mark.slow
def test_logits_of_a_whole_batch_are_never_held() -> None:
    """Four times the tokens need no more memory for logits: 152K of vocabulary, 64 MB at a time."""
    shape = ModelShape(64, 1, 4, 2, 16, 128, 151_936)
    config = LearnerConfig(dtype="bfloat16", activation_checkpointing=True)
    short, long = (
        run_step(shape, config.model_copy(update={"tokens_per_microbatch": tokens})).peak
        for tokens in (1024, 4096)
    )
    logits = 4 * (4096 - 1024) * 151_936 / 1e9
    assert long - short < 0.05 * logits


@pytest.mark.slow
def test_memory_of_all_layers_is_extrapolated_from_few() -> None:
    shape = ModelShape(64, 8, 4, 2, 16, 128, 1000, tied=True)
    config = CONFIG.model_copy(update={"tokens_per_microbatch": 512})
    expected, found = run_step(shape, config), measure_memory(shape, config)
    assert found.state == pytest.approx(expected.state, rel=0.001)
    assert found.peak == pytest.approx(expected.peak, rel=0.02)


def test_a_step_with_the_state_in_host_memory(qwen3: Path) -> None:
    """Shards, gradients and moments stay on the CPU; each layer is computed on the GPU."""
    config = CONFIG.model_copy(update={"ranks": 8, "cpu_offload": True})
    with fake_cuda(8) as trace:
        learner = Learner(
            qwen3,
            config,
            OptimizerConfig(),
            total_steps=1,
            seed=0,
            device=DEVICE,
            read=lambda path: None,
        )
        assert trace.gb < 1e-5
        learner.offload_optimizer()
        learner.onload_optimizer()
        assert learner.rl_step(full_batch(config), LossConfig(), 1)["updates"] == 1
        assert set(trace.matmuls) == {torch.bfloat16}
        tensors = learner.checkpoint_tensors()
        assert all(tensor.device.type == "cpu" for tensor in tensors.values())
        assert all(tensor.device.type == "cpu" for tensor in learner.state().values())


@pytest.mark.parametrize("ranks", [1, 8])
def test_adapters_train_on_fake_devices(ranks: int) -> None:
    """LoRA: the frozen weights have no gradients and no moments."""
    shape = ModelShape(64, 2, 4, 2, 16, 128, 50_000)
    full = CONFIG.model_copy(update={"ranks": ranks})
    adapters = full.model_copy(update={"lora": LoraConfig(rank=4)})
    assert run_step(shape, adapters).state < 0.6 * run_step(shape, full).state


def test_fakes_leave_torch_as_it_was(qwen3: Path) -> None:
    def patched() -> list[Any]:
        mesh = vars(learner_module)["init_device_mesh"]
        return [torch.cuda.Stream, torch.UntypedStorage.resize_, torch.nn.functional.linear, mesh]

    before = patched()
    whole_step(qwen3, 8)
    assert patched() == before
    assert not torch.distributed.is_initialized()
    assert torch.ones(2).sum().item() == 2.0
