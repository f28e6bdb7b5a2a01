"""docs/api.md: up to date, complete, and its examples are valid."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rstar2

ROOT = Path(__file__).resolve().parents[1]
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
NAMES = sorted(rstar2.__all__)
CALLED = (
    *("Environment", "tool", "python", "train", "evaluate_model", "Agent", "Sandbox"),
    "resample_on_correct",
)
"""Names whose docstring describes every parameter."""
RUN = (
    *("Environment", "tool", "EpisodeView", "Recipe", "Reward", "Problem", "resample_on_correct"),
    "InfrastructureError",
)
"""Names whose example needs neither a model nor a sandbox."""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api_page", ROOT / "scripts" / "api_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def examples(name: str) -> list[str]:
    """The examples of a public name: the Python blocks of its docstring."""
    doc = inspect.getdoc(getattr(rstar2, name)) or ""
    return re.findall(r"^Example:\n\n((?:    .*\n|\n)+)", doc + "\n", re.MULTILINE)


def test_the_page_is_up_to_date(script: ModuleType) -> None:
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), (
        "run python scripts/reference_pages.py"
    )


def test_the_page_has_every_public_name_once(script: ModuleType) -> None:
    listed = [name for names in script.SECTIONS.values() for name in names]
    assert sorted(listed) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_one_example(name: str) -> None:
    (example,) = examples(name)
    code = inspect.cleandoc("\n" + example)
    compile(code, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert len([line for line in code.splitlines() if line.strip()]) <= 7


@pytest.mark.parametrize("name", CALLED)
def test_every_parameter_is_described(name: str) -> None:
    value = getattr(rstar2, name)
    doc = inspect.getdoc(value) or ""
    described = re.findall(r"^(\w+): ", doc, re.MULTILINE)
    assert described == [p for p in inspect.signature(value).parameters if p != "function"]


@pytest.mark.parametrize("name", RUN)
def test_the_examples_that_need_no_model_run(name: str) -> None:
    namespace: dict[str, Any] = {"rstar2": rstar2}
    exec(inspect.cleandoc("\n" + examples(name)[0]), namespace)


def test_the_example_of_a_user_error_raises_one() -> None:
    with pytest.raises(rstar2.UserError, match="environment environment has no problems"):
        exec(inspect.cleandoc("\n" + examples("UserError")[0]), {"rstar2": rstar2})


def test_the_environments_of_the_docs_can_be_made() -> None:
    blocks = PYTHON.findall((ROOT / "docs" / "environments.md").read_text(encoding="utf-8"))
    namespace: dict[str, Any] = {"rstar2": rstar2}
    for block in blocks:
        if "rstar2.train" not in block and "await" not in block:
            exec(block, namespace)
    game, shop = namespace["game"], namespace["shop"]
    assert game.problems("train", None, 0)[7].answer == "7"
    view = rstar2.EpisodeView(shop.problems("train", None, 0)[0], seed=0)
    (add,) = shop.tools(view)
    assert add("fig") == "1 items, 3 euros"
    assert shop.reward(view)
