"""`reasoning-gym`: a hundred families of generated problems with their own scorers, as one
environment. Needs the package reasoning-gym (in the extra `adapters`).

    environment: {use: reasoning-gym, args: {tasks: [gcd, lcm], tools: [python]}}
    environment: {use: reasoning-gym, args: {tasks: {chain_sum: {max_terms: 2, max_digits: 1}}}}

- A problem is a pure function of (family, settings, seed, index), so a run draws the same problems
  again. The splits are disjoint whatever the seeds: a hash of the question decides.
- The reward is the family's own score of the text in the last <answer> tags, from 0 to 1.
- Some scorers evaluate the answer as Python. So scorers run in the code environment, in sessions
  that have imported the package once. After every score the session is rolled back, so that no
  answer can change how the next one is scored.
- With `right_share` there are demonstrations for SFT of small models. They teach the format: only
  that share of them has the right answer, so that RL has something to learn.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import math
import random
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rstar2.codeenv.protocol import RunRequest
from rstar2.environments.base import SandboxClient, Tool
from rstar2.environments.environment import Environment, Episode, EpisodeView, Tools
from rstar2.environments.python_tool import PythonTool
from rstar2.errors import DataError, InfrastructureError, InvariantError, UserError
from rstar2.seeds import derive_seed
from rstar2.types import Failure, Limits, Outcome, Problem, Reward, Split, Trajectory

NAME = "reasoning-gym"
SYSTEM = (
    "Solve the problem. Think first, then give only the final answer between <answer> and "
    "</answer> tags."
)
HELDOUT_SHARE = 8
"""One question in this many is held out."""
MAX_REPEATS = 2000
"""A family is exhausted after this many draws in a row without a new question."""
SIZE = 2**31
"""Nominal size of the generated data sets; nothing is generated in advance."""
DEFAULT_COUNT = 1024
IMPORT_LIMITS = Limits(wall_s=60.0, cpu_s=30.0)
SCORE_LIMITS = Limits(wall_s=10.0, cpu_s=10.0)
CALL_DEADLINE_S = 120.0
ANSWER_CHARS = 10_000
MAX_SESSIONS = 4

Settings = Mapping[str, Any]


def create_dataset(task: str, settings: Settings, seed: int) -> Any:
    """One family's generator; a wrong name or setting is a UserError that says what is known."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise UserError(
            f"environment {NAME} needs reasoning-gym: pip install 'rstar2[adapters]'"
        ) from error
    if task not in DATASETS:
        from difflib import get_close_matches

        near = get_close_matches(task, DATASETS, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(DATASETS)}"
        raise UserError(f"environment.args.tasks: {NAME} has no family {task!r}; {hint}")
    try:
        return reasoning_gym.create_dataset(task, **{**settings, "seed": seed, "size": SIZE})
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"environment.args.tasks.{task}: {dict(settings)}: {error}") from error


def split_of(task: str, question: str) -> Split:
    """The split that a question belongs to; it depends on nothing else."""
    digest = hashlib.sha256(f"{task}\n{question}".encode()).digest()
    return "heldout" if digest[0] % HELDOUT_SHARE == 0 else "train"


@dataclass(frozen=True, slots=True)
class Family:
    """One family of problems with its settings."""

    task: str
    settings: Settings

    def entries(self, split: Split, seed: int) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
        """(seed, index, entry) of distinct questions of a split; ends when no new one comes."""
        own_seed = derive_seed(NAME, self.task, split, seed) % 2**31
        dataset = create_dataset(self.task, self.settings, own_seed)
        seen: set[str] = set()
        repeats = 0
        for index in itertools.count():
            entry = dataset[index]
            question = entry["question"]
            if question in seen or split_of(self.task, question) != split:
                repeats += 1
                if repeats > MAX_REPEATS:
                    return
                continue
            repeats = 0
            seen.add(question)
            yield own_seed, index, entry


