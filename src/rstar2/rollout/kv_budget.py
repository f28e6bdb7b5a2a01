"""The ledger of one engine's KV cache: who holds how many tokens, never more than there are.

Pure state, no I/O. Two sentences of Invariant 5 live here: the sum of tokens reserved never
exceeds the capacity, and a reservation is released exactly once (a second release is a bug and
raises InvariantError). Amounts are rounded up to the engine's block size, as the engine will.
"""

from __future__ import annotations

from rstar2.errors import InvariantError
from rstar2.types import EngineCapacity


class KvBudget:
    """Reservations of sessions on one engine, in tokens."""

    def __init__(self, capacity: EngineCapacity) -> None:
        self.capacity = capacity
        self._held: dict[str, int] = {}
        self._reserved = 0

    def rounded(self, tokens: int) -> int:
        """`tokens` in whole blocks."""
        block = self.capacity.block_tokens
        return -(-tokens // block) * block

    @property
    def total(self) -> int:
        """Tokens in whole blocks that the cache can hold."""
        return self.capacity.kv_tokens // self.capacity.block_tokens * self.capacity.block_tokens

    @property
    def reserved(self) -> int:
        return self._reserved

    @property
    def free(self) -> int:
        return self.total - self._reserved

    @property
    def sessions(self) -> tuple[str, ...]:
        """Who holds a reservation, oldest first."""
        return tuple(self._held)

    def held(self, session: str) -> int:
        """Tokens that this session holds here (0: none)."""
        return self._held.get(session, 0)

    def fits(self, session: str, tokens: int) -> bool:
        """Whether the session's reservation could become `tokens`."""
        return self.rounded(tokens) - self.held(session) <= self.free

    def resize(self, session: str, tokens: int) -> None:
        """Make the session's reservation `tokens`, opening it if there is none."""
        wanted = self.rounded(tokens)
        growth = wanted - self.held(session)
        if wanted <= 0:
            raise InvariantError(f"reservation of {session} would be {wanted} tokens")
        if growth > self.free:
            raise InvariantError(
                f"reserving {wanted} tokens for {session} would exceed the cache: "
                f"{self._reserved} of {self.total} are taken"
            )
        self._held[session] = wanted
        self._reserved += growth

    def release(self, session: str) -> int:
        """End the session's reservation; returns what it held."""
        if session not in self._held:
            raise InvariantError(f"{session} holds no reservation: released twice")
        tokens = self._held.pop(session)
        self._reserved -= tokens
        return tokens
