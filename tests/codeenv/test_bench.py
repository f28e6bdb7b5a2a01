"""Measuring: figures add up, and the programs measured are not part of the warm-up."""

from __future__ import annotations

from typing import Any

from rstar2.codeenv.client.bench import PROGRAMS, measure, quantile
from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.codeenv.jail import warmup
from rstar2.config import CodeEnvConfig


def test_quantiles_take_the_nearest_rank() -> None:
    values = [float(v) for v in range(100, 0, -1)]
    assert quantile(values, 0.5) == 51.0
    assert quantile(values, 0.99) == 100.0
    assert quantile([7.0], 0.99) == 7.0


async def test_measuring_counts_calls_and_losses(serve: Any) -> None:
    async with (
        serve() as server,
        await CodeEnvClient.start(CodeEnvConfig(urls=(server.url,))) as client,
    ):
        figures = await measure(client, "echo 1", 0.2, 4)
        assert figures["calls"] == server.executor.executed.total() > 0
        assert figures["infrastructure"] == 0
        assert 0 < figures["p50_ms"] <= figures["p99_ms"]


def test_the_warm_up_has_not_seen_what_is_measured() -> None:
    warm = {
        line
        for flavour in warmup.FLAVOURS
        for text in warmup.programs(flavour)
        for line in text.split("\n")
    }
    measured = {line for text in PROGRAMS.values() for line in text.split("\n")}
    assert {line for line in warm & measured if not line.startswith("import ")} == set()
