"""The directory of one evaluation: settings, answers (written as each one ends) and results.

    evals/NAME/
      settings.json          settings; only the number of samples may change
      environment.json       versions, machine, command
      problems/<set>.jsonl   the problems as they were read
      answers/<set>.jsonl    one line per graded answer, append-only, in the order they ended
      results.json           the figures (types: evaluate.scores.BenchmarkScore)
      report.html
      .lock                  held by the process that writes here

Invariants
- Each answer is recorded once: its line is written when it is complete, and a (problem, sample)
  that has a line is never generated again. kill -9 loses only rollouts that had not ended.
- All answers in a directory have the same settings, problems and weights. Another model or another
  version of a benchmark is refused, and the error names what changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import msgspec

from rstar2 import machine
from rstar2.errors import InvariantError, UserError
from rstar2.evaluate.benchmarks import Benchmark
from rstar2.evaluate.scores import BenchmarkScore, GradedAnswer
from rstar2.files import write_file
from rstar2.record import flatten
from rstar2.record.files import JsonLines, RunLock, cut_torn_line
from rstar2.record.read import read_lines
from rstar2.types import Problem, Turn, decode, encode

FORMAT = 1
SETTINGS, RESULTS = "settings.json", "results.json"


@dataclass(frozen=True, slots=True)
class EvalSettings:
    """Everything that an answer depends on."""

    model: str
    weights: str
    """Fingerprint of the weights, or the model name at an endpoint."""
    engine: str
    benchmarks: Mapping[str, str]
    """Digest of the problems by benchmark."""
    samples: int
    temperature: float
    top_p: float
    top_k: int
    max_length: int
    max_turns: int
    seed: int
    stream: str = ""
    """Name that seeds derive from; empty means the name of the benchmark."""
    template: Mapping[str, Any] = field(default_factory=dict)
    agent: Mapping[str, Any] = field(default_factory=dict)
    tool: Mapping[str, Any] = field(default_factory=dict)
    """Limits of one tool call."""
    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class EvalResults:
    """The content of results.json."""

    settings: EvalSettings
    scores: Mapping[str, BenchmarkScore]
    complete: bool
    rescored: bool = False


class EvalDirectory:
    """The only writer of an evaluation directory; a context manager."""

    def __init__(self, path: Path, settings: EvalSettings, lock: RunLock) -> None:
        self.path, self.settings, self._lock = path, settings, lock
        self._files: dict[str, JsonLines] = {}
        self._done: dict[str, set[tuple[str, int]]] = {}

    @classmethod
    def open(cls, path: Path, settings: EvalSettings, benchmarks: Iterable[Benchmark]) -> Self:
        """Create a directory, or resume one with the same settings."""
        _refuse_foreign(path)
        path.mkdir(parents=True, exist_ok=True)
        lock = RunLock(path / ".lock")
        try:
            if (path / SETTINGS).exists():
                _check_same(path, settings)
            else:
                for benchmark in benchmarks:
                    _write_problems(path, benchmark)
                write_file(path / "environment.json", encode(machine.describe()))
            write_file(path / SETTINGS, encode(settings))
        except BaseException:
            lock.release()
            raise
        return cls(path, settings, lock)

    def done(self, benchmark: str) -> set[tuple[str, int]]:
        """The (problem, sample) pairs that have an answer."""
        if benchmark not in self._done:
            file = answers_file(self.path, benchmark)
            if file.exists():
                cut_torn_line(file)
            keys = [(line.problem_id, line.sample) for line in read_lines(file, _Key)]
            self._done[benchmark] = set(keys)
            if len(keys) != len(self._done[benchmark]):
                raise InvariantError(f"{file}: an answer is recorded twice")
        return self._done[benchmark]

    def add(self, answer: GradedAnswer) -> None:
        """Record a graded answer; a kill after this call does not lose it."""
        key, done = (answer.problem_id, answer.sample), self.done(answer.benchmark)
        if key in done:
            raise InvariantError(f"{answer.benchmark}: {key} was answered twice")
        if answer.trajectory.reward is None:
            raise InvariantError(f"{answer.benchmark}: {key} has no reward")
        file = self._files.get(answer.benchmark)
        if file is None:
            file = JsonLines(answers_file(self.path, answer.benchmark))
            self._files[answer.benchmark] = file
        file.append(_slim(answer))
        file.flush()
        done.add(key)

    def finish(
        self, scores: Mapping[str, BenchmarkScore], *, rescored: bool = False
    ) -> EvalResults:
        """Write the results."""
        complete = all(score.missing == 0 for score in scores.values())
        results = EvalResults(self.settings, scores, complete, rescored)
        write_file(self.path / RESULTS, encode(results))
        return results

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Key(msgspec.Struct):
    problem_id: str
    sample: int


def _slim(answer: GradedAnswer) -> GradedAnswer:
    """Drop what only training needs: it would be most of the file at 30,000 tokens per answer."""
    trajectory = answer.trajectory
    more = tuple(replace(s, turns=_bare(s.turns)) for s in trajectory.more_segments)
    slim = replace(trajectory, turns=_bare(trajectory.turns), more_segments=more)
    return replace(answer, trajectory=slim)


def _bare(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    return tuple(replace(turn, logprobs=(), entropies=None) for turn in turns)


# --------------------------------------------------------------------------- reading


def answers_file(path: Path, benchmark: str) -> Path:
    """The file with the answers to one benchmark."""
    return path / "answers" / f"{benchmark}.jsonl"


def read_answers(path: Path, benchmark: str) -> Iterator[GradedAnswer]:
    """Stream the recorded answers."""
    return read_lines(answers_file(path, benchmark), GradedAnswer)


def read_settings(path: Path) -> EvalSettings:
    """Read the settings of an evaluation."""
    try:
        return decode((path / SETTINGS).read_bytes(), EvalSettings)
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"{path} is not the directory of an evaluation: {error}") from error


def read_results(path: Path) -> EvalResults:
    """Read the results of an evaluation from its directory or its results.json."""
    file = path / RESULTS if path.is_dir() else path
    try:
        return decode(file.read_bytes(), EvalResults)
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"{path} has no evaluation results: {error}") from error


def read_problems(path: Path, benchmark: str) -> tuple[Problem, ...]:
    """The problems of a benchmark as they were when they were answered."""
    problems = tuple(read_lines(path / "problems" / f"{benchmark}.jsonl", Problem))
    if not problems:
        raise UserError(f"{path} has no problems of {benchmark!r}")
    return problems


def elapsed(path: Path, benchmark: str) -> float:
    """Seconds in which at least one rollout ran; pauses between two runs do not count."""
    spans = sorted(
        (t.started_at, t.started_at + t.wall_s)
        for t in (answer.trajectory for answer in read_answers(path, benchmark))
    )
    total, end = 0.0, 0.0
    for start, stop in spans:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


# --------------------------------------------------------------------------- opening


def _refuse_foreign(path: Path) -> None:
    if path.is_dir() and not (path / SETTINGS).exists():
        foreign = sorted(p.name for p in path.iterdir() if p.name not in (".lock", "problems"))
        foreign = [name for name in foreign if not name.endswith((".new", "environment.json"))]
        if foreign:
            raise UserError(
                f"{path} is not empty and not an evaluation (it contains {foreign[0]}): "
                "use another --out"
            )
    elif path.exists() and not path.is_dir():
        raise UserError(f"--out {path} is a file")


def _write_problems(path: Path, benchmark: Benchmark) -> None:
    folder = path / "problems"
    folder.mkdir(exist_ok=True)
    lines = b"".join(encode(problem) + b"\n" for problem in benchmark.problems)
    write_file(folder / f"{benchmark.name}.jsonl", lines)


def _check_same(path: Path, settings: EvalSettings) -> None:
    """Refuse other settings in the same directory; the error names what changed."""
    before = flatten(msgspec.to_builtins(read_settings(path)))
    after = flatten(msgspec.to_builtins(settings))
    changed = [
        f"  {key}: {before.get(key, '-')} -> {after.get(key, '-')}"
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key) and key != "samples"
    ]
    if changed:
        raise UserError(
            f"{path} has answers with other settings:\n"
            + "\n".join(changed[:8])
            + "\nrestore the old values to resume it, or use another --out"
        )
