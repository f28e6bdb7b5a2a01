"""The warm-up of a zygote: imports and small representative computations.

The computations run the code that calls use most (solving, simplifying, linear algebra, printing,
failing), so that a forked child finds its caches filled and its pages in place. No benchmark
measures these programs. Zygotes come in flavours, because every mapping makes each fork slower:

    plain    the usual standard library
    numpy    plain + NumPy
    base     numpy + SymPy and mpmath
    scipy    base + SciPy and NumPy's random numbers
    packages scipy + packages that the server's owner chose; only if there are any
    verify   base + the trusted functions of verify.FUNCTIONS; it runs no programs

A program starts in the lightest flavour that has the modules it mentions (`server/workers.py`). One
that imports more than that is handed to a warmer flavour (see `handover`).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from collections.abc import Sequence

from rstar2.codeenv.jail import frames, runner, sympy_cache, warm_programs
from rstar2.codeenv.jail.syscalls import words

FLAVOURS = ("plain", "numpy", "base", "scipy", "verify")
PACKAGES = "packages"

_STANDARD = words(
    """
abc argparse ast base64 bisect cmath collections collections.abc contextlib copy
dataclasses datetime decimal enum fractions functools heapq io itertools json
linecache math numbers operator os pathlib pickle pprint queue random re shutil
statistics string struct sys tempfile textwrap threading time traceback types typing
warnings zlib
"""
)
_NEEDS = {
    "numpy": "numpy",
    "sympy": "base",
    "mpmath": "base",
    "scipy": "scipy",
    "numpy.random": "scipy",
}
"""Module -> the lightest flavour that has it."""
_BUILT_ON = {
    "numpy": "plain",
    "base": "numpy",
    "scipy": "base",
    "verify": "base",
    PACKAGES: "scipy",
}
_ADDS = {
    "plain": _STANDARD,
    "numpy": ("numpy", "numpy.linalg"),
    "base": ("mpmath", "sympy"),
    "scipy": words(
        "numpy.random scipy scipy.linalg scipy.special scipy.optimize scipy.integrate scipy.stats"
    ),
    "verify": (),
    PACKAGES: (),
}

_PROGRAMS = {
    "plain": warm_programs.PLAIN,
    "numpy": warm_programs.NUMPY,
    "base": warm_programs.SYMPY,
    "scipy": warm_programs.SCIPY,
    "verify": "",
    PACKAGES: "",
}


def flavours(packages: Sequence[str]) -> tuple[str, ...]:
    """The flavours of a server with these packages."""
    return (*FLAVOURS, PACKAGES) if packages else FLAVOURS


def warmer(flavour: str, module: str, packages: Sequence[str] = ()) -> str | None:
    """The flavour to hand a program to that imports a module; None if it is in the right one."""
    needed = PACKAGES if module in packages else _NEEDS.get(module)
    return needed if needed is not None and needed not in _layers(flavour) else None


def warm_elsewhere(flavour: str, packages: Sequence[str] = ()) -> frozenset[str]:
    """The modules whose import moves a program from this flavour to a warmer one."""
    modules = (*_NEEDS, *packages)
    return frozenset(module for module in modules if warmer(flavour, module, packages) is not None)


def _layers(flavour: str) -> list[str]:
    """A flavour and those that it is built on, lightest first."""
    layers = [flavour]
    while layers[0] in _BUILT_ON:
        layers.insert(0, _BUILT_ON[layers[0]])
    return layers


def import_modules(flavour: str, packages: Sequence[str] = ()) -> dict[str, str]:
    """Import the flavour's modules; returns the errors of those that cannot be imported."""
    missing: dict[str, str] = {}
    names = [name for layer in _layers(flavour) for name in _ADDS[layer]]
    for name in (*names, *(packages if flavour == PACKAGES else ())):
        try:
            sympy_cache.import_sympy() if name == "sympy" else importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - a package may raise anything; it is reported
            missing[name] = f"{type(error).__name__}: {error}"
    return missing


def programs(flavour: str) -> list[str]:
    """The flavour's representative programs, which succeed."""
    texts = [_PROGRAMS[layer] for layer in _layers(flavour)]
    if flavour == "base":  # two seconds: too long for flavours that few programs with SymPy use
        texts.append(warm_programs.MORE_SYMPY)
    return [program for text in texts for program in split(text)]


def split(text: str) -> list[str]:
    """The programs of a text in which empty lines separate them."""
    return [program.strip("\n") for program in text.split("\n\n") if program.strip("\n")]


def run_programs(flavour: str, own: Sequence[str] = ()) -> list[str]:
    """Run the representative programs in this process; returns the errors of those that failed.

    `own` are programs of the server's owner.
    """
    failed = [error for program in (*programs(flavour), *own) if (error := _run(program))]
    for program in split(warm_programs.FAILING):
        _run(program)
    runner.reseed()
    if "sympy" in sys.modules:
        sympy_cache.limit()
    return failed


def _run(program: str) -> str | None:
    """Run one program and discard its output; returns its traceback if it failed."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        record = runner.execute(program, runner.fresh_main(), 10_000)
    return None if record.kind in (frames.NOTHING, frames.VALUE) else record.text
