"""A server that a client starts, owns and restarts; it dies with its owner, even on kill -9.

The child is `python -m rstar2.codeenv.server.serve` in its own session (a Ctrl-C in the terminal
reaches
the owner, who then stops it in order). The pipe to its stdin is the lease on its life: its end
tells the child that the owner is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import sys

import msgspec

from rstar2 import errors
from rstar2.codeenv import deadlines
from rstar2.codeenv.wire import ServerReady
from rstar2.config import CodeEnvConfig
from rstar2.errors import CodeEnvError, DeadlineError


class LocalServer:
    """One owned server process at a time."""

    def __init__(self, config: CodeEnvConfig, host: str = "127.0.0.1") -> None:
        self.token = secrets.token_hex(16)
        self.config = config.model_copy(update={"urls": (), "token": self.token, "host": host})
        self.ready = ServerReady()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> ServerReady:
        """Start the process and wait until it serves; raises the error it named."""
        assert not self.running, "one owned server at a time"
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rstar2.codeenv.server.serve",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(deadlines.OWNED_START_S):
                self.ready = await self._hello(self._process)
        except TimeoutError as error:
            await self.stop()
            raise DeadlineError(
                f"the local code environment did not start within {deadlines.OWNED_START_S:g} s"
            ) from error
        except BaseException:
            await self.stop()
            raise
        return self.ready

    async def _hello(self, process: asyncio.subprocess.Process) -> ServerReady:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(ConnectionError):  # it died at once: the empty line below tells
            process.stdin.write(self.config.model_dump_json().encode() + b"\n")
            await process.stdin.drain()
        line = await process.stdout.readline()
        if not line:
            raise CodeEnvError(
                f"the local code environment ended at once with status {await process.wait()}; "
                "its message is on stderr, and `rstar2 doctor` shows what this machine can do"
            )
        ready = msgspec.json.decode(line, type=ServerReady)
        if ready.error:
            kind = getattr(errors, ready.error, CodeEnvError)
            raise kind(ready.message)
        return ready

    async def wait(self) -> int:
        """Wait for the process to end."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> None:
        """Ask it to end, then make it; returns when it is gone."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            if process.stdin is not None:
                process.stdin.close()
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), deadlines.OWNED_STOP_S)
            except TimeoutError:
                process.kill()
        await process.wait()
        # asyncio closes the pipes when the transport notices; do it now, so that nothing is left.
        process._transport.close()  # type: ignore[attr-defined]
        self._process = None
