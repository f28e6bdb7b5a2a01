"""A session as its caller uses it: `async with await client.open() as session`.

client.open() -> CodeSession -> run, run, branch -> CodeSession -> close
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from rstar2.codeenv.protocol import RunRequest, SessionInfo
from rstar2.types import Limits, ToolResult

if TYPE_CHECKING:
    from rstar2.codeenv.client.client import CodeEnvClient


class CodeSession:
    """A Python interpreter on one server that keeps its state across calls.

    - Variables, imports, files and threads of a call that succeeds are there in the next call.
      Threads run only while a call of their session runs.
    - A call that fails (any outcome except OK and NO_OUTPUT) leaves the interpreter as it was
      before the call. Files are not rolled back, and threads that were alive are gone.
    - `branch` copies the interpreter and its files; from then on the two are independent. Threads
      are not copied.
    - A session that is lost (its worker or its server ended) stays lost: `run` returns the outcome
      INFRASTRUCTURE with a message that says so, and `branch` raises CodeEnvError. A call never
      runs in a silently fresh interpreter.
    - A session that is not used for its `ttl_s` expires; it then counts as lost.
    - Calls of one session, and of all its branches, run one after another in order of arrival.

    Ids are made here unless given. `close` may be called more than once.
    """

    def __init__(self, client: CodeEnvClient, info: SessionInfo) -> None:
        self._client = client
        self.info = info
        self._closed = False

    @property
    def id(self) -> str:
        return self.info.id

    async def run(
        self,
        code: str,
        stdin: str = "",
        limits: Limits = Limits(),
        *,
        call_id: str | None = None,
        deadline_s: float | None = None,
    ) -> ToolResult:
        """Run code in this session. A call is never sent twice, so no effect happens twice."""
        request = RunRequest(
            call_id or f"c-{uuid.uuid4().hex}", code, stdin, limits, self.id, deadline_s
        )
        return await self._client.run(request)

    async def branch(self, branch: str | None = None) -> CodeSession:
        """A copy of this session in its current state; `branch` is the id of the copy."""
        return CodeSession(self._client, await self._client.branch_session(self.id, branch))

    async def close(self) -> None:
        """End the session and free its memory. A lost or expired session is closed already."""
        if not self._closed:
            self._closed = True
            await self._client.close_session(self.id)

    async def __aenter__(self) -> CodeSession:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
