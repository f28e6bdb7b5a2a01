"""Seeds that depend only on their purpose.

A seed derived from (recipe seed, stage, step, problem, rollout) is the same in every process, for
any order of events, before and after a resume.
"""

from __future__ import annotations

from hashlib import blake2b


def derive_seed(*parts: int | str) -> int:
    """Hash the parts to a 63-bit seed."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
