"""The paper's cleaning of RL problems, as separate filters with counts.

A filter returns None to keep a problem, or the reason why it is dropped. The order matters only for
the counts: cheap filters come first. Filters keep at most flat hash tables, so memory stays small
over millions of rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from rstar2.errors import DataError
from rstar2.problems.overlap import Contamination, Decontaminated, Duplicates, Names, words
from rstar2.reward.grade import check_gold
from rstar2.types import Problem

_INTEGER = re.compile(r"[+-]?\d+")
_UNVERIFIABLE = re.compile(
    r"(?:^|[.!?]\s+)(?:prove|justify|sketch|draw|explain)\b|\b(?:prove that|justify your)\b"
    r"|\bexplain (?:why|how|your)\b|(?:^|[.!?,:;]\s+|\bto )show that\b"
    r"|\b(?:sketch|draw) (?:the|a) (?:graph|diagram|figure|picture)\b"
)
_UNVERIFIABLE_WORDS = ("prove", "justify", "sketch", "draw", "explain", "show that")
"""Only instructions count: a TV show that runs for 2 hours and a child who draws are fine."""
_ELSEWHERE = re.compile(
    r"\[asy\]|!\[|<img|\b(?:figure|diagram|picture|graph) (?:below|above|shown)"
)
_ELSEWHERE_WORDS = ("[asy]", "![", "<img", " below", " above", " shown")
_PARTS = re.compile(r"\n\s*\(?[b-d][.)]\s")


@dataclass(frozen=True, slots=True)
class IntegerAnswers:
    """Keep integer answers only: they can be verified without doubt."""

    name: str = "integer answers only"

    def drop(self, problem: Problem) -> str | None:
        if _INTEGER.fullmatch(problem.answer):
            return None
        return f"answer {problem.answer[:60]!r} is not an integer"


@dataclass(frozen=True, slots=True)
class OfKinds:
    """Keep the problems of some kinds, as their data set names them."""

    kinds: frozenset[str]
    met: set[str] = field(default_factory=set)
    """The kinds of all problems so far."""
    name: str = "of the chosen kinds"

    def drop(self, problem: Problem) -> str | None:
        self.met.add(problem.kind)
        if problem.kind in self.kinds:
            return None
        return f"kind {problem.kind!r} is not among {', '.join(sorted(self.kinds))}"


@dataclass(frozen=True, slots=True)
class VerifiableProblems:
    """Drop problems that ask for a proof, need a picture or have several parts."""

    name: str = "verifiable and well formed"
    min_words: int = 3

    def drop(self, problem: Problem) -> str | None:
        few = len(problem.prompt.split()) < self.min_words
        if few and len(words(problem.prompt)) < self.min_words:  # $1+2i$ is many words
            return f"prompt has fewer than {self.min_words} words"
        if "\ufffd" in problem.prompt:
            return "prompt has undecodable characters"
        lowered = problem.prompt.lower()  # a word search is ten times faster than a match
        if any(map(lowered.__contains__, _ELSEWHERE_WORDS)) and (
            match := _ELSEWHERE.search(lowered)
        ):
            return f"refers to a picture: {match[0]!r}"
        if any(map(lowered.__contains__, _UNVERIFIABLE_WORDS)) and (
            match := _UNVERIFIABLE.search(lowered)
        ):
            return f"asks for more than an answer: {match[0]!r}"
        if "\n" in lowered and _PARTS.search(lowered):
            return "asks several questions"
        return None


@dataclass(frozen=True, slots=True)
class NotGiant:
    """Drop very long answers: they reward copying digits, not reasoning."""

    digits: int = 12
    characters: int = 60
    name: str = "no giant answers"

    def drop(self, problem: Problem) -> str | None:
        if _INTEGER.fullmatch(problem.answer):
            digits = len(problem.answer.lstrip("+-0"))
            return f"answer has {digits} digits" if digits > self.digits else None
        size = len(problem.answer)
        return f"answer has {size} characters" if size > self.characters else None


@dataclass(frozen=True, slots=True)
class GoldsReadable:
    """Drop problems whose reference answer their grader cannot read: no answer could be right.

    Whether the grader also *accepts* it needs algebra that may not terminate, so `prepare` runs
    that check in the code environment, in batches.
    """

    name: str = "golds readable by their grader"

    def drop(self, problem: Problem) -> str | None:
        try:
            check_gold(problem)
        except DataError as error:
            return str(error)
        return None


@dataclass(slots=True)
class UniqueProblems:
    """Drop exact and near duplicates; the first one is kept."""

    name: str = "no duplicates"
    _seen: Duplicates = field(default_factory=Duplicates)
    _ids: Names = field(default_factory=Names)

    def drop(self, problem: Problem) -> str | None:
        self._ids.append(problem.id)
        duplicate = self._seen.check(problem.prompt)
        if duplicate is None:
            return None
        kind, earlier = duplicate
        return f"{kind} duplicate of {self._ids[earlier]}"


def decontaminated(evaluation_sets: Iterable[Problem]) -> Decontaminated[Problem]:
    """A filter that drops problems that share 8 words in a row with an evaluation set."""
    return Decontaminated(Contamination.of(evaluation_sets), lambda problem: (problem.prompt,))
