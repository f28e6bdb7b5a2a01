"""Inside the cell: the executor under attack, the canaries, a line protocol on stdin and stdout.

Canaries: a world-readable secret file, a secret in the environment and memory of this process (the
service), listeners on loopback and on an abstract Unix socket, a victim process of the same user,
and a world-writable directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

SECRET = f"canary-{secrets.token_hex(16)}"
os.environ["RSTAR2_TEST_SECRET"] = SECRET

from rstar2.codeenv.jail import confine  # noqa: E402
from rstar2.codeenv.protocol import RunRequest  # noqa: E402
from rstar2.codeenv.server import probe  # noqa: E402
from rstar2.codeenv.server.calls import CallTable  # noqa: E402
from rstar2.codeenv.server.executor import WorkerExecutor  # noqa: E402 - after the secret
from rstar2.config import CodeEnvConfig  # noqa: E402
from rstar2.config.codeenv import WarmUp  # noqa: E402
from rstar2.errors import CodeEnvError, UserError  # noqa: E402
from rstar2.types import Limits, encode  # noqa: E402

INSTALLED = {Path(path).parts[2] for path in confine.readable_paths() if path.startswith("/tmp/")}
"""Entries of /tmp that lead to an interpreter or a checkout below it."""


PATIENCE_S = 90.0
"""How long a wait for an event may take on a busy machine."""


class Canaries:
    """The targets of the attacks; they notice whether an attack succeeded."""

    def __init__(self) -> None:
        self.contacts: list[str] = []
        home = Path("/srv/cell/service")
        home.mkdir(mode=0o755)
        self.secret_file = home / "secret.txt"
        self.secret_file.write_text(SECRET)
        self.secret_file.chmod(0o644)
        self.open_directory = Path("/srv/cell/everybody")
        self.open_directory.mkdir()
        self.open_directory.chmod(0o777)
        self.victim = subprocess.Popen(["sleep", "100000"])
        self.tcp = self._listen(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0))
        self.udp = self._listen(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0))
        self._listen(socket.AF_UNIX, socket.SOCK_STREAM, "\0rstar2-canary")
        self.unix_path = str(home / "service.sock")
        self._listen(socket.AF_UNIX, socket.SOCK_STREAM, self.unix_path)
        Path(self.unix_path).chmod(0o777)
        self.datagrams = str(home / "datagrams.sock")
        self._listen(socket.AF_UNIX, socket.SOCK_DGRAM, self.datagrams)
        Path(self.datagrams).chmod(0o777)
        self._listen(socket.AF_UNIX, socket.SOCK_DGRAM, "\0rstar2-datagrams")

    def _listen(self, family: int, kind: int, address: Any) -> int:
        sock = socket.socket(family, kind)
        sock.bind(address)
        if kind == socket.SOCK_STREAM:
            sock.listen(8)
        threading.Thread(target=self._serve, args=(sock, kind, str(address)), daemon=True).start()
        return int(sock.getsockname()[1]) if family == socket.AF_INET else 0

    def _serve(self, sock: socket.socket, kind: int, label: str) -> None:
        while True:
            if kind == socket.SOCK_STREAM:
                sock.accept()[0].close()
            else:
                sock.recvfrom(100)
            self.contacts.append(label)

    def facts(self) -> dict[str, Any]:
        return {
            "secret": SECRET,
            "secret_file": str(self.secret_file),
            "open_directory": str(self.open_directory),
            "victim": self.victim.pid,
            "server": os.getpid(),
            "tcp": self.tcp,
            "udp": self.udp,
            "unix_path": self.unix_path,
            "datagrams": self.datagrams,
            "secret_address": _address(SECRET),
        }

    def damage(self) -> list[str]:
        """Everything that an attack changed or reached; empty if all attacks failed."""
        damage = [f"contact on {label}" for label in self.contacts]
        if self.victim.poll() is not None:
            damage.append(f"victim ended: {self.victim.returncode}")
        if (
            self.secret_file.read_text() != SECRET
            or self.secret_file.stat().st_mode & 0o777 != 0o644
        ):
            damage.append("secret file changed")
        damage += [f"planted {p}" for p in self.open_directory.iterdir()]
        return damage


def _children(parent: int) -> list[str]:
    """The pids of a process's children."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "stat").read_text().rpartition(")")[2].split()[1] == str(parent):
                    pids.append(entry.name)
    return pids


