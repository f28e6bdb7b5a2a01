"""`base.Engine` over HTTP: the server application and its client.

    POST /generate /score /release /resume /sleep /wake /weights   GET /held /load /capacity

Bodies are msgpack; token ids are int32 bytes. Weights are not sent over HTTP: `/weights` names a
directory that both sides can read. Every request carries a bearer token. A client that disconnects
cancels its generation, which frees its KV. Error responses name the error: 400 UserError, 503
EngineError, 504 DeadlineError.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rstar2.engine import wire
from rstar2.engine.base import Engine, WeightUpdate
from rstar2.engine.checksums import HeldWeights
from rstar2.engine.http import EngineHttp
from rstar2.errors import DeadlineError, EngineError, InfrastructureError, UserError
from rstar2.http_client import Address
from rstar2.token_arrays import plain
from rstar2.types import EngineCapacity, EngineLoad, Generation, Sampling

CONTROL_DEADLINE_S = 300.0
SLACK_S = 5.0
"""The engine enforces a generation's deadline; the client waits this much longer."""

KEEP_SERVER_S = 600
"""Keep-alive of idle connections; clients close them much earlier (`engine.http`)."""

CLIENT_CLOSED = 499
"""Status of a request whose client disconnected; it is never delivered."""

Handler = Callable[[bytes], Awaitable[object]]


class Generate(msgspec.Struct, frozen=True):
    """A request for one generation."""

    prompt: bytes
    sampling: Sampling
    session: str
    deadline_s: float


class TakeWeights(msgspec.Struct, frozen=True):
    """A request to install the weights of a directory."""

    version: int
    path: str
    hold: bool


class EngineFailure(msgspec.Struct, frozen=True):
    """Why a request failed."""

    error: str
    message: str


_encode = msgspec.msgpack.Encoder(enc_hook=plain).encode
_decode = msgspec.msgpack.decode


# --------------------------------------------------------------------------- server


class EngineApp(Starlette):
    """An ASGI application over one engine."""

    def __init__(self, engine: Engine, token: str) -> None:
        self._engine = engine
        self._authorization = f"Bearer {token}".encode()
        super().__init__(
            routes=[
                self._route("POST", "/generate", self._generate),
                self._route("POST", "/score", self._score),
                self._route("POST", "/release", self._release),
                self._route("POST", "/resume", self._resume),
                self._route("POST", "/sleep", self._sleep),
                self._route("POST", "/wake", self._wake),
                self._route("POST", "/weights", self._weights),
                self._route("GET", "/held", self._held),
                self._route("GET", "/load", self._load),
                self._route("GET", "/capacity", self._capacity),
            ]
        )

    def _route(self, method: str, path: str, handler: Handler) -> Route:
        async def endpoint(request: Request) -> Response:
            authorization = request.headers.get("authorization", "").encode()
            if not hmac.compare_digest(authorization, self._authorization):
                return _response(401, EngineFailure("user", "the bearer token is missing or wrong"))
            work = asyncio.ensure_future(_answer(handler, await request.body()))
            disconnect = asyncio.ensure_future(_disconnected(request))
            try:
                await asyncio.wait({work, disconnect}, return_when=asyncio.FIRST_COMPLETED)
                return work.result() if work.done() else Response(status_code=CLIENT_CLOSED)
            finally:
                work.cancel()
                disconnect.cancel()
                await asyncio.gather(work, disconnect, return_exceptions=True)

        return Route(path, endpoint, methods=[method])

    async def _generate(self, body: bytes) -> Generation:
        call = _decode(body, type=Generate)
        return await self._engine.generate(
            wire.unpack_ids(call.prompt).tolist(),
            call.sampling,
            session=call.session,
            deadline_s=call.deadline_s,
        )

    async def _score(self, body: bytes) -> list[float]:
        return await self._engine.score(wire.unpack_ids(body).tolist())

    async def _release(self, body: bytes) -> None:
        await self._engine.release(body.decode())

    async def _resume(self, _: bytes) -> None:
        await self._engine.resume()

    async def _sleep(self, _: bytes) -> None:
        await self._engine.sleep()

    async def _wake(self, _: bytes) -> None:
        await self._engine.wake()

    async def _weights(self, body: bytes) -> None:
        new = _decode(body, type=TakeWeights)
        update = WeightUpdate(new.version, path=Path(new.path), hold=new.hold)
        await self._engine.update_weights(update)

    async def _held(self, _: bytes) -> HeldWeights:
        return await self._engine.held_weights()

    async def _load(self, _: bytes) -> EngineLoad:
        return await self._engine.load()

    async def _capacity(self, _: bytes) -> EngineCapacity:
        return self._engine.capacity()


async def _answer(handler: Handler, body: bytes) -> Response:
    try:
        return _response(200, await handler(body))
    except UserError as error:
        return _response(400, EngineFailure("user", str(error)))
    except DeadlineError as error:
        return _response(504, EngineFailure("deadline", str(error)))
    except (InfrastructureError, msgspec.MsgspecError) as error:
        return _response(503, EngineFailure("engine", str(error)))


def _response(status: int, content: object) -> Response:
    return Response(_encode(content), status, media_type="application/msgpack")


async def _disconnected(request: Request) -> None:
    """Wait until the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        continue


# --------------------------------------------------------------------------- client


class EngineClient:
    """HTTP client of an EngineApp."""

    def __init__(self, name: str, url: str, token: str) -> None:
        self.name, self.url = name, url
        self._http = EngineHttp(f"{name} at {url}", Address.parse(url, token))

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str, deadline_s: float
    ) -> Generation:
        call = Generate(wire.pack_ids(prompt_ids), sampling, session, deadline_s)
        body = await self._ask(
            "POST", "/generate", _encode(call), deadline_s + SLACK_S, patient=True
        )
        return _decode(body, type=Generation)

    async def release(self, session: str) -> None:
        await self._ask("POST", "/release", session.encode())

    async def score(self, token_ids: Sequence[int], deadline_s: float) -> list[float]:
        body = await self._ask("POST", "/score", wire.pack_ids(token_ids), deadline_s)
        return _decode(body, type=list[float])

    async def held_weights(self) -> HeldWeights:
        return _decode(await self._ask("GET", "/held"), type=HeldWeights)

    async def load(self) -> EngineLoad:
        unsent = self._http.unsent
        load = _decode(await self._ask("GET", "/load"), type=EngineLoad)
        return replace(load, waiting=load.waiting + max(unsent, self._http.unsent))

    async def capacity(self) -> EngineCapacity:
        return _decode(await self._ask("GET", "/capacity"), type=EngineCapacity)

    async def resume(self) -> None:
        await self._ask("POST", "/resume")

    async def sleep(self) -> None:
        await self._ask("POST", "/sleep")

    async def wake(self) -> None:
        await self._ask("POST", "/wake")

    async def weights(self, version: int, path: Path, *, hold: bool) -> None:
        await self._ask("POST", "/weights", _encode(TakeWeights(version, str(path), hold)))

    async def close(self) -> None:
        await self._http.close()

    async def _ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        deadline_s: float = CONTROL_DEADLINE_S,
        *,
        patient: bool = False,
    ) -> bytes:
        status, answer = await self._http.ask(method, path, body, deadline_s, patient=patient)
        if status == 200:
            return answer
        try:
            failure = _decode(answer, type=EngineFailure)
        except msgspec.MsgspecError as error:
            raise EngineError(f"{self.name}: {path} answered {status}: {error}") from error
        kinds = {"user": UserError, "deadline": DeadlineError}
        raise kinds.get(failure.error, EngineError)(failure.message)
