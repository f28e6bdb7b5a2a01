"""What several learner tests share: random samples, captured gradients, a slow reference."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rstar2.config import LearnerConfig, LossConfig, OptimizerConfig
from rstar2.learner.checkpoint import CheckpointStore
from rstar2.learner.group import LearnerGroup, LocalRanks
from rstar2.learner.learner import Learner
from rstar2.types import Batch, Sample

VOCABULARY = 97
PROBE = [((1, 2, 3), (0, 1, 1))]
ADAMW = OptimizerConfig(lr=1e-3, warmup_steps=3)


def as_float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def random_batch(
    rng: random.Random, groups: int = 4, members: int = 4, longest: int = 120
) -> Batch:
    """Ragged samples with prompts, tool tokens in between, and logprobs near a random model's."""
    samples = []
    for g in range(groups):
        for i in range(members):
            length = rng.randint(8, longest)
            ids = tuple(rng.randrange(VOCABULARY) for _ in range(length))
            mask = (*(int(t >= 4 and rng.random() < 0.7) for t in range(length - 1)), 1)
            logprobs = tuple(as_float32(-rng.uniform(4, 9)) if m else 0.0 for m in mask)
            advantage = as_float32(rng.gauss(0, 1))
            samples.append(Sample(ids, mask, logprobs, advantage, f"g{g}", f"{g}.{i}", 0))
    return Batch(0, tuple(samples))


def make_learner(
    model_dir: Path, optimizer: OptimizerConfig | None = None, budget: int = 4096
) -> Learner:
    return Learner(
        model_dir,
        LearnerConfig(tokens_per_microbatch=budget),
        optimizer or OptimizerConfig(lr=1e-3, clip_norm=1e9),
        total_steps=10,
        seed=0,
    )


def captured_gradient(learner: Learner, batch: Batch, loss: LossConfig) -> dict[str, Tensor]:
    """The gradient of one whole batch, with the weights left as they are."""
    gradient: dict[str, Tensor] = {}

    def step() -> None:
        gradient.update(_gradients(learner._named()))

    learner._optimizers.step = step  # type: ignore[method-assign]
    assert learner.rl_step(batch, loss, 1)["updates"] == 1
    return gradient


def _gradients(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    gradients = {}
    for name, parameter in named.items():
        assert parameter.grad is not None
        gradients[name] = parameter.grad.clone()
    return gradients


def reference(
    model_dir: Path, batch: Batch, loss: LossConfig, anchor: dict[str, Tensor] | None = None
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient of the first mini-batch, one sequence and token at a time, in float64."""
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float64, attn_implementation="sdpa"
    )
    frozen = None
    if anchor is not None:
        frozen = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float64, attn_implementation="sdpa"
        )
        frozen.load_state_dict({n: v.double() for n, v in anchor.items()}, strict=False)
    total = by_sequence = torch.zeros((), dtype=torch.float64)
    tokens = 0
    for sample in batch.samples:
        logits = model(torch.tensor([sample.token_ids])).logits[0]
        fixed = None if frozen is None else frozen(torch.tensor([sample.token_ids])).logits[0]
        places = [t for t, m in enumerate(sample.mask) if m]
        tokens += len(places)
        now = [logits[t - 1].log_softmax(-1)[sample.token_ids[t]] for t in places]
        gaps = [n.item() - sample.logprobs[t] for n, t in zip(now, places, strict=True)]
        mean_ratio = torch.tensor(sum(gaps) / len(gaps)).exp().item()
        if loss.sequence_mask and not loss.sequence_mask[0] <= mean_ratio <= loss.sequence_mask[1]:
            continue
        if loss.kind == "gspo":
            logratio = torch.stack([logprob - logprob.detach() for logprob in now]).mean()
            cap = loss.importance_cap
            weight = 1.0 if cap is None else min(mean_ratio, cap)
            by_sequence = by_sequence - weight * logratio.exp() * sample.advantage
            continue
        for t, logprob, gap in zip(places, now, gaps, strict=True):
            weight = 1.0
            if loss.importance_cap is not None:
                weight = min(torch.tensor(gap).exp().item(), loss.importance_cap)
            ratio = (logprob - logprob.detach()).exp()
            gain = logprob if loss.kind == "cispo" else ratio
            total = total - weight * gain * sample.advantage
            if fixed is not None:
                d = fixed[t - 1].log_softmax(-1)[sample.token_ids[t]].detach() - logprob
                total = total + loss.kl * (d.exp() - d - 1)
            if loss.entropy:
                logp = logits[t - 1].log_softmax(-1)
                total = total + loss.entropy * (logp.exp() * logp).sum()
    total = total / tokens + by_sequence / len(batch.samples)
    total.backward()
    return total.item(), _gradients(dict(model.named_parameters()))


def largest_gap(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest difference relative to the largest entry of each tensor."""
    assert a.keys() == b.keys()
    return max(
        ((a[n].double() - b[n].double()).abs().max() / b[n].abs().max().clamp(min=1e-12)).item()
        for n in a
    )


def make_group(
    model_dir: Path, ranks: int, optimizer: OptimizerConfig = ADAMW, *, cpu_offload: bool = False
) -> LearnerGroup:
    return LearnerGroup(
        model_dir,
        LearnerConfig(ranks=ranks, tokens_per_microbatch=256, threads=1, cpu_offload=cpu_offload),
        optimizer,
        total_steps=10,
        seed=0,
        call_deadline_s=120.0,
    )


def hold_group(model_dir: Path, pipe: Connection) -> None:
    """A parent that starts two ranks, sends their ids and waits to be killed."""
    group = make_group(model_dir, 2)
    ranks = local_ranks(group)
    pipe.send(([process.pid for process in ranks._processes], ranks._rendezvous.name))
    time.sleep(600)


def local_ranks(group: LearnerGroup) -> LocalRanks:
    """The processes of a group on this machine."""
    assert isinstance(group._ranks, LocalRanks)
    return group._ranks


def write_forever(model_dir: Path, directory: Path, pipe: Connection) -> None:
    """Resume from the latest checkpoint and save without end, reporting each complete one."""
    store, learner = CheckpointStore(directory, keep=3), make_learner(model_dir)
    saved = store.latest()
    if saved is not None:
        learner.load(saved.path)
    for step in itertools.count(saved.step + 1 if saved else 1):
        learner.sft_step([((1, 2, 3, 4), (0, 1, 1, 1))])
        store.save(step, learner, {"loss": learner.sft_loss(PROBE)})
        pipe.send(step)
