"""The Python face: `import rstar2` is light, and its names are there when they are used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import rstar2
from rstar2 import config, extras
from rstar2.cli import COMMANDS

HEAVY = ("torch", "transformers", "pydantic", "yaml", "numpy", "msgspec", "typer", "rich")
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def python(program: str, *, blocked: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKER.format(blocked=blocked) + program]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def type_checkers_see(package: ModuleType) -> dict[str | None, str | None]:
    """The names that a package imports for type checkers only, and their modules."""
    tree = ast.parse(Path(str(package.__file__)).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname: node.module for node in imports for alias in node.names}


def test_import_loads_nothing_else() -> None:
    done = python(
        "before = set(sys.modules)\n"
        "import rstar2\n"
        f"assert not [m for m in {HEAVY!r} if m in sys.modules]\n"
        "assert {m for m in set(sys.modules) - before if m.startswith('rstar2')} == {'rstar2'}\n"
    )
    assert done.returncode == 0, done.stderr


def test_a_sandbox_loads_nothing_of_recipes() -> None:
    """`rstar2 codeenv run` starts two processes, and each would pay for it."""
    done = python(
        "import rstar2.cli.codeenv, rstar2.sandbox\n"
        "import rstar2.codeenv.server.serve, rstar2.codeenv.server.executor\n"
        "unused = ('yaml', 'numpy', 'rich.progress', 'rstar2.config.schema')\n"
        "assert not [name for name in unused if name in sys.modules]\n"
    )
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_importable_and_listed() -> None:
    for name in rstar2.__all__:
        assert getattr(rstar2, name).__name__ == name
    assert set(rstar2.__all__) <= set(dir(rstar2))


def test_every_name_of_the_configuration_is_importable_in_any_order() -> None:
    for name in config.__all__:
        assert getattr(config, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Recipes'"):
        _ = config.Recipes
    assert type_checkers_see(config) == {
        name: f"rstar2.config.{module}" for name, module in config._PUBLIC.items()
    }


def test_type_checkers_see_the_same_names() -> None:
    assert type_checkers_see(rstar2) == rstar2._PUBLIC


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'sandbocks'"):
        rstar2.sandbocks  # noqa: B018


def test_resampling_on_correct_needs_neither_pydantic_nor_yaml_nor_torch() -> None:
    done = python(
        "from rstar2.grpo import resample_on_correct\n"
        "from rstar2 import resample_on_correct as same\n"
        "assert same is resample_on_correct\n"
        "kept = resample_on_correct([1, 0, 1, 0], [0, 0, 0.5, 0], keep=2, seed=0)\n"
        "assert len(kept) == 2, kept\n",
        blocked=("pydantic", "yaml", "torch", "numpy"),
    )
    assert done.returncode == 0, done.stderr


def test_every_command_can_be_imported_without_any_extra() -> None:
    modules = sorted({module for module, _, _ in COMMANDS.values()})
    done = python(
        f"import importlib\nfor name in {modules!r}:\n    importlib.import_module(name)\n",
        blocked=tuple(extras.MODULES),
    )
    assert done.returncode == 0, done.stderr


def test_a_command_without_its_extra_is_refused_in_one_line(tmp_path: Path) -> None:
    done = python(
        "from rstar2.cli import main\nmain(['view', '.'])\n", blocked=("torch", "starlette")
    )
    assert done.returncode == 2
    assert done.stderr == (
        "error: this command needs starlette, which is not installed: pip install 'rstar2[train]'\n"
    )


def test_a_missing_module_that_no_extra_installs_stays_an_import_error() -> None:
    assert extras.explain(ModuleNotFoundError("No module named 'x'", name="x")) is None
    assert extras.explain(ModuleNotFoundError("nameless")) is None


def test_a_missing_submodule_names_the_extra_of_its_package() -> None:
    error = extras.explain(ModuleNotFoundError("No module named 'ray.util'", name="ray.util"))
    assert "pip install 'rstar2[ray]'" in str(error)
