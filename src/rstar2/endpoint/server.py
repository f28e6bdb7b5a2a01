"""One OpenAI-compatible base URL per rollout, served from the fleet.

    GET  /{secret}/v1/models
    POST /{secret}/v1/chat/completions

The secret is random and valid until its rollout ends; any API key is accepted. A program that
disconnects cancels its request, which then leaves no trace in the rollout.

Who is to blame decides the response:

| what happened                                     | status | becomes                             |
|---------------------------------------------------|--------|-------------------------------------|
| a request that cannot be served                   | 400    | the program's business              |
| the rollout reached max_length or max_turns       | 400    | `stop` of the rollout               |
| an engine failed or missed its deadline           | 503    | `failure`; later requests get 503   |
| an error in this code                             | 500    | `error`, which ends the run         |
| a URL whose rollout has ended                     | 404    |                                     |

Only status 503 could be worth a retry, and the rollout is retried as a whole: the headers tell
OpenAI's clients not to repeat the request.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rstar2.agent.episodes import failure_of
from rstar2.agent.loop import RolloutSpec, release_session, sample_turn
from rstar2.agent.template import Template
from rstar2.endpoint.chat import (
    ChatChoice,
    ChatRequest,
    ChatRequestError,
    chunks,
    completion,
    error_body,
    read_reply,
    read_request,
)
from rstar2.endpoint.segments import ChatMessage, ChatPrompt, RolloutTokens, cut_at_stop
from rstar2.engine.base import Generator
from rstar2.errors import DeadlineError, EngineError, InfrastructureError, InvariantError
from rstar2.http_server import SignalFreeServer
from rstar2.seeds import derive_seed
from rstar2.tasks import cancel_all
from rstar2.types import Failure, Finish, Generation, StopReason, Turn

HOST = "127.0.0.1"
MODEL = "policy"
START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 10.0
KEEP_ALIVE_S = 600
CLIENT_CLOSED = 499
"""Status of a request whose client disconnected; it is never delivered."""
LIMIT_CODES = {
    StopReason.MAX_LENGTH: "context_length_exceeded",
    StopReason.MAX_TURNS: "turn_limit",
}
NO_RETRY = {"x-should-retry": "false"}


@dataclass(slots=True)
class RolloutEndpoint:
    """One rollout: what its program asked, and the tokens that were sampled for it."""

    id: str
    seed: int
    generator: Generator
    template: Template
    spec: RolloutSpec
    deadline_s: float
    """For one generation."""
    base_url: str = ""
    tokens: RolloutTokens = field(init=False)
    stop: StopReason | None = None
    """The limit that the rollout reached first."""
    failure: Failure | None = None
    error: Exception | None = None
    refused: str = ""
    """The newest request that was refused, and why."""
    turns: int = 0
    numbers: Iterator[int] = field(default_factory=itertools.count)
    """One per generation, for its seed and the ids of its calls."""
    clock: float = field(default_factory=time.perf_counter)
    sessions: set[str] = field(default_factory=set)
    program: asyncio.Timeout | None = None
    """The deadline of the program while it runs. It stands still while the model answers."""
    answering: int = 0
    left_s: float = 0.0
    """What is left of the program's deadline while it stands still."""

    def __post_init__(self) -> None:
        self.tokens = RolloutTokens(self.template)

    async def complete(self, request: ChatRequest) -> tuple[list[ChatChoice], dict[str, int]]:
        """Sample the replies to a request and record them; returns them and the token counts."""
        if self.failure is not None:
            raise EngineError(f"this rollout has failed: {self.failure.message}")
        if self.turns + request.choices > self.spec.max_turns:
            raise ChatRequestError(
                "messages",
                f"the rollout has reached its limit of {self.spec.max_turns} turns",
                StopReason.MAX_TURNS,
            )
        self.turns += request.choices
        with self._program_waits():
            return await self._complete(request)

    @contextmanager
    def _program_waits(self) -> Iterator[None]:
        """Stop the program's clock: a turn has its own deadline, and may wait for an engine."""
        loop = asyncio.get_running_loop()
        program = self.program
        if program is not None and not program.expired() and (when := program.when()) is not None:
            self.left_s = when - loop.time()
            program.reschedule(None)
        self.answering += 1
        try:
            yield
        finally:
            self.answering -= 1
            if self.program is not None and not self.program.expired() and not self.answering:
                self.program.reschedule(loop.time() + self.left_s)

    async def _complete(self, request: ChatRequest) -> tuple[list[ChatChoice], dict[str, int]]:
        prompts: list[ChatPrompt] = []
        sampled: list[tuple[ChatChoice, Turn]] = []
        try:
            for _ in range(request.choices):
                prompts.append(self.tokens.prompt(request.messages, request.tools))
                sampled.append(await self._sample(request, prompts[-1], next(self.numbers)))
        except BaseException:
            self.turns -= request.choices
            for prompt in prompts:
                self.tokens.abandon(prompt)
            raise
        for prompt, (choice, turn) in zip(prompts, sampled, strict=True):
            self.tokens.record(prompt, choice.message, turn)
        prompt_tokens = len(prompts[0].ids)
        new = sum(len(turn.sampled_ids) for _, turn in sampled)
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new,
            "total_tokens": prompt_tokens + new,
        }
        return [choice for choice, _ in sampled], usage

    async def _sample(
        self, request: ChatRequest, prompt: ChatPrompt, number: int
    ) -> tuple[ChatChoice, Turn]:
        started = time.perf_counter()
        generation = await self._generate(request, prompt, number)
        generation, text, stopped = cut_at_stop(generation, self.template.turn_text, request.stops)
        message = read_reply(
            text,
            call_prefix=f"call_{number}_",
            calls_allowed=bool(request.tools) and request.calls_allowed,
        )
        turn = Turn(
            sampled_ids=generation.token_ids,
            logprobs=generation.logprobs,
            versions=generation.versions,
            text=self.template.turn_text(generation.token_ids),
            entropies=generation.entropies,
            finish=Finish.STOP if stopped else generation.finish,
            engine=generation.engine,
            started_s=started - self.clock,
            queue_s=generation.queue_s,
            preempted_s=generation.preempted_s,
            generate_s=time.perf_counter() - started,
            cached_tokens=generation.cached_tokens,
        )
        return ChatChoice(message, _finish_reason(message, turn.finish)), turn

    async def _generate(self, request: ChatRequest, prompt: ChatPrompt, number: int) -> Generation:
        room = self.spec.max_length - len(prompt.ids)
        if room < 1:
            raise ChatRequestError(
                "messages",
                f"the prompt has {len(prompt.ids)} tokens, which leaves no room for a reply: a "
                f"rollout has at most {self.spec.max_length}",
                StopReason.MAX_LENGTH,
            )
        session = f"{self.id}#{prompt.session}" if prompt.session else self.id
        self.sessions.add(session)
        generation = await sample_turn(
            self.generator,
            prompt.ids,
            self.spec.sampling,
            self.template,
            max_new_tokens=min(room, request.max_tokens or room),
            seed=derive_seed(self.seed, number),
            session=session,
            deadline_s=self.deadline_s,
        )
        if generation.finish is Finish.CANCELLED:
            raise EngineError("the engine cancelled the request")
        return generation

    async def release(self) -> None:
        """Free the cached prefixes of all segments."""
        for session in sorted(self.sessions):
            await release_session(self.generator, session)


