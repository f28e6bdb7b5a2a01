"""The learner: one rank's part of training, or all of it when there is one rank.

    samples -> plan (token budget, ranks) -> packs -> forward, loss, backward ... -> clip -> step

Invariants:
- The denominator of a loss is the number of predicted tokens of the whole mini-batch over all
  micro-batches and ranks, counted before the first forward pass; how the mini-batch is split
  changes rounding only.
- All ranks call the same methods with the same arguments in the same order. Every rank returns
  the same metrics; `state`, `logprobs` and `export` give their result on rank 0.
- An update whose gradient is not finite is not applied; it is counted, and several in a row
  raise InvariantError.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rstar2.config import LearnerConfig, LossConfig, OptimizerConfig
from rstar2.engine.checksums import bit_sums
from rstar2.errors import CheckpointError, InvariantError, RecipeError
from rstar2.grpo.batch import split_minibatches
from rstar2.grpo.loss import Stats
from rstar2.learner import checkpoint, lora, weights
from rstar2.learner.minibatch import MiniBatch
from rstar2.learner.model import PackedPolicy, ReadModel, adapt, load_policy, read_model
from rstar2.learner.optim import Optimizers
from rstar2.learner.pack import Pack, empty_pack, input_length, make_pack, make_row, plan
from rstar2.learner.sft_loss import LossOf, SftRow, mean_logprob_loss
from rstar2.learner.tolerance import probe_tolerance
from rstar2.malloc import limit_freed_memory
from rstar2.types import Batch, TokenValues

MAX_SKIPPED = 5
"""Updates in a row that may be skipped because their gradient is not finite."""

BASE_PROBE = tuple(range(1, 33))
"""Tokens whose logprobs identify the frozen weights of a checkpoint of adapters."""


class Learner:
    """A causal LM, its optimizer and the two ways to train it: GRPO and SFT."""

    def __init__(
        self,
        model_dir: str | Path,
        learner: LearnerConfig,
        optimizer: OptimizerConfig,
        *,
        total_steps: int,
        seed: int,
        device: str = "cpu",
        read: ReadModel = read_model,
    ) -> None:
        """`read` returns the model with its weights on rank 0, and None on the others."""
        self.model_dir, self.config, self.device = str(model_dir), learner, device
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        if learner.ranks != self.ranks:
            raise RecipeError(
                f"learner.ranks={learner.ranks}, but {self.ranks} process(es) take part; "
                "LearnerGroup starts as many as the recipe says"
            )
        if learner.threads:
            torch.set_num_threads(learner.threads)
        torch.manual_seed(seed)
        random.seed(seed)
        self.dtype = torch.bfloat16 if learner.dtype == "bfloat16" else torch.float32
        mesh = None
        if self.ranks > 1:
            mesh = init_device_mesh(device.split(":")[0], (self.ranks,))
        change = None
        if learner.lora is not None:
            change = partial(adapt, config=learner.lora, dtype=self.dtype, seed=seed)
        self.policy: PackedPolicy = load_policy(
            model_dir,
            device,
            dtype=self.dtype,
            mesh=mesh,
            checkpointing=learner.activation_checkpointing,
            offload=learner.cpu_offload,
            read=read,
            change=change,
        )
        self.on_progress: Callable[[], None] = lambda: None
        """Called after every pass over a micro-batch."""
        self._skipped = 0
        self._minibatches: list[MiniBatch] = []
        """Mini-batches of the last RL step, with the logprobs of their tokens."""
        self._reference: dict[str, Tensor] | None = None
        self._optimizers = self._make_optimizers(optimizer, total_steps)
        self._base_logprobs = self.logprobs([BASE_PROBE])[0] if learner.lora is not None else []
        """Logprobs without an adapter, which identify the frozen weights."""

    # ------------------------------------------------------------------ training

    def rl_step(
        self, batch: Batch, loss: LossConfig, minibatches: int, temperature: float = 1.0
    ) -> dict[str, float]:
        """Train on a batch: one optimizer step per mini-batch of whole groups.

        All policies are scored at the temperature at which the rollouts were sampled.
        """
        parts = split_minibatches(batch.samples, minibatches)
        if not parts:
            raise InvariantError(f"step {batch.step}: the batch has no sample to learn from")
        plans = [self._packs([(s.token_ids, s.mask) for s in part]) for part in parts]
        reference = self._reference_logprobs(plans, temperature) if loss.kl else None
        # The first mini-batch runs under the old weights: its own logprobs, detached, are `old`.
        old = [None, *[self._current_logprobs(packs, temperature) for packs in plans[1:]]]

        stats = Stats.empty(self.device)
        norms: list[float] = []
        self._minibatches = []
        rate = self._optimizers.factor * self._optimizers.config.lr
        for index, (part, packs) in enumerate(zip(parts, plans, strict=True)):
            tokens = sum(sum(sample.mask[1:]) for sample in part)
            sequences = sum(any(sample.mask[1:]) for sample in part)
            minibatch = MiniBatch(part, packs, old[index], reference[index] if reference else None)
            self._minibatches.append(minibatch)
            loss_of = minibatch.loss_of(loss, tokens, sequences, self.device)
            norms.append(self._update(packs, loss_of, stats, temperature))
        limit_freed_memory()
        metrics = self._reduced(stats).metrics(loss)
        return metrics | self._step_metrics(norms, rate, plans)

    def token_values(self) -> list[TokenValues]:
        """Logprobs of every token that the last RL step was trained on, per sample."""
        token_values = [values for part in self._minibatches for values in part.token_values()]
        self._minibatches = []
        if self.ranks > 1:
            shared: list[Any] = [None] * self.ranks
            dist.all_gather_object(shared, token_values)
            token_values = [values for each in shared for values in each]
        return sorted(token_values, key=lambda values: values.trajectory_id)

    def sft_step(self, rows: Sequence[SftRow]) -> dict[str, float]:
        """One optimizer step on the mean negative logprob of the masked-in tokens."""
        packs = self._packs(rows)
        rate = self._optimizers.factor * self._optimizers.config.lr
        stats = Stats.empty(self.device)
        norm = self._update(packs, mean_logprob_loss(rows, self.device), stats)
        total = self._reduced(stats).metrics(LossConfig())
        metrics = {"loss": total["loss"], "entropy": total["entropy"], "tokens": total["tokens"]}
        return metrics | self._step_metrics([norm], rate, [packs])

    @torch.no_grad()
    def sft_loss(self, rows: Sequence[SftRow]) -> float:
        """Mean negative logprob of the masked-in tokens; the weights stay as they are."""
        packs = self._packs(rows)
        stats = Stats.empty(self.device)
        loss_of = mean_logprob_loss(rows, self.device)
        for pack in packs:
            stats.add(loss_of(pack, *self._forward(pack))[1])
        self._free_gathered()
        return self._reduced(stats).metrics(LossConfig())["loss"]

    @torch.no_grad()
    def logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Logprob of each token after the first of each sequence, at temperature 1."""
        rows = [(ids, [0] + [1] * (len(ids) - 1)) for ids in token_ids]
        packs = self._packs(rows)
        by_row: dict[int, list[float]] = {}
        for pack, values in zip(packs, self._current_logprobs(packs), strict=True):
            sizes = [len(row.predict) for row in pack.rows]
            for row, part in zip(pack.rows, values.split(sizes), strict=True):
                by_row[row.index] = part.tolist()
        if self.ranks > 1:
            shared: list[Any] = [None] * self.ranks
            dist.all_gather_object(shared, by_row)
            by_row = {index: values for each in shared for index, values in each.items()}
        return [by_row.get(i, []) for i in range(len(token_ids))]

    def _update(
        self, packs: Sequence[Pack], loss_of: LossOf, stats: Stats, temperature: float = 1.0
    ) -> float:
        """Forward and backward over all micro-batches, then one clipped step; the gradient norm."""
        self._optimizers.zero_grad()
        for pack in packs:
            loss, part = loss_of(pack, *self._forward(pack, temperature))
            # FSDP averages gradients over ranks; the loss is already divided by all tokens.
            (loss * self.ranks).backward()
            self.on_progress()
            stats.add(part)
        total_norm = torch.nn.utils.clip_grad_norm_(
            self.policy.parameters(), self._optimizers.config.clip_norm
        )
        norm = float(total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm)
        if math.isfinite(norm):
            self._skipped = 0
            self._optimizers.step()
        else:
            self._skipped += 1
            if self._skipped >= MAX_SKIPPED:
                raise InvariantError(
                    f"{MAX_SKIPPED} updates in a row had a gradient that is not finite"
                )
        self._optimizers.zero_grad()
        return norm

    def _forward(self, pack: Pack, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        with self._precision():
            logprob_T, entropy_T = self.policy(pack, temperature)
        self.on_progress()
        return logprob_T, entropy_T

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        """Mixed precision of one rank; with several, FSDP casts the gathered weights."""
        if self.ranks == 1 and self.dtype is not torch.float32:
            return torch.autocast(self.device.split(":")[0], self.dtype)
        return contextlib.nullcontext()

    @torch.no_grad()
    def _current_logprobs(self, packs: Sequence[Pack], temperature: float = 1.0) -> list[Tensor]:
        """Logprobs of every predicted token under the current weights."""
        logprobs = [self._forward(pack, temperature)[0] for pack in packs]
        self._free_gathered()
        return logprobs

    def _free_gathered(self) -> None:
        """Free gathered weights after a pass without backward, so none is reused when stale."""
        if isinstance(self.policy, FSDPModule):
            self.policy.reshard()

    def _packs(self, rows: Sequence[SftRow]) -> list[Pack]:
        """This rank's micro-batches of the rows; rows with nothing to predict are left out."""
        usable = [i for i, (_, mask) in enumerate(rows) if any(mask[1:])]
        if not usable:
            raise InvariantError("no row has a token to predict")
        lengths = [input_length(rows[i][1]) for i in usable]
        packs = []
        for bins in plan(lengths, self.config.tokens_per_microbatch, self.ranks):
            members = [make_row(usable[i], *rows[usable[i]]) for i in bins[self.rank]]
            packs.append(make_pack(members, self.device) if members else empty_pack(self.device))
        return packs

    def _reduced(self, stats: Stats) -> Stats:
        """The statistics of all ranks."""
        if self.ranks > 1:
            dist.all_reduce(stats.sums, dist.ReduceOp.SUM)
            dist.all_reduce(stats.maxima, dist.ReduceOp.MAX)
        return stats

    def _step_metrics(
        self, norms: Sequence[float], rate: float, plans: Sequence[Sequence[Pack]]
    ) -> dict[str, float]:
        return {
            "grad_norm": max(norms),
            "lr": rate,
            "updates": float(len(norms)),
            "updates_skipped": float(sum(not math.isfinite(norm) for norm in norms)),
            "microbatches": float(sum(len(packs) for packs in plans)),
        }

    # ------------------------------------------------------------------ KL reference

    @torch.no_grad()
    def _reference_logprobs(
        self, plans: Sequence[Sequence[Pack]], temperature: float
    ) -> list[list[Tensor]]:
        """Logprobs under the reference: the weights at the first use of KL since the last reset."""
        if self._reference is None:
            self._reference = {n: p.detach().clone() for n, p in self._named().items()}
        with self._weights_of(self._reference):
            return [self._current_logprobs(packs, temperature) for packs in plans]

    @contextlib.contextmanager
    def _weights_of(self, other: dict[str, Tensor]) -> Iterator[None]:
        """Run with other weights, in place, shard by shard; no second model is held."""
        mine = {n: p.detach().clone() for n, p in self._named().items()}
        try:
            self._copy_in(other)
            yield
        finally:
            self._copy_in(mine)

    @torch.no_grad()
    def _copy_in(self, values: dict[str, Tensor]) -> None:
        for name, param in self._named().items():
            param.copy_(values[name])

    # ------------------------------------------------------------------ weights and state

    def _named(self) -> dict[str, Tensor]:
        """Trained parameters by their name in the model; tied ones once."""
        named = self.policy.model.named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    def _make_optimizers(self, config: OptimizerConfig, total_steps: int) -> Optimizers:
        return Optimizers(self._named(), self.policy.matrices, config, total_steps)

    def reset_optimizer(
        self, config: OptimizerConfig | None = None, total_steps: int | None = None
    ) -> None:
        """Start a phase: new moments and step count; the current weights become the reference."""
        away = self._optimizers.away
        self._optimizers = self._make_optimizers(
            config or self._optimizers.config, total_steps or self._optimizers.total_steps
        )
        if away:
            self.offload_optimizer()
        self._reference = None

    def offload_optimizer(self) -> None:
        """Move the moments to host memory, where engines on the same GPU do not need it."""
        if not self._optimizers.away:
            self._optimizers.move(away=True)

    def onload_optimizer(self) -> None:
        """Move the moments back, before the next step."""
        if self._optimizers.away:
            self._optimizers.move(away=False)

    def retune(self, config: OptimizerConfig, total_steps: int | None = None) -> None:
        """Change learning rates and schedule; moments, step count and reference stay."""
        if config.matrix_optimizer != self._optimizers.config.matrix_optimizer:
            raise RecipeError("matrix_optimizer can only change where the optimizer is reset")
        self._optimizers.retune(config, total_steps or self._optimizers.total_steps)

    def state(self) -> dict[str, Tensor]:
        """All weights by transformers name: whole, on the CPU, detached; rank 0 only."""
        gathered = self._gathered(copy=True)
        whole = {name: value for name, value in gathered if value is not None}
        return {name: whole[first] for name, first in self._names().items() if self.rank == 0}

    def _names(self) -> dict[str, str]:
        """Every transformers name of a weight, and the first name of the same tensor."""
        firsts: dict[int, str] = {}
        return {
            lora.plain_name(name): firsts.setdefault(id(value), lora.plain_name(name))
            for name, value in self.policy.model.state_dict(keep_vars=True).items()
            if not lora.is_adapter(name)
        }

    @torch.no_grad()
    def _gathered(
        self, dtype: torch.dtype | None = None, *, copy: bool = False
    ) -> Iterator[tuple[str, Tensor | None]]:
        """Weights one after the other, tied ones once: whole, on the CPU; None except on rank 0.

        All ranks take part in gathering each. Without `copy` they may be the live ones.
        """
        names = self._names()
        adapters = lora.adapters(self._named(), self.config.lora)
        for name, value in self.policy.model.state_dict(keep_vars=True).items():
            plain = lora.plain_name(name)
            if lora.is_adapter(name) or names[plain] != plain:
                continue
            adapter = adapters.get(name)
            if adapter is not None:
                weight = self._merged(value, adapter)
                yield plain, weight.to(dtype or weight.dtype) if self.rank == 0 else None
                continue
            part = value.detach().to(dtype or value.dtype)
            whole = part.full_tensor() if isinstance(part, DTensor) else part
            yield plain, whole.to("cpu", copy=copy) if self.rank == 0 else None

    def _merged(self, value: Tensor, adapter: lora.Adapter) -> Tensor:
        """A whole weight on the CPU; on rank 0 its adapter is added."""
        weight, a, b = _whole(value), _whole(adapter.a), _whole(adapter.b)  # all ranks take part
        return lora.merge(weight, a, b, adapter.scale) if self.rank == 0 else weight

    @torch.no_grad()
    def with_planted(self, scale: float, method: str, *args: Any) -> Any:
        """Call a method with a planted adapter (`lora.planted`) in place of the trained one."""
        with self._weights_of(lora.planted(self._named(), scale)):
            return getattr(self, method)(*args)

    def export_adapter(self, path: str | Path) -> None:
        """Write the adapter alone, as peft and vLLM read it."""
        if self.config.lora is None:
            raise RecipeError("there is no adapter to export: the run trains all weights")
        state = {name: _whole(value) for name, value in self._named().items()}
        if self.rank == 0:
            lora.export(state, self.config.lora, self.model_dir, Path(path))

    @torch.no_grad()
    def weight_sums(self, dtype: str, exported: bool) -> dict[str, int]:
        """Checksums of all weights in an engine's number format.

        `exported`: the engine reads an export, whose weights have the learner's own format. The
        ranks add up their shards; only merged adapters must be gathered for it.
        """
        casts = (*((self.dtype,) if exported else ()), getattr(torch, dtype))
        if self.config.lora is None:
            return weights.shard_sums(self._named(), casts)
        return bit_sums(weights.untied(self.state()).items(), casts)

    def export_bytes(self) -> int:
        """Size of the weights of an export, nearly: those of an adapter are counted too."""
        return sum(p.numel() for p in self.policy.model.parameters()) * self.dtype.itemsize

    def parameter_shapes(self) -> dict[str, list[int]]:
        """Shapes by parameter name: they identify the model."""
        return {name: list(p.shape) for name, p in self._named().items()}

    def checkpoint_facts(self) -> dict[str, Any]:
        """Optimizer settings, step counts and whether there is a reference."""
        optimizers = self._optimizers
        return {
            "optimizer": optimizers.config.model_dump(mode="json"),
            "optimizer_steps": optimizers.steps,
            "total_steps": optimizers.total_steps,
            "reference": self._reference is not None,
            "ranks": self.ranks,
            "base": self._base_logprobs,
        }

    def checkpoint_tensors(self) -> dict[str, Any]:
        """Weights, optimizer moments and reference by name; restored in place."""
        tensors: dict[str, Any] = {f"model.{n}": p.detach() for n, p in self._named().items()}
        tensors |= {f"optimizer.{name}": value for name, value in self._optimizers.state().items()}
        for name, value in (self._reference or {}).items():
            tensors[f"reference.{name}"] = value
        return tensors

    def prepare_restore(self, facts: Mapping[str, Any]) -> None:
        """Restore settings and step counts; allocate moments and, if there was one, reference."""
        base, mine = facts.get("base", []), self._base_logprobs
        gap = max((abs(a - b) for a, b in zip(base, mine, strict=True)), default=0.0)
        if gap > probe_tolerance(self.config.dtype):
            raise CheckpointError(
                f"the checkpoint has an adapter of another model than {self.model_dir}: the frozen "
                f"weights' logprobs differ by {gap:.3g}"
            )
        self.reset_optimizer(OptimizerConfig(**facts["optimizer"]), facts["total_steps"])
        self._optimizers.steps = facts["optimizer_steps"]
        if facts["reference"]:
            self._reference = {n: torch.empty_like(p) for n, p in self._named().items()}

    def save(self, path: str | Path, extra: dict[str, Any] | None = None) -> None:
        """Write all that is needed to resume (weights, optimizer, RNG, `extra`), atomically."""
        checkpoint.save(Path(path), self, extra or {})

    def load(self, path: str | Path) -> dict[str, Any]:
        """Resume from a checkpoint of any number of ranks; returns its `extra`."""
        return checkpoint.load(Path(path), self)

    def export(
        self, path: str | Path, tokenizer: Any | None = None, stop_ids: Sequence[int] = ()
    ) -> None:
        """Write a model directory that transformers and vLLM can load."""
        tensors = self._gathered(self.dtype)
        try:
            if self.rank == 0:
                named = ((name, value) for name, value in tensors if value is not None)
                model = self.policy.model
                weights.export(named, model, Path(path), self.dtype, tokenizer, stop_ids)
        finally:
            for _ in tensors:  # all ranks gather all tensors, also if writing failed
                pass


def _whole(value: Tensor) -> Tensor:
    """A copy of a tensor on the CPU, gathered from all ranks."""
    gathered = value.full_tensor() if isinstance(value, DTensor) else value
    return gathered.detach().to("cpu", copy=True)
