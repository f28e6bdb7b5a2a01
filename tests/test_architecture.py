"""The shape of the tree: imports point one way, light modules stay light, files stay readable."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "rstar2"

LAYERS = (
    {
        *("types", "errors", "seeds", "machine", "malloc"),
        *("files", "child", "model_config", "extras", "plugins"),
        *("paper_format", "tasks", "tool_text", "descriptors", "http_client"),
        *("token_arrays", "http_server"),
    },
    {"config", "record", "track"},
    {
        *("agent", "codeenv", "endpoint", "engine", "entropy", "environments", "evaluate"),
        *("grpo", "learner", "problems", "report", "reward", "rollout", "router", "sandbox"),
        "viewer",
    },
    {"pipeline", "cluster", "plan", "mcp", "gpu_check"},
    {"evidence"},
    {"cli", "__main__", "api"},
)
"""A module may import from its own layer and those above it in this list; stages may import each
other only without cycles."""

LIGHT = (
    *("rstar2.types", "rstar2.errors", "rstar2.config", "rstar2.record", "rstar2.cli"),
    *("rstar2.cli.train", "rstar2.report", "rstar2.pipeline.progress", "rstar2.agent.parser"),
    "rstar2.pipeline.controller",
    *("rstar2.reward", "rstar2.problems", "rstar2.problems.arithmetic", "rstar2.codeenv"),
)
HEAVY = ("torch", "transformers", "vllm", "ray")

LONGEST_FILE, LONGEST_FUNCTION = 500, 80
LONGER = {"rstar2.types": 670}
"""All nouns are on one page, on purpose."""


def modules() -> dict[str, Path]:
    return {
        ".".join(("rstar2", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): path
        for path in sorted(SOURCE.rglob("*.py"))
    }


def part(module: str) -> str:
    """The top-level part of a module: rstar2.codeenv.jail.confine -> codeenv."""
    return module.split(".")[1] if "." in module else ""


@cache
def syntax(path: Path) -> ast.Module:
    """The parsed file; several tests look at every file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Modules of rstar2 that a file imports, at the top or within functions."""
    return tuple(_imports(syntax(path)))


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("rstar2."))
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "rstar2":
                yield from (f"rstar2.{alias.name}" for alias in node.names)
            elif node.module.startswith("rstar2."):
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer(name: str) -> int:
    return next(i for i, parts in enumerate(LAYERS) if name in parts)


def test_every_part_of_the_tree_has_a_layer() -> None:
    known = set().union(*LAYERS) | {"", "recipes"}
    assert {part(module) for module in modules()} <= known


def test_imports_point_one_way() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, path in modules().items()
        for imported in imports(path)
        if part(module) and part(imported) in set().union(*LAYERS)
        if layer(part(imported)) > layer(part(module))
    ]
    assert wrong == []


def test_parts_do_not_import_each_other_in_circles() -> None:
    edges: dict[str, set[str]] = {}
    for module, path in modules().items():
        if part(module):
            needs = {part(name) for name in imports(path)} - {part(module), ""}
            edges.setdefault(part(module), set()).update(needs)
    while leaves := {name for name, needs in edges.items() if not needs & edges.keys()}:
        for name in leaves:
            del edges[name]
    assert edges == {}, f"these import each other: {sorted(edges)}"


ROOMS = {
    "client": ("server", "jail"),
    "server": ("client",),
    "jail": ("client", "server"),
}
"""Each package of the code environment, and the packages that it must not import."""
SHARED = {"", "deadlines", "protocol", "sizes", "wire"}
"""Modules of the code environment that all three packages may import."""


def test_the_code_environment_is_three_packages() -> None:
    wrong = []
    for module, path in modules().items():
        if part(module) != "codeenv":
            continue
        room = ".".join(module.split(".")[2:3])
        assert room in ROOMS or room in SHARED, f"{module} belongs to no package"
        forbidden = tuple(ROOMS) if room in SHARED else ROOMS[room]
        wrong += [
            f"{module} imports {name}"
            for name in imports(path)
            if name.startswith(tuple(f"rstar2.codeenv.{other}" for other in forbidden))
        ]
    assert wrong == []


def test_light_modules_load_no_torch() -> None:
    """One process imports them all: a heavy package that is loaded then was imported by one."""
    codeenv = [name for name in modules() if part(name) == "codeenv"]
    commands = [name for name in modules() if name.startswith("rstar2.cli.")]
    program = (
        "import importlib, sys\n"
        f"for name in {[*LIGHT, *codeenv, *commands]!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "    assert not heavy, f'{name} loads {heavy}'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def long_functions(tree: ast.Module) -> list[str]:
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= LONGEST_FUNCTION
    ]


def test_files_and_functions_stay_readable() -> None:
    wrong = []
    for module, path in modules().items():
        text = path.read_text(encoding="utf-8")
        tree = syntax(path)
        if text.count("\n") > LONGER.get(module, LONGEST_FILE):
            wrong.append(f"{module} has {text.count(chr(10))} lines")
        if not ast.get_docstring(tree):
            wrong.append(f"{module} has no docstring that states its role")
        wrong += [f"{module}.{name} is too long" for name in long_functions(tree)]
    assert wrong == []


def test_one_name_one_class() -> None:
    """No two classes share a name; a leading underscore does not count as a difference."""
    places: dict[str, list[str]] = {}
    for module, path in modules().items():
        for node in ast.walk(syntax(path)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(module)
    shared = {name: where for name, where in places.items() if len(where) > 1}
    assert shared == {}


TASK_FREE = ("agent", "grpo", "pipeline", "rollout")
"""Parts that work for every environment: they know no tool, no prompt and no answer format."""
TASK_WORDS = re.compile(r"python[^3]|\bboxed|<answer|<reason|RunRequest|math.verify", re.IGNORECASE)
TASK_MODULES = (
    *("rstar2.environments.python_math", "rstar2.environments.python_tool", "rstar2.reward"),
    *("rstar2.paper_format", "rstar2.problems.arithmetic", "rstar2.codeenv"),
)


def test_the_loop_and_the_trainer_know_no_task() -> None:
    wrong = []
    for module, path in modules().items():
        if part(module) not in TASK_FREE:
            continue
        words = TASK_WORDS.findall(path.read_text(encoding="utf-8"))
        wrong += [f"{module} says {word!r}" for word in words]
        wrong += [
            f"{module} imports {name}"
            for name in imports(path)
            if name.startswith(TASK_MODULES) and (module, name) not in STARTS_THE_SANDBOX
        ]
    assert wrong == []


STARTS_THE_SANDBOX = {
    ("rstar2.pipeline.runtime", "rstar2.codeenv.client.client"),
    ("rstar2.pipeline.runtime", "rstar2.codeenv.client.client.CodeEnvClient"),
}
"""A run starts the code environment and hands it to the environment, which alone calls it."""


def test_no_test_skips_for_a_package_that_make_install_installs() -> None:
    """Such a test would be skipped without a word if the package were missing in CI."""
    root = SOURCE.parents[1]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    wanted, installed = ["dev", "adapters"], set()
    for extra in wanted:
        for requirement in extras[extra]:
            name, *inner = re.findall(r"[\w-]+", requirement.split(">")[0])
            wanted += inner if name == "rstar2" else []
            installed.add(name.replace("-", "_"))
    assert {"trl", "mcp", "sandbox_fusion"} <= installed
    skipped = [
        f"{path.relative_to(root)}: {name}"
        for path in sorted((root / "tests").rglob("*.py"))
        for name in re.findall(r'importorskip\("(\w+)', path.read_text(encoding="utf-8"))
        if name in installed
    ]
    assert skipped == []
