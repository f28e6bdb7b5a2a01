"""`rstar2 env`: list environments, check one, or play the model in it.

rstar2 env list
rstar2 env check cities:env --arg count=10
rstar2 env try python-math
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from rstar2.config import AgentConfig, CodeEnvConfig, EnvironmentConfig, SamplingConfig
from rstar2.config import TemplateConfig as Format
from rstar2.errors import UserError
from rstar2.plugins import make_importable
from rstar2.types import Finish, Message, Outcome, Problem, ToolCall, Trajectory

if TYPE_CHECKING:
    from rstar2.agent.episodes import LoopEvent
    from rstar2.engine.openai import ChatReply
    from rstar2.environments.base import EnvironmentProtocol, EpisodeProtocol, SandboxClient

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="List, check and try environments: tasks with problems, tools and a reward.",
)

MAX_TOKENS = 1 << 20
SCRIPTED_TURNS = 4
WRONG_TURN = "I do not know."

Name = Annotated[
    str, typer.Argument(help="A name from `rstar2 env list`, or module:attribute.", metavar="NAME")
]
Args = Annotated[
    list[str] | None,
    typer.Option("--arg", metavar="KEY=VALUE", help="An argument of the environment. Repeatable."),
]
Number = Annotated[int, typer.Option(min=0, help="Which held-out problem to use.")]
Turns = Annotated[int, typer.Option(min=1, help="Maximum number of turns.")]


@app.command("list")
def list_() -> None:
    """List the environments that are built in or come with installed packages."""
    from rstar2.environments.load import known_environments

    known = known_environments().values()
    names = max(len(entry.name) for entry in known)
    origins = max(len(entry.origin) for entry in known)
    for entry in known:
        typer.echo(f"{entry.name:<{names}}  {entry.origin:<{origins}}  {entry.target}")
    typer.echo("An environment of your own is named module:attribute.")


@app.command()
def check(name: Name, arg: Args = None, problem: Number = 0) -> None:
    """Open an episode, call each tool with wrong arguments, and run two scripted rollouts: one that
    writes the problem's answer, and one that does not. Show a demonstration if there are any."""
    environment = load(name, arg or [])

    async def work() -> bool:
        async with opened(environment, problem) as (given, episode, sandbox):
            show_prompt(environment, given, episode)
            await call_wrongly(episode)
            show_demonstration(environment)
            scripts = {
                "A scripted rollout with the right answer": right_turns(
                    environment, given, episode
                ),
                "A scripted rollout without an answer": itertools.repeat(WRONG_TURN),
            }
            complete = True
            for title, script in scripts.items():
                typer.echo(f"\n# {title}")
                trajectory = await rollout(
                    environment, given, sandbox, functools.partial(next, script), SCRIPTED_TURNS
                )
                complete = report(trajectory) and complete
        return complete

    if not asyncio.run(work()):
        raise typer.Exit(1)


@app.command("try")
def try_(name: Name, arg: Args = None, problem: Number = 0, max_turns: Turns = 10) -> None:
    """Play the model: you write its turns, the environment answers and gives the reward.

    A turn ends with an empty line. `/call TOOL {"argument": ...}` is short for a tool call.
    """
    environment = load(name, arg or [])

    async def work() -> bool:
        async with opened(environment, problem) as (given, episode, sandbox):
            show_prompt(environment, given, episode)
            trajectory = await rollout(environment, given, sandbox, read_turn, max_turns)
        return report(trajectory)

    if not asyncio.run(work()):
        raise typer.Exit(1)


