"""`rstar2.Environment`: an environment from problems, tools and a reward function.

    env = rstar2.Environment(
        problems="cities.jsonl",
        tools=[population, rstar2.python()],
        reward=lambda episode: float(episode.answer == episode.problem.answer),
        system="Answer questions about cities.",
    )

The functions that a person gives (`reward`, `reply`) take an EpisodeView: the problem, the turns so
far, the answer, and `state`, a dict of their own. Plain functions run in a thread, async ones on
the event loop. Tools with a state of their own are made per episode: `tools` may be a function of
the episode.
"""

from __future__ import annotations

import inspect
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rstar2.environments.base import Answer, OpenTool, SandboxClient, Tool, ToolSpec, as_reward
from rstar2.environments.mcp import McpConnection, McpTool, mcp_tools
from rstar2.environments.problems import ProblemList, ProblemSource
from rstar2.environments.python_tool import python
from rstar2.environments.threads import call_function
from rstar2.environments.tools import FunctionTool
from rstar2.errors import InfrastructureError, UserError
from rstar2.paper_format import format_penalty as paper_penalty
from rstar2.tasks import close_all
from rstar2.types import (
    Conversation,
    Failure,
    Message,
    Problem,
    Reward,
    Split,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

AnyTool = Tool | Callable[..., Any] | str
"""A tool, a function that becomes one, or a name: `python`, `python-session`, or `mcp:...` for
the tools of an MCP server."""
MakeDemonstration = Callable[[Problem, random.Random], Sequence[str]]


@dataclass(slots=True)
class EpisodeView:
    """An episode as the functions of an environment see it: `reward`, `reply` and `tools`.

    Example:

        def reward(episode: rstar2.EpisodeView) -> float:
            calls = [call.name for turn in episode.turns for call in turn.calls]
            return float(episode.answer == episode.problem.answer) - 0.1 * len(calls)
    """

    problem: Problem
    """With `prompt`, `answer` and your own data in `meta`."""
    seed: int
    """The rollout's own seed; use it for everything random."""
    turns: Sequence[Turn] = ()
    """The model's turns so far, each with `text`, `calls` and `results`."""
    answer: str = ""
    """The text of the last turn, or what stands between the answer tags."""
    trajectory: Trajectory | None = None
    """The whole rollout; only for the reward."""
    state: dict[str, Any] = field(default_factory=dict)
    """For your own use; private to the episode, and shared by its functions."""

    @property
    def text(self) -> str:
        """What the model said last."""
        return self.turns[-1].text if self.turns else ""


Tools = Sequence[AnyTool] | Callable[[EpisodeView], Sequence[AnyTool]]


class Environment:
    """A task: problems, tools, replies and a reward.

    problems: a JSONL file (relative to the current directory), a list of problems or dicts
        (`prompt`, `answer`, `id`, `kind`; other keys become `meta`), or a function of (split,
        seed) that returns such a list, where split is "train" or "heldout". Of a file or list one
        problem in eight is held out for evaluation
    reward: a function of the finished episode that returns any finite number; plain or async
    tools: tools and functions, or a function of the episode that returns them; it is called once
        for every episode, so such tools may have a state of their own
    system: the system message, or a function of the problem
    reply: a function of the episode, called after every turn without a tool call: returns the next
        user message, or None to end. Without it the first such turn ends the episode
    format_penalty: a function of the trajectory for RoC's p_format; by default the paper's for
        tagged answers, else 0
    demonstrations: a function of (problem, random.Random) for SFT: returns a list of texts, the
        model's turn, the response to it, the model's turn, ..., that ends with a turn.
        `tool.call_text(...)` writes a tool call
    answer_tags: tags around the answer, such as ("<answer>", "</answer>"); without them the last
        turn is the answer
    prefill: the beginning of every first turn, which the model reads instead of sampling it
    name: for records, messages and the default run directory

    Raises UserError if an argument cannot work: problems that cannot be read, two tools with one
    name, a tool whose signature has no schema. Errors of your functions during a rollout are named
    failures of that rollout.

    Example:

        env = rstar2.Environment(
            [{"prompt": f"Twice {n}?", "answer": 2 * n} for n in range(100)],
            reward=lambda episode: episode.answer == episode.problem.answer,
        )
    """

    def __init__(
        self,
        problems: ProblemSource,
        reward: Callable[[EpisodeView], Any],
        *,
        tools: Tools = (),
        system: str | Callable[[Problem], str] = "",
        reply: Callable[[EpisodeView], Any] | None = None,
        format_penalty: Callable[[Trajectory], float] | None = None,
        demonstrations: MakeDemonstration | None = None,
        answer_tags: tuple[str, str] | None = None,
        prefill: str = "",
        name: str = "environment",
    ) -> None:
        if not callable(reward):
            raise UserError(f"reward must be a function of the episode, got {reward!r}")
        self.name, self.prefill, self.answer_tags = name, prefill, answer_tags
        self.reward, self.system = reward, system
        self._reply, self._penalty = reply, format_penalty
        self._demonstrate = demonstrations
        self._problems = ProblemList(problems, name)
        self._tools: tuple[Tool, ...] | Callable[[EpisodeView], Sequence[AnyTool]]
        self._tools = tools if callable(tools) else make_tools(tools)
        self.made_from: Mapping[str, Any] = {
            "reward": reward,
            "tools": self._tools,
            "system": system,
            "reply": reply,
            "format_penalty": format_penalty,
            "demonstrations": demonstrations,
            "answer_tags": answer_tags,
            "prefill": prefill,
        }
        """For the record of a run (`identity`)."""

    def __repr__(self) -> str:
        return f"<environment {self.name}>"

    @property
    def makes_tools(self) -> bool:
        """Whether tools are made for every episode."""
        return callable(self._tools)

    @property
    def needs_sandbox(self) -> bool:
        """Whether a tool needs the code environment; tools made per episode may."""
        return callable(self._tools) or any(tool.needs_sandbox for tool in self._tools)

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        """At most `count` problems of a split, in their order; None means all.

        split: "train" or "heldout"
        count: how many, from the first
        seed: what a function of (split, seed) gets; a file or list does not depend on it
        """
        return self._problems.take(split, count, seed)

    def tools(self, view: EpisodeView) -> tuple[Tool, ...]:
        """The tools of one episode."""
        return make_tools(self._tools(view)) if callable(self._tools) else self._tools

    def messages(self, problem: Problem) -> tuple[Message, ...]:
        """What the model reads first."""
        system = self.system(problem) if callable(self.system) else self.system
        first = (Message("system", system),) if system else ()
        return (*first, Message("user", problem.prompt))

    async def open(self, problem: Problem, *, seed: int, sandbox: SandboxClient | None) -> Episode:
        """Start an episode."""
        view = EpisodeView(problem, seed)
        return Episode(self, view, sandbox, await self.tools_of(view))

    async def tools_of(self, view: EpisodeView) -> tuple[Tool, ...]:
        """The tools of one episode. A function that makes them runs in a thread: it may start a
        server."""
        if not callable(self._tools):
            return self._tools
        try:
            tools: tuple[Tool, ...] = await call_function(self.tools, view)
            return tools
        except UserError as error:
            if isinstance(error.__cause__, InfrastructureError):  # it may start the next time
                raise error.__cause__ from error
            raise

    def format_penalty(self, trajectory: Trajectory) -> float:
        """RoC's p_format: as given, or the paper's for tagged answers, else 0."""
        if self._penalty is not None:
            return self._penalty(trajectory)
        if self.answer_tags is None:
            return 0.0
        return paper_penalty(trajectory.answer_tags, len(trajectory.turns))

    def demonstrations(self, count: int, seed: int) -> Iterator[Conversation]:
        """Conversations for SFT, one for each problem of the training split in turn."""
        if self._demonstrate is None:
            return
        rng = random.Random(f"demonstrations {seed}")
        problems = list(self.problems("train", None, seed))
        for index in range(count):
            if index % len(problems) == 0:
                rng.shuffle(problems)
            yield self._conversation(index, problems[index % len(problems)], rng)

    def _conversation(self, index: int, problem: Problem, rng: random.Random) -> Conversation:
        assert self._demonstrate is not None
        texts = list(self._demonstrate(problem, rng))
        if len(texts) % 2 == 0 or not all(isinstance(text, str) for text in texts):
            raise UserError(
                f"environment {self.name}: a demonstration is a list of texts (the model's turn, "
                f"the response, the model's turn, ...) that ends with a turn; got {texts!r}"
            )
        messages = list(self.messages(problem))
        for number, text in enumerate(texts):
            if number % 2 == 0:
                messages.append(Message("assistant", text))
            else:
                called = "<tool_call>" in texts[number - 1]
                messages.append(Message("tool" if called else "user", text))
        tools = tuple(tool.spec.signature for tool in self.tools(EpisodeView(problem, 0)))
        return Conversation(f"{self.name}-{index}", tuple(messages), tools, source=self.name)

    async def reply(self, view: EpisodeView) -> Sequence[Message] | None:
        """The environment's reply to the last turn; None ends the episode."""
        if self._reply is None:
            return None
        said = await call_function(self._reply, view)
        if said is None:
            return None
        return [Message("user", said)] if isinstance(said, str) else list(said)

    async def close(self) -> None:
        """End the MCP servers that the episodes share."""
        if not callable(self._tools):
            shared = {tool.connection: tool for tool in self._tools if isinstance(tool, McpTool)}
            await close_all(tool.shutdown() for tool in shared.values())


class Episode:
    """One rollout of one problem of an Environment."""

    def __init__(
        self,
        environment: Environment,
        view: EpisodeView,
        sandbox: SandboxClient | None,
        tools: Sequence[Tool],
    ) -> None:
        self._environment, self._view = environment, view
        self.messages: Sequence[Message] = environment.messages(view.problem)
        self._servers: set[McpConnection] = set()
        """MCP servers of this episode; those of the environment are not among them."""
        if environment.makes_tools:
            self._servers = {tool.connection for tool in tools if isinstance(tool, McpTool)}
        for server in self._servers:
            server.join()
        self.tools: Sequence[ToolSpec] = tuple(tool.spec for tool in tools)
        self._open: dict[str, OpenTool] = {tool.spec.name: tool.open(sandbox) for tool in tools}

    @property
    def answer_tags(self) -> tuple[str, str] | None:
        return self._environment.answer_tags

    async def call(self, call: ToolCall, deadline_s: float) -> ToolResult:
        """Run a call with its tool."""
        return await self._open[call.name].call(call, deadline_s)

    async def reply(self, turns: Sequence[Turn]) -> Sequence[Message] | None:
        """Ask the environment's reply function."""
        view = self._view
        view.turns = tuple(turns)
        view.answer = self._answer_of(turns[-1].text) or ""
        return await self._environment.reply(view)

    def _answer_of(self, text: str) -> str | None:
        """The answer in the text of a turn; None without complete answer tags."""
        if self.answer_tags is None:
            return text.strip()
        opening, closing = self.answer_tags
        end = text.rfind(closing)
        start = text.rfind(opening, 0, end) if end >= 0 else -1
        return text[start + len(opening) : end].strip() if start >= 0 else None

    def answer(self, turns: Sequence[Turn]) -> Answer:
        """The last turn, or what its answer tags hold."""
        if not turns:
            return Answer(None, 0, complete=False)
        if self.answer_tags is None:
            said = not turns[-1].calls
            return Answer(turns[-1].text.strip() if said else None, int(said), complete=said)
        answers = [self._answer_of(turn.text) for turn in turns]
        given = [answer for answer in answers if answer is not None]
        count = sum(turn.text.count(self.answer_tags[0]) for turn in turns)
        return Answer(given[-1] if given else None, count, complete=answers[-1] is not None)

    async def reward(self, trajectory: Trajectory, deadline_s: float) -> Reward | Failure:
        """Ask the environment's reward function; what it raises is a Failure."""
        view = self._view
        view.turns, view.trajectory = trajectory.turns, trajectory
        view.answer = trajectory.answer or ""
        value = await call_function(self._environment.reward, view)
        return as_reward(value, trajectory.answer, self._environment.name)

    async def close(self) -> None:
        """Close the tools of the episode, and the servers that were started for it."""
        tools = [tool.close() for tool in self._open.values()]
        await close_all([*tools, *(server.leave() for server in self._servers)])


def make_tools(given: Iterable[AnyTool]) -> tuple[Tool, ...]:
    """Tools of an environment: functions become tools, and names must differ."""
    if isinstance(given, str | Mapping):
        raise UserError(f"tools must be a list of tools and functions, got {given!r}")
    tools: list[Tool] = []
    for one in given:
        if isinstance(one, str):
            tools += _named_tools(one)
        elif isinstance(one, Tool):
            tools.append(one)
        elif inspect.isfunction(one):
            tools.append(FunctionTool(one))
        else:
            raise UserError(
                f"tools: {one!r} is neither a tool nor a function: decorate it with @rstar2.tool"
            )
    for name, times in Counter(tool.spec.name for tool in tools).items():
        if times > 1:
            raise UserError(
                f"two tools are called {name!r}: give one of them another name with "
                "@rstar2.tool(name=...)"
            )
    return tuple(tools)


def _named_tools(name: str) -> Sequence[Tool]:
    if name.startswith("mcp:"):
        return mcp_tools(name)
    if name in ("python", "python-session"):
        return (python(session=name != "python"),)
    raise UserError(
        f"tools: {name!r} is neither a tool nor a function, nor one of the names python, "
        "python-session, mcp:stdio:COMMAND and mcp:URL"
    )
