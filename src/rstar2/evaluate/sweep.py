"""Generate the answers that an evaluation still lacks, and compute its scores.

    missing_tasks ──> Answerer ──> grade ──> EvalDirectory.add
    EvalDirectory ──> score_answers (recorded rewards) or rescore (graded again) ──> BenchmarkScore

Invariants
- The seed of an answer derives from (seed, benchmark, index of the problem, sample) and from
  nothing else: an evaluation that was killed and resumed draws with the same seeds. A vLLM
  server gets them only with `engine.seeded`; without, it draws other answers.
- A rollout lost to infrastructure gets no reward and no line. It counts as missing, and the same
  command tries it again.
- At most `concurrency` rollouts run at a time, so that none waits for a slot beyond its deadline.
- Scoring reads one answer at a time and keeps only what the figures need, so memory stays small.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rstar2.agent.loop import RolloutSpec
from rstar2.errors import DataError, InfrastructureError
from rstar2.evaluate.answerers import Answerer, Task
from rstar2.evaluate.benchmarks import Benchmark
from rstar2.evaluate.scores import (
    AnswerSummary,
    BenchmarkScore,
    GradedAnswer,
    score,
    summarise_answer,
)
from rstar2.evaluate.store import (
    EvalDirectory,
    EvalSettings,
    elapsed,
    read_answers,
    read_problems,
)
from rstar2.reward.grade import Verifier, grade
from rstar2.seeds import derive_seed
from rstar2.tasks import LostInARow, for_each, together
from rstar2.types import Problem, Trajectory

GRADE_DEADLINE_S = 30.0
AT_ONCE = 256
"""Answers that `rescore` grades at the same time."""


def missing_tasks(
    benchmarks: Sequence[Benchmark], settings: EvalSettings, directory: EvalDirectory
) -> Iterator[Task]:
    """The answers that are not recorded yet, in order of problems."""
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
    """Answer all tasks; returns how many rollouts were lost to infrastructure, by error name."""
    lost: Counter[str] = Counter()
    in_a_row = LostInARow("rollouts")
    queue = iter(tasks)

    async def worker() -> None:
        for task in queue:
            trajectory, tokens = await answerer.answer(task, spec)
            if trajectory.failure is not None:
                lost[trajectory.failure.name] += 1
                in_a_row.lost(f"{trajectory.failure.name}: {trajectory.failure.message}")
                continue
            in_a_row.kept()
            answer = GradedAnswer(task.benchmark, task.problem.id, task.sample, tokens, trajectory)
            directory.add(answer)
            on_answer(answer)

    await together(worker() for _ in range(min(concurrency, len(tasks))))
    return lost


async def answer_all(
    answerer: Answerer, tasks: Sequence[Task], spec: RolloutSpec, at_once: int
) -> list[Trajectory]:
    """The rollouts of all tasks in order, at most `at_once` at a time; none is recorded."""
    in_a_row = LostInARow("rollouts")
    made: dict[int, Trajectory] = {}

    async def answer(number: int) -> None:
        made[number], _ = await answerer.answer(tasks[number], spec)
        failure = made[number].failure
        if failure is None:
            in_a_row.kept()
        else:
            in_a_row.lost(f"{failure.name}: {failure.message}")

    await for_each(range(len(tasks)), answer, at_once)
    return [made[number] for number in range(len(tasks))]


# --------------------------------------------------------------------------- scoring


def score_answers(path: Path, benchmarks: Sequence[str], samples: int) -> dict[str, BenchmarkScore]:
    """The score of each benchmark from the recorded rewards."""
    scores = {}
    for name in benchmarks:
        problems = read_problems(path, name)
        graders = {problem.id: problem.grader for problem in problems}
        summaries = [summarise_answer(a, graders[a.problem_id]) for a in read_answers(path, name)]
        scores[name] = score(name, problems, summaries, samples=samples, wall_s=elapsed(path, name))
    return scores


async def rescore(
    path: Path,
    benchmarks: Mapping[str, Sequence[Problem] | None],
    samples: int,
    verifier: Verifier,
    on_answer: Callable[[GradedAnswer], None] = lambda answer: None,
) -> dict[str, BenchmarkScore]:
    """Grade the recorded answers again; None for a benchmark means its recorded problems.

    The extracted answers are reused: nothing is parsed again from the text.
    """
    return {
        name: await _rescore_one(
            path, name, given or read_problems(path, name), samples, verifier, on_answer
        )
        for name, given in benchmarks.items()
    }


async def _rescore_one(
    path: Path,
    name: str,
    problems: Sequence[Problem],
    samples: int,
    verifier: Verifier,
    on_answer: Callable[[GradedAnswer], None],
) -> BenchmarkScore:
    by_id = {problem.id: problem for problem in problems}
    changes: Counter[str] = Counter()
    answers = read_answers(path, name)
    summaries: list[AnswerSummary] = []

    async def worker() -> None:
        for answer in answers:
            if answer.problem_id not in by_id:
                raise DataError(
                    f"{name} has no problem {answer.problem_id}, but there is an answer to it"
                )
            problem = by_id[answer.problem_id]
            fresh = await regrade(answer, problem, verifier)
            if fresh.trajectory.correct != answer.trajectory.correct:
                changes["to_right" if fresh.trajectory.correct else "to_wrong"] += 1
            summaries.append(summarise_answer(fresh, problem.grader))
            on_answer(fresh)

    await together(worker() for _ in range(AT_ONCE))
    wall_s = elapsed(path, name)
    return score(name, problems, summaries, samples=samples, wall_s=wall_s, settled=changes)


async def regrade(answer: GradedAnswer, problem: Problem, verifier: Verifier) -> GradedAnswer:
    """Grade an answer again."""
    bare = replace(answer.trajectory, reward=None, failure=None)
    graded = await grade(bare, problem, verifier, GRADE_DEADLINE_S)
    if graded.failure is not None:
        raise InfrastructureError(
            f"{problem.id}, sample {answer.sample}: {graded.failure.name}: {graded.failure.message}"
        )
    return replace(answer, trajectory=graded)