def _finish_reason(message: ChatMessage, finish: Finish) -> str:
    if finish is Finish.LENGTH:
        return "length"
    return "tool_calls" if message.calls else "stop"


# --------------------------------------------------------------------------- HTTP


def new_secret() -> str:
    """The part of a base URL that cannot be guessed."""
    return secrets.token_urlsafe(24)


class EndpointServer:
    """The HTTP server of all rollouts of a process; use as an async context manager."""

    def __init__(self, host: str = HOST) -> None:
        self._host = host
        self._rollouts: dict[str, RolloutEndpoint] = {}
        self._running: dict[str, set[asyncio.Task[Any]]] = {}
        self._url = ""
        self._socket: socket.socket | None = None
        self._server: SignalFreeServer | None = None
        self._serving: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Listen on a free port."""
        app = Starlette(
            routes=[
                Route("/{secret}/v1/models", self._models, methods=["GET"]),
                Route("/{secret}/v1/chat/completions", self._completions, methods=["POST"]),
            ]
        )
        self._socket = socket.create_server((self._host, 0), backlog=1024)
        self._url = f"http://{self._host}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            app,
            log_level="error",
            lifespan="off",
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(STOP_DEADLINE_S),
        )
        self._server = SignalFreeServer(config)
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                while not self._server.started:
                    if self._serving.done():
                        self._serving.result()
                        raise InfrastructureError("the endpoint's HTTP server ended during startup")
                    await asyncio.sleep(0.01)
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                raise DeadlineError(
                    f"the endpoint's HTTP server did not start within {START_DEADLINE_S:g} s"
                ) from error
            raise

    async def close(self) -> None:
        """Stop listening and cancel what is running; idempotent."""
        for secret in list(self._rollouts):
            await self._end(secret)
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            _, pending = await asyncio.wait({self._serving}, timeout=STOP_DEADLINE_S)
            if pending:
                self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
        self._server = self._serving = self._socket = None

    @asynccontextmanager
    async def rollout(
        self, rollout: RolloutEndpoint, secret: str | None = None
    ) -> AsyncIterator[RolloutEndpoint]:
        """Serve a rollout at its own `base_url` until the block ends.

        A caller that gives `secret` again must know that no request of the former rollout is left.
        """
        secret = secret or new_secret()
        if secret in self._rollouts:
            raise InvariantError("two rollouts at the same time have the same secret")
        rollout.base_url = f"{self._url}/{secret}/v1"
        self._rollouts[secret], self._running[secret] = rollout, set()
        try:
            yield rollout
        finally:
            await self._end(secret)
            await rollout.release()

    async def _end(self, secret: str) -> None:
        self._rollouts.pop(secret, None)
        tasks = self._running.pop(secret, set())
        await cancel_all(tasks)

    async def _models(self, request: Request) -> Response:
        if request.path_params["secret"] not in self._rollouts:
            return _gone()
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rstar2"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _completions(self, request: Request) -> Response:
        secret = request.path_params["secret"]
        try:
            body = await request.body()
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED)
        if secret not in self._rollouts:
            return _gone()
        running = self._running[secret]
        work = asyncio.ensure_future(_answer(self._rollouts[secret], body))
        disconnect = asyncio.ensure_future(_disconnected(request))
        running.add(work)
        try:
            await asyncio.wait({work, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if work.cancelled():
                return _gone()
            return work.result() if work.done() else Response(status_code=CLIENT_CLOSED)
        finally:
            running.discard(work)
            work.cancel()
            disconnect.cancel()
            await asyncio.gather(work, disconnect, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    """Wait until the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        continue


