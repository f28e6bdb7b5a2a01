"""Filters that sample a model: agreement with the label, and difficulty for the current policy.

    problems.jsonl ──> undecided problems ──> Ask (at most k samples) ──> answers.jsonl ──> Rule
                                                                               └─> problems.jsonl

Invariants
- Each answer is recorded once, before it counts. After kill -9 the same command samples only the
  missing answers and reaches the same decisions: the seed of a sample derives only from the problem
  and the sample number.
- A problem is sampled only until the rule is decided: 2 matches of 16 may take two answers. More
  samples would not change the decision.
- An answer lost to infrastructure is not a wrong answer: it is not recorded. A problem that stays
  undecided because of it is an error, or is dropped and counted with --drop-undecided.
- Memory is about ten bytes per problem: problems are read twice and not kept.

`difficulty` applies the same rule inside a training run, from the rollouts of a filter stage.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from rstar2.errors import DataError, EngineError, UserError
from rstar2.files import replacing_file, write_file
from rstar2.problems.card import (
    DROPPED,
    JSON,
    MARKDOWN,
    Card,
    Dropped,
    DroppedRows,
    StepCount,
    read_card,
)
from rstar2.problems.load import read_jsonl
from rstar2.problems.prepare import PROBLEMS
from rstar2.record.files import JsonLines, RunLock
from rstar2.record.read import read_lines
from rstar2.seeds import derive_seed
from rstar2.types import Failure, Group, Problem, encode

ANSWERS, SETTINGS = "answers.jsonl", "settings.json"
MOST_SAMPLES = 64


# --------------------------------------------------------------------------- rules


class Rule(Protocol):
    """When a problem is kept. `name` is its line in the data card, `key` its entry in `meta`."""

    @property
    def name(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def samples(self) -> int: ...

    def decide(self, correct: int, wrong: int) -> bool | None:
        """Whether the problem is kept; None while undecided."""
        ...


@dataclass(frozen=True, slots=True)
class Agreement:
    """Keep a problem if at least `matches` of `samples` reference answers equal the label."""

    matches: int = 2
    samples: int = 16
    key: str = "agreement"

    @property
    def name(self) -> str:
        return f"at least {self.matches} of {self.samples} answers match"

    def decide(self, correct: int, wrong: int) -> bool | None:
        if correct >= self.matches:
            return True
        return False if self.samples - wrong < self.matches else None


@dataclass(frozen=True, slots=True)
class NotAlwaysSolved:
    """Drop a problem if all `samples` answers of the policy are right; keep never-solved ones."""

    samples: int = 8
    key: str = "solved"

    @property
    def name(self) -> str:
        return f"not solved {self.samples} of {self.samples} times"

    def decide(self, correct: int, wrong: int) -> bool | None:
        if wrong:
            return True
        return False if correct == self.samples else None


# --------------------------------------------------------------------------- sampling


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """One sampled answer: right, wrong, or lost to infrastructure."""

    correct: bool
    answer: str | None = None
    failure: Failure | None = None


Ask = Callable[[Problem, int, int], Awaitable[SampledAnswer]]
"""(problem, sample, seed) -> sampled answer."""


@dataclass(frozen=True, slots=True)
class Question:
    """Everything that the answers depend on, except the problems."""

    rule: Rule
    model: Mapping[str, Any]
    """Identifies the model and its settings; resuming with another one is refused."""
    seed: int = 0
    only: Sequence[str] = ()
    """Sources to filter; empty means all. Problems of other sources are kept unchanged."""
    exhaustive: bool = False
    """Draw all samples even when the rule is decided, for the counts."""

    def asks(self, problem: Problem) -> bool:
        return not self.only or problem.source in self.only


@dataclass(frozen=True, slots=True)
class _AnswerLine:
    row: int
    id: str
    sample: int
    correct: bool
    answer: str | None = None


@dataclass(slots=True)
class _Tally:
    """Counts of the answers so far, by row."""

    correct: np.ndarray
    wrong: np.ndarray
    asked: np.ndarray
    """Bit s is set when sample s is recorded."""

    @classmethod
    def of(cls, rows: int) -> _Tally:
        return cls(np.zeros(rows, np.uint8), np.zeros(rows, np.uint8), np.zeros(rows, np.uint64))

    def add(self, line: _AnswerLine) -> None:
        bit = np.uint64(1 << line.sample)
        if self.asked[line.row] & bit:
            raise DataError(f"{ANSWERS}: sample {line.sample} of {line.id} is recorded twice")
        self.asked[line.row] |= bit
        (self.correct if line.correct else self.wrong)[line.row] += 1

    def open_samples(self, row: int, samples: int) -> Iterator[int]:
        return (s for s in range(samples) if not int(self.asked[row]) >> s & 1)


class Asking:
    """A directory of answers to one question, and its problems."""

    def __init__(self, problems: Path, out: Path, question: Question) -> None:
        if not 1 <= question.rule.samples <= MOST_SAMPLES:
            raise UserError(f"samples: {question.rule.samples} is not between 1 and {MOST_SAMPLES}")
        self.source, self.out, self.question = problems, out, question
        digest, rows = _digest(problems)
        self.rows = rows
        self.tally = _Tally.of(rows)
        out.mkdir(parents=True, exist_ok=True)
        self._lock = RunLock(out / ".lock")
        try:
            self._check_settings(digest)
            self._journal = JsonLines(out / ANSWERS)
            for line in read_lines(out / ANSWERS, _AnswerLine):
                self.tally.add(line)
        except BaseException:
            self._lock.release()
            raise
        self.answered = int(self.tally.correct.sum()) + int(self.tally.wrong.sum())
        self.lost = 0

    def _check_settings(self, digest: str) -> None:
        """Write the settings, or refuse a directory that has answers with other settings."""
        question = self.question
        asked = {
            "problems": digest,
            "rule": question.rule.name,
            "model": dict(question.model),
            "seed": question.seed,
            "only": list(question.only),
        }
        path = self.out / SETTINGS
        if not path.exists():
            foreign = [p.name for p in self.out.iterdir() if p.name != ".lock"]
            if foreign:
                raise UserError(
                    f"output {self.out} is not empty (it contains {foreign[0]}): use another --out"
                )
            write_file(path, encode(asked))
            return
        before = msgspec.json.decode(path.read_bytes())
        changed = [key for key in asked if asked[key] != before.get(key)]
        if changed:
            said = "; ".join(f"{key}: {before.get(key)} -> {asked[key]}" for key in changed)
            raise UserError(
                f"{self.out} has answers with other settings ({said}): restore the old values to "
                "resume it, or use another --out"
            )

    def verdict(self, row: int) -> bool | None:
        """Whether the problem is kept, from the answers so far; None while undecided."""
        correct, wrong = int(self.tally.correct[row]), int(self.tally.wrong[row])
        if self.question.exhaustive and correct + wrong < self.question.rule.samples:
            return None
        return self.question.rule.decide(correct, wrong)

    async def ask(
        self, ask: Ask, *, concurrency: int, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Sample until every problem is decided or has no samples left."""
        from rstar2.tasks import LostInARow, together

        waiting = (
            (row, problem)
            for row, problem in enumerate(read_jsonl(self.source))
            if self.question.asks(problem) and self.verdict(row) is None
        )
        in_a_row = LostInARow("answers")

        async def worker() -> None:
            for row, problem in waiting:
                for sample in self.tally.open_samples(row, self.question.rule.samples):
                    if self.verdict(row) is not None:
                        break
                    seed = derive_seed("answers", self.question.seed, problem.id, sample)
                    sampled = await ask(problem, sample, seed)
                    if sampled.failure is None:
                        in_a_row.kept()
                        self._record(
                            _AnswerLine(row, problem.id, sample, sampled.correct, sampled.answer)
                        )
                    else:
                        self.lost += 1
                        in_a_row.lost(f"{sampled.failure.name}: {sampled.failure.message}")
                if progress is not None:
                    progress(row + 1, self.answered)

        await together(worker() for _ in range(concurrency))

    def _record(self, line: _AnswerLine) -> None:
        self._journal.append(line)
        self._journal.flush()
        self.tally.add(line)
        self.answered += 1

    def finish(self, *, drop_undecided: bool = False) -> Card:
        """Write kept and dropped problems; undecided ones are an error unless dropped."""
        rule = self.question.rule
        card = read_card(self.source.parent) or Card(sources=self._count_sources())
        card.kept, card.kept_by_source = 0, {}
        count = StepCount(rule.name)
        undecided: list[str] = []
        with (
            replacing_file(self.out / PROBLEMS) as kept,
            replacing_file(self.out / DROPPED) as dropped,
        ):
            for row, problem in enumerate(read_jsonl(self.source)):
                if self.question.asks(problem):
                    count.entered += 1
                    stays = self.verdict(row)
                    if stays is None:
                        undecided.append(problem.id)
                    if not stays:
                        DroppedRows(dropped).drop(count, self._dropped(row, problem, stays))
                        continue
                    count.left += 1
                    problem = self._marked(row, problem)
                kept.write(encode(problem) + b"\n")
                card.keep(problem.source)
            if undecided and not drop_undecided:
                raise EngineError(
                    f"{len(undecided)} problems are undecided, such as {undecided[0]}: {self.lost} "
                    "answers were lost; run the same command to retry, or use --drop-undecided"
                )
        card.steps.append(count)
        card.notes.append(f"{rule.name}: {self.answered:,} answers of {self._model()}")
        write_file(self.out / MARKDOWN, card.markdown().encode())
        write_file(self.out / JSON, encode(card))
        return card

    def _count_sources(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for problem in read_jsonl(self.source):
            counts[problem.source] = counts.get(problem.source, 0) + 1
        return counts

    def _model(self) -> str:
        return str(self.question.model.get("model", "the model"))

    def _marked(self, row: int, problem: Problem) -> Problem:
        correct, wrong = int(self.tally.correct[row]), int(self.tally.wrong[row])
        mark = {"correct": correct, "asked": correct + wrong}
        return replace(problem, meta={**problem.meta, self.question.rule.key: mark})

    def _dropped(self, row: int, problem: Problem, stays: bool | None) -> Dropped:
        correct, wrong = int(self.tally.correct[row]), int(self.tally.wrong[row])
        said = f"{correct} of {correct + wrong} answers were right"
        reason = said if stays is False else f"undecided: {said}, the rest were lost"
        return Dropped(self.question.rule.name, reason, problem.id, problem.prompt, problem.answer)

    def close(self) -> None:
        self._journal.close()
        self._lock.release()


def _digest(path: Path) -> tuple[str, int]:
    """A digest of a file of problems, and their number."""
    digest = hashlib.sha256()
    rows = 0
    for problem in read_jsonl(path):
        digest.update(encode((problem.id, problem.prompt, problem.answer, problem.grader)))
        rows += 1
    return digest.hexdigest()[:16], rows


# --------------------------------------------------------------------------- during training


@dataclass(frozen=True, slots=True)
class Difficulty:
    """How often the policy solved each problem, and which problems are kept.

    Problems with only correct answers are dropped; never-solved ones are kept (stage 3 of the
    paper), and so are problems without a graded answer.
    """

    solved: tuple[tuple[int, int], ...]
    """(correct, graded) per problem, in order."""

    @property
    def kept(self) -> tuple[int, ...]:
        """Indices of the problems that are kept."""
        return tuple(i for i, (c, n) in enumerate(self.solved) if c < n or n == 0)

    def metrics(self) -> dict[str, float]:
        """Metrics of the filter."""
        histogram = Counter(c for c, n in self.solved if n)
        never = sum(c == 0 for c, n in self.solved if n)
        return {
            "problems/seen": float(len(self.solved)),
            "problems/kept": float(len(self.kept)),
            "problems/always_solved": float(len(self.solved) - len(self.kept)),
            "problems/never_solved": float(never),
            "problems/ungraded": float(sum(n == 0 for _, n in self.solved)),
            **{f"problems/solved_{c}": float(n) for c, n in sorted(histogram.items())},
        }


def difficulty(groups: Iterable[Group]) -> Difficulty:
    """Count the correct answers of every problem."""
    return Difficulty(
        tuple((sum(r > 0.5 for r in group.rewards), len(group.rewards)) for group in groups)
    )
