"""`verifiers`: environments packaged for verifiers (and prime-rl), through the endpoint.

    environment: {use: verifiers, args: {id: my-taskset}}

verifiers drives the model through its own OpenAI client; the client's base URL is the rollout's
(`rstar2.endpoint`), so that the tokens stay the model's own. Needs the package verifiers 0.4 (in
the extra `adapters`).

- `id` is the taskset, an installed package or a module next to the recipe. `taskset` has its own
  settings, `env` those of the environment (`{agent: {harness: {id: "null"}, max_turns: 4}}`).
- Agents run in verifiers' `subprocess` runtime unless `env` names another one.
- The splits are disjoint: a hash of the prompt decides.
- The reward is the mean reward of the traces whose agent can be trained. A trace with an error is a
  Failure. If the rollout had reached a limit and the error may come from that (AFTER_LIMIT), the
  reward is 0.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rstar2.endpoint.environment import PROGRAM_DEADLINE_S, Demonstrate, ProgramEnvironment
from rstar2.endpoint.program import ProgramError
from rstar2.endpoint.server import MODEL
from rstar2.errors import DataError, InfrastructureError, UserError
from rstar2.types import Failure, Problem, Split

if TYPE_CHECKING:
    from verifiers.v1 import Env, Task
    from verifiers.v1.trace import Error as EpisodeFault

log = logging.getLogger(__name__)

HELDOUT_SHARE = 8
"""One task in this many is held out."""
DEFAULT_COUNT = 1024
MAX_TASKS = 100_000
"""Tasks of an endless taskset that are looked at."""
START_DEADLINE_S = 120.0
CLOSE_DEADLINE_S = 15.0
AFTER_LIMIT = frozenset(("HarnessError", "EnvError"))
"""Errors that a refused request can cause, beside the ProviderError that reports it."""
NO_KEY = "RSTAR2_NO_API_KEY"
"""Name of an environment variable that is not set: the endpoint takes any key."""


class VerifiersEnvironment(ProgramEnvironment):
    """A verifiers environment. Its resources are held by a task of their own, from the first
    rollout until `close`."""

    reuses_urls = True  # verifiers keeps one HTTP client per URL

    def __init__(
        self,
        id: str,
        *,
        taskset: Mapping[str, Any] | None = None,
        env: Mapping[str, Any] | None = None,
        demonstrations: Demonstrate | None = None,
        deadline_s: float = PROGRAM_DEADLINE_S,
    ) -> None:
        self._env = load_env(id, taskset or {}, env or {})
        self._tasks: dict[str, Task[Any, Any, Any]] = {}
        self._holder: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._stop: asyncio.Event | None = None
        super().__init__(
            self._episode,
            self._make_problems,
            demonstrations=demonstrations,
            deadline_s=deadline_s,
            name=f"verifiers/{id}",
        )
        self.made_from = {
            "id": id,
            "taskset": dict(taskset or {}),
            "env": dict(env or {}),
            "demonstrations": demonstrations,
        }

    # ------------------------------------------------------------------ problems

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        """Tasks of a split, in the order of the taskset."""
        endless = not self._env.taskset.bounded
        wanted = DEFAULT_COUNT if count is None and endless else count
        problems: list[Problem] = []
        for problem in self._make_problems(split, seed):
            if wanted is not None and len(problems) >= wanted:
                break
            problems.append(problem)
        if count is not None and len(problems) < count:
            raise DataError(
                f"{self.name}: only {len(problems)} tasks in the split {split}, but {count} are "
                "wanted: ask for fewer"
            )
        return tuple(problems)

    def _make_problems(self, split: Split, seed: int) -> Iterator[Problem]:
        taken: set[str] = set()
        for number, task in enumerate(self._env.taskset):
            if number >= MAX_TASKS:
                return
            id = str(task.data.id or task.data.name or number)
            if id in taken:  # names need not differ
                id = f"{id}#{number}"
            taken.add(id)
            prompt = task.data.prompt_text
            digest = hashlib.sha256(prompt.encode()).digest()
            if (digest[0] % HELDOUT_SHARE == 0) != (split == "heldout"):
                continue
            self._tasks[id] = task
            yield Problem(id, prompt, "", grader="verifiers", source=self.name)

    # ------------------------------------------------------------------ rollouts

    async def _episode(self, base_url: str, api_key: str, problem: Problem) -> float | Failure:
        """One episode of one task; returns its reward."""
        from verifiers.v1 import EvalClientConfig, ModelContext

        await self._serving()
        client = EvalClientConfig(base_url=base_url, api_key_var=NO_KEY)
        episode = await self._env.run_episode(
            self._tasks[problem.id], ModelContext(model=MODEL, client=client)
        )
        errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
        if not episode.ok:
            reasons = "; ".join(f"{error.type}: {error.message}" for error in errors)
            text = f"the verifiers episode failed: {reasons or 'no reason was given'}"
            if all(_may_follow_a_limit(error) for error in errors):
                raise ProgramError(text)
            return Failure("program", text)
        rewards = [float(trace.reward) for trace in episode.traces if trace.agent.trainable]
        if not rewards:
            raise ProgramError("the verifiers episode has no trace of an agent to be trained")
        return sum(rewards) / len(rewards)

    async def _serving(self) -> None:
        """Wait until the environment's own servers are up."""
        if self._holder is None or self._holder.done():
            self._ready = asyncio.get_running_loop().create_future()
            self._stop = asyncio.Event()
            self._holder = asyncio.ensure_future(self._hold(self._ready, self._stop))
        assert self._ready is not None
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                await asyncio.shield(self._ready)
        except TimeoutError as error:
            raise InfrastructureError(
                f"{self.name}: its servers did not start within {START_DEADLINE_S:g} s"
            ) from error

    async def _hold(self, ready: asyncio.Future[None], stop: asyncio.Event) -> None:
        try:
            async with self._env.serving():
                ready.set_result(None)
                await stop.wait()
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)
            ready.exception()  # whoever awaits it raises it; nobody may await it

    async def close(self) -> None:
        """End the environment's own servers and the endpoint."""
        holder, stop, self._holder = self._holder, self._stop, None
        try:
            if holder is not None and stop is not None:
                stop.set()
                await self._ended(holder)
        finally:
            await super().close()

    async def _ended(self, holder: asyncio.Task[None]) -> None:
        """Wait for the environment's servers to end; the rollouts have ended, so errors are
        logged."""
        _, pending = await asyncio.wait({holder}, timeout=CLOSE_DEADLINE_S)
        if pending:
            log.warning("%s: its servers did not end in %g s", self.name, CLOSE_DEADLINE_S)
            holder.cancel()
            _, pending = await asyncio.wait({holder}, timeout=CLOSE_DEADLINE_S)
        if not pending and not holder.cancelled() and holder.exception() is not None:
            log.warning("%s: its servers ended with %r", self.name, holder.exception())


