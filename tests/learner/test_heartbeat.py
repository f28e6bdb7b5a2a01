"""When a rank hangs: decided by hand-computed times, then with real processes (test_ranks.py)."""

from __future__ import annotations

import os
import time
from pathlib import Path

from rstar2.learner.heartbeat import HangWatch, Heart, Pulse, PulseReader


def pulses(*pairs: tuple[int, int]) -> dict[int, Pulse]:
    return {rank: Pulse(marks, life) for rank, (marks, life) in enumerate(pairs)}


def test_a_rank_without_a_sign_of_life_is_named() -> None:
    watch = HangWatch(10.0)
    watch.begin("rl_step", 0.0)
    assert watch.look(pulses((0, 1), (0, 1)), 1.0) is None
    assert watch.look(pulses((0, 2), (0, 1)), 11.0) is None, "10 s are allowed"
    hang = watch.look(pulses((0, 3), (0, 1)), 11.5)
    assert hang == "learner rank(s) [1] gave no sign of life for 10 s"


def test_living_ranks_without_progress_are_stuck_only_where_the_method_is_known() -> None:
    watch = HangWatch(10.0)
    watch.begin("rl_step", 0.0)
    for now in range(1, 100):  # the first call: nothing is known yet
        assert watch.look(pulses((0, now), (0, now)), float(now)) is None
    watch.end(100.0)  # 100 s without a mark
    watch.begin("rl_step", 200.0)
    assert watch.look(pulses((7, 1), (6, 1)), 201.0) is None
    for life, now in enumerate(range(209, 1200, 9)):
        assert watch.look(pulses((7, life + 2), (6, life + 2)), float(now)) is None
    for life, now in enumerate(range(1196, 1214, 9)):
        hang = watch.look(pulses((7, -life), (6, -life)), float(now))
    assert hang == "no learner rank has progressed for 1000 s; rank(s) [1] are behind"


def test_any_rank_that_progresses_is_progress() -> None:
    watch = HangWatch(1.0)
    watch.begin("rl_step", 0.0)
    watch.end(0.1)
    watch.begin("rl_step", 0.0)
    for now in range(1, 50):
        assert watch.look(pulses((now, now), (0, now)), now * 0.9) is None


def test_counters_are_read_by_another_process_while_the_rank_computes(tmp_path: Path) -> None:
    reader = PulseReader(tmp_path / "heart")
    heart = Heart(tmp_path / "heart")
    first = reader.read(os.getpid())
    heart.mark()
    assert reader.read(os.getpid()).marks == first.marks + 1
    while reader.read(os.getpid()).life == first.life:  # it beats by itself
        time.sleep(0.01)
