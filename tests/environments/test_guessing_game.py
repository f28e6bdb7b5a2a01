"""`examples/guessing_game.py`: its replies, rewards and demonstrations."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rstar2 import Environment
from rstar2.cli.env import app
from rstar2.config import EnvironmentConfig, TemplateConfig
from rstar2.environments.load import load_environment

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def game() -> Environment:
    named = EnvironmentConfig(use="guessing_game:env", folder=str(EXAMPLES))
    env = load_environment(named, TemplateConfig())
    assert isinstance(env, Environment)
    return env


def play(
    game: Environment, monkeypatch: pytest.MonkeyPatch, guesses: list[str]
) -> tuple[list[str], float]:
    """The replies to the guesses, and the reward."""
    monkeypatch.chdir(EXAMPLES)
    typed = "".join(f"{guess}\n\n" for guess in guesses)
    shown = CliRunner().invoke(app, ["try", "guessing_game:env"], input=typed)
    assert shown.exit_code == 0, shown.output
    _, *replies = re.findall(r"## user\n(.+)", shown.output)
    return replies, float(re.findall(r"^reward ([\d.]+)", shown.output, re.MULTILINE)[0])


def test_the_reward_falls_with_the_number_of_guesses(
    game: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = game.problems("heldout", 1, 0)[0].answer
    assert play(game, monkeypatch, [secret]) == ([], 1.0)
    assert play(game, monkeypatch, ["0", "99", "?", secret]) == (
        ["higher", "lower", "Write a number."],
        0.7,
    )
    assert play(game, monkeypatch, ["0", "0", "0", "0"]) == (["higher"] * 3, 0.0)


def test_demonstrations_keep_to_the_rules(game: Environment) -> None:
    for problem in game.problems("train", 50, 0):
        assert game._demonstrate is not None
        texts = game._demonstrate(problem, random.Random(problem.id))
        guesses, replies = texts[::2], texts[1::2]
        assert len(guesses) == len(replies) + 1 <= 4
        assert set(replies) <= {"higher", "lower"}
        assert problem.answer not in guesses[:-1]