def _thread_states(pid: str) -> list[str]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [(t / "stat").read_text().rpartition(")")[2].split()[0] for t in threads]


def _marked() -> bool:
    """Whether a program has called `mark()` (attacker.MARK)."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "comm").read_text() == "marked\n":
                    return True
    return False


async def _until_marked(run: asyncio.Task[Any]) -> None:
    """Wait until the program of a call has called `mark()`."""
    async with asyncio.timeout(PATIENCE_S):
        while not _marked():
            assert not run.done(), f"the program ended: {run.result()}"
            await asyncio.sleep(0.01)


def _mappings(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text().splitlines()


def _address(text: str) -> int:
    """The address of the characters of an ASCII string in this process."""
    return id(text) + sys.getsizeof(text) - len(text) - 1


class Server:
    """Executes the orders of the attacker, one at a time."""

    def __init__(self, executor: WorkerExecutor, canaries: Canaries) -> None:
        self.executor = executor
        self.table = CallTable(executor, executor.config, "cell")
        self.canaries = canaries

    async def answer(self, order: dict[str, Any]) -> Any:
        operation = order.pop("op")
        handler = getattr(self, f"do_{operation}")
        return await handler(**order)

    async def do_run(self, limits: dict[str, Any], **fields: Any) -> Any:
        result = await self.table.call(
            RunRequest(id=secrets.token_hex(8), limits=Limits(**limits), **fields)
        )
        return json.loads(encode(result))

    async def do_runs(self, orders: list[dict[str, Any]]) -> Any:
        """Run programs side by side."""
        return await asyncio.gather(*(self.do_run(**order) for order in orders))

    @contextlib.asynccontextmanager
    async def _beside(self, endless: dict[str, Any]) -> AsyncIterator[asyncio.Task[Any]]:
        """Once `endless` has called `mark()` and while it runs; it is cancelled at the end."""
        occupied = asyncio.create_task(self.do_run(**endless))
        await _until_marked(occupied)
        try:
            yield occupied
        finally:
            occupied.cancel()
            await asyncio.gather(occupied, return_exceptions=True)

    async def do_runs_beside(self, endless: dict[str, Any], orders: list[dict[str, Any]]) -> Any:
        async with self._beside(endless) as occupied:
            results = await self.do_runs(orders)
            return {"results": results, "endless_still_runs": not occupied.done()}

    async def do_open_beside(self, endless: dict[str, Any]) -> Any:
        async with self._beside(endless):
            return await self.do_open()

    async def do_open(self) -> Any:
        return (await self.executor.open_session(None, None)).id

    async def do_branch(self, session: str) -> Any:
        return (await self.executor.branch_session(session, None)).id

    async def do_refused_branch(self, session: str) -> Any:
        """The error of a branch that must fail."""
        try:
            await self.executor.branch_session(session, None)
        except CodeEnvError as error:
            return f"{error.name}: {error}"
        return ""

    async def do_abandon(self, **order: Any) -> Any:
        """Run a program in a session and leave when it has called `mark()`."""
        run = asyncio.create_task(self.do_run(**order))
        await _until_marked(run)
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)

    async def do_session_threads(self) -> Any:
        """The states of all threads of the only session and its branches (proc_pid_stat(5)).

        Waits until all have stopped: the worker does not wait until a new branch has stopped.
        """
        (link,) = [link for link in self.executor.workers.links if link.spec.session]
        deadline = time.monotonic() + PATIENCE_S
        while True:
            states = [state for pid in _children(link.pid) for state in _thread_states(pid)]
            if set(states) == {"T"} or time.monotonic() > deadline:
                return states
            await asyncio.sleep(0.01)

    async def do_end_session_worker(self) -> Any:
        """Kill the worker of the only session, and wait until it has ended."""
        (link,) = [link for link in self.executor.workers.links if link.spec.session]
        os.kill(link.pid, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.shield(link.exited)

    async def do_close_session(self, session: str) -> Any:
        with contextlib.suppress(UserError):
            await self.executor.close_session(session)

    async def do_kill_session_worker(self, **order: Any) -> Any:
        """Run a program in a session; stop the worker when it runs, kill it once a bomb spreads."""
        (link,) = [link for link in self.executor.workers.links if link.spec.session]
        before = len(_children(link.pid))
        run = asyncio.create_task(self.do_run(**order))
        copies = 20 if link.spec.forks else 1  # the stopped worker allows no copies
        for number, more in ((signal.SIGSTOP, 1), (signal.SIGKILL, copies)):
            async with asyncio.timeout(PATIENCE_S):
                while len(_children(link.pid)) < before + more and not run.done():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            os.kill(link.pid, number)
        return await run

    async def do_unjailed(self, code: str) -> Any:
        """Run a program in the cell but outside the jail: shows that an attack can succeed."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd="/srv/cell/everybody",
        )  # fmt: skip
        out, _ = await asyncio.wait_for(process.communicate(), 120)
        return out.decode("utf-8", "replace")

    async def do_sweep_leftovers(self) -> Any:
        """Leave a hostile tree as a killed server would, then clean up as the next start does."""

        def leave_and_sweep() -> list[str]:
            leftover = Path("/tmp/rstar2-codeenv-999999999-1-left")
            leftover.mkdir()
            here = os.open(leftover, os.O_RDONLY)
            for _ in range(3000):
                os.mkdir("d" * 30, dir_fd=here)
                inner = os.open("d" * 30, os.O_RDONLY, dir_fd=here)
                os.mkdir("locked", 0, dir_fd=here)
                os.symlink("/srv/cell/service", "link", dir_fd=here)
                os.close(here)
                here = inner
            os.close(here)
            probe.sweep_runtime()
            return [str(leftover)] if leftover.exists() else []

        return await asyncio.to_thread(leave_and_sweep)

    async def do_shared_mappings(self) -> Any:
        """Writable shared mappings of the workers."""
        lines = [line for link in self.executor.workers.links for line in _mappings(link.pid)]
        assert lines
        return [line for line in lines if "rw-s" in line]

    async def do_forgive(self, contacts: int) -> Any:
        """Wait for the contacts of an attack that is expected to succeed, and forget them."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.canaries.contacts) < contacts:  # noqa: ASYNC110 (threads, no event)
                await asyncio.sleep(0.01)
        self.canaries.contacts.clear()

    async def do_damage(self) -> Any:
        """Damage and leftovers. Cleaning up after an attack takes time: wait until it is done."""
        deadline = time.monotonic() + PATIENCE_S
        while (left := self.leftovers()) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.03)
        return self.canaries.damage() + left

    def leftovers(self) -> list[str]:
        """Processes that are not ours, and files in /tmp that should not exist."""
        ours = {1, os.getpid(), self.canaries.victim.pid}
        ours |= {z.pid for z in self.executor.workers.zygotes.values()}
        ours |= {link.pid for link in self.executor.workers.links}
        left = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) not in ours:
                with contextlib.suppress(OSError):
                    status = (entry / "stat").read_text()
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    session_heads = any(link.spec.session for link in self.executor.workers.links)
                    starting = "zygote" in command and status.split()[3] == str(os.getpid())
                    if not session_heads and not starting:
                        left.append(f"process left: {status.split()[:4]} {command[-60:]}")
        expected = {Path(self.executor.workers.directory).name} | INSTALLED
        left += [f"file left: {p}" for p in Path("/tmp").iterdir() if p.name not in expected]
        allowed = {link.name for link in self.executor.workers.links} | {"canary"}
        with contextlib.suppress(OSError):
            inside = {p.name for p in Path(self.executor.workers.directory).iterdir()}
            left += [f"scratch left: {name}" for name in inside - allowed]
        return left


async def main(level: str, warm_up: WarmUp) -> None:
    executor = WorkerExecutor(CodeEnvConfig(slots=2, isolation=level, warm_up=warm_up), level)
    await executor.start()
    server = Server(executor, Canaries())
    print(json.dumps({"ready": True, **server.canaries.facts()}), flush=True)
    loop = asyncio.get_running_loop()
    while True:
        line = await loop.run_in_executor(None, sys.stdin.readline)
        if not line:
            break
        try:
            answer = {"ok": await server.answer(json.loads(line))}
        except Exception as error:  # noqa: BLE001 - shown by the test that caused it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    await server.table.close(0)
    await executor.close()
    left = [name for name in os.listdir("/tmp") if name.startswith("rstar2")]  # noqa: PTH208
    print(json.dumps({"left": left}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main(**json.loads(sys.stdin.readline())))
