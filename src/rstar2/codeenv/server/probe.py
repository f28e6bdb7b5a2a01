"""What this kernel and container support, and the isolation level that follows.

`resolve` is called once before an executor is made. It tries each feature in a temporary child
process; the reason names a namespace that could not be created.
"""

from __future__ import annotations

import functools
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rstar2.codeenv.jail import cgroups, confine, landlock, scratch, syscalls
from rstar2.codeenv.protocol import Isolation
from rstar2.errors import IsolationError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Probe:
    """Features of this kernel, container and user, as tried just now."""

    machine: str
    kernel: str
    root: bool
    landlock_abi: int
    seccomp: str | None
    """None if it works, else why not; the same for namespaces and pidfd."""
    namespaces: str | None
    pidfd: str | None
    cgroups: tuple[str, ...]
    """Usable controllers: memory and pids set limits, cpuacct (version 1) counts CPU time."""
    huge_pages: str


@dataclass(frozen=True, slots=True)
class Resolution:
    """The isolation level of calls, and why it is not a better one."""

    level: Isolation
    reason: str
    advice: tuple[str, ...] = ()


def probe() -> Probe:
    """Try everything that the jail needs."""
    controllers = {c for h in cgroups.hierarchies() for c in h.controllers}
    return Probe(
        machine=syscalls.MACHINE,
        kernel=os.uname().release,
        root=os.geteuid() == 0,
        landlock_abi=(
            min(landlock.abi(), newest_landlock_abi())
            if syscalls.MACHINE in syscalls.AUDIT_ARCH
            else 0
        ),
        seccomp=_tried(_try_seccomp),
        namespaces=_tried(_try_namespaces),
        pidfd=_tried(lambda: os.close(os.pidfd_open(os.getpid()))),
        cgroups=tuple(sorted(controllers)),
        huge_pages=_huge_pages(),
    )


def resolve(asked: str, features: Probe | None = None) -> Resolution:
    """The level for `asked` (auto, strict, portable); IsolationError if it is unavailable."""
    features = features or probe()
    common = [
        text
        for text in (
            None if features.landlock_abi else "Landlock is missing (Linux 5.13 or later needed)",
            features.seccomp and f"seccomp: {features.seccomp}",
            features.pidfd and f"pidfd: {features.pidfd}",
        )
        if text
    ]
    if common:
        raise IsolationError("no isolation level is available here: " + "; ".join(common))
    advice = _advice(features)
    if asked == "portable":
        return Resolution("portable", "requested", advice)
    if features.namespaces is None:
        return Resolution("strict", "namespaces can be created", advice)
    if asked == "strict":
        raise IsolationError(
            f"isolation strict is unavailable: {features.namespaces}. " + " ".join(advice)
        )
    return Resolution("portable", f"no namespaces: {features.namespaces}", advice)


def _advice(features: Probe) -> tuple[str, ...]:
    advice = []
    if features.namespaces is not None:
        advice.append(
            "For strict: allow unprivileged user namespaces (sysctl user.max_user_namespaces, "
            "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns=0), "
            "or in a container add CAP_SYS_ADMIN or a seccomp profile that allows unshare."
        )
    if not {"memory", "pids"} <= set(features.cgroups):
        advice.append(
            "For child processes inside calls: give the service a delegated control group with "
            "memory and pids (systemd-run --user -p Delegate=yes, or run as root)."
        )
    return tuple(advice)


def worker_uid(level: str, wanted: int) -> int | None:
    """The unprivileged uid that root gives a worker; None keeps the current one.

    In portable the interpreter must be readable for that uid, because its files are not bound to
    other places. If it is not, the worker stays root without capabilities, confined by Landlock.
    """
    if os.geteuid() != 0:
        return None
    return wanted if level == "strict" or _interpreter_open_to_all() else None


@functools.cache
def _interpreter_open_to_all() -> bool:
    return all(_open_to_all(path) for path in confine.readable_paths())


def _open_to_all(path: str) -> bool:
    real = Path(path).resolve()
    return all(p.stat().st_mode & stat.S_IXOTH for p in real.parents) and bool(
        real.stat().st_mode & stat.S_IROTH
    )


def newest_landlock_abi() -> int:
    """The newest ABI of Landlock to use. Tests lower it to that of an older kernel."""
    return int(os.environ.get("RSTAR2_TEST_LANDLOCK_ABI", landlock.NEWEST_ABI))


def sweep_runtime() -> None:
    """Remove this user's runtime directories of servers that have ended."""
    for entry in Path(tempfile.gettempdir()).glob(f"{cgroups.PREFIX}*-*-*"):
        if not cgroups.owner_alive(entry.name) and _is_ours(entry):
            remove_runtime(str(entry))


def _is_ours(entry: Path) -> bool:
    try:
        return entry.lstat().st_uid == os.geteuid()
    except FileNotFoundError:
        return False  # another server that starts at the same time has removed it


def remove_runtime(directory: str) -> None:
    """Remove a runtime directory. One that cannot be removed is logged and stops nothing."""
    try:
        scratch.remove_tree(directory)
    except FileNotFoundError:
        return  # another server that starts at the same time has removed it
    except OSError as error:
        _log.warning("%s could not be removed: %s; delete it by hand", directory, error)


def _tried(action: Callable[[], object]) -> str | None:
    """Run `action` in a forked child; None if it worked, else its error."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - reported to the parent, which decides
            os.write(writer, str(error).encode()[:2000] or b"failed")
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        text = answer.read().decode("utf-8", "replace")
    _, status = os.waitpid(pid, 0)
    return text or (None if status == 0 else f"the trial ended with status {status}")


def _try_seccomp() -> None:
    from rstar2.codeenv.jail import seccomp

    confine.prctl(38, 1)
    seccomp.base_filter(strict=False).install()


def _try_namespaces() -> None:
    """Create namespaces, mount and pivot, in a temporary directory."""
    runtime = tempfile.mkdtemp(prefix=f"{cgroups.owner_name()}-")
    try:
        pid = os.fork()
        if pid == 0:
            _enter_trial(runtime)
        _, status = os.waitpid(pid, 0)
        if status:
            raise OSError(Path(runtime, "error").read_text())
    finally:
        remove_runtime(runtime)


def _enter_trial(runtime: str) -> None:
    error_file = os.open(f"{runtime}/error", os.O_CREAT | os.O_WRONLY, 0o600)
    spec = confine.JailSpec(
        "strict",
        "trial",
        runtime,
        64,
        4,
        1,
        worker_uid("strict", 60_099),
        cgroups.ControlGroup(1, None, None),
    )
    try:
        confine.unshare_namespaces()
        pid = os.fork()
        if pid == 0:
            confine.enter(spec)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        os._exit(1 if status else 0)
    except BaseException as error:  # noqa: BLE001 - reported to the parent in the file
        os.write(error_file, str(error).encode())
    finally:
        os._exit(1)


def _huge_pages() -> str:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unavailable"
    return text.partition("[")[2].partition("]")[0] or "unknown"
