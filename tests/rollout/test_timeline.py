"""Timelines: what is drawn, what is exported, and that hostile names stay harmless."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

from rstar2.rollout.timeline import TimelineSpan, chrome_trace, counts, page, svg

SPANS = [
    TimelineSpan("engine-10", "g/0", "generating", 0.0, 2.0),
    TimelineSpan("engine-10", "g/0", "tool", 2.0, 3.0),
    TimelineSpan("engine-2", "g/1", "generating", 1.0, 4.0),
    TimelineSpan("", "g/2", "queued", 0.0, 4.0),
]


def test_states_are_counted_over_time() -> None:
    open_spans = counts(SPANS, [0.5, 1.5, 2.5, 3.5])
    assert open_spans["generating"] == [1, 2, 1, 1]
    assert open_spans["tool"] == [0, 0, 1, 0]
    assert open_spans["queued"] == [1, 1, 1, 1]


def test_drawing_is_wellformed_with_engines_in_order() -> None:
    root = ET.fromstring(svg(SPANS, title="a run"))
    texts = [element.text or "" for element in root.iter() if element.tag.endswith("text")]
    order = [t for t in texts if t.startswith("engine") or t == "no engine"]
    assert order == ["engine-2", "engine-10", "no engine"]


def test_many_trajectories_are_sampled_evenly() -> None:
    spans = [TimelineSpan("e", f"t{i}", "generating", float(i), i + 1.0) for i in range(100)]
    drawn = svg(spans, bars=10)
    assert drawn.count("<title>t") == 10
    assert "t0: generating" in drawn
    assert "t90: generating" in drawn


def test_trace_has_a_process_per_engine_and_a_thread_per_trajectory() -> None:
    events = json.loads(chrome_trace(SPANS))["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {"engine-10", "engine-2", "no engine", "g/0", "g/1", "g/2"}
    tool = next(e for e in events if e["name"] == "tool")
    assert (tool["ts"], tool["dur"]) == (2_000_000.0, 1_000_000.0)


def test_hostile_names_are_text() -> None:
    made = page(
        [TimelineSpan("<script>e", "<img src=x>", "generating", 0, 1)], title="<b>", text="</pre>"
    )
    assert "<script>e" not in made
    assert "<img" not in made
    assert "</pre></pre>" not in made


def test_nothing_can_be_drawn_too() -> None:
    ET.fromstring(svg([]))
