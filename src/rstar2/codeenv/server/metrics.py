"""Prometheus text for /metrics: counters, gauges and two histograms."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping

from rstar2.codeenv.wire import Health

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """Counts observations in fixed buckets of seconds."""

    def __init__(self, buckets: tuple[float, ...] = BUCKETS_S) -> None:
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.buckets, seconds)] += 1
        self.total_s += seconds

    @property
    def count(self) -> int:
        return sum(self.counts)

    def lines(self, name: str) -> Iterable[str]:
        seen = 0
        for bound, count in zip((*self.buckets, "+Inf"), self.counts, strict=True):
            seen += count
            yield f'{name}_bucket{{le="{bound}"}} {seen}'
        yield f"{name}_sum {self.total_s:.6f}"
        yield f"{name}_count {seen}"


class Metrics:
    """Counters of the call table; gauges are read from Health."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        """(kind, outcome) -> calls answered."""
        self.refused: Counter[str] = Counter()
        """Refusals by error code, over requests and calls."""
        self.replayed = 0
        """Calls answered from the first execution of their id."""
        self.abandoned = 0
        """Calls cancelled because no caller waited for them any more."""
        self.latency = Histogram()
        self.queued = Histogram()

    def render(self, health: Health, active: int) -> str:
        out: list[str] = []
        _family(
            out, "rstar2_codeenv_calls_total", "counter", "Calls answered, by kind and outcome.",
            {f'{{kind="{kind}",outcome="{outcome}"}}': n
             for (kind, outcome), n in sorted(self.calls.items())},
        )  # fmt: skip
        _family(
            out, "rstar2_codeenv_refused_total", "counter", "Requests and calls refused, by code.",
            {f'{{code="{code}"}}': n for code, n in sorted(self.refused.items())},
        )  # fmt: skip
        for name, kind, text, value in (
            (
                "replayed_total",
                "counter",
                "Calls answered with the remembered result of their id.",
                self.replayed,
            ),
            (
                "abandoned_total",
                "counter",
                "Calls cancelled because no caller waited any more.",
                self.abandoned,
            ),
            (
                "restarts_total",
                "counter",
                "Workers and zygotes replaced after a crash.",
                health.restarts,
            ),
            ("queue_depth", "gauge", "Calls waiting for a slot.", health.queued),
            ("active_calls", "gauge", "Calls admitted and not yet answered.", active),
            ("slots", "gauge", "Maximum number of calls executed at once.", health.slots),
            ("busy_slots", "gauge", "Slots executing a call.", health.busy),
            ("sessions", "gauge", "Live sessions.", health.sessions),
        ):
            _family(out, f"rstar2_codeenv_{name}", kind, text, {"": value})
        _family(
            out, "rstar2_codeenv_info", "gauge", "Isolation level and id of this server.",
            {f'{{isolation="{health.isolation}",server="{health.server}"}}': 1},
        )  # fmt: skip
        for name, text, histogram in (
            ("latency_seconds", "Time from admission to answer.", self.latency),
            ("queue_seconds", "Time spent waiting for a slot.", self.queued),
        ):
            full = f"rstar2_codeenv_{name}"
            out += [f"# HELP {full} {text}", f"# TYPE {full} histogram", *histogram.lines(full)]
        return "\n".join(out) + "\n"


def _family(out: list[str], name: str, kind: str, text: str, values: Mapping[str, int]) -> None:
    out += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
    out += [f"{name}{labels} {value}" for labels, value in values.items()]
