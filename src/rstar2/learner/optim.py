"""AdamW and Muon under one schedule, with state that is addressed by parameter name, so that a
checkpoint can be restored onto any number of ranks.

Muon (orthogonalised momentum) updates the weight matrices of the decoder layers; AdamW updates
embeddings, head and vectors.

Why not `torch.optim.Muon` (torch 2.13): it orthogonalises in bfloat16, one matrix at a time, and
does not gather matrices that FSDP has sharded. This one works in float32, so that results are equal
on one rank and on several; it stacks matrices of one shape into one call, because on small models
one call per matrix takes several times as long as the rest of the step; and it gathers each sharded
matrix before orthogonalising it. Momentum, coefficients and the learning-rate scale are the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rstar2.config import OptimizerConfig
from rstar2.errors import InvariantError

MUON_MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


def lr_factor(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Multiplier of the learning rates at optimizer step `step` (from 0)."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def orthogonalise(matrices: Tensor) -> Tensor:
    """Approximate the closest semi-orthogonal matrices of [n, a, b] (Newton-Schulz, float32)."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.float()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if tall else x
    return result


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, on matrices; same-shape matrices in one batch."""

    def __init__(self, params: list[Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    by_shape[param.shape].append(param)
            for shape, params in by_shape.items():
                updates = orthogonalise(torch.stack([self._direction(p) for p in params]))
                rate = group["lr"] * math.sqrt(max(1.0, shape[0] / shape[1]))
                for param, update in zip(params, updates, strict=True):
                    local = _local(param)
                    local.mul_(1.0 - group["lr"] * group["weight_decay"])
                    local.add_(_own_part(update, param).to(local.dtype), alpha=-rate)

    def _direction(self, param: Tensor) -> Tensor:
        """The whole matrix of momentum plus gradient, gathered where it is sharded."""
        assert param.grad is not None
        momentum = self.state[param]["momentum"]
        momentum.lerp_(param.grad, 1.0 - MUON_MOMENTUM)
        direction = param.grad.lerp(momentum, MUON_MOMENTUM)
        return direction.full_tensor() if isinstance(direction, DTensor) else direction


class Optimizers:
    """The optimizers of a config over named parameters: step, schedule, state by name."""

    def __init__(
        self,
        named: Mapping[str, Tensor],
        matrices: Collection[str],
        config: OptimizerConfig,
        total_steps: int,
    ) -> None:
        self.config, self.total_steps, self.steps = config, total_steps, 0
        self._named = dict(named)
        self.away = False
        """Whether the moments are in host memory (`move`)."""
        muon = set(matrices) if config.matrix_optimizer == "muon" else set()
        rest = {n: p for n, p in named.items() if n not in muon}
        groups: list[dict[str, Any]] = [
            {"params": [p for p in rest.values() if p.ndim >= 2]},
            {"params": [p for p in rest.values() if p.ndim < 2], "weight_decay": 0.0, "bare": True},
        ]
        adamw = torch.optim.AdamW(
            groups,
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._all: list[tuple[torch.optim.Optimizer, float]] = [(adamw, config.lr)]
        self._owner: dict[str, torch.optim.Optimizer] = dict.fromkeys(rest, adamw)
        if muon:
            parts = [p for n, p in named.items() if n in muon]
            other = Muon(parts, config.matrix_lr, config.weight_decay)
            self._all.append((other, config.matrix_lr))
            self._owner |= dict.fromkeys((n for n in named if n in muon), other)
        self._start_state()

    def _start_state(self) -> None:
        """Allocate all state now, so that a checkpoint can be restored into it at any step."""
        for name, param in self._named.items():
            owner = self._owner[name]
            if isinstance(owner, Muon):
                owner.state[param] = {"momentum": torch.zeros_like(param)}
            else:
                owner.state[param] = {
                    "step": torch.zeros((), dtype=torch.float32, device=param.device),
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }

    @property
    def factor(self) -> float:
        """Multiplier of the learning rates at the next step."""
        return lr_factor(self.steps, self.config, self.total_steps)

    def retune(self, config: OptimizerConfig, total_steps: int) -> None:
        """Change learning rates and schedule; moments and step count stay."""
        self.config, self.total_steps = config, total_steps
        rates = (config.lr, config.matrix_lr)
        self._all = [(o, rate) for (o, _), rate in zip(self._all, rates, strict=False)]
        for optimizer, _ in self._all:
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.0 if group.get("bare") else config.weight_decay
                if "betas" in group:
                    group["betas"] = config.betas

    def move(self, *, away: bool) -> None:
        """Move all moments to host memory, or back to their parameters for the next step."""
        for name, param in self._named.items():
            state = self._owner[name].state[param]
            for key, value in state.items():
                state[key] = value.to("cpu" if away else _local(param).device)
        self.away = away

    def step(self) -> None:
        """Update all parameters at the scheduled rate."""
        if self.away:
            raise InvariantError("the optimizer's state is in host memory: move it back first")
        factor = self.factor
        for optimizer, rate in self._all:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
        self.steps += 1

    def zero_grad(self) -> None:
        for optimizer, _ in self._all:
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """Live tensors by `<parameter>.<moment>`; a checkpoint is loaded into them in place."""
        return {
            f"{name}.{key}": value
            for name, param in self._named.items()
            for key, value in self._owner[name].state[param].items()
        }


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _own_part(whole: Tensor, like: Tensor) -> Tensor:
    """The part of a whole matrix that this rank holds of `like`."""
    if not isinstance(like, DTensor):
        return whole
    shape, offset = compute_local_shape_and_global_offset(
        like.shape, like.device_mesh, like.placements
    )
    return whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
