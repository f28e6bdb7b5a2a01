"""The warm-up of a zygote: imports and small representative computations.

The computations run the code that calls use most (solving, simplifying, linear algebra, printing,
failing), so that a forked child finds its caches filled and its pages in place. No benchmark
measures these programs. Zygotes come in flavours, because every mapping makes each fork slower:

    plain    the usual standard library
    numpy    plain + NumPy
    base     numpy + SymPy and mpmath
    scipy    base + SciPy and NumPy's random numbers
    verify   base + the trusted functions of verify.FUNCTIONS; it runs no programs

A program starts in the lightest flavour that has the modules it mentions, also in base64 text that
it decodes, as the release's client sends its programs. A program that imports more than that is
handed to a warmer flavour (see `handover`).
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import io
import re

from rstar2.codeenv.jail import runner
from rstar2.codeenv.jail.syscalls import words

FLAVOURS = ("plain", "numpy", "base", "scipy", "verify")

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
_BUILT_ON = {"numpy": "plain", "base": "numpy", "scipy": "base", "verify": "base"}
_ADDS = {
    "plain": _STANDARD,
    "numpy": ("numpy", "numpy.linalg"),
    "base": ("mpmath", "sympy"),
    "scipy": words(
        "numpy.random scipy scipy.linalg scipy.special scipy.optimize scipy.integrate scipy.stats"
    ),
    "verify": (),
}

_PROGRAMS = {
    "plain": (
        "print('hello', 7 * 6)",
        "total = 0\nfor i in range(1000):\n    total += i * i % 7\n"
        "print(f'{total:>8} {total / 3:.4f}')",
        "import math, itertools, collections, fractions\n"
        "print(math.comb(10, 4), collections.Counter('abca'), fractions.Fraction(3, 9))\n"
        "print(sum(1 for p in itertools.permutations(range(5)) if p[0] < p[-1]))",
        "int('seven')",
        "[1, 2][5]",
        "print('unfinished'",
        "2 ** 100",
    ),
    "numpy": (
        "import numpy as np\na = np.arange(16.0).reshape(4, 4) + np.eye(4)\n"
        "print(np.linalg.det(a), np.linalg.solve(a, np.ones(4)), np.linalg.eigvals(a))\n"
        "print((a @ a).sum(axis=0), a.mean(), np.sort(a.ravel())[:3])",
    ),
    "base": (
        "from sympy import symbols, solve, simplify, expand, factor, Rational\n"
        "x = symbols('x')\nprint(solve(2*x**2 + x - 15, x), solve([x + 3], [x]))\n"
        "print(expand((x + 1)**3), factor(x**2 - 1), simplify((x**2 - 1)/(x - 1)))\n"
        "print(Rational(3, 7) + Rational(1, 2))",
        "import sympy as sp\nn, k = sp.symbols('n k', integer=True, positive=True)\n"
        "print(sp.factorint(360), sp.isprime(97), sp.gcd(12, 18), sp.binomial(10, 3))\n"
        "print(sp.summation(k, (k, 1, n)), sp.sqrt(8), sp.N(sp.pi, 20))\n"
        "print(sp.diff(sp.sin(n)**2, n), sp.integrate(n**2, n), sp.Matrix([[1, 2], [3, 4]]).det())",
    ),
    "scipy": (
        "import numpy as np\nfrom scipy import optimize, integrate, linalg, stats, special\n"
        "print(optimize.brentq(lambda t: t * t - 2, 0, 2), integrate.quad(np.sin, 0, 1)[0])\n"
        "print(linalg.det(np.eye(3)), stats.norm.cdf(0.5), special.gamma(4.5))",
    ),
    "verify": (),
}


_64 = rb"[A-Za-z0-9+/]"
_ENCODED = re.compile(rb"[\"']((?:%b{4}){4,}(?:%b{2}==|%b{3}=)?)[\"']" % (_64, _64, _64))
"""Base64 of at least 12 bytes as a literal."""


def flavour_for(code: bytes) -> str:
    """The lightest flavour with the modules a program mentions; all of them can execute it."""
    if b"b64decode" in code:
        code = b"\n".join([code, *map(base64.b64decode, _ENCODED.findall(code))])
    if b"scipy" in code or (b"random" in code and (b"numpy" in code or b"np." in code)):
        return "scipy"
    if b"sympy" in code or b"mpmath" in code:
        return "base"
    return "numpy" if b"numpy" in code else "plain"


def warmer(flavour: str, module: str) -> str | None:
    """The flavour to hand a program to that imports a module; None if it is in the right one."""
    needed = _NEEDS.get(module)
    return needed if needed is not None and needed not in _layers(flavour) else None


def warm_elsewhere(flavour: str) -> frozenset[str]:
    """The modules whose import moves a program from this flavour to a warmer one."""
    return frozenset(module for module in _NEEDS if warmer(flavour, module) is not None)


def _layers(flavour: str) -> list[str]:
    """A flavour and those that it is built on, lightest first."""
    layers = [flavour]
    while layers[0] in _BUILT_ON:
        layers.insert(0, _BUILT_ON[layers[0]])
    return layers


def import_modules(flavour: str) -> list[str]:
    """Import the flavour's modules; returns those that are not installed."""
    missing = []
    for name in (name for layer in _layers(flavour) for name in _ADDS[layer]):
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    return missing


def run_programs(flavour: str, rounds: int = 2) -> None:
    """Run the representative programs in this process and discard their output."""
    programs = [program for layer in _layers(flavour) for program in _PROGRAMS[layer]]
    for _ in range(rounds):
        for program in programs:
            with contextlib.redirect_stdout(io.StringIO()):
                runner.execute(program, runner.fresh_main(), 10_000)
        runner.reseed()
