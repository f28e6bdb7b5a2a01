"""All answers that an evaluation still lacks: drawn, graded, put on record as each one ends.

    what is missing ──> Answerer ──> grade ──> EvalDirectory.add
                        fleet of engines, or an endpoint that speaks text

Invariants
- The seed of an answer derives from (seed, benchmark, problem's place, sample), and from nothing
  that happened before: what is drawn after a kill is what would have been drawn without it.
- A rollout lost to infrastructure gets no verdict and no line: it is counted as missing, and the
  same command tries it again.
- At most `concurrency` rollouts are under way, so that none waits for a place beyond its deadline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from rstar2.agent.calls import ToolRunner
from rstar2.agent.dialogue import ChatModel, Dialogue, opening
from rstar2.agent.loop import RolloutSpec
from rstar2.config import AgentConfig, TemplateConfig
from rstar2.engine.openai import OnText, Reply
from rstar2.errors import InfrastructureError
from rstar2.evaluate.benchmarks import Benchmark
from rstar2.evaluate.scores import GradedAnswer
from rstar2.evaluate.store import EvalDirectory, EvalSettings
from rstar2.reward.grade import Verifier, grade
from rstar2.rollout.groups import GRADE_DEADLINE_S, GroupRunner, together
from rstar2.seeds import derive_seed
from rstar2.types import Finish, Message, Problem, Trajectory

OUTAGE = 8
"""So many rollouts lost in a row, none answered between them, end the sweep."""


@dataclass(frozen=True, slots=True)
class Task:
    """One answer to be had."""

    benchmark: str
    problem: Problem
    group_id: str
    sample: int
    seed: int


class Answerer(Protocol):
    """Rolls a problem out and has it graded; returns it with the tokens of its completion."""

    async def answer(self, task: Task, spec: RolloutSpec) -> tuple[Trajectory, int]: ...


def missing(
    benchmarks: Sequence[Benchmark], settings: EvalSettings, directory: EvalDirectory
) -> Iterator[Task]:
    """What is not on record yet, the samples of a problem next to each other."""
    for benchmark in benchmarks:
        done = directory.done(benchmark.name)
        stream = settings.stream or f"eval/{benchmark.name}"
        for index, problem in enumerate(benchmark.problems):
            for sample in range(settings.samples):
                if (problem.id, sample) not in done:
                    yield Task(
                        benchmark.name,
                        problem,
                        f"{stream}/{index}",
                        sample,
                        derive_seed(settings.seed, stream, index, sample),
                    )


async def sweep(
    tasks: Sequence[Task],
    answerer: Answerer,
    directory: EvalDirectory,
    spec: RolloutSpec,
    *,
    concurrency: int,
    on_answer: Callable[[GradedAnswer], None] = lambda answer: None,
) -> Counter[str]:
    """Answer all tasks; returns the rollouts lost to infrastructure, by name."""
    lost: Counter[str] = Counter()
    in_a_row = 0
    queue = iter(tasks)

    async def worker() -> None:
        nonlocal in_a_row
        for task in queue:
            trajectory, tokens = await answerer.answer(task, spec)
            if trajectory.failure is not None:
                lost[trajectory.failure.name] += 1
                in_a_row += 1
                if in_a_row >= OUTAGE:
                    raise InfrastructureError(
                        f"{in_a_row} rollouts in a row were lost, the last one to "
                        f"{trajectory.failure.name}: {trajectory.failure.message}"
                    )
                continue
            in_a_row = 0
            answer = GradedAnswer(task.benchmark, task.problem.id, task.sample, tokens, trajectory)
            directory.add(answer)
            on_answer(answer)

    await together(worker() for _ in range(min(concurrency, len(tasks))))
    return lost


# --------------------------------------------------------------------------- engines


@dataclass(frozen=True, slots=True)
class FleetAnswerer:
    """The loop, fleet and grader of training."""

    runner: GroupRunner

    async def answer(self, task: Task, spec: RolloutSpec) -> tuple[Trajectory, int]:
        trajectory = await self.runner.rollout(
            task.problem,
            group_id=task.group_id,
            index=task.sample,
            seed=task.seed,
            spec=spec,
        )
        return trajectory, len(trajectory.completion_ids)


# --------------------------------------------------------------------------- endpoints


@dataclass(slots=True)
class Metered:
    """A chat model whose completions, tool responses included, share one budget of tokens.

    The server counts: what the messages of a turn have beyond those of the turn before is what was
    added since. A server that gives no counts is not held to the budget as a whole.
    """

    model: ChatModel
    budget: int
    first_prompt: int = 0
    used: int = 0

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        seed: int | None,
        deadline_s: float,
        on_text: OnText | None,
    ) -> Reply:
        """One turn, within what is left."""
        left = self.budget - self.used
        if left <= 0:
            return Reply("", Finish.LENGTH)
        reply = await self.model.complete(
            messages,
            max_tokens=min(max_tokens, left),
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            deadline_s=deadline_s,
            on_text=on_text,
        )
        self.first_prompt = self.first_prompt or reply.prompt_tokens
        counted = reply.prompt_tokens - self.first_prompt + reply.completion_tokens
        self.used = max(self.used, counted)
        return reply


@dataclass(frozen=True, slots=True)
class EndpointAnswerer:
    """The same parser, tools and grader over an endpoint that speaks text.

    `spec.max_length` bounds the completion here: the endpoint's tokenizer is not ours, so the
    length of its prompt is known only afterwards.
    """

    model: ChatModel
    tools: ToolRunner
    verifier: Verifier
    agent: AgentConfig
    template: TemplateConfig = field(default_factory=TemplateConfig)

    async def answer(self, task: Task, spec: RolloutSpec) -> tuple[Trajectory, int]:
        for attempt in range(1, self.agent.retries + 2):
            model = Metered(self.model, spec.max_length)
            dialogue = Dialogue(
                model,
                self.tools,
                self.agent,
                spec.sampling,
                opening(task.problem, self.template),
                spec.max_length,
                spec.max_turns,
            )
            trajectory = await dialogue.run(
                task.problem,
                id=f"{task.group_id}/{task.sample}~{attempt}",
                group_id=task.group_id,
                seed=task.seed,
            )
            if trajectory.failure is None:
                trajectory = await grade(trajectory, task.problem, self.verifier, GRADE_DEADLINE_S)
            if trajectory.failure is None:
                break
        return replace(trajectory, attempts=attempt), model.used
