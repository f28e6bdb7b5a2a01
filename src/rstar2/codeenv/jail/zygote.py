"""The zygote: a clean, warm, single-threaded interpreter that forks jailed workers on demand.

The server starts it with a minimal environment and only a control socket open, so that it contains
nothing of the service (secrets, torch, threads). Messages are JSON, one per packet; a request to
spawn carries the worker's socket. When the control socket closes, the zygote kills and reaps its
workers, removes their control groups and scratch directories, and exits.

The imports below deliberately precede the warm-up: what a worker writes in every call then lies
outside the warm heap, whose huge pages stay intact.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from rstar2.codeenv.jail import (
    cgroups,
    confine,
    handover,
    heap,
    runner,
    scratch,
    session,
    verify,
    warmup,
    worker,
)

_PR_SET_CHILD_SUBREAPER = 36


_START = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("rstar2", sys.argv[1] + "/__init__.py")
sys.modules["rstar2"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["rstar2"])
from rstar2.codeenv.jail.zygote import main
main(sys.argv[2], int(sys.argv[3]))
"""
"""Imports rstar2 alone: other packages beside it may belong to another version of Python."""


def command(python: str = sys.executable) -> list[str]:
    """How to start a zygote: isolated from the environment and the current directory."""
    return [python, "-I", "-c", _START, str(Path(__file__).resolve().parents[2])]


def environment() -> dict[str, str]:
    """The environment variables of a zygote and its calls."""
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": "/tmp",
        "USER": "user",
        "LOGNAME": "user",
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "TMPDIR": "/tmp",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "NUMEXPR_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
    }