def load(name: str, given: Sequence[str]) -> EnvironmentProtocol:
    """The environment of a name, with `key=value` arguments in YAML."""
    from rstar2.environments.load import load_environment

    arguments: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UserError(f"--arg {text!r}: write it as key=value")
        try:
            arguments[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UserError(f"--arg {text!r}: {value!r} is not valid YAML") from None
    make_importable(None)
    return load_environment(EnvironmentConfig(use=name, args=arguments), Format())


@asynccontextmanager
async def opened(
    environment: EnvironmentProtocol, number: int
) -> AsyncIterator[tuple[Problem, EpisodeProtocol, SandboxClient | None]]:
    """A problem and an episode of it; the code environment runs if it is needed."""
    from rstar2.agent.episodes import open_episode
    from rstar2.codeenv.client.client import CodeEnvClient

    problems = environment.problems("heldout", number + 1, 0)
    if number >= len(problems):
        raise UserError(f"--problem {number}: there are only {len(problems)} held-out problems")
    deadline_s = AgentConfig().tool_deadline_s
    async with AsyncExitStack() as stack:
        sandbox: CodeEnvClient | None = None
        if environment.needs_sandbox:
            sandbox = await CodeEnvClient.start(CodeEnvConfig())
            stack.push_async_callback(sandbox.close)
        stack.push_async_callback(environment.close)
        opening = open_episode(
            environment, problems[number], seed=0, sandbox=sandbox, deadline_s=deadline_s
        )
        episode = await stack.enter_async_context(opening)
        yield problems[number], episode, sandbox


# --------------------------------------------------------------------------- what is shown


def show_prompt(
    environment: EnvironmentProtocol, problem: Problem, episode: EpisodeProtocol
) -> None:
    """Print the first messages and the tool schemas of an episode."""
    typer.echo(f"environment {environment.name}, problem {problem.id}")
    for message in episode.messages:
        typer.echo(f"\n## {message.role}\n{message.content}")
    typer.echo(f"\n## Tools: {', '.join(tool.name for tool in episode.tools) or 'none'}")
    for tool in episode.tools:
        typer.echo(json.dumps(tool.signature, indent=2, ensure_ascii=False))


async def call_wrongly(episode: EpisodeProtocol) -> None:
    """Call each tool with an argument that it does not have, as a model might."""
    from rstar2.agent.episodes import CallRunner
    from rstar2.agent.parser import CallParser
    from rstar2.environments.tools import call_text
    from rstar2.tool_text import tool_text

    if episode.tools:
        typer.echo("\n## Calls with wrong arguments")
    parser = CallParser(tuple(episode.tools), 1)
    for tool in episode.tools:
        calls: tuple[ToolCall, ...] = parser.parse(
            call_text(tool.name, {"no_such_argument": None}), f"check-{tool.name}"
        )
        results: list[Any] = []
        runner = CallRunner(episode, AgentConfig(invalid_calls=2))
        await runner.run(0, calls, results)
        if runner.failure is not None:
            typer.echo(f"{tool.name}: lost: {runner.failure.name}: {runner.failure.message}")
        for result in results:
            note = "" if result.outcome.failed else " (the tool accepts arguments it does not have)"
            typer.echo(f"{tool.name}: {result.outcome}{note}: {tool_text(result)}")


def show_demonstration(environment: EnvironmentProtocol) -> None:
    """Print the first demonstration for SFT, if the environment has any."""
    for conversation in environment.demonstrations(1, 0):
        typer.echo("\n# A demonstration for SFT")
        for message in conversation.messages:
            typer.echo(f"\n## {message.role}\n{message.content}")


def right_turns(
    environment: EnvironmentProtocol, problem: Problem, episode: EpisodeProtocol
) -> Iterator[str]:
    """An example call of the first tool, then the problem's own answer in every turn."""
    from rstar2.environments.python_math import PythonMath

    answer = problem.answer
    if isinstance(environment, PythonMath):
        answer = f"\\boxed{{{answer}}}"
    if episode.answer_tags is not None:
        answer = f"{episode.answer_tags[0]}{answer}{episode.answer_tags[1]}"
    calls = [f"<tool_call>\n{tool.example}\n</tool_call>" for tool in episode.tools[:1]]
    return itertools.chain(calls, itertools.repeat(answer))


def report(trajectory: Trajectory) -> bool:
    """Print the end of a rollout; False if it was lost."""
    typer.echo(f"\n## End: {trajectory.stop}, answer {trajectory.answer!r}")
    outcomes = [Outcome(result.outcome).value for result in trajectory.results]
    typer.echo(f"tool results: {', '.join(outcomes) or 'none'}")
    if trajectory.failure is not None:
        typer.echo(f"lost: {trajectory.failure.name}: {trajectory.failure.message}")
        return False
    assert trajectory.reward is not None
    typer.echo(f"reward {trajectory.reward.value:g}, format penalty {trajectory.format_penalty:g}")
    return True


# --------------------------------------------------------------------------- rollouts


@dataclass(slots=True)
class WrittenTurns:
    """A model whose turns come from a function."""

    next_turn: Callable[[], str]

    async def complete(self, messages: Sequence[Message], **options: Any) -> ChatReply:
        from rstar2.engine.openai import ChatReply
        from rstar2.environments.threads import call_function

        return ChatReply(await call_function(self.next_turn), Finish.STOP)


async def rollout(
    environment: EnvironmentProtocol,
    problem: Problem,
    sandbox: SandboxClient | None,
    next_turn: Callable[[], str],
    max_turns: int,
) -> Trajectory:
    """One rollout whose turns are written, in an episode of its own."""
    from rstar2.agent.chat_loop import ChatLoop, opening_messages
    from rstar2.agent.episodes import Replied, ToolReturned, conclude, open_episode

    def observe(event: LoopEvent) -> None:
        if isinstance(event, ToolReturned):
            typer.echo(f"\n## {event.call.name or 'tool'}: {event.result.outcome}\n{event.text}")
        elif isinstance(event, Replied):
            typer.echo(f"\n## user\n{event.text}")
        elif next_turn is not read_turn:
            typer.echo(f"\n## assistant\n{event.text}")

    agent = AgentConfig()
    opening = open_episode(
        environment, problem, seed=0, sandbox=sandbox, deadline_s=agent.tool_deadline_s
    )
    async with opening as episode:
        loop = ChatLoop(
            WrittenTurns(next_turn),
            agent,
            SamplingConfig(),
            opening_messages(episode, Format()),
            MAX_TOKENS,
            max_turns,
            observer=observe,
        )
        trajectory = await loop.run(episode, problem, id="try/0", group_id="try", seed=0)
        return await conclude(environment, episode, trajectory, agent)


def read_turn() -> str:
    """A turn from standard input, up to an empty line or the end of the input."""
    from rstar2.environments.tools import call_text

    if sys.stdin.isatty():
        typer.echo("\n## assistant (an empty line ends the turn)")
    lines: list[str] = []
    for line in sys.stdin:
        if not line.strip():
            if lines:
                break
            continue
        if line.startswith("/call "):
            name, _, arguments = line.removeprefix("/call ").strip().partition(" ")
            try:
                lines.append(call_text(name, json.loads(arguments or "{}")))
            except (json.JSONDecodeError, TypeError, ValueError) as error:
                typer.echo(f"/call {name}: the arguments are no JSON object: {error}")
            continue
        lines.append(line.rstrip("\n"))
    if not lines:
        raise UserError("the input ended before the episode did, so there is no reward")
    return "\n".join(lines)
