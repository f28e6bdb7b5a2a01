"""Drawing a mixture by weights: how many rows of each source, which, and in what order. Pure.

No row is ever drawn twice: the weights say the shares, the scarcest source decides the size.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rstar2.errors import UserError
from rstar2.seeds import derive_seed


def plan(
    available: Mapping[str, int], weights: Mapping[str, float] | None, total: int | None
) -> dict[str, int]:
    """Rows to draw of each source. Without weights all of them, or `total` in their proportion."""
    shares = dict(weights) if weights else {name: float(count) for name, count in available.items()}
    if missing := sorted(available.keys() - shares.keys()):
        raise UserError(f"--weight: {', '.join(missing)} have none; give every source a weight")
    if unknown := sorted(shares.keys() - available.keys()):
        raise UserError(f"--weight: no source is called {', '.join(unknown)}: {sorted(available)}")
    if weights and (bad := [name for name, share in shares.items() if not share > 0]):
        raise UserError(f"--weight: {', '.join(bad)}: a weight is a number above 0")
    if weights and (empty := [name for name, count in available.items() if not count]):
        raise UserError(f"nothing of {', '.join(empty)} came through the steps: nothing to mix")
    sizes = [count / shares[name] for name, count in available.items() if shares[name]]
    scale = min(sizes, default=0.0)
    if total is not None:
        scale = min(scale, total / sum(shares.values()))
    # A hair more than the product: 1/3 of 3 rows is one row.
    return {name: min(available[name], int(scale * shares[name] + 1e-6)) for name in available}


def draw(
    available: Mapping[str, int], counts: Mapping[str, int], seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """(source, row) of every drawn row, shuffled; equal for equal arguments."""
    sources, rows = [], []
    for index, (name, count) in enumerate(counts.items()):
        rng = np.random.default_rng(derive_seed("mix", name, seed))
        chosen = rng.permutation(available[name])[:count]
        rows.append(chosen.astype(np.uint32))
        sources.append(np.full(count, index, dtype=np.uint16))
    order = np.random.default_rng(derive_seed("mix", seed)).permutation(sum(counts.values()))
    if not sources:
        return np.zeros(0, np.uint16), np.zeros(0, np.uint32)
    return np.concatenate(sources)[order], np.concatenate(rows)[order]
