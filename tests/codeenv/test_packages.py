"""Packages, warm-up programs and an interpreter of one's own."""

from __future__ import annotations

import asyncio
import sys
import zipfile
from pathlib import Path

import pytest

from rstar2.codeenv.jail import warmup
from rstar2.codeenv.protocol import RunRequest
from rstar2.codeenv.server import packages, probe
from rstar2.codeenv.server.executor import WorkerExecutor
from rstar2.config import CodeEnvConfig
from rstar2.errors import UserError
from rstar2.types import Limits, Outcome


def wheel(directory: Path, name: str, text: str) -> None:
    """A wheel with one package."""
    directory.mkdir(exist_ok=True)
    with zipfile.ZipFile(directory / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", text)
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Name: {name}\nVersion: 1.0\n")


def test_package_that_is_not_installed_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"packages: 'no_such_package' is not installed"):
        packages.prepare(CodeEnvConfig(packages=("json", "no_such_package")))


def test_directory_without_wheels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contains no wheel"):
        packages.prepare(CodeEnvConfig(packages=(f"{tmp_path}/",)))


def test_broken_wheel_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "bad-1.0-py3-none-any.whl").write_text("no archive")
    with pytest.raises(UserError, match=r"bad-1\.0.* cannot be unpacked"):
        packages.prepare(CodeEnvConfig(packages=(f"{tmp_path}/",)))


def test_interpreter_that_does_not_run_is_refused() -> None:
    with pytest.raises(UserError, match="python: '/bin/false' cannot run programs"):
        packages.prepare(CodeEnvConfig(python="/bin/false"))


def test_missing_warm_up_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="warm_up_programs: cannot read"):
        packages.prepare(CodeEnvConfig(warm_up_programs=(f"{tmp_path}/none.py",)))


def test_programs_that_mention_a_package_run_where_it_is_warm() -> None:
    assert warmup.flavour_for(b"import networkx", ("networkx",)) == "packages"
    assert warmup.flavour_for(b"import networkx") == "plain"
    assert warmup.warmer("base", "networkx", ("networkx",)) == "packages"
    assert warmup.warmer("packages", "scipy", ("networkx",)) is None


@pytest.mark.slow
async def test_wheels_are_importable_warm_and_reported(tmp_path: Path) -> None:
    wheel(
        tmp_path / "wheels", "ownpack", "count = 0\ndef more():\n    global count\n    count += 1\n"
    )
    program = tmp_path / "warm.py"
    program.write_text("import ownpack\nownpack.more()\n")
    config = CodeEnvConfig(
        slots=1,
        warm_up="never",
        python=sys.executable,
        packages=(f"{tmp_path}/wheels",),
        warm_up_programs=(str(program),),
    )
    executor = WorkerExecutor(config, probe.resolve("auto").level)
    directory = Path(executor.setup.directory)
    await executor.start()
    try:
        deadline = asyncio.get_running_loop().time() + 300
        limits = Limits(wall_s=60.0, cpu_s=60.0)
        for number, code in enumerate(("import ownpack", "ownpack = __import__('own' + 'pack')")):
            shown = (
                f"import sys\nprint('own' + 'pack' in sys.modules)\n{code}\nprint(ownpack.count)"
            )
            result = await executor.run(RunRequest(f"p{number}", shown, limits=limits), deadline)
            assert (result.outcome, result.stdout) == (Outcome.OK, "True\n1\n"), result
        assert executor.stats().packages == ("ownpack",)
        assert "packages" in executor.stats().warm
    finally:
        await executor.close()
    assert not directory.exists()  # noqa: ASYNC240
