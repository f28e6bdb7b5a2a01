"""The settings of the code environment, apart from the rest of the schema: its client and server
import nothing else of the recipe, and start a fifth of a second earlier."""

from __future__ import annotations

import functools
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from rstar2.types import Limits

WarmUp = Literal["before", "after", "never"]
URL_VARIABLE = "RSTAR2_CODEENV_URL"
"""Commands use the server at this address instead of starting one."""
TOKEN_VARIABLE = "RSTAR2_CODEENV_TOKEN"
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class Section(BaseModel):
    """Base class of all sections: immutable, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class CodeEnvConfig(Section):
    """The code environment: a local server that rstar2 owns, or servers given by URL."""

    urls: tuple[str, ...] = ()
    """Servers to use; empty starts a local server."""
    token: str | None = None  #: Secret of the servers.
    isolation: Literal["auto", "strict", "portable"] = "auto"
    """`auto` is strict where the machine allows it."""
    host: str = "127.0.0.1"  #: Address of the local server.
    port: int = Field(0, ge=0, le=65535)
    """0 chooses a free port."""
    slots: int = Field(0, ge=0)
    """Calls executed at a time; 0 means one per core, plus one."""
    warm_up: WarmUp = "before"
    """When interpreters with NumPy, SymPy and SciPy are started: `before` the server is ready
    (SymPy; the others right after), `after` it, or `never` (a call that needs one waits)."""
    packages: tuple[str, ...] = ()
    """Installed packages, and directories of wheels (with a slash), to import in advance."""
    warm_up_programs: tuple[str, ...] = ()
    """Files of programs that interpreters run once before they serve."""
    python: str = ""
    """The interpreter that runs programs; empty: the one that runs the server."""
    queue: int = Field(50_000, ge=1)  #: Calls that may wait; more are refused.
    connections: int = Field(4096, ge=8)
    """Connections that the server keeps open; at most half of the process's descriptors."""
    batch: int = Field(64, ge=1, le=1024)  #: Calls that the client sends in one request.
    linger_s: float = Field(0.002, ge=0)  #: How long the client waits to fill a request.
    sessions: int = Field(1024, ge=0)
    """Sessions that may be open, branches included."""
    session_ttl_s: float = Field(300.0, gt=0)
    """A session that is not used for this long is closed."""
    session_memory_mb: int = Field(1024, ge=64)  #: Memory of a session.
    session_scratch_mb: int = Field(128, ge=1)
    """Files of a session and all its branches together (strict), or of each (portable)."""
    reuse_mb: int = Field(64, ge=0)
    """Memory of a server for results that may be reused; 0 reuses none. Only calls that name a
    group take part, and training names none."""
    default: Limits = Limits(
        wall_s=5.0,
        cpu_s=5.0,
        memory_mb=512,
        processes=32,
        file_mb=16,
        scratch_mb=32,
        output_chars=10_000,
    )
    """Limits of a call that names none."""
    cap: Limits = Limits(
        wall_s=60.0,
        cpu_s=60.0,
        memory_mb=4096,
        processes=128,
        file_mb=256,
        scratch_mb=512,
        output_chars=1_000_000,
    )
    """The highest limits that a call may ask for."""


@functools.lru_cache(maxsize=256)
def effective_limits(asked: Limits, default: Limits, cap: Limits) -> Limits:
    """Every limit set: what was asked or the default, never above the server's cap."""

    def pick(name: str) -> float:
        wanted = getattr(asked, name)
        value = getattr(default, name) if wanted is None else wanted
        return min(float(value), float(getattr(cap, name)))

    return Limits(
        wall_s=float(pick("wall_s")),
        cpu_s=float(pick("cpu_s")),
        memory_mb=int(pick("memory_mb")),
        processes=int(pick("processes")),
        file_mb=int(pick("file_mb")),
        scratch_mb=int(pick("scratch_mb")),
        output_chars=int(pick("output_chars")),
    )