def families(tasks: Sequence[str] | Mapping[str, Settings | None]) -> tuple[Family, ...]:
    """The families of `args.tasks`: a list of names, or settings by name."""
    if isinstance(tasks, str) or not tasks:
        raise UserError(f"environment.args.tasks = {tasks!r}: give a list of families, as in [gcd]")
    given = dict(tasks) if isinstance(tasks, Mapping) else dict.fromkeys(tasks)
    for task, settings in given.items():
        create_dataset(task, settings or {}, 0)
    return tuple(Family(task, dict(settings or {})) for task, settings in given.items())


def make_problems(
    chosen: Sequence[Family], split: Split, count: int | None, seed: int
) -> tuple[Problem, ...]:
    """`count` problems with distinct questions, in turn from every family, in shuffled order."""
    wanted = DEFAULT_COUNT if count is None else count
    streams = {family.task: family.entries(split, seed) for family in chosen}
    problems: list[Problem] = []
    while len(problems) < wanted and streams:
        for task in list(streams):
            drawn = next(streams[task], None)
            if drawn is None:
                del streams[task]
            elif len(problems) < wanted:
                problems.append(_problem(task, *drawn))
    if count is not None and len(problems) < count:
        names = ", ".join(family.task for family in chosen)
        raise DataError(
            f"{NAME}: {names} has only {len(problems)} distinct questions in the split {split}, "
            f"but {count} are wanted: ask for fewer, or make the settings wider"
        )
    random.Random(f"{NAME} {split} {seed}").shuffle(problems)
    return tuple(problems)


def _problem(task: str, seed: int, index: int, entry: Mapping[str, Any]) -> Problem:
    return Problem(
        id=f"{task}-{seed}-{index}",
        prompt=entry["question"].strip(),
        answer=str(entry["answer"]),
        grader=NAME,
        kind=task,
        source=NAME,
        meta={"seed": seed, "index": index, "question": entry["question"]},
    )


# --------------------------------------------------------------------------- scores

SETUP = """
import json, sys
import reasoning_gym
from reasoning_gym.factory import create_dataset
datasets = {}
def dataset(task, settings, seed):
    key = task, json.dumps(settings, sort_keys=True), seed
    if key not in datasets:
        datasets[key] = create_dataset(task, **{**settings, "seed": seed, "size": 2 ** 31})
    return datasets[key]
class ScoreDone(Exception):
    pass
"""
PREPARE = "dataset(**json.loads(sys.stdin.read()))\n"
SCORE = """
given = json.loads(sys.stdin.read())
family = dataset(given["task"], given["settings"], given["seed"])
entry = family[given["index"]]
if entry["question"] != given["question"]:
    raise ValueError("the family does not generate the same question again")
print(given["nonce"], float(family.score_answer(given["answer"], entry)))
raise ScoreDone
"""
"""Fails on purpose: a failed call leaves the session as it was."""


@dataclass(slots=True)
class ScoreSession:
    """A session of the code environment that scores answers, one after another."""

    id: str | None = None
    """None until the session is open and has imported the package."""
    prepared: set[tuple[str, int]] = field(default_factory=set)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0
    """Answers that it scores, or that wait for it."""

    def forget(self) -> None:
        """The next answer opens the session again."""
        self.id = None
        self.prepared.clear()