def _may_follow_a_limit(error: EpisodeFault) -> bool:
    """Whether a refused request can be the reason; a broken sandbox or reward cannot."""
    refused = error.type == "ProviderError" and (error.status_code or 500) < 500
    return refused or error.type in AFTER_LIMIT


def load_env(id: str, taskset: Mapping[str, Any], env: Mapping[str, Any]) -> Env[Any]:
    """The verifiers environment of a taskset; a wrong name or setting is a UserError."""
    try:
        from pydantic import ValidationError
        from verifiers.v1 import AgentConfig, env_config_type, load_environment, resolve_env_config
    except ModuleNotFoundError as error:
        raise UserError(
            "environment verifiers needs the package verifiers: pip install 'rstar2[adapters]'"
        ) from error
    try:
        given = dict(env)
        for name, declared in env_config_type(id, str(env.get("id", ""))).model_fields.items():
            if isinstance(declared.default, AgentConfig):
                given[name] = {"runtime": {"type": "subprocess"}, **dict(env.get(name, {}))}
        return load_environment(resolve_env_config({**given, "taskset": {**taskset, "id": id}}))
    except (ModuleNotFoundError, ImportError, AttributeError, TypeError) as error:
        raise UserError(f"environment.args.id = {id!r}: {error}") from error
    except (ValidationError, ValueError) as error:
        raise UserError(f"environment.args: verifiers refuses the settings: {error}") from error
