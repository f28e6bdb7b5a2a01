"""What a run records about its environment, and what it refuses when it is resumed."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

import rstar2
from rstar2.config import EnvironmentConfig, Recipe
from rstar2.endpoint.environment import ProgramEnvironment
from rstar2.environments.base import EnvironmentProtocol
from rstar2.environments.environment import EpisodeView
from rstar2.environments.identity import identify, identify_object
from rstar2.environments.load import load_environment, recipe_problems
from rstar2.environments.reasoning_gym import ReasoningGym
from rstar2.errors import RecipeError
from rstar2.record import RunDirectory
from rstar2.types import Problem, Split

MODULE = """
import rstar2
from scores import right
import parts.tables

def make(size, start=0):
    return rstar2.Environment(parts.tables.problems(size), right, name="sized")
"""
FILES = {
    "towns.py": MODULE,
    "scores.py": "def right(episode):\n    from late import value\n    return value\n",
    "late.py": "value = 1.0\n",
    "unused.py": "x = 1\n",
    "parts/__init__.py": "",
    "parts/tables.py": "from .deeper import STEP\ndef problems(size):\n"
    "    return [{'prompt': str(n * STEP)} for n in range(size)]\n",
    "parts/deeper.py": "STEP = 1\n",
}
RECIPE = Recipe(name="mine")
CHANGED = "another version of {}, which the source of environment 'sized' imports"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with an environment and its helpers; they are forgotten after the test."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def problems_of(environment: EnvironmentProtocol) -> dict[Split, Sequence[Problem]]:
    return {split: recipe_problems(RECIPE, environment, split) for split in get_args(Split)}


def named(folder: Path) -> dict[str, Any]:
    config = EnvironmentConfig(use="towns:make", args={"size": 9}, folder=str(folder))
    environment = load_environment(config)
    return identify(config, environment, problems_of(environment))


def given(environment: EnvironmentProtocol) -> dict[str, Any]:
    return identify_object(environment, problems_of(environment))


def resume(run: Path, environment: dict[str, Any]) -> None:
    RunDirectory.create_or_resume(run, RECIPE, environment=environment).close()


def test_the_record_names_what_the_environment_consists_of(folder: Path) -> None:
    record = named(folder)
    assert {key: record[key] for key in ("name", "use", "args")} == {
        "name": "sized", "use": "towns:make", "args": {"size": 9}
    }  # fmt: skip
    assert sorted(record["modules"]) == [
        "late.py", "parts/__init__.py", "parts/deeper.py", "parts/tables.py", "scores.py"
    ]  # fmt: skip
    assert sorted(record["problems"]) == ["heldout", "train"]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("towns.py", "another version of the source of environment 'sized'"),
        ("scores.py", CHANGED.format("scores.py")),
        ("late.py", CHANGED.format("late.py")),
        ("parts/deeper.py", CHANGED.format("parts/deeper.py")),
    ],
)
def test_a_changed_source_or_helper_is_refused(folder: Path, file: str, message: str) -> None:
    resume(folder / "run", named(folder))
    resume(folder / "run", named(folder))
    (folder / "unused.py").write_text("x = 2\n")
    resume(folder / "run", named(folder))
    (folder / file).write_text(FILES[file] + "\n# changed\n")
    with pytest.raises(RecipeError, match=message) as refusal:
        resume(folder / "run", named(folder))
    assert "put the old one back" in str(refusal.value)
    assert "--fresh" in str(refusal.value)


def test_other_arguments_are_refused(folder: Path) -> None:
    first = named(folder)
    resume(folder / "run", first)
    with pytest.raises(RecipeError, match=r"now with \{'size': 10\}"):
        resume(folder / "run", {**first, "args": {"size": 10}})


def test_a_run_without_the_newer_records_is_resumed(folder: Path) -> None:
    first = named(folder)
    old = {key: first[key] for key in ("name", "use", "version", "args", "source")}
    resume(folder / "run", old)
    (folder / "late.py").write_text("value = 2.0\n")
    resume(folder / "run", named(folder))


# --------------------------------------------------------------------------- objects


def half(episode: EpisodeView) -> float:
    return 0.5


@dataclass
class Judge:
    threshold: float
    names: frozenset[str] = frozenset(("a", "b", "c"))
    _asked: int = 0

    def __call__(self, episode: EpisodeView) -> float:
        return self.threshold

    def score(self, episode: EpisodeView) -> float:
        return self.threshold


@rstar2.tool
def look(city: str) -> str:
    """Look at a city."""
    return city


def above(threshold: float) -> Callable[[EpisodeView], float]:
    def reward(episode: EpisodeView) -> float:
        return threshold

    return reward


def scaled(episode: EpisodeView, factor: float) -> float:
    return factor


def make(
    reward: Callable[[EpisodeView], Any] = half,
    *,
    prompts: Sequence[str] = ("a", "b"),
    **options: Any,
) -> rstar2.Environment:
    problems = [{"prompt": prompt} for prompt in prompts]
    return rstar2.Environment(problems, reward, name="own", **options)


@pytest.mark.parametrize(
    ("before", "after", "part"),
    [
        (make(above(0.5)), make(above(0.6)), "another reward of environment 'own'"),
        (make(Judge(0.5)), make(Judge(0.6)), "another reward"),
        (make(Judge(0.5).score), make(Judge(0.6).score), "another reward"),
        (
            make(functools.partial(scaled, factor=1.0)),
            make(functools.partial(scaled, factor=2.0)),
            "another reward",
        ),
        (make(system="Hello."), make(system="Hi."), "another system"),
        (make(), make(tools=[look]), "another tools"),
        (make(tools=["python"]), make(tools=["python-session"]), "another tools"),
        (make(), make(answer_tags=("<a>", "</a>")), "another answer_tags"),
        (make(), make(prompts=("a", "c")), r"other problems \(split heldout, train\)"),
    ],
)
def test_a_changed_argument_of_an_object_is_refused(
    tmp_path: Path, before: rstar2.Environment, after: rstar2.Environment, part: str
) -> None:
    resume(tmp_path, given(before))
    with pytest.raises(RecipeError, match=part):
        resume(tmp_path, given(after))


def test_equal_objects_are_the_same_environment(tmp_path: Path) -> None:
    judge = Judge(0.5)
    resume(tmp_path / "judged", given(make(judge)))
    judge._asked += 1
    resume(tmp_path / "judged", given(make(judge)))
    gym = ReasoningGym(["gcd"], tools=["python"])
    resume(tmp_path / "gym", identify_object(gym, {}))
    resume(tmp_path / "gym", identify_object(ReasoningGym(["gcd"], tools=["python"]), {}))
    with pytest.raises(RecipeError, match="another tasks of environment 'reasoning-gym'"):
        resume(tmp_path / "gym", identify_object(ReasoningGym(["lcm"], tools=["python"]), {}))


def test_the_source_of_an_object_is_that_of_its_reward(tmp_path: Path) -> None:
    record = given(make())
    assert record["source"]
    assert not any("rstar2/" in name for name in record["modules"])


SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from tests.environments.test_identity import Judge, given, look, make
print(json.dumps(given(make(Judge(0.5), tools=[look]))))
"""


