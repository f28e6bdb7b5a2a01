"""One engine behind HTTP: what `base.Engine` promises, over the network.

    POST /generate /score /release /resume /weights   GET /load /capacity

Bodies are msgpack of the nouns; token ids travel as int32 bytes. Weights do not travel here: they
are in a directory that both sides see, and `/weights` names it. Every request carries a bearer
token. A client that hangs up cancels its generation, so that its KV is free again. Errors come back
by name: 400 the caller's, 503 the engine's, 504 a deadline.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from rstar2.engine import wire
from rstar2.engine.base import Engine, WeightUpdate
from rstar2.engine.http import connections
from rstar2.errors import DeadlineError, EngineError, InfrastructureError, UserError
from rstar2.types import EngineCapacity, EngineLoad, Generation, Sampling

CONTROL_DEADLINE_S = 300.0
SLACK_S = 5.0
"""The engine keeps a generation's deadline itself; the client stops waiting this much later."""

KEEP_SERVER_S = 600
"""How long a server keeps idle connections; clients give them up long before (`connections`)."""

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Generate(msgspec.Struct, frozen=True):
    """A turn that is asked for."""

    prompt: bytes
    sampling: Sampling
    session: str
    deadline_s: float


class TakeWeights(msgspec.Struct, frozen=True):
    """Weights that are to be installed, by the directory they are in."""

    version: int
    path: str
    hold: bool


class EngineFailure(msgspec.Struct, frozen=True):
    """Why a request was not answered."""

    error: str
    message: str


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.decode


# --------------------------------------------------------------------------- server


class EngineApp:
    """An ASGI application over one engine."""

    def __init__(self, engine: Engine, token: str) -> None:
        self.engine, self.token = engine, token

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            await _answer(send, 401, _encode(EngineFailure("user", "no or another token")))
            return
        body = await _body(receive)
        work = asyncio.ensure_future(self._handle(scope["path"], body))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await _answer(send, *work.result())
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _handle(self, path: str, body: bytes) -> tuple[int, bytes]:
        try:
            return 200, _encode(await self._call(path, body))
        except UserError as error:
            return 400, _encode(EngineFailure("user", str(error)))
        except DeadlineError as error:
            return 504, _encode(EngineFailure("deadline", str(error)))
        except (InfrastructureError, msgspec.MsgspecError) as error:
            return 503, _encode(EngineFailure("engine", str(error)))

    async def _call(self, path: str, body: bytes) -> Any:
        engine = self.engine
        match path:
            case "/generate":
                asked = _decode(body, type=Generate)
                return await engine.generate(
                    wire.unpack_ids(asked.prompt).tolist(),
                    asked.sampling,
                    session=asked.session,
                    deadline_s=asked.deadline_s,
                )
            case "/score":
                return await engine.score(wire.unpack_ids(body).tolist())
            case "/release":
                return await engine.release(body.decode())
            case "/load":
                return await engine.load()
            case "/capacity":
                return engine.capacity()
            case "/resume":
                return await engine.resume()
            case "/weights":
                new = _decode(body, type=TakeWeights)
                update = WeightUpdate(new.version, path=Path(new.path), hold=new.hold)
                return await engine.update_weights(update)
        raise UserError(f"no such path: {path}")


async def _body(receive: Receive) -> bytes:
    parts = bytearray()
    while True:
        message = await receive()
        parts += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(parts)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/msgpack"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


# --------------------------------------------------------------------------- client


class EngineClient:
    """The other end of an EngineApp."""

    def __init__(self, name: str, url: str, token: str) -> None:
        self.name, self.url = name, url
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {token}"},
            limits=connections(),
            timeout=None,
            trust_env=False,
        )

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str, deadline_s: float
    ) -> Generation:
        asked = Generate(wire.pack_ids(prompt_ids), sampling, session, deadline_s)
        body = await self._ask("POST", "/generate", _encode(asked), deadline_s + SLACK_S)
        return _decode(body, type=Generation)

    async def release(self, session: str) -> None:
        await self._ask("POST", "/release", session.encode())

    async def score(self, token_ids: Sequence[int], deadline_s: float) -> list[float]:
        body = await self._ask("POST", "/score", wire.pack_ids(token_ids), deadline_s)
        return _decode(body, type=list[float])

    async def load(self) -> EngineLoad:
        return _decode(await self._ask("GET", "/load"), type=EngineLoad)

    async def capacity(self) -> EngineCapacity:
        return _decode(await self._ask("GET", "/capacity"), type=EngineCapacity)

    async def resume(self) -> None:
        await self._ask("POST", "/resume")

    async def weights(self, version: int, path: Path, *, hold: bool) -> None:
        await self._ask("POST", "/weights", _encode(TakeWeights(version, str(path), hold)))

    async def close(self) -> None:
        await self._http.aclose()

    async def _ask(
        self, method: str, path: str, body: bytes = b"", deadline_s: float = CONTROL_DEADLINE_S
    ) -> bytes:
        try:
            async with asyncio.timeout(deadline_s):
                response = await self._http.request(method, path, content=body)
        except TimeoutError as error:
            raise DeadlineError(
                f"{self.name}: {path} not answered within {deadline_s:g} s"
            ) from error
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: the client was closed
            raise EngineError(
                f"{self.name} at {self.url}: {path}: {type(error).__name__}: {error}"
            ) from error
        if response.status_code == 200:
            return response.content
        failed = _decode(response.content, type=EngineFailure)
        kinds = {"user": UserError, "deadline": DeadlineError}
        raise kinds.get(failed.error, EngineError)(failed.message)