@dataclass(slots=True)
class Scorer:
    """Scores answers in sessions of the code environment.

    An answer goes to the session with the shortest queue. A session is opened if all others are
    busy, up to MAX_SESSIONS: an answer that takes long delays few others, whose deadline runs.
    """

    settings: Mapping[str, Settings]
    sessions: list[ScoreSession] = field(default_factory=list)
    sandbox: SandboxClient | None = None

    async def score(
        self, sandbox: SandboxClient, problem: Problem, answer: str | None, deadline_s: float
    ) -> Reward | Failure:
        """The family's own score of an answer. A lost session is opened again, once."""
        if answer is None:
            return Reward(0.0, None, NAME)
        session = self._shortest_queue(sandbox)
        ahead, started = session.waiting, False
        session.waiting += 1
        try:
            async with asyncio.timeout(deadline_s), session.lock:
                started = True
                return await self._score_once_more(session, sandbox, problem, answer)
        except TimeoutError:
            queue = "" if started else f": {ahead} answers were before it in the queue"
            return Failure("deadline", f"{problem.id}: no score within {deadline_s:g} s{queue}")
        except InfrastructureError as error:
            return Failure(error.name, str(error))
        finally:
            session.waiting -= 1

    def _shortest_queue(self, sandbox: SandboxClient) -> ScoreSession:
        if self.sandbox is not sandbox:
            self.sessions, self.sandbox = [], sandbox
        shortest = min(self.sessions, key=lambda session: session.waiting, default=None)
        if shortest is None or (shortest.waiting and len(self.sessions) < MAX_SESSIONS):
            shortest = ScoreSession()
            self.sessions.append(shortest)
        return shortest

    async def _score_once_more(
        self, session: ScoreSession, sandbox: SandboxClient, problem: Problem, answer: str
    ) -> Reward | Failure:
        try:
            try:
                return await self._score(session, sandbox, problem, answer)
            except (InfrastructureError, UserError):  # the session expired, or its server died
                session.forget()
                return await self._score(session, sandbox, problem, answer)
        except BaseException:  # also a cancellation: its call may still be running
            session.forget()
            raise

    async def _score(
        self, session: ScoreSession, sandbox: SandboxClient, problem: Problem, answer: str
    ) -> Reward | Failure:
        task, seed, index = problem.kind, problem.meta["seed"], problem.meta["index"]
        if session.id is None:
            opened = (await sandbox.open_session()).id
            await self._run(opened, sandbox, SETUP, "", IMPORT_LIMITS)
            session.id = opened
        given = {"task": task, "settings": dict(self.settings[task]), "seed": seed}
        if (task, seed) not in session.prepared:
            await self._run(session.id, sandbox, PREPARE, json.dumps(given), IMPORT_LIMITS)
            session.prepared.add((task, seed))
        nonce = secrets.token_hex(8)
        more = {"index": index, "question": problem.meta["question"], "nonce": nonce}
        body = json.dumps({**given, **more, "answer": answer[:ANSWER_CHARS]})
        result = await sandbox.run(
            RunRequest(
                secrets.token_hex(8),
                SCORE,
                stdin=body,
                limits=SCORE_LIMITS,
                session=session.id,
                deadline_s=CALL_DEADLINE_S,
            )
        )
        if result.outcome is Outcome.INFRASTRUCTURE:
            raise InfrastructureError(result.message)
        for line in reversed(result.stdout.splitlines()):
            if line.startswith(f"{nonce} "):
                value = float(line.removeprefix(f"{nonce} "))
                if math.isfinite(value):
                    return Reward(value, answer, NAME, result.wall_s)
        reason = (result.traceback or result.message or result.outcome.value).strip()
        return Failure("reward", f"{problem.id}: the scorer of {task} failed: {reason[-500:]}")

    async def _run(
        self, session: str, sandbox: SandboxClient, code: str, stdin: str, limits: Limits
    ) -> None:
        result = await sandbox.run(
            RunRequest(
                secrets.token_hex(8),
                code,
                stdin=stdin,
                limits=limits,
                session=session,
                deadline_s=CALL_DEADLINE_S,
            )
        )
        if not result.outcome.succeeded:
            reason = (result.traceback or result.message or result.outcome.value).strip()
            raise InfrastructureError(f"the scorer cannot be started: {reason[-500:]}")

    async def close(self) -> None:
        """Close the sessions."""
        sessions, sandbox = self.sessions, self.sandbox
        self.sessions, self.sandbox = [], None
        for session in sessions:
            if session.id is not None and sandbox is not None:
                try:
                    await sandbox.close_session(session.id)
                except (InfrastructureError, UserError):  # it expired, or its server has ended
                    continue


# --------------------------------------------------------------------------- the environment

