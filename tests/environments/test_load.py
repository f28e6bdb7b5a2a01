"""Environments by name: where they are searched, and what a wrong name or argument says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rstar2.cli.env import app
from rstar2.config import EnvironmentConfig, TemplateConfig, load_recipe
from rstar2.environments.load import known_environments, load_environment, recipe_problems
from rstar2.environments.python_math import PythonMath
from rstar2.errors import RecipeError, UserError

MODULE = """
import rstar2

@rstar2.tool
def look(city: str) -> str:
    \"\"\"Look at a city.\"\"\"
    return city.upper()

def right(episode):
    return episode.answer == episode.problem.answer

def make(size: int, start: int = 0):
    if size < 0:
        raise ValueError("size must not be negative")
    problems = [{"prompt": f"{n}?", "answer": n} for n in range(start, start + size)]
    return rstar2.Environment(problems, right, tools=[look], name="sized")

env = make(3)
number = 5
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with the module `towns`; it is forgotten after the test."""
    (tmp_path / "towns.py").write_text(MODULE)
    path = list(sys.path)
    yield tmp_path
    sys.modules.pop("towns", None)
    sys.path[:] = path


def config(folder: Path, use: str = "towns:env", **args: object) -> EnvironmentConfig:
    return EnvironmentConfig(use=use, args=args, folder=str(folder))


def test_a_module_next_to_the_recipe_is_imported(folder: Path) -> None:
    recipe = folder / "mine.yaml"
    recipe.write_text(
        "extends: tiny\nname: mine\nenvironment: {use: 'towns:make', args: {size: 9}}"
    )
    loaded = load_recipe(recipe).recipe
    assert loaded.environment.folder == str(folder)
    environment = load_environment(loaded.environment, loaded.template)
    assert environment.name == "sized"
    assert len(recipe_problems(loaded, environment, "train")) == 8
    assert len(recipe_problems(loaded, environment, "heldout")) == 1
    changed = load_recipe(recipe, ["environment.args.size=20"]).recipe
    assert changed.environment.args == {"size": 20}


def test_the_default_is_the_papers_task() -> None:
    environment = load_environment(EnvironmentConfig(), TemplateConfig(prefill_reason=False))
    assert isinstance(environment, PythonMath)
    assert environment.prefill == ""
    assert known_environments()["python-math"].origin == "built in"


@pytest.mark.parametrize(
    ("use", "args", "message"),
    [
        ("python-moth", {}, "did you mean python-math"),
        ("nowhere:env", {}, "there is no module 'nowhere' in "),
        ("towns:emv", {}, "towns has no attribute 'emv': did you mean env"),
        ("towns:", {}, "write it as module:attribute"),
        ("towns:number", {}, "is 'int', not an environment"),
        ("towns:env", {"size": 3}, "takes no arguments"),
        ("towns:make", {}, "environment.args.size is missing: towns:make takes size, start"),
        (
            "towns:make",
            {"sise": 3},
            "environment.args.sise is not a parameter of this environment: did",
        ),
        ("towns:make", {"size": -1}, "raised ValueError: size must not be negative"),
        ("python-math", {"problem": "x"}, "did you mean problems"),
    ],
)
def test_a_wrong_name_or_argument_says_what_is_known(
    use: str, args: dict[str, object], message: str, folder: Path
) -> None:
    with pytest.raises(RecipeError, match=message):
        load_environment(config(folder, use, **args))


def test_a_module_that_raises_names_its_line(folder: Path) -> None:
    (folder / "towns.py").write_text("import rstar2\nrstar2.nothing_like_this\n")
    with pytest.raises(RecipeError, match=r"cannot be imported: AttributeError.*nothing_like_this"):
        load_environment(config(folder))


# --------------------------------------------------------------------------- the command


def test_list_names_what_is_known() -> None:
    shown = CliRunner().invoke(app, ["list"])
    assert shown.exit_code == 0
    assert "python-math" in shown.output


def test_check_shows_prompt_schemas_errors_and_reward(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    shown = CliRunner().invoke(app, ["check", "towns:make", "--arg", "size=9"])
    assert shown.exit_code == 0, shown.output
    assert '"name": "look"' in shown.output
    assert "look: bad_arguments: Wrong arguments: unexpected 'no_such_argument'" in shown.output
    assert "reward 1, format penalty 0" in shown.output


def test_check_plays_a_wrong_rollout_and_shows_a_demonstration(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "towns.py").write_text(
        MODULE + "env = rstar2.Environment([{'prompt': 'Twice 1?', 'answer': 2}], right,\n"
        "    reply=lambda episode: None if episode.answer == '2' else 'No.',\n"
        "    demonstrations=lambda problem, rng: ['1', 'No.', '2'])\n"
    )
    shown = CliRunner().invoke(app, ["check", "towns:env"])
    assert shown.exit_code == 0, shown.output
    demonstration, right, wrong = shown.output.split("\n# ")[1:]
    assert demonstration.endswith("## assistant\n1\n\n## user\nNo.\n\n## assistant\n2\n")
    assert right.count("## assistant\n2") == 1
    assert "reward 1," in right
    assert wrong.count("## assistant\nI do not know.\n\n## user\nNo.") == 3
    assert "## End: max_turns" in wrong
    assert "reward 0," in wrong


def test_check_finds_a_reward_that_cannot_read_a_wrong_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "towns.py").write_text(
        MODULE.replace("episode.answer ==", "int(episode.answer) + 0 * ")
    )
    shown = CliRunner().invoke(app, ["check", "towns:env"])
    assert shown.exit_code == 1
    assert "lost: reward: reward raised ValueError" in shown.output


def test_check_fails_if_the_reward_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "towns.py").write_text(MODULE.replace("episode.problem.answer", "1 / 0"))
    shown = CliRunner().invoke(app, ["check", "towns:env"])
    assert shown.exit_code == 1
    assert "lost: reward: reward raised ZeroDivisionError" in shown.output


def test_try_plays_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    turns = '/call look {"city": "Rome"}\n\n0\n\n'
    shown = CliRunner().invoke(app, ["try", "towns:env"], input=turns)
    assert shown.exit_code == 0, shown.output
    assert "## look: ok\nROME" in shown.output
    assert "reward 1," in shown.output


def test_try_ends_with_its_input(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    shown = CliRunner().invoke(app, ["try", "towns:env"], input='/call look {"city": "Rome"}\n\n')
    assert isinstance(shown.exception, UserError)
    assert str(shown.exception) == "the input ended before the episode did, so there is no reward"
