"""The wheel works outside the checkout: commands start and recipes are found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with only the wheel's files in it; dependencies come from this interpreter."""
    work = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [
        *pip,
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(work),
        str(ROOT),
    ]
    subprocess.run(build, check=True, timeout=120)
    (wheel,) = work.glob("rstar2-*.whl")
    target = work / "site"
    subprocess.run(
        [*pip, "install", "--quiet", "--no-deps", "--target", target, wheel],
        check=True,
        timeout=120,
    )
    return target


def rstar2(installed: Path, cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "rstar2", *args]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def test_the_wheel_is_what_runs(installed: Path, tmp_path: Path) -> None:
    code = "import rstar2; print(rstar2.__file__)"
    env = {**os.environ, "PYTHONPATH": str(installed)}
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert Path(run.stdout.strip()).is_relative_to(installed)


def test_help_lists_the_commands(installed: Path, tmp_path: Path) -> None:
    run = rstar2(installed, tmp_path, "--help")
    assert run.returncode == 0, run.stderr
    for command in ("quickstart", "train", "codeenv", "chat", "doctor"):
        assert command in run.stdout


def test_packaged_recipes_resolve_without_a_checkout(installed: Path, tmp_path: Path) -> None:
    run = rstar2(installed, tmp_path, "train", "tiny", "--dry-run")
    assert run.returncode == 0, run.stderr
    assert "prompts_per_step" in run.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_program_runs_in_the_jail(installed: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("print(6 * 7)\n")
    run = rstar2(installed, tmp_path, "codeenv", "run", str(program), "--json")
    assert run.returncode == 0, run.stderr
    assert '"stdout":"42\\n"' in run.stdout.replace(": ", ":")
