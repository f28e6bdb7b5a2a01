"""When the collapse detector stops a run, and what it keeps as best."""

from __future__ import annotations

import json

from rstar2.config import CollapseConfig
from rstar2.pipeline.collapse import CollapseWindow, detect_collapse
from rstar2.pipeline.state import RunState

CONFIG = CollapseConfig(window=3, reward_drop=0.5, entropy_floor=0.05, format_drop=0.5)


def run(
    rewards: list[float], entropy: float = 1.0, formats: list[float] | None = None
) -> tuple[CollapseWindow, int, str]:
    window = CollapseWindow()
    for step, reward in enumerate(rewards, start=1):
        share = formats[step - 1] if formats else 1.0
        window, reason = detect_collapse(
            window, CONFIG, step=step, reward=reward, entropy=entropy, format_share=share
        )
        if reason:
            return window, step, reason
    return window, 0, ""


def test_noise_is_no_collapse() -> None:
    window, stopped, _ = run([0.2, 0.6, 0.5, 0.4, 0.7, 0.6, 0.3, 0.4])
    assert stopped == 0
    assert window.best_step == 5 or window.best_step == 6
    assert len(window.rewards) == 3


def test_reward_cliff_stops_and_the_best_window_is_remembered() -> None:
    window, stopped, reason = run([0.6, 0.8, 0.7, 0.3, 0.2, 0.1])
    assert stopped == 6
    assert "reward fell from 0.700 to 0.200" in reason
    assert window.best_step == 3


def test_entropy_floor_and_format_cliff() -> None:
    assert "entropy" in run([0.5] * 4, entropy=0.01)[2]
    assert "answers" in run([0.5] * 6, formats=[1, 1, 1, 0.2, 0.2, 0.2])[2]


def test_nothing_is_judged_before_the_window_is_full() -> None:
    assert run([0.9, 0.0])[1] == 0


def test_state_travels_as_json() -> None:
    state = RunState(
        phase="hard", step=3, done=("sft",), kept={"hard": (1, 5)}, window=CollapseWindow((0.5,))
    )
    assert RunState.from_dict(json.loads(json.dumps(state.to_dict()))) == state
    assert state.begin("hard") is state
    assert state.begin("next").step == 0
