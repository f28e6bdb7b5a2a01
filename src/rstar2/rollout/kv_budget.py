"""The ledger of one engine's KV cache: who holds how many tokens, never more than there are.

Pure state, no I/O. Two sentences of Invariant 5 live here: the sum of tokens reserved never
exceeds the capacity, and a reservation is released exactly once (a second release is a bug and
raises InvariantError). What the engine itself reports as used counts as taken, whoever uses it.
"""

from __future__ import annotations

from collections.abc import Mapping

from rstar2.errors import InvariantError
from rstar2.types import EngineCapacity


class KvBudget:
    """Reservations of sessions on one engine, in tokens."""

    def __init__(self, capacity: EngineCapacity) -> None:
        self.capacity = capacity
        self.total = capacity.kv_tokens // capacity.block_tokens * capacity.block_tokens
        """Tokens in whole blocks that the cache can hold."""
        self.reserved = 0
        self.used = 0
        """What the engine last reported, less what was released since."""
        self._held: dict[str, int] = {}

    def rounded(self, tokens: int) -> int:
        """`tokens` in whole blocks."""
        block = self.capacity.block_tokens
        return -(-tokens // block) * block

    @property
    def taken(self) -> int:
        """Tokens promised or in use, whichever is more."""
        return max(self.reserved, min(self.used, self.total))

    @property
    def free(self) -> int:
        """Tokens that are not promised."""
        return self.total - self.reserved

    @property
    def sessions(self) -> tuple[str, ...]:
        """Who holds a reservation, oldest first."""
        return tuple(self._held)

    def held(self, session: str) -> int:
        """Tokens that this session holds here (0: none)."""
        return self._held.get(session, 0)

    def fits(self, session: str, tokens: int) -> bool:
        """Whether the session's reservation could become `tokens`."""
        return tokens - self.held(session) <= self.free

    def resize(self, session: str, tokens: int) -> None:
        """Make the session's reservation `tokens`, opening it if there is none."""
        if tokens <= 0:
            raise InvariantError(f"reservation of {session} would be {tokens} tokens")
        growth = tokens - self.held(session)
        if growth > self.free:
            raise InvariantError(
                f"reserving {tokens} tokens for {session} would exceed the cache: "
                f"{self.reserved} of {self.total} are taken"
            )
        self._held[session] = tokens
        self.reserved += growth

    def revise(self, tokens: Mapping[str, int]) -> None:
        """Give all holders new reservations at once; nobody comes or goes."""
        total = sum(tokens.values())
        if tokens.keys() != self._held.keys():
            raise InvariantError("a revision must name exactly those who hold a reservation")
        if total > self.total or min(tokens.values(), default=1) <= 0:
            raise InvariantError(f"revised reservations of {total} of {self.total} tokens")
        self._held.update(tokens)
        self.reserved = total

    def release(self, session: str) -> int:
        """End the session's reservation; returns what it held."""
        if session not in self._held:
            raise InvariantError(f"{session} holds no reservation: released twice")
        tokens = self._held.pop(session)
        self.reserved -= tokens
        self.used = max(0, self.used - tokens)
        return tokens
