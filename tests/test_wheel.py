"""The bare package: the wheel and its own dependencies in a new environment, outside the checkout.

Commands start, recipes are found, programs run, and what needs an extra says which one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rstar2 import extras
from rstar2.cli import COMMANDS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
PACKAGES, MEGABYTES = 35, 250
"""Upper bounds of the bare installation; measured: see docs/sandbox.md."""


def requirements_of(requirements: Iterable[str]) -> set[str]:
    """The distributions that pip would install for some requirements; all are in this environment.

    It has the same versions: `make install` resolves the same requirements with constraints.txt.
    """
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        assert requirement.specifier.contains(metadata.version(requirement.name)), requirement
        for extra in {"", *requirement.extras}:
            if (requirement.name, extra) not in seen:
                seen.add((requirement.name, extra))
                children = map(Requirement, metadata.requires(requirement.name) or ())
                waiting += [
                    c for c in children if not c.marker or c.marker.evaluate({"extra": extra})
                ]
    return {name for name, _ in seen}


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with only the wheel and what it depends on."""
    work = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(work), str(ROOT)]
    subprocess.run([*pip, *build], check=True, timeout=300)
    (wheel,) = work.glob("rstar2-*.whl")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", work / "bare"], check=True, timeout=300
    )
    python = work / "bare" / "bin" / "python"
    install = ["--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, *install, str(wheel)], check=True, timeout=300)
    (packages,) = (work / "bare" / "lib").glob("python*/site-packages")
    (own,) = metadata.distributions(path=[str(packages)])
    without_extras = [text for text in own.requires or () if "extra ==" not in text]
    for name in requirements_of(without_extras):
        for file in metadata.files(name) or ():
            if ".." not in file.parts:  # no scripts
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(str(file.locate()), packages / file)
    return python


def run(python: Path, cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    command = [str(python), *args]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def rstar2(python: Path, cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return run(python, cwd, "-m", "rstar2", *args)


def test_it_is_small_and_has_no_torch(python: Path, tmp_path: Path) -> None:
    done = run(
        python,
        tmp_path,
        "-c",
        "import json, rstar2\n"
        "from importlib.metadata import distributions\n"
        "names = sorted(d.name for d in distributions())\n"
        "print(json.dumps([rstar2.__file__, names]))",
    )
    assert done.returncode == 0, done.stderr
    file, names = json.loads(done.stdout)
    packages = Path(file).parent.parent
    assert packages.is_relative_to(python.parent.parent)
    size = sum(p.stat().st_size for p in packages.rglob("*") if p.is_file() and not p.is_symlink())
    print(f"{len(names)} packages, {size / 1e6:.0f} MB: {', '.join(names)}")
    assert not {"torch", "transformers", "scipy"} & set(names)
    assert len(names) <= PACKAGES
    assert size / 1e6 <= MEGABYTES


def test_every_help_page_needs_only_the_bare_package(python: Path, tmp_path: Path) -> None:
    program = (
        "import sys\nfrom rstar2.cli import app\n"
        f"for name in {list(COMMANDS)!r}:\n"
        "    try:\n        app(args=[name, '--help'])\n"
        "    except SystemExit as ended:\n        assert not ended.code, name\n"
    )
    done = run(python, tmp_path, "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("--help") >= len(COMMANDS)


def test_packaged_recipes_resolve_without_a_checkout(python: Path, tmp_path: Path) -> None:
    done = rstar2(python, tmp_path, "train", "tiny", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "prompts_per_step" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_program_runs_in_the_jail(python: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("print(6 * 7)\n")
    done = rstar2(python, tmp_path, "codeenv", "run", str(program), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["stdout"] == "42\n"


def test_the_three_lines_work(python: Path, tmp_path: Path) -> None:
    program = (
        "from rstar2 import Sandbox\n"
        "with Sandbox() as box:\n"
        "    print(box.run('print(6*7)').stdout)\n"
        "    print(box.run('import sympy; print(sympy.factorint(91))').stdout)\n"
    )
    done = run(python, tmp_path, "-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "42\n\n{7: 1, 13: 1}\n\n", "")


def test_resampling_on_correct_works(python: Path, tmp_path: Path) -> None:
    program = (
        "from rstar2.grpo import resample_on_correct\n"
        "print(resample_on_correct([1, 0, 1, 0], [0, 0, 0.5, 0], keep=2, seed=0))"
    )
    done = run(python, tmp_path, "-c", program)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("train", "tiny"),
        ("quickstart",),
        ("sft", "tiny"),
        ("eval", "run", "model", "--on", "arithmetic", "--out", "out"),
        ("view", "run"),
        ("entropy", "run"),
        ("chat", "--model", "model", "hello"),
        ("simulate",),
        ("route", "http://127.0.0.1:1"),
    ],
    ids=lambda command: command[0],
)
def test_what_needs_the_training_extra_says_so(
    python: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "run" / "exports" / "sft").mkdir(parents=True)
    (tmp_path / "run" / "exports" / "sft" / "config.json").write_text("{}")
    (tmp_path / "run" / "recipe.yaml").write_text("extends: tiny\n")
    (tmp_path / "run" / "environment.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    done = rstar2(python, tmp_path, *command)
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "pip install 'rstar2[train]'" in errors[0]
    assert "Traceback" not in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_the_table_of_extras_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for module, extra in extras.MODULES.items():
        packages = project["optional-dependencies"][extra]
        assert any(text.startswith(module.replace("_", "-")) for text in packages), module
    bare = {text.partition(">")[0] for text in project["dependencies"]}
    assert not bare & {module.replace("_", "-") for module in extras.MODULES}