FUNCTIONS: Mapping[str, Callable[..., int]] = {
    "math.gcd": math.gcd,
    "math.lcm": math.lcm,
    "max": max,
    "min": min,
}
PROGRAMS = {"gcd": "math.gcd", "lcm": "math.lcm"}
"""Families whose demonstrations run Python, and the function that solves them."""


class ReasoningGym(Environment):
    """Families of reasoning-gym.

    tasks: names of families, or settings by name
    tools: as for `rstar2.Environment`; `python` is the Python tool
    system: the system message; small models leave it out with `template.system: none`
    right_share: share of demonstrations with the right answer; without it there are none
    """

    needs_sandbox = True

    def __init__(
        self,
        tasks: Sequence[str] | Mapping[str, Settings | None],
        *,
        tools: Tools = (),
        system: str = SYSTEM,
        right_share: float | None = None,
    ) -> None:
        self.families = families(tasks)
        self.scorer = Scorer({family.task: family.settings for family in self.families})
        self._right_share = right_share
        self._others: tuple[Problem, ...] = ()
        super().__init__(
            self._draw,
            _in_the_episode,
            tools=tools,
            system=system,
            demonstrations=None if right_share is None else self._demonstration,
            answer_tags=("<answer>", "</answer>"),
            name=NAME,
        )
        self.made_from = {
            "tasks": self.families,
            "tools": self._tools,
            "system": system,
            "right_share": right_share,
        }

    def _draw(self, split: Split, seed: int) -> Sequence[Problem]:
        return self.problems(split, None, seed)

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        """Problems of all families in turn."""
        return make_problems(self.families, split, count, seed)

    async def open(
        self, problem: Problem, *, seed: int, sandbox: SandboxClient | None
    ) -> ReasoningGymEpisode:
        """Start an episode."""
        if sandbox is None:
            raise InvariantError(f"{NAME} needs the code environment")
        view = EpisodeView(problem, seed)
        return ReasoningGymEpisode(self, view, sandbox, await self.tools_of(view))

    async def close(self) -> None:
        """End the scorer's session and what the tools share."""
        await self.scorer.close()
        await super().close()

    def _demonstration(self, problem: Problem, rng: random.Random) -> Sequence[str]:
        """A conversation in the right format, mostly with a wrong answer."""
        right = rng.random() < (self._right_share or 0.0)
        tools = self.tools(EpisodeView(problem, 0))
        tool = next((t for t in tools if isinstance(t, PythonTool)), None)
        if tool is not None and problem.kind in PROGRAMS:
            return _tool_demonstration(problem, tool, rng, right=right)
        if not self._others:
            self._others = tuple(self.problems("train", None, 0))
        answer = problem.answer if right else rng.choice(self._others).answer
        return [f"<answer>{answer}</answer>"]


def _in_the_episode(_: object) -> float:
    raise InvariantError("the episode asks the scorer itself")


def _tool_demonstration(
    problem: Problem, tool: PythonTool, rng: random.Random, *, right: bool
) -> Sequence[str]:
    solver = PROGRAMS[problem.kind]
    name = solver if right else rng.choice([other for other in FUNCTIONS if other != solver])
    numbers = [int(digits) for digits in re.findall(r"\d+", problem.prompt)]
    head = "import math\n" if name.startswith("math.") else ""
    code = f"{head}print({name}({', '.join(map(str, numbers))}))"
    output = FUNCTIONS[name](*numbers)
    return [tool.call_text(code), str(output), f"<answer>{output}</answer>"]


class ReasoningGymEpisode(Episode):
    """An episode whose reward is the family's own score."""

    def __init__(
        self,
        environment: ReasoningGym,
        view: EpisodeView,
        sandbox: SandboxClient,
        tools: Sequence[Tool],
    ) -> None:
        super().__init__(environment, view, sandbox, tools)
        self._scorer, self._sandbox, self._problem = environment.scorer, sandbox, view.problem

    async def reward(self, trajectory: Trajectory, deadline_s: float) -> Reward | Failure:
        """Score the answer in the code environment."""
        return await self._scorer.score(self._sandbox, self._problem, trajectory.answer, deadline_s)