def main(settings: str, descriptor: int) -> None:
    """Warm up, report, then spawn workers until the server closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control = socket.socket(fileno=descriptor)
    options = json.loads(settings)
    zygote = Zygote(control, options)
    zygote.warm_up()
    zygote.serve()
    os._exit(0)  # an interpreter that ends in order would unmap parts of malloc's heap


class Zygote:
    """Forks workers and owns them."""

    def __init__(self, control: socket.socket, options: dict[str, Any]) -> None:
        self.control = control
        self.flavour: str = options["flavour"]
        self.functions: dict[str, str] = options["functions"]
        self.packages: tuple[str, ...] = tuple(options["packages"])
        self.programs: list[str] = options["programs"]
        if options["directory"]:
            sys.path.append(options["directory"])
            confine.more_readable_paths.append(options["directory"])
        self.workers: dict[int, tuple[int, Any]] = {}
        """pidfd -> (pid, spec)."""

    def warm_up(self) -> None:
        """Import, run representative programs, collapse and freeze the heap, then report."""
        warm = heap.WarmHeap()
        missing = warmup.import_modules(self.flavour, self.packages)
        failed = warmup.run_programs(self.flavour, self.programs)
        if self.flavour == "verify":
            missing |= verify.preload(self.functions)
        if self.flavour != "verify":
            handover.install(warmup.warm_elsewhere(self.flavour, self.packages))
        sys.argv = [runner.PROGRAM_FILE]
        sys.path.insert(0, "")
        gc.collect()
        warm.settle()
        heap.immortalize()
        gc.freeze()
        gc.disable()
        confine.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self.say(ready=True, flavour=self.flavour, missing=missing, failed=failed)

    def say(self, **message: Any) -> None:
        """Send a message to the server."""
        with contextlib.suppress(OSError):  # the server has closed the socket: serve() ends next
            self.control.sendall(json.dumps(message).encode())

    def serve(self) -> None:
        """Spawn and reap until the control socket closes, then clean up."""
        poller = select.poll()
        poller.register(self.control, select.POLLIN)
        while True:
            for descriptor, _ in poller.poll():
                if descriptor == self.control.fileno():
                    data, descriptors, _, _ = socket.recv_fds(self.control, 1 << 16, 4)
                    if not data:
                        self.close()
                        return
                    pidfd = self.spawn(json.loads(data), descriptors)
                    if pidfd is not None:
                        poller.register(pidfd, select.POLLIN)
                else:
                    poller.unregister(descriptor)
                    self.reap(descriptor)

    def reap(self, pidfd: int) -> None:
        """Reap a worker that ended and remove its control groups and scratch directory."""
        pid, spec = self.workers.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        os.close(pidfd)
        oom = cgroups.oom_kills(spec.group)
        self._kill_orphans()
        _remove_traces(spec)
        self.say(exited=spec.name, status=status, oom=oom)

    def _kill_orphans(self) -> None:
        """Kill and reap processes of lost workers: the kernel makes them children of the zygote."""
        listing = Path(f"/proc/self/task/{os.getpid()}/children")
        if listing.exists():  # not in every kernel
            known = {pid for pid, _ in self.workers.values()}
            confine.kill_children(lambda: {int(pid) for pid in listing.read_text().split()}, known)

    def spawn(self, message: dict[str, Any], descriptors: list[int]) -> int | None:
        """Fork a worker into its jail; returns a pidfd that is readable when it has ended."""
        fields = message["spec"]
        spec = confine.JailSpec(**{**fields, "group": cgroups.ControlGroup(**fields["group"])})
        try:
            if spec.level == "portable":
                Path(spec.scratch).mkdir(mode=0o700)
                if spec.uid is not None:
                    os.chown(spec.scratch, spec.uid, spec.uid)
            pid = self._fork_worker(spec, descriptors[0])
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            _remove_traces(spec)
            self.say(failed=spec.name, error=str(error))
            return None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self.workers[pidfd] = (pid, spec)
        self.say(spawned=spec.name, pid=pid)
        return pidfd

    def _fork_worker(self, spec: Any, descriptor: int) -> int:
        """Fork a worker; returns its pid."""
        confine.prepare(spec)
        owner = os.geteuid(), os.getegid()
        pid = confine.fork_worker(spec.level)
        if pid == 0:
            self._become_worker(spec, descriptor, owner)
        return pid

    def _become_worker(self, spec: Any, descriptor: int, owner: tuple[int, int]) -> NoReturn:
        """In the worker: enter the jail and serve. A failure is reported on the worker's socket."""
        control = socket.socket(fileno=os.dup(descriptor))
        try:
            os.setsid()  # signals to its process group must not reach the zygote, other workers
            cgroups.join(spec.group, os.getpid())
            if spec.level == "strict":
                confine.leave_namespaces(*owner)
            null = os.open("/dev/null", os.O_RDWR)
            for target in range(4):
                os.dup2(null, target)
            kept = os.dup2(control.detach(), 200)
            os.closerange(4, 200)
            os.closerange(201, os.sysconf("SC_OPEN_MAX"))
            control = socket.socket(fileno=kept)
            os.set_inheritable(kept, False)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            runner.prepare_streams()
            functions = self.functions
            kind = session.SessionWorker if spec.session else worker.JailWorker
            server = kind(
                control, spec, lambda body, fd: verify.run(functions, body, fd), heap.collapse
            )
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            server.base_as = pages * os.sysconf("SC_PAGE_SIZE")
            confine.enter(spec)
            os.environ["HOME"] = os.environ["TMPDIR"] = tempfile.tempdir = spec.scratch
            if not spec.session:  # a session shares the zygote's pages until it writes to them
                heap.fill_holes()
                heap.collapse()
            server.serve()
        except BaseException as error:  # noqa: BLE001 - reported to the server, then exit
            with contextlib.suppress(OSError):
                control.sendall(f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)

    def close(self) -> None:
        """Kill and reap every worker and remove their control groups and scratch directories."""
        for pidfd in self.workers:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        for pid, spec in self.workers.values():
            os.waitpid(pid, 0)
            _remove_traces(spec)
        self.workers.clear()
        self._kill_orphans()


def _remove_traces(spec: Any) -> None:
    """Remove the control groups and the scratch directory of a worker that has ended."""
    for directory in spec.group.directories:
        cgroups.remove(directory)
    if spec.level == "portable":
        with contextlib.suppress(OSError):  # the server tries again when it stops, and logs it
            scratch.remove_tree(spec.scratch)
