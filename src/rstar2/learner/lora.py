"""LoRA: trained adapters beside the frozen linear layers of the decoder (`learner.lora`), by peft.

    y = W x + scale * B A x        scale = alpha / rank; A is random, B is zero at the start

Only A and B have gradients, optimizer state and a place in checkpoints. Engines and exports get
ordinary weights (`merge`). `rehearse` proves that an engine applies what it is sent: at the start B
is zero, and for some steps its effect is smaller than the probe's tolerance, so a probe of the real
adapter could not see that it was lost. A planted adapter with a large effect can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from rstar2 import extras
from rstar2.config import LoraConfig
from rstar2.engine.base import Engine
from rstar2.errors import RecipeError, WeightUpdateError
from rstar2.files import replacing_directory
from rstar2.learner import weights
from rstar2.types import WeightVersion

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "default"
"""peft's name of the one adapter."""
A, B, FROZEN = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight", ".base_layer"

REHEARSAL: WeightVersion = -2
"""Version of a planted adapter; no rollout is sampled under it."""
VISIBLE = 4.0
"""A planted adapter moves the probe's logprobs by at least this times the tolerance."""
FIRST_SCALE, DOUBLINGS = 0.01, 14


# --------------------------------------------------------------------------- the model


def add_adapters(
    model: PreTrainedModel, layers: Sequence[nn.Module], config: LoraConfig, seed: int
) -> None:
    """Freeze a model and put an adapter beside its linear layers, equal for equal seeds."""
    extras.need("peft", feature="learner.lora")
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    targets = linear_names(model, layers, config.targets)
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(
            PeftConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets), model
        )
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.float()


def linear_names(
    model: PreTrainedModel, layers: Sequence[nn.Module], targets: Sequence[str]
) -> list[str]:
    """Full names of the decoder's linear layers: all, or those whose last name is a target."""
    inside = {id(module) for layer in layers for module in layer.modules()}
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) in inside
    ]
    known = sorted({name.rpartition(".")[2] for name in linear})
    unknown = [name for name in targets if name not in known]
    if unknown or not linear:
        raise RecipeError(
            f"learner.lora.targets = {list(targets)}: the decoder layers of "
            f"{type(model).__name__} have the linear layers {', '.join(known) or 'none'}"
        )
    return [name for name in linear if not targets or name.rpartition(".")[2] in targets]


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to the adapter."""
    return name.endswith((A, B))


def plain_name(name: str) -> str:
    """transformers' name of a frozen parameter."""
    return name.replace(f"{FROZEN}.", ".")


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter of one linear layer; its tensors may be shards."""

    a: Tensor
    b: Tensor
    scale: float


def adapters(named: Mapping[str, Tensor], config: LoraConfig | None) -> dict[str, Adapter]:
    """The adapters of a model by the name of the weight that they change."""
    if config is None:
        return {}
    scale = config.alpha / config.rank
    layers = [name.removesuffix(A) for name in named if name.endswith(A)]
    return {
        f"{layer}{FROZEN}.weight": Adapter(named[layer + A], named[layer + B], scale)
        for layer in layers
    }


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale * B A, in float32."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale)


def planted(named: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The adapter with B set to `scale` everywhere: an effect that cannot be overlooked."""
    return {
        name: torch.full_like(value, scale) if name.endswith(B) else value.detach().clone()
        for name, value in named.items()
    }


def export(state: Mapping[str, Tensor], config: LoraConfig, base: str, path: Path) -> None:
    """Write an adapter as peft and vLLM read it: adapter_config.json and its tensors."""
    from peft import LoraConfig as PeftConfig
    from safetensors.torch import save_file

    names = {name: name.replace(f".{ADAPTER}.", ".") for name in state}
    described = PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=sorted({name.split(".lora_")[0].rpartition(".")[2] for name in state}),
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    with replacing_directory(path) as temporary:
        described.save_pretrained(str(temporary))
        save_file(
            {f"base_model.model.{names[name]}": value for name, value in state.items()},
            temporary / "adapter_model.safetensors",
            metadata={"format": "pt"},
        )


# --------------------------------------------------------------------------- the proof


class AdapterSource(weights.WeightSource, Protocol):
    """A learner whose adapter can be replaced for the time of one call."""

    def with_planted(self, scale: float, method: str, *args: Any) -> Any: ...


class PlantedSource:
    """A learner's weights with a planted adapter; the learner keeps its own."""

    def __init__(self, learner: AdapterSource, scale: float) -> None:
        self._learner, self.scale = learner, scale

    def state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._learner.with_planted(self.scale, "state")
        return state

    def weight_sums(self, dtype: str, exported: bool) -> dict[str, int]:
        sums: dict[str, int] = self._learner.with_planted(
            self.scale, "weight_sums", dtype, exported
        )
        return sums

    def export_bytes(self) -> int:
        return self._learner.export_bytes()

    def logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        values: list[list[float]] = self._learner.with_planted(self.scale, "logprobs", token_ids)
        return values

    def export(
        self, path: str | Path, tokenizer: Any | None = None, stop_ids: Sequence[int] = ()
    ) -> None:
        self._learner.with_planted(self.scale, "export", path, tokenizer, stop_ids)

    def export_adapter(self, path: str | Path) -> None:
        self._learner.with_planted(self.scale, "export_adapter", path)


def plant(
    learner: AdapterSource, probe_ids: Sequence[int], tolerance: float
) -> tuple[PlantedSource, float]:
    """An adapter that moves the probe far beyond the tolerance, and by how much it does."""
    own = learner.logprobs([list(probe_ids)])[0]
    gap = 0.0
    for doubling in range(DOUBLINGS):
        source = PlantedSource(learner, FIRST_SCALE * 2**doubling)
        moved = source.logprobs([list(probe_ids)])[0]
        gap = max(abs(x - y) for x, y in zip(own, moved, strict=True))
        if gap >= VISIBLE * tolerance:
            return source, gap
    raise WeightUpdateError(
        f"no planted adapter moves the learner's own logprobs of the probe by more than {gap:.3g}: "
        "the learner does not apply its adapter"
    )


async def rehearse(
    learner: AdapterSource,
    engines: Sequence[Engine],
    probe_ids: Sequence[int],
    *,
    tolerance: float,
    in_thread: weights.InThread,
    **options: Any,
) -> weights.Publication:
    """Publish a planted adapter and prove that the engines apply it; how far it moves the probe.

    The caller publishes the real weights next: until then the engines must not serve.
    """
    source, gap = await in_thread(plant, learner, probe_ids, tolerance)
    try:
        made = await weights.publish(
            source,
            engines,
            REHEARSAL,
            probe_ids,
            tolerance=tolerance,
            in_thread=in_thread,
            **options,
        )
    except WeightUpdateError as error:
        raise WeightUpdateError(
            f"an engine does not apply LoRA adapters: a planted one moves the learner's logprobs "
            f"by {gap:.3g}, but {error}"
        ) from error
    return replace(made, metrics={"weights/rehearsal_gap": gap})
