"""The metrics of one RL step, from its groups and the learner's report. Pure.

`record.metric_names` describes every name. Shares are 0..1, lengths in tokens, times in seconds.
Many rollouts spend time on generation, tools and grading at once: each of the three is reported as
its share of the collection time, so that the split adds up to the wall-clock time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rstar2.evaluate.metrics import failing_calls, mean
from rstar2.rollout.collector import CollectedStep
from rstar2.rollout.fleet import EngineUsage
from rstar2.types import Outcome, Selection, StopReason, Trajectory, WeightVersion


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds that the controller waited in one step, by arrow."""

    collect_s: float
    learn_s: float
    publish_s: float
    overlapped: bool = False
    """Whether engines continued to generate while the step was learnt and published."""

    @property
    def generating_s(self) -> float:
        """Seconds in which engines generated."""
        whole = self.collect_s + self.learn_s + self.publish_s
        return whole if self.overlapped else self.collect_s


def step_metrics(
    collected: CollectedStep,
    selections: Sequence[Selection],
    learned: Mapping[str, float] | None,
    times: StepTimes,
) -> dict[str, float]:
    """All metrics of one RL step except those of engines and publication."""
    rollouts = [t for d in collected.drawn for t in d.group.trajectories]
    metrics = rollout_metrics(rollouts)
    metrics.update(_accuracy_by_kind(collected))
    used = len(collected.groups)
    drawn = len(collected.drawn)
    lost = collected.lost
    metrics |= {
        "groups/drawn": drawn,
        "groups/used": used,
        "groups/dropped": drawn - used,
        "groups/refilled": max(0, drawn - collected.wanted),
        "groups/surplus": collected.surplus,
        "rollouts/drawn": len(rollouts) + lost.total(),
        "rollouts/kept": sum(len(s.kept) for s in selections),
        "rollouts/lost": lost.total(),
        **{f"rollouts/lost_{name}": count for name, count in sorted(lost.items())},
    }
    if learned is not None:
        metrics |= learned
    metrics |= time_split(rollouts, times)
    metrics |= tool_times(rollouts, times)
    metrics["tokens_per_s"] = sum(t.sampled_tokens for t in rollouts) / max(
        1e-9, times.generating_s
    )
    return metrics


def rollout_metrics(rollouts: Sequence[Trajectory]) -> dict[str, float]:
    """Behaviour of the policy over graded rollouts; a share without a denominator is left out."""
    outcomes = Counter(r.outcome for t in rollouts for r in t.results)
    calls = sum(n for o, n in outcomes.items() if o is not Outcome.INFRASTRUCTURE)
    metrics: dict[str, float] = {
        "reward": mean(t.reward.value for t in rollouts if t.reward),
        "response_length": mean(t.completion_tokens for t in rollouts),
        "sampled_length": mean(t.sampled_tokens for t in rollouts),
        "turns": mean(len(t.all_turns) for t in rollouts),
        "calls": mean(t.calls for t in rollouts),
        "truncated": mean(t.truncated for t in rollouts),
        "max_turns": mean(t.stop is StopReason.MAX_TURNS for t in rollouts),
        "no_answer": mean(t.unanswered for t in rollouts),
    }
    clean = failing_calls(t for t in rollouts if t.correct)
    every = failing_calls(rollouts)
    if clean is not None:
        metrics["failing_calls_in_correct"] = clean
    if every is not None:
        metrics["tool_errors"] = every
    for outcome, count in sorted(outcomes.items()):
        if outcome.failed:
            metrics[f"tool_errors/{outcome.value}"] = count / calls
    return metrics


def time_split(rollouts: Sequence[Trajectory], times: StepTimes) -> dict[str, float]:
    """The step's seconds by activity."""
    spent = {
        "generate": sum(turn.generate_s for t in rollouts for turn in t.all_turns),
        "tools": sum(turn.tools_s for t in rollouts for turn in t.all_turns),
        "grade": sum(t.reward.wall_s for t in rollouts if t.reward),
    }
    total = sum(spent.values()) or 1.0
    split = {f"time/{name}": times.collect_s * s / total for name, s in spent.items()}
    return split | {
        "time/collect": times.collect_s,
        "time/learn": times.learn_s,
        "time/publish": times.publish_s,
        "time/step": times.collect_s + times.learn_s + times.publish_s,
    }


def staleness_metrics(collected: CollectedStep, version: WeightVersion) -> dict[str, float]:
    """Weight updates between the dispatch of the groups used and the step that learns from them."""
    ages = [version - d.version for d in collected.drawn if d.used]
    if not ages:
        return {"groups/stale": float(collected.stale)}
    return {
        "groups/stale": float(collected.stale),
        "staleness/mean": mean(ages),
        "staleness/max": float(max(ages)),
    }


def tool_times(rollouts: Sequence[Trajectory], times: StepTimes) -> dict[str, float]:
    """Speed of the code environment: calls per second, and how long turns waited for it."""
    executed = [r for t in rollouts for r in t.results if not r.outcome.malformed]
    waits = sorted(turn.tools_s for t in rollouts for turn in t.all_turns if turn.results)
    if not executed or not waits:
        return {}
    return {
        "codeenv/calls": float(len(executed)),
        "codeenv/calls_per_s": len(executed) / max(1e-9, times.generating_s),
        "codeenv/latency_s": mean(waits),
        "codeenv/latency_p50_s": waits[len(waits) // 2],
        "codeenv/latency_p95_s": waits[min(len(waits) - 1, 95 * len(waits) // 100)],
        "codeenv/run_s": mean(r.wall_s for r in executed),
        "codeenv/queue_s": mean(r.queue_s for r in executed),
    }


def engine_metrics(uses: Iterable[EngineUsage]) -> dict[str, float]:
    """Use of each engine; `rollout.fleet.usage_metrics` gives the means over all engines."""
    metrics: dict[str, float] = {}
    for use in uses:
        metrics |= {
            f"engine/{use.name}/idle_share": use.idle_share,
            f"engine/{use.name}/kv_share": use.kv_share,
            f"engine/{use.name}/kv_peak": use.kv_peak,
            f"engine/{use.name}/tokens": float(use.tokens),
        }
    return metrics


def _accuracy_by_kind(collected: CollectedStep) -> dict[str, float]:
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for drawn in collected.drawn:
        rewards[drawn.group.problem.kind].extend(drawn.group.rewards)
    return {f"accuracy/{kind}": mean(r) for kind, r in sorted(rewards.items()) if kind and r}
