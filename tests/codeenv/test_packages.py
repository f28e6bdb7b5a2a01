"""Packages, warm-up programs and an interpreter of one's own."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from rstar2.codeenv.jail import cgroups, warmup
from rstar2.codeenv.protocol import RunRequest
from rstar2.codeenv.server import packages, probe
from rstar2.codeenv.server.executor import WorkerExecutor
from rstar2.codeenv.server.workers import lightest_flavour
from rstar2.config import CodeEnvConfig
from rstar2.errors import UserError
from rstar2.types import Limits, Outcome


def wheel(directory: Path, name: str, text: str) -> None:
    """A wheel with one package."""
    directory.mkdir(exist_ok=True)
    with zipfile.ZipFile(directory / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", text)
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Name: {name}\nVersion: 1.0\n")


async def test_package_that_is_not_installed_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"packages: 'no_such_package' is not installed"):
        await packages.prepare(CodeEnvConfig(packages=("json", "no_such_package")))


async def test_directory_without_wheels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contains no wheel"):
        await packages.prepare(CodeEnvConfig(packages=(f"{tmp_path}/",)))


async def test_broken_wheel_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "bad-1.0-py3-none-any.whl").write_text("no archive")
    with pytest.raises(UserError, match=r"bad-1\.0.* cannot be unpacked"):
        await packages.prepare(CodeEnvConfig(packages=(f"{tmp_path}/",)))


async def test_interpreter_that_does_not_run_is_refused() -> None:
    with pytest.raises(UserError, match="python: '/bin/false' cannot run programs"):
        await packages.prepare(CodeEnvConfig(python="/bin/false"))


async def test_missing_warm_up_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="warm_up_programs: cannot read"):
        await packages.prepare(CodeEnvConfig(warm_up_programs=(f"{tmp_path}/none.py",)))


def unpacked() -> list[Path]:
    """Directories of unpacked wheels that this process has made."""
    return [*Path(tempfile.gettempdir()).glob(f"{cgroups.owner_name()}-packages-*")]


async def test_nothing_is_left_of_wheels_that_are_refused(tmp_path: Path) -> None:
    wheel(tmp_path, "ownpack", "")
    with pytest.raises(UserError, match="'no_such_package' is not installed"):
        await packages.prepare(CodeEnvConfig(packages=(f"{tmp_path}/", "no_such_package")))
    assert unpacked() == []


def gated(tmp_path: Path) -> tuple[str, Path, Path]:
    """An interpreter that creates a file when it is started, and waits for another one."""
    started, go_on, script = (tmp_path / name for name in ("started", "go-on", "python"))
    script.write_text(
        f"#!/bin/sh\n: > {started}\nwhile [ ! -e {go_on} ]; do sleep 0.05; done\n"
        f'exec {sys.executable} "$@"\n'
    )
    script.chmod(0o755)
    return str(script), started, go_on


async def until_exists(path: Path) -> None:
    async with asyncio.timeout(50):
        while not path.exists():  # noqa: ASYNC110, ASYNC240 (another process creates it)
            await asyncio.sleep(0.02)


async def test_the_event_loop_runs_while_packages_are_checked(tmp_path: Path) -> None:
    python, started, go_on = gated(tmp_path)
    preparing = asyncio.create_task(packages.prepare(CodeEnvConfig(python=python)))
    await until_exists(started)
    go_on.touch()
    assert (await preparing).python == python


async def test_nothing_is_left_when_the_caller_leaves(tmp_path: Path) -> None:
    python, started, go_on = gated(tmp_path)
    wheel(tmp_path / "wheels", "ownpack", "")
    config = CodeEnvConfig(python=python, packages=(f"{tmp_path}/wheels",))
    preparing = asyncio.create_task(packages.prepare(config))
    await until_exists(started)
    assert len(unpacked()) == 1
    preparing.cancel()
    go_on.touch()
    with pytest.raises(asyncio.CancelledError):
        await preparing
    assert unpacked() == []


def test_programs_that_mention_a_package_run_where_it_is_warm() -> None:
    assert lightest_flavour(b"import networkx", ("networkx",)) == "packages"
    assert lightest_flavour(b"import networkx") == "plain"
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
    await executor.start()
    directory = Path(executor.setup.directory)
    assert directory.exists()  # noqa: ASYNC240
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
