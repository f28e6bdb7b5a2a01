"""Which problems are still worth training on: those the current policy does not always solve.

The policy answers each problem k times; all-correct problems are dropped, never-correct ones stay
(the paper's stage 3). A problem none of whose answers could be graded says nothing and stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rstar2.types import Group


@dataclass(frozen=True, slots=True)
class Difficulty:
    """How often each problem was solved, and which stay."""

    solved: tuple[tuple[int, int], ...]
    """(correct, graded) per problem, in order."""

    @property
    def kept(self) -> tuple[int, ...]:
        """Indices of the problems that stay."""
        return tuple(i for i, (c, n) in enumerate(self.solved) if c < n or n == 0)

    def metrics(self) -> dict[str, float]:
        """What the filter did, for the record."""
        histogram = Counter(c for c, n in self.solved if n)
        never = sum(c == 0 for c, n in self.solved if n)
        return {
            "problems/seen": float(len(self.solved)),
            "problems/kept": float(len(self.kept)),
            "problems/always_solved": float(len(self.solved) - len(self.kept)),
            "problems/never_solved": float(never),
            **{f"problems/solved_{c}": float(n) for c, n in sorted(histogram.items())},
        }


def difficulty(groups: Iterable[Group]) -> Difficulty:
    """Count the correct answers of every problem."""
    return Difficulty(
        tuple((sum(r > 0.5 for r in group.rewards), len(group.rewards)) for group in groups)
    )
