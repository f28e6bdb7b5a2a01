"""Run directories written by hand through the real RunDirectory: plain ones, and a hostile one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rstar2.config import Recipe, RlConfig, StageConfig
from rstar2.evaluate.metrics import summarise
from rstar2.record import RunDirectory
from rstar2.types import (
    Choice,
    Group,
    Outcome,
    Problem,
    Reward,
    Selection,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

HOSTILE = (
    "<script>window.owned = 1</script><img src=x onerror='window.owned = 2'>"
    "\"><svg/onload=window.owned=3></textarea><iframe src='javascript:window.owned=4'></iframe>"
    "{{constructor.constructor('window.owned=5')()}} ${window.owned=6} </script><!--"
)
ANSI = "\x1b[31mred\x1b[0m \x07 \x00 \u202egnp.exe\u202c"
HUGE = "x" * 300_000


def recipe(name: str = "plain") -> Recipe:
    stages = (StageConfig(name="stage1", steps=9, max_length=64),)
    return Recipe(name=name, rl=RlConfig(stages=stages))


def rollout(
    group: str, member: int, correct: bool, text: str = "", output: str = "4"
) -> Trajectory:
    code = f"print(2 + {member})"
    outcome = Outcome.OK if member % 2 == 0 else Outcome.EXCEPTION
    said = text or (
        f'think {member}</reason>\n<tool_call>\n{{"code": "{code}"}}\n</tool_call>\n'
        f"<tool_response>\n{output}\n</tool_response>\n<reason>so</reason><answer>\\boxed{{4}}</answer>"
    )
    call = ToolCall(f"{group}/{member}/c", "python", {"code": text or code})
    result = ToolResult(
        call.id, outcome, stdout=output, traceback="" if member % 2 == 0 else output
    )
    first = Turn(
        (5, 6, 7), (-0.5, -1.0, -0.1), ((1, 3),), (call,), (result,), (8, 9),
        entropies=(0.1, 1.5, 0.2), engine="engine-0", started_s=0.0, queue_s=0.1,
        generate_s=0.5, tools_s=0.2,
    )  # fmt: skip
    last = Turn((10, 11), (-0.2, -0.3), ((2, 2),), entropies=(0.3, 0.4), started_s=0.7)
    return Trajectory(
        f"{group}/{member}", "p", group, member, (1, 2), (first, last), StopReason.ANSWERED,
        answer_tags=1, text=said, answer="4", reward=Reward(float(correct), "4", "math"),
        started_at=100.0 + member, wall_s=1.0,
    )  # fmt: skip


MEMBERS = 4


def group_of(name: str, step: int, **how: str) -> tuple[Group, Selection]:
    rollouts = tuple(rollout(name, m, m % 2 == 0, **how) for m in range(MEMBERS))
    choices = tuple(
        Choice(
            t.id, m < MEMBERS // 2, f"reason {m}", float(m % 2 == 0), 0.5 * (m % 2), 0.0, 1.0 + m
        )
        for m, t in enumerate(rollouts)
    )
    problem = Problem("p", how.get("text") or f"What is {step} + {MEMBERS}?", "4", kind="sum")
    return Group(name, problem, step, rollouts), Selection(name, "roc", choices)


def write_step(run: RunDirectory, step: int, groups: int = 2, **how: str) -> None:
    """One RL step with its groups, the last of them not used."""
    for number in range(groups):
        made, selection = group_of(f"stage1/{step}/{number}", step, **how)
        used = groups == 1 or number < groups - 1
        run.trajectories("stage1", step, made, selection if used else None)
    figures = {"reward": 0.1 * step, "entropy": 1.0 / step, "time/step": 2.0, "time/generate": 1.0}
    run.metrics("stage1", step, figures)


def write_plain(path: Path, steps: int) -> Path:
    with RunDirectory.create_or_resume(path, recipe()) as run:
        for step in range(1, steps + 1):
            write_step(run, step)
    return path


def write_evaluated(path: Path, rewards: Mapping[str, Mapping[str, Sequence[float]]]) -> Path:
    """A finished run that evaluated problems, by stage: the rewards of each problem's rollouts."""
    with RunDirectory.create_or_resume(path, recipe()) as run:
        write_step(run, 1)
        for step, (stage, problems) in enumerate(rewards.items()):
            groups = []
            for number, (name, values) in enumerate(problems.items()):
                id = f"eval-{stage}-sampled/{step}/{number}"
                members = tuple(rollout(id, m, value > 0.5) for m, value in enumerate(values))
                kind = name.rstrip("0123456789")
                groups.append(
                    Group(id, Problem(name, f"Solve {name}", "4", kind=kind), step, members)
                )
                run.trajectories(f"eval-{stage}-sampled", step, groups[-1], None)
            run.evaluation(summarise(groups, stage=stage, step=step, mode="sampled", wall_s=1.0))
        run.event("finished")
    return path


WIDE_NAME = "rstar2-agent-14b-roc-on-dapo-math-seed0-2026-11-17"
LATEX = (
    r"Let $f(x) = \frac{x^2 - 1}{\sqrt{x} + 1}$ for $x \geq 0$, and let \[ S = \sum_{k=1}^{n} "
    r"\binom{n}{k} f(k). \] Find the largest $n \le 2026$ such that $S$ is divisible by $7$, "
    r"if tickets cost $5 and $6."
)


def write_wide(path: Path) -> Path:
    """A run with the long names, problems and lists of calls that real runs have."""
    stages = (StageConfig(name="stage1", steps=9, max_length=64),)
    long_recipe = Recipe(name="rstar2-agent-14b-roc-on-dapo-math", rl=RlConfig(stages=stages))
    calls = [Outcome.OK, Outcome.EXCEPTION, Outcome.SYNTAX_ERROR, Outcome.BAD_JSON, Outcome.TIMEOUT]
    with RunDirectory.create_or_resume(path, long_recipe) as run:
        made, selection = group_of("stage1/1/0", 1, text=LATEX)
        rollouts = tuple(
            replace(
                r,
                answer="98765432109876543210",
                turns=tuple(_with_results(turn, calls) for turn in r.turns),
            )
            for r in made.trajectories
        )
        made = replace(made, trajectories=rollouts)
        reasons = "drawn: 3 of 11 correct rollouts by the inverse of their penalty"
        choices = tuple(replace(c, reason=reasons, weight=18.1818) for c in selection.choices)
        run.trajectories("stage1", 1, made, replace(selection, choices=choices))
        run.metrics("stage1", 1, {"reward": 0.5, "entropy": 0.1, "time/step": 2.0})
        run.event("finished")
    return path


def _with_results(turn: Turn, outcomes: list[Outcome]) -> Turn:
    if not turn.calls:
        return turn
    calls = tuple(replace(turn.calls[0], id=f"{turn.calls[0].id}{n}") for n in range(len(outcomes)))
    results = tuple(
        replace(turn.results[0], call_id=c.id, outcome=o)
        for c, o in zip(calls, outcomes, strict=True)
    )
    return replace(turn, calls=calls, results=results)


def write_hostile(path: Path) -> Path:
    """A run whose every text wants to be markup, and one rollout that printed far too much."""
    with RunDirectory.create_or_resume(path, recipe(HOSTILE)) as run:
        write_step(run, 1, groups=1, text=HOSTILE + ANSI, output=HOSTILE + ANSI)
        write_step(run, 2, groups=1, output=HUGE)
        run.event(HOSTILE, detail=HOSTILE)
    return path
