"""User packages for programs: names of installed ones, or directories of wheels.

Wheels are unpacked into a directory of the server, which programs can read. Names are checked
against the interpreter that runs programs, so that a server with a wrong name does not start.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rstar2.codeenv.jail import cgroups
from rstar2.codeenv.server import probe
from rstar2.config import CodeEnvConfig
from rstar2.errors import UserError

_PROBE_S = 60.0
_PROBE = """
import importlib.util, json, sys
sys.path.append(sys.argv[1])
print(json.dumps([name for name in sys.argv[2:] if importlib.util.find_spec(name) is None]))
"""


@dataclass(frozen=True, slots=True)
class InterpreterSetup:
    """What the interpreters of programs have, in addition to their flavours."""

    python: str = sys.executable
    packages: tuple[str, ...] = ()
    """Modules that are imported in advance."""
    directory: str = ""
    """Unpacked wheels; empty if there are none."""
    programs: tuple[str, ...] = field(default=())
    """Warm-up programs of the user."""


async def prepare(config: CodeEnvConfig) -> InterpreterSetup:
    """Read the programs, unpack the wheels and check the names; UserError names what is wrong.

    The event loop runs meanwhile. Nothing is left behind by a failure, or if the caller leaves.
    """
    preparing = asyncio.create_task(asyncio.to_thread(_prepare, config))
    try:
        return await asyncio.shield(preparing)
    except asyncio.CancelledError:
        await asyncio.wait([preparing])  # a thread cannot be cancelled
        if preparing.exception() is None:
            await asyncio.to_thread(discard, preparing.result())
        raise


def discard(setup: InterpreterSetup) -> None:
    """Remove the unpacked wheels."""
    if setup.directory:
        probe.remove_runtime(setup.directory)


def _prepare(config: CodeEnvConfig) -> InterpreterSetup:
    python = config.python or sys.executable
    programs = tuple(_read(Path(path)) for path in config.warm_up_programs)
    directories = [entry for entry in config.packages if "/" in entry]
    names = [entry for entry in config.packages if "/" not in entry]
    directory = ""
    if directories:
        directory = tempfile.mkdtemp(prefix=f"{cgroups.owner_name()}-packages-")
    try:
        for entry in directories:
            names += unpack(Path(entry), Path(directory))
        if names or config.python:
            _check(python, directory, names)
    except BaseException:
        if directory:
            probe.remove_runtime(directory)
        raise
    return InterpreterSetup(python, tuple(dict.fromkeys(names)), directory, programs)


def unpack(wheels: Path, target: Path) -> list[str]:
    """Unpack every wheel of a directory; returns the names of their modules."""
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise UserError(f"packages: {wheels} contains no wheel (*.whl)")
    names: list[str] = []
    for file in files:
        try:
            with zipfile.ZipFile(file) as archive:
                entries = archive.namelist()
                archive.extractall(target)
        except (OSError, zipfile.BadZipFile) as error:
            raise UserError(f"packages: {file} cannot be unpacked: {error}") from error
        heads = {entry.partition("/")[0]: "/" in entry for entry in entries}
        for head, is_directory in heads.items():
            if head.endswith((".dist-info", ".data", ".libs")):
                continue
            if is_directory or head.endswith((".py", ".so")):
                names.append(head.partition(".")[0])
    for path in (target, *target.rglob("*")):  # readable whatever the umask is
        path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))
    return names


def _check(python: str, directory: str, names: Sequence[str]) -> None:
    """Check that the interpreter runs and finds every module."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", _PROBE, directory, *names],
            capture_output=True, text=True, timeout=_PROBE_S, check=True,
        )  # fmt: skip
        missing = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise UserError(f"python: {python!r} cannot run programs: {error}") from error
    if missing:
        raise UserError(
            f"packages: {missing[0]!r} is not installed for {python}; install it there, or name a "
            "directory of wheels (with a slash, as in ./wheels)"
        )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"warm_up_programs: cannot read {path}: {error}") from error


def settings(flavour: str, functions: Mapping[str, str], setup: InterpreterSetup) -> str:
    """What a zygote is started with. Trusted functions need the server's own interpreter only."""
    trusted = flavour == "verify"
    return json.dumps(
        {
            "flavour": flavour,
            "functions": dict(functions),
            "packages": [] if trusted else setup.packages,
            "directory": "" if trusted else setup.directory,
            "programs": [] if trusted else setup.programs,
        }
    )