def test_the_record_does_not_depend_on_the_process() -> None:
    """Hashes of strings, and so the order of sets, differ between processes."""
    root = Path(__file__).resolve().parents[2]
    records = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT, str(root)],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(records) == 1


def test_a_changed_script_that_a_program_environment_starts_is_refused(tmp_path: Path) -> None:
    for name in ("agent.py", "helper.py"):
        (tmp_path / name).write_text("import helper\n" if name == "agent.py" else "x = 1\n")

    def record() -> dict[str, Any]:
        words = [sys.executable, str(tmp_path / "agent.py"), "--fast"]
        problems = [{"prompt": str(n)} for n in range(9)]
        return given(ProgramEnvironment(words, problems, name="agents"))

    about = record()
    assert sorted(about["scripts"]) == ["agent.py", "helper.py"]
    old = {key: value for key, value in about.items() if key != "scripts"}
    resume(tmp_path / "old", old)  # recorded by an earlier version
    resume(tmp_path / "run", about)
    for name, text in (("agent.py", "import helper\n"), ("helper.py", "x = 1\n")):
        (tmp_path / name).write_text(text + "# changed\n")
        resume(tmp_path / "old", record())
        with pytest.raises(RecipeError, match=f"another version of {name}, which environment"):
            resume(tmp_path / "run", record())
        (tmp_path / name).write_text(text)
