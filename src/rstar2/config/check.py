"""Check the values of a recipe against each other. Pure, no I/O; runs before anything starts.

A fault is a sentence that says how to fix it, and the settings it concerns. The loader adds where
each of these was set.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

from rstar2.config.codeenv import LOOPBACK
from rstar2.config.schema import ADVANTAGES, LOSSES, OptimizerConfig, Recipe, StageConfig
from rstar2.plugins import unknown_name

_STAGE_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class RecipeFault:
    """One conflict in a recipe, and the settings that cause it."""

    text: str
    paths: tuple[str, ...]

    def render(self, origin: Callable[[str], str]) -> str:
        """The sentence, then where each setting was set."""
        places = ", ".join(f"{path} from {origin(path)}" for path in self.paths)
        return f"{self.text}\n      ({places})"


def check(recipe: Recipe) -> list[RecipeFault]:
    """All faults of a recipe; empty if there is none."""
    parts = (
        *(_lengths, _resampling, _algorithms, _batches, _stages),
        *(_sft, _sampling, _offload, _lora, _engines, _codeenv),
    )
    return [fault for part in parts for fault in part(recipe)]


def _lengths(recipe: Recipe) -> Iterator[RecipeFault]:
    lengths = {f"rl.stages.{i}.max_length": s.max_length for i, s in enumerate(recipe.rl.stages)}
    lengths["evaluation.max_length"] = recipe.evaluation.max_length
    if recipe.sft is not None:
        lengths["sft.max_length"] = recipe.sft.max_length
    for path, length in lengths.items():
        if length > recipe.model.max_length:
            yield RecipeFault(
                f"{path} = {length} is longer than "
                f"model.max_length = {recipe.model.max_length}: raise that or lower this",
                (path, "model.max_length"),
            )
        if path == "sft.max_length":
            continue
        if recipe.engine.kind == "embedded" and length > recipe.engine.kv_tokens:
            yield RecipeFault(
                f"engine.kv_tokens = {recipe.engine.kv_tokens} cannot hold one rollout of "
                f"{path} = {length} tokens: raise it to at least that",
                ("engine.kv_tokens", path),
            )
        if length <= recipe.agent.response_tokens:
            yield RecipeFault(
                f"one tool response (agent.response_tokens = {recipe.agent.response_tokens}) "
                f"would fill a whole rollout ({path} = {length}): lower it",
                ("agent.response_tokens", path),
            )


def _resampling(recipe: Recipe) -> Iterator[RecipeFault]:
    roc = recipe.rl.roc
    if roc.kept > roc.drawn:
        yield RecipeFault(
            f"rl.roc.kept = {roc.kept} is more than rl.roc.drawn = {roc.drawn}: "
            "draw more or keep fewer",
            ("rl.roc.kept", "rl.roc.drawn"),
        )
    elif roc.variant == "none" and roc.kept != roc.drawn:
        yield RecipeFault(
            f"rl.roc.variant = none keeps every rollout, so rl.roc.drawn = {roc.drawn} must equal "
            f"rl.roc.kept = {roc.kept}",
            ("rl.roc.variant", "rl.roc.drawn", "rl.roc.kept"),
        )
    if roc.min_positives + roc.min_negatives > roc.kept:
        yield RecipeFault(
            f"rl.roc.min_positives + min_negatives = {roc.min_positives + roc.min_negatives} "
            f"is more than rl.roc.kept = {roc.kept}",
            ("rl.roc.min_positives", "rl.roc.min_negatives", "rl.roc.kept"),
        )


def _algorithms(recipe: Recipe) -> Iterator[RecipeFault]:
    names = (
        ("rl.advantage", recipe.rl.advantage, ADVANTAGES),
        ("rl.loss.kind", recipe.rl.loss.kind, LOSSES),
    )
    for path, name, known in names:
        if name not in known and ":" not in name:
            yield RecipeFault(unknown_name(path, name, known), (path,))


def _batches(recipe: Recipe) -> Iterator[RecipeFault]:
    rl, ranks = recipe.rl, recipe.learner.ranks
    if rl.minibatches > rl.prompts_per_step:
        yield RecipeFault(
            f"rl.minibatches = {rl.minibatches} is more than rl.prompts_per_step = "
            f"{rl.prompts_per_step}, and groups are never split: use fewer",
            ("rl.minibatches", "rl.prompts_per_step"),
        )
    rollouts = rl.prompts_per_step * rl.roc.kept // rl.minibatches
    if rollouts < ranks:
        yield RecipeFault(
            f"a minibatch of {rollouts} rollouts (prompts_per_step x roc.kept / minibatches) "
            f"cannot be shared by learner.ranks = {ranks}: use fewer ranks or minibatches",
            ("learner.ranks", "rl.prompts_per_step", "rl.roc.kept", "rl.minibatches"),
        )
    if 0 < rl.count < rl.prompts_per_step:
        yield RecipeFault(
            f"rl.count = {rl.count} problems is less than one step draws "
            f"(rl.prompts_per_step = {rl.prompts_per_step}): raise it, or 0 for all",
            ("rl.count", "rl.prompts_per_step"),
        )
    longest = max((stage.max_length for stage in rl.stages), default=0)
    if longest > recipe.learner.tokens_per_microbatch:
        yield RecipeFault(
            f"learner.tokens_per_microbatch = {recipe.learner.tokens_per_microbatch} cannot hold "
            f"one rollout of {longest} tokens: raise it to at least that",
            ("learner.tokens_per_microbatch",),
        )
    if rl.staleness and rl.loss.importance_cap is None:
        yield RecipeFault(
            f"rl.staleness = {rl.staleness} uses rollouts of older weights and needs the "
            "importance correction: set rl.loss.importance_cap, such as 2.0",
            ("rl.staleness", "rl.loss.importance_cap"),
        )


def _stages(recipe: Recipe) -> Iterator[RecipeFault]:
    seen: dict[str, int] = {}
    for index, stage in enumerate(recipe.rl.stages):
        path = f"rl.stages.{index}.name"
        reserved = stage.name in ("base", "sft") or stage.name.startswith(("eval-", "filter-"))
        if reserved or not _STAGE_NAME.fullmatch(stage.name):
            yield RecipeFault(
                f"{path} = {stage.name!r} is not a valid stage name: use lower-case letters, "
                "digits and dashes, not base or sft, and no leading eval- or filter-",
                (path,),
            )
        if stage.name in seen:
            yield RecipeFault(
                f"two stages are called {stage.name!r}: give each its own name",
                (f"rl.stages.{seen[stage.name]}.name", path),
            )
        seen[stage.name] = index
        yield from _plateau(recipe, index, stage)
    total = sum(stage.steps for stage in recipe.rl.stages) * recipe.rl.minibatches
    yield from _optimizer("rl.optimizer", recipe.rl.optimizer, total)
    mask = recipe.rl.loss.sequence_mask
    if mask is not None and not 0 <= mask[0] < mask[1]:
        yield RecipeFault(
            f"rl.loss.sequence_mask = {list(mask)} must be an increasing pair such as [0.5, 2.0]",
            ("rl.loss.sequence_mask",),
        )


def _plateau(recipe: Recipe, index: int, stage: StageConfig) -> Iterator[RecipeFault]:
    if stage.until is None:
        return
    path, plateau, every = f"rl.stages.{index}.until.plateau", stage.until.plateau, 1
    if plateau.metric.startswith("evaluation/"):
        every = recipe.evaluation.every
        if not every:
            yield RecipeFault(
                f"{path}.metric = {plateau.metric} needs evaluations during RL: set "
                "evaluation.every, such as 10",
                (f"{path}.metric", "evaluation.every"),
            )
            return
        if plateau.metric == "evaluation/greedy" and not recipe.evaluation.greedy:
            yield RecipeFault(
                f"{path}.metric = {plateau.metric}, but evaluation.greedy = false: use "
                "evaluation/sampled",
                (f"{path}.metric", "evaluation.greedy"),
            )
    if 2 * plateau.window * every >= stage.steps:
        yield RecipeFault(
            f"{path}.window = {plateau.window} compares {2 * plateau.window * every} steps, so the "
            f"stage cannot end before its {stage.steps} steps: lower it",
            (f"{path}.window", f"rl.stages.{index}.steps"),
        )


def _sft(recipe: Recipe) -> Iterator[RecipeFault]:
    sft = recipe.sft
    if sft is None:
        return
    if (sft.steps > 0) == (sft.epochs > 0):
        state = "both set" if sft.steps else "both 0"
        yield RecipeFault(
            f"sft.steps = {sft.steps} and sft.epochs = {sft.epochs:g} are {state}: set one and "
            "leave the other at 0 (or leave SFT out with `sft: null`)",
            ("sft.steps", "sft.epochs"),
        )
    yield from _optimizer("sft.optimizer", sft.optimizer, sft.steps)


def _optimizer(path: str, optimizer: OptimizerConfig, steps: int) -> Iterator[RecipeFault]:
    if steps and optimizer.warmup_steps >= steps:
        yield RecipeFault(
            f"{path}.warmup_steps = {optimizer.warmup_steps} is not shorter than the "
            f"{steps} optimizer steps of the phase: lower it",
            (f"{path}.warmup_steps",),
        )
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        yield RecipeFault(
            f"{path}.betas = {list(optimizer.betas)} must lie in [0, 1)", (f"{path}.betas",)
        )


def _sampling(recipe: Recipe) -> Iterator[RecipeFault]:
    if recipe.rl.stages and recipe.rl.sampling.temperature == 0:
        yield RecipeFault(
            "rl.sampling.temperature = 0 draws the same rollout every time, so no group has a "
            "gradient: use 1.0",
            ("rl.sampling.temperature",),
        )
    sampling = recipe.rl.sampling
    for path, value, off in (("top_p", sampling.top_p, 1), ("top_k", sampling.top_k, 0)):
        if recipe.rl.stages and value != off:
            yield RecipeFault(
                f"rl.sampling.{path} = {value:g} draws rollouts from a truncated distribution, but "
                "the learner scores tokens under the whole one, so ratios would be wrong: use "
                f"{off} (rl.sampling.temperature is supported)",
                (f"rl.sampling.{path}",),
            )


def _offload(recipe: Recipe) -> Iterator[RecipeFault]:
    if recipe.learner.cpu_offload and recipe.learner.ranks == 1:
        yield RecipeFault(
            "learner.cpu_offload = true needs several ranks, and learner.ranks = 1: use more, or "
            "leave it out",
            ("learner.cpu_offload", "learner.ranks"),
        )


def _lora(recipe: Recipe) -> Iterator[RecipeFault]:
    if recipe.learner.lora is None:
        return
    optimizers = {"rl.optimizer": recipe.rl.optimizer}
    if recipe.sft is not None:
        optimizers["sft.optimizer"] = recipe.sft.optimizer
    for path, optimizer in optimizers.items():
        if optimizer.matrix_optimizer != "adamw":
            yield RecipeFault(
                f"{path}.matrix_optimizer = {optimizer.matrix_optimizer} updates whole weight "
                "matrices, and learner.lora trains none: use adamw, or leave learner.lora out",
                (f"{path}.matrix_optimizer", "learner.lora"),
            )


def _engines(recipe: Recipe) -> Iterator[RecipeFault]:
    engine = recipe.engine
    if engine.quantization == "int8":
        if engine.kind != "embedded":
            yield RecipeFault(
                f"engine.quantization = int8 is for embedded engines, not for {engine.kind}: use "
                "none; vLLM quantizes by its own options (engine.arguments)",
                ("engine.quantization", "engine.kind"),
            )
        if recipe.rl.stages and recipe.rl.loss.importance_cap is None:
            yield RecipeFault(
                "engine.quantization = int8 samples from rounded weights and needs the importance "
                "correction: set rl.loss.importance_cap, such as 2.0",
                ("engine.quantization", "rl.loss.importance_cap"),
            )
    if engine.lora == "adapter":
        wrong = (
            "engine.kind = vllm"
            if engine.kind != "vllm"
            else "learner.lora"
            if recipe.learner.lora is None
            else "engine.weight_transfer = files"
            if engine.weight_transfer != "files"
            else "servers of its own (no engine.urls)"
            if engine.urls
            else "one machine (no cluster section)"
            if recipe.cluster is not None
            else ""
        )
        if wrong:
            yield RecipeFault(
                f"engine.lora = adapter needs {wrong}: set that, or use merged", ("engine.lora",)
            )
    if engine.sleep and (engine.kind != "vllm" or engine.urls or recipe.rl.staleness):
        yield RecipeFault(
            "engine.sleep = true needs vLLM servers that rstar2 starts (engine.kind = vllm, no "
            "engine.urls) and that do not generate while the learner trains (rl.staleness = 0)",
            ("engine.sleep", "engine.kind", "engine.urls", "rl.staleness"),
        )
    if engine.sleep and recipe.cluster is not None and not recipe.cluster.colocate:
        yield RecipeFault(
            "engine.sleep = true, but cluster.colocate = false gives engines their own GPUs: "
            "leave one of them out",
            ("engine.sleep", "cluster.colocate"),
        )
    if engine.kind == "openai":
        if recipe.rl.stages:
            yield RecipeFault(
                "engine.kind = openai is for evaluation only (it takes no weights and returns no "
                "exact tokens): use embedded or vllm, or leave rl.stages out",
                ("engine.kind", "rl.stages"),
            )
        if not engine.urls:
            yield RecipeFault(
                "engine.kind = openai needs engine.urls", ("engine.kind", "engine.urls")
            )
    if engine.kind == "embedded" and engine.urls:
        yield RecipeFault(
            "engine.urls are not used by engine.kind = embedded: leave them out or use vllm",
            ("engine.urls", "engine.kind"),
        )
    if engine.urls and engine.count not in (1, len(engine.urls)):
        yield RecipeFault(
            f"engine.count = {engine.count} but engine.urls names {len(engine.urls)}: "
            "leave the count out",
            ("engine.count", "engine.urls"),
        )
    if recipe.deterministic and engine.kind != "embedded":
        yield RecipeFault(
            f"deterministic: true is not possible with engine.kind = {engine.kind}, whose "
            "numbers depend on how requests are batched: use embedded",
            ("deterministic", "engine.kind"),
        )


def _codeenv(recipe: Recipe) -> Iterator[RecipeFault]:
    env = recipe.codeenv
    if not env.urls and env.host not in LOOPBACK and not env.token:
        yield RecipeFault(
            f"codeenv.host = {env.host} opens the code environment to the network without "
            "codeenv.token: set one, or use 127.0.0.1",
            ("codeenv.host", "codeenv.token"),
        )
    for field in fields(env.default):
        asked, most = getattr(env.default, field.name), getattr(env.cap, field.name)
        if asked is not None and most is not None and asked > most:
            yield RecipeFault(
                f"codeenv.default.{field.name} = {asked} is above codeenv.cap.{field.name} = "
                f"{most}: lower it or raise the cap",
                (f"codeenv.default.{field.name}", f"codeenv.cap.{field.name}"),
            )
    wall = env.default.wall_s
    if wall is not None and recipe.agent.tool_deadline_s <= wall:
        yield RecipeFault(
            f"agent.tool_deadline_s = {recipe.agent.tool_deadline_s:g} ends the wait for a call "
            f"before the call itself may end (codeenv.default.wall_s = {wall:g}): raise it",
            ("agent.tool_deadline_s", "codeenv.default.wall_s"),
        )
