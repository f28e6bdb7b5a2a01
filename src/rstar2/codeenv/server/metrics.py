"""Prometheus text for /metrics: counters, gauges and two histograms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rstar2.codeenv.server.calls import CallTable, Histogram


def render(table: CallTable) -> str:
    """The text that GET /metrics returns."""
    metrics, health = table.metrics, table.health()
    out: list[str] = []
    _family(
        out, "rstar2_codeenv_calls_total", "counter", "Calls answered, by kind and outcome.",
        {f'{{kind="{kind}",outcome="{outcome}"}}': n
         for (kind, outcome), n in sorted(metrics.calls.items())},
    )  # fmt: skip
    _family(
        out, "rstar2_codeenv_refused_total", "counter", "Requests and calls refused, by code.",
        {f'{{code="{code}"}}': n for code, n in sorted(metrics.refused.items())},
    )  # fmt: skip
    _family(
        out, "rstar2_codeenv_reuse_total", "counter",
        "Calls that name a group: answered from memory (hit), executed (miss), or executed because "
        "the program might not be deterministic (refused).",
        {f'{{result="{result}"}}': n for result, n in sorted(table.reuse.counts.items())},
    )  # fmt: skip
    for name, kind, text, value in (
        (
            "replayed_total",
            "counter",
            "Calls answered with the remembered result of their id.",
            metrics.replayed,
        ),
        (
            "abandoned_total",
            "counter",
            "Calls cancelled because no caller waited any more.",
            metrics.abandoned,
        ),
        (
            "restarts_total",
            "counter",
            "Workers and zygotes replaced after a crash.",
            health.restarts,
        ),
        ("queue_depth", "gauge", "Calls waiting for a slot.", health.queued),
        ("active_calls", "gauge", "Calls admitted and not yet answered.", table.active),
        ("slots", "gauge", "Maximum number of calls executed at once.", health.slots),
        ("busy_slots", "gauge", "Slots executing a call.", health.busy),
        ("sessions", "gauge", "Live sessions.", health.sessions),
        ("reuse_bytes", "gauge", "Memory of results that may be reused.", table.reuse.bytes),
    ):
        _family(out, f"rstar2_codeenv_{name}", kind, text, {"": value})
    _family(
        out, "rstar2_codeenv_info", "gauge", "Isolation level and id of this server.",
        {f'{{isolation="{health.isolation}",server="{health.server}"}}': 1},
    )  # fmt: skip
    for name, text, histogram in (
        ("latency_seconds", "Time from admission to answer.", metrics.latency),
        ("queue_seconds", "Time spent waiting for a slot.", metrics.queued),
    ):
        full = f"rstar2_codeenv_{name}"
        out += [
            f"# HELP {full} {text}",
            f"# TYPE {full} histogram",
            *_bucket_lines(full, histogram),
        ]
    return "\n".join(out) + "\n"


def _bucket_lines(name: str, histogram: Histogram) -> Iterator[str]:
    seen = 0
    for bound, count in zip((*histogram.buckets, "+Inf"), histogram.counts, strict=True):
        seen += count
        yield f'{name}_bucket{{le="{bound}"}} {seen}'
    yield f"{name}_sum {histogram.total_s:.6f}"
    yield f"{name}_count {seen}"


def _family(out: list[str], name: str, kind: str, text: str, values: Mapping[str, int]) -> None:
    out += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
    out += [f"{name}{labels} {value}" for labels, value in values.items()]
