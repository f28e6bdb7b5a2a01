"""The isolation levels and the time limits that tests of the executor run in."""

from __future__ import annotations

import dataclasses

from rstar2.codeenv.server import probe
from rstar2.config import CodeEnvConfig
from rstar2.errors import IsolationError

PATIENT = dataclasses.replace(CodeEnvConfig().default, wall_s=60.0, cpu_s=60.0)
"""Limits of calls that name none: a program that ends by itself does so on a busy machine too."""


def levels() -> list[str]:
    """All levels that this machine supports."""
    try:
        best = probe.resolve("auto").level
    except IsolationError:
        return []
    return ["strict", "portable"] if best == "strict" else ["portable"]