async def _answer(rollout: RolloutEndpoint, body: bytes) -> Response:
    """Serve one request; errors are kept in the rollout, by whose fault they are."""
    try:
        request = read_request(body)
        choices, usage = await rollout.complete(request)
    except ChatRequestError as error:
        rollout.stop = rollout.stop or error.stop
        rollout.refused = str(error)
        code = None if error.stop is None else LIMIT_CODES[error.stop]
        return _error(400, str(error), "invalid_request_error", error.param, code)
    except (InfrastructureError, OSError) as error:
        rollout.failure = rollout.failure or failure_of(error)
        return _error(503, str(error), "server_error", None, rollout.failure.name)
    except Exception as error:  # noqa: BLE001 - `run_program` raises it where the rollout runs
        rollout.error = rollout.error or error
        return _error(500, repr(error), "server_error", None, "internal")
    id, created = f"chatcmpl-{secrets.token_hex(8)}", int(time.time())
    if not request.stream:
        return JSONResponse(completion(id, created, MODEL, choices, usage))
    parts = chunks(id, created, MODEL, choices, usage if request.include_usage else None)
    events = [f"data: {json.dumps(part)}\n\n" for part in parts]
    return StreamingResponse(iter([*events, "data: [DONE]\n\n"]), media_type="text/event-stream")


def _error(status: int, message: str, kind: str, param: str | None, code: str | None) -> Response:
    return JSONResponse(error_body(message, kind, param, code), status, headers=NO_RETRY)


def _gone() -> Response:
    return _error(404, "the rollout of this URL has ended", "not_found_error", None, "ended")
