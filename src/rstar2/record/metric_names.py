"""Every metric that a run records in metrics.jsonl: what it is, what is good, what is alarming.

docs/reference/metrics.md is made from this table. `<...>` in a name stands for any word: a kind of
problem, an engine, a failure. A test runs the whole recipe and finds metrics that are missing here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MetricNote:
    """The description of one metric. Shares are 0..1, lengths in tokens, times in seconds."""

    meaning: str
    good: str = ""
    alarming: str = ""


N = MetricNote

METRICS: dict[str, dict[str, MetricNote]] = {
    "SFT": {
        "heldout_loss": N(
            "loss on conversations that SFT does not train on, every `sft.eval_every` steps",
            "falls with `loss`",
            "rises while `loss` falls: SFT overfits, take fewer steps",
        ),
    },
    "Reward and behaviour": {
        "reward": N(
            "mean verified reward of all graded rollouts of the step, before resampling",
            "rises over tens of steps; single steps vary",
            "stays near 0 (the policy lacks the format: more SFT, easier problems) or near 1 "
            "(nothing left to learn: harder problems); a steep fall is a collapse",
        ),
        "accuracy/<kind>": N(
            "mean reward of the problems of one kind, where problems have kinds",
            "all kinds rise",
            "one kind stays at 0: its problems or its grader may be wrong",
        ),
        "failing_calls_in_correct": N(
            "share of failed tool calls in correct rollouts, the figure that RoC lowers",
            "falls",
            "stays level while `reward` rises, as it does without RoC",
        ),
        "tool_errors": N(
            "share of failed tool calls in all rollouts",
            "falls",
            "rises suddenly: read rollouts of the step in the viewer",
        ),
        "tool_errors/<outcome>": N(
            "the same by outcome of the call: `exception`, `timeout`, `bad_json`, ...",
            "`bad_json`, `unknown_tool` and `bad_arguments` go to 0 first",
            "many `timeout`: see `codeenv.default.wall_s`; many `memory`: `memory_mb`",
        ),
        "response_length": N(
            "mean tokens after the prompt, tool responses included",
            "changes slowly",
            "grows towards the stage's `max_length` while `reward` does not rise",
        ),
        "sampled_length": N("mean tokens that the policy itself sampled", "as `response_length`"),
        "turns": N("mean number of assistant turns", "between 1 and the stage's `max_turns`"),
        "calls": N(
            "mean number of tool calls per rollout",
            "above 0 for tasks that need the tool",
            "goes to 0: the policy has stopped to use its tool",
        ),
        "truncated": N(
            "share of rollouts that reached the length limit",
            "falls; more than 0.1 early in the first stage is intended",
            "rises: raise `max_length` in the next stage, or look for repetition",
        ),
        "max_turns": N(
            "share of rollouts that reached the turn limit",
            "near 0",
            "high: raise `max_turns`, or the policy repeats calls",
        ),
        "no_answer": N(
            "share of rollouts without an answer in its tags",
            "falls to near 0",
            "rises: format collapse; `rl.collapse.format_drop` stops a run on it",
        ),
    },
    "Groups and rollouts": {
        "groups/drawn": N("groups that were sampled for the step"),
        "groups/used": N(
            "groups that the step learns from",
            "equals `rl.prompts_per_step`",
            "fewer: problems are too easy or too hard for the policy",
        ),
        "groups/dropped": N(
            "groups whose kept rewards were all equal, so that they teach nothing",
            "well below `groups/drawn`",
            "most groups: change the difficulty of the problems",
        ),
        "groups/refilled": N(
            "groups that replaced dropped ones", "", "near (refill - 1) x prompts"
        ),
        "groups/surplus": N(
            "groups that were started before it was known that they are not needed; left out",
            "few",
            "as many as `groups/used`: engines compute much in vain",
        ),
        "groups/stale": N("groups that were too old to learn from (`rl.staleness`)", "0"),
        "staleness/mean": N(
            "mean weight updates between sampling and learning", "at most staleness"
        ),
        "staleness/max": N("the same for the oldest group of the step", "at most `rl.staleness`"),
        "rollouts/drawn": N("rollouts that were sampled, lost ones included"),
        "rollouts/kept": N("rollouts that RoC kept", "`rl.roc.kept` x `groups/used`"),
        "rollouts/lost": N(
            "rollouts lost to infrastructure or to errors of the environment; never a reward of 0",
            "0",
            "above a few per step: log.txt has the messages; if most are lost the run stops",
        ),
        "rollouts/lost_<failure>": N("the same by name of the failure"),
    },
    "Learner": {
        "loss": N(
            "the loss that is minimised; in SFT the mean negative logprob",
            "SFT: falls. RL: near 0, and says little by itself",
            "not finite",
        ),
        "loss/policy": N("its policy part, with clipping"),
        "loss/kl": N("KL to the reference policy, if `rl.loss.kl` is above 0", "small"),
        "entropy": N(
            "mean entropy of the policy at the sampled tokens, in nats",
            "falls slowly",
            "falls to near 0 within few steps: exploration is over "
            "(`rl.collapse.entropy_floor` can stop the run); rises steadily: the policy degrades",
        ),
        "lr": N("learning rate of the step's last update"),
        "grad_norm": N(
            "largest gradient norm of the step's updates, before clipping",
            "stays in one order of magnitude",
            "rises by orders of magnitude, or is not finite",
        ),
        "updates": N("optimizer updates of the step", "`rl.minibatches`"),
        "updates_skipped": N(
            "updates left out because their gradient was not finite", "0", "above 0 repeatedly"
        ),
        "microbatches": N("forward and backward passes of the step"),
        "tokens": N("tokens in the loss"),
    },
    "Policy ratio": {
        "ratio/mean": N("mean ratio of new to old policy per token", "near 1"),
        "ratio/max": N("largest ratio", "", "grows from step to step"),
        "ratio/clip": N(
            "share of clipped tokens",
            "0 with one mini-batch, else a few per cent at most",
            "tens of per cent: lower the learning rate or `rl.minibatches`",
        ),
        "ratio/clip_low": N("share clipped at 1 - `clip_low`"),
        "ratio/clip_high": N("share clipped at 1 + `clip_high`"),
        "ratio/kl": N("KL between old and new policy, estimated", "small", "rises steadily"),
    },
    "Engine against learner": {
        "mismatch/abs": N(
            "mean difference of a sampled token's logprob between engine and learner",
            "rounding error: below 1e-4 with the embedded engine in float32",
            "grows at `rl.staleness` 0: the engine serves other weights or another prompt",
        ),
        "mismatch/abs_max": N("the largest such difference"),
        "mismatch/ratio_max": N("largest ratio of the learner's to the engine's probability"),
        "mismatch/kl": N("KL(rollout, old) by the k1 estimate, which may be negative", "near 0"),
        "mismatch/k3": N("the same by the k3 estimate, never negative", "near 0", "grows"),
        "mismatch/ess": N("effective sample size of the importance weights", "1", "falls"),
        "mismatch/capped": N(
            "share of tokens whose importance weight reached `rl.loss.importance_cap`", "near 0"
        ),
        "mismatch/dropped": N("share of tokens in sequences dropped by `sequence_mask`", "near 0"),
    },
    "Weights": {
        "weights/version": N("version that the engines serve", "rises by 1 per step"),
        "weights/megabytes": N("size of the update"),
        "weights/rehearsal_gap": N(
            "LoRA: how far a planted adapter moves the learner's logprobs of the probe",
            "four times the tolerance or more",
        ),
        "weights/tolerance": N(
            "bfloat16: largest difference that the probe may have, four times the largest that was "
            "measured before",
            "below 1",
            "far above 1: engine and learner differ by more than their number formats",
        ),
        "weights/probe_gap": N(
            "difference of the probe's logprobs, engine against learner, after the update",
            "below 1e-3 in float32",
            "above the tolerance the run stops with WeightUpdateError",
        ),
    },
    "Engines": {
        "engine/idle_share": N(
            "share of the step in which an engine had nothing to generate, mean over engines",
            "low",
            "high: few long rollouts hold up the step, or tools are slow (`codeenv/queue_s`)",
        ),
        "engine/kv_share": N("mean share of the KV cache in use", "high without preemptions"),
        "engine/kv_peak": N("highest share of the KV cache in use", "up to 1"),
        "engine/turns": N("turns that were generated"),
        "engine/moved": N("turns that continued on another engine than the one before", "few"),
        "engine/queue_s": N("mean seconds that a turn waited for an engine", "", "grows"),
        "engine/preemptions": N(
            "rollouts that an engine evicted and computed again", "few", "more than rollouts"
        ),
        "engine/deaths": N("engines that were lost and restarted", "0", "above 0: see log.txt"),
        "engine/<name>/idle_share": N("idle share of one engine", "alike for all engines"),
        "engine/<name>/kv_share": N("KV use of one engine"),
        "engine/<name>/kv_peak": N("highest KV use of one engine"),
        "engine/<name>/tokens": N("tokens that one engine sampled"),
        "tokens_per_s": N("tokens sampled per second of generation, all engines together"),
    },
    "Code environment": {
        "codeenv/calls": N("calls that were executed"),
        "codeenv/calls_per_s": N("calls per second of generation"),
        "codeenv/latency_s": N(
            "mean seconds that a turn waited for its tools",
            "near `codeenv/run_s`",
            "far above it: calls queue; add slots or servers",
        ),
        "codeenv/latency_p50_s": N("the median"),
        "codeenv/latency_p95_s": N("the 95th percentile", "below the call's time limit"),
        "codeenv/run_s": N("mean seconds that a program ran"),
        "codeenv/queue_s": N("mean seconds that a call waited for a slot", "near 0", "grows"),
    },
    "Time": {
        "time/step": N("seconds of the whole step", "the sum of collect, learn and publish"),
        "time/collect": N("waiting for rollouts"),
        "time/generate": N("the part of `time/collect` in which rollouts generated"),
        "time/tools": N("the part in which they waited for tools", "small", "above generation"),
        "time/grade": N("the part in which answers were graded", "small"),
        "time/learn": N("optimizer updates"),
        "time/publish": N("sending weights to the engines and proving them"),
        "time/weights": N("sending and proving alone, without waiting for engines to pause"),
        "time/evaluate": N("the evaluation of this step (`evaluation.every`)"),
    },
    "Evaluation during training": {
        "evaluation/<mode>": N("accuracy on the held-out problems, greedy or sampled", "rises"),
        "evaluation/<mode>_length": N("mean tokens of these answers"),
        "evaluation/<mode>_failing_calls_in_correct": N("failed calls in correct answers", "falls"),
    },
    "Difficulty filter": {
        "problems/seen": N("problems that the policy answered before the stage"),
        "problems/kept": N("problems that the stage trains on", "", "0: the stage cannot start"),
        "problems/always_solved": N("problems that were dropped because every answer was right"),
        "problems/never_solved": N("problems without a right answer; they are kept"),
        "problems/ungraded": N("problems whose rollouts were lost twice; they are kept"),
        "problems/solved_<count>": N("problems with this many right answers"),
    },
}


def describe(name: str) -> MetricNote | None:
    """The description of a recorded metric; None if the table does not know it."""
    for group in METRICS.values():
        for pattern, note in group.items():
            if re.fullmatch(re.sub(r"<\w+>", "[^/]+", pattern), name):
                return note
    return None
