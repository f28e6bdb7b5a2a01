"""`rstar2 chat`: talk to an agent that reasons, runs Python and answers.

The model is a transformers directory of a small model (embedded engine, streamed token by token), a
run directory (the export of its last stage), or an OpenAI-compatible endpoint. A message on the
command line is answered once; without one, every line of standard input is a message.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer
from rich.console import Console

from rstar2 import extras
from rstar2.agent.episodes import (
    LoopEvent,
    Replied,
    ToolReturned,
    conclude,
    open_episode,
)
from rstar2.agent.loop import AgentLoop, RolloutSpec
from rstar2.cli.chat_output import ColouredOutput
from rstar2.cli.model_directory import (
    known_questions,
    longest,
    model_directory,
    trained_environment,
    unknown_question,
)
from rstar2.cli.waiting import waiting
from rstar2.config import (
    AgentConfig,
    CodeEnvConfig,
    EnvironmentConfig,
    SamplingConfig,
    TemplateConfig,
)
from rstar2.config.codeenv import TOKEN_VARIABLE, URL_VARIABLE
from rstar2.environments.base import EnvironmentProtocol, SandboxClient
from rstar2.environments.load import load_environment
from rstar2.environments.open import open_environment
from rstar2.errors import UserError
from rstar2.types import Generation, Message, Problem, Sampling, StopReason, Trajectory, encode

if TYPE_CHECKING:
    from rstar2.agent.chat_loop import ChatLoop
    from rstar2.agent.template import Template
    from rstar2.engine.embedded import EmbeddedEngine

progress = Console(stderr=True, markup=False, highlight=False)

Prompt = Annotated[
    str | None, typer.Argument(help="One message. Without it, every line of stdin is a message.")
]
Model = Annotated[
    Path | None, typer.Option(help="A transformers directory, or an rstar2 run directory.")
]
Url = Annotated[str | None, typer.Option(help="An OpenAI-compatible endpoint, instead of --model.")]
Served = Annotated[str | None, typer.Option("--served-model", help="The endpoint's model to use.")]
Key = Annotated[
    str | None,
    typer.Option(envvar="OPENAI_API_KEY", help="API key of the endpoint.", show_envvar=True),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON trajectory per message.")]
Turns = Annotated[int, typer.Option(min=1, help="Maximum number of assistant turns per message.")]
Length = Annotated[
    int, typer.Option(min=16, help="Maximum number of tokens of the whole conversation.")
]
Temperature = Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")]
Seed = Annotated[int, typer.Option(help="Seed of the sampling.")]
System = Annotated[
    str, typer.Option(help="System prompt: paper, none, or auto (as in the checkpoint's training).")
]
Environment = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="The environment with the model's tools: auto (the one that it was trained in), or "
        "any that `rstar2 env list` shows.",
    ),
]
CodeEnv = Annotated[
    list[str] | None,
    typer.Option(
        envvar=URL_VARIABLE,
        metavar="URL",
        help="A code environment that runs already. Without it, one is started.",
    ),
]


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one chat."""

    max_turns: int
    max_length: int
    sampling: SamplingConfig
    seed: int
    as_json: bool


class Speaker(Protocol):
    """Answers messages of one conversation, in order."""

    async def say(self, text: str) -> Trajectory: ...


def chat(
    prompt: Prompt = None,
    model: Model = None,
    url: Url = None,
    served_model: Served = None,
    api_key: Key = None,
    as_json: AsJson = False,
    max_turns: Turns = 10,
    max_length: Length = 4096,
    temperature: Temperature = 0.6,
    seed: Seed = 0,
    system: System = "auto",
    environment: Environment = "auto",
    codeenv: CodeEnv = None,
) -> None:
    """Talk to an agent that reasons, uses its tools and answers.

    A model from a run has the tools that it was trained with, others have a Python tool.
    """
    if (model is None) == (url is None):
        raise UserError("chat needs either --model DIR or --url URL")
    if system not in ("auto", "paper", "none"):
        raise UserError(f"--system {system!r}: expected auto, paper or none")
    directory = None if model is None else model_directory(model)
    sampling = SamplingConfig(temperature=temperature)
    options = Options(max_turns, max_length, sampling, seed, as_json)

    task = chat_environment(environment, directory)
    # Interpreters start when a program needs them: most conversations need one, not all.
    config = CodeEnvConfig(
        urls=tuple(codeenv or ()), token=os.environ.get(TOKEN_VARIABLE), warm_up="never"
    )

    async def run() -> bool:
        async with AsyncExitStack() as stack:
            with waiting("loading the model" if directory else "connecting to the endpoint"):
                speaker: Speaker
                if url is not None:
                    endpoint = (url, served_model, api_key)
                    speaker = await _endpoint(stack, endpoint, task, config, options, system)
                else:
                    assert directory is not None
                    speaker = await _embedded(stack, directory, task, config, options, system)
            own = environment != "auto" or directory is None
            knows = None if own or directory is None else known_questions(directory)
            return await converse(speaker, prompt, options, knows)

    if not asyncio.run(run()):
        raise typer.Exit(1)


def chat_environment(name: str, directory: Path | None) -> EnvironmentConfig:
    """The environment that a conversation takes place in."""
    if name != "auto":
        return EnvironmentConfig(use=name, folder=str(Path.cwd()))
    return EnvironmentConfig() if directory is None else trained_environment(directory)


def _episodic(environment: EnvironmentProtocol) -> EnvironmentProtocol:
    """The environment, unless a program writes its prompts: then chat is not possible."""
    from rstar2.endpoint.environment import ProgramEnvironment

    if isinstance(environment, ProgramEnvironment):
        raise UserError(
            f"chat cannot use environment {environment.name}: an agent program writes its "
            "prompts. --environment python-math gives the model a Python tool instead"
        )
    return environment


async def converse(
    speaker: Speaker,
    prompt: str | None,
    options: Options,
    knows: Callable[[str], bool] | None = None,
) -> bool:
    """Answer one message or every line of stdin; False if the last answer failed.

    `knows` says which messages a model that knows little can answer; others get a warning.
    """
    trajectory: Trajectory | None = None
    async for text in _messages(prompt, quiet=options.as_json):
        if knows is not None and not knows(text):
            progress.print(unknown_question(), style="yellow")
        trajectory = await speaker.say(text)
        if options.as_json:
            sys.stdout.write(encode(trajectory).decode() + "\n")
            sys.stdout.flush()
        if trajectory.failure is not None:
            progress.print(f"{trajectory.stop}: {trajectory.failure.message}", style="red")
            break
        if not options.as_json:
            progress.print(_summary(trajectory), style="dim")
        if trajectory.stop is StopReason.MAX_LENGTH:
            progress.print(_too_long(trajectory, options), style="red")
            break
    return trajectory is None or trajectory.failure is None


async def _messages(prompt: str | None, *, quiet: bool) -> AsyncIterator[str]:
    """The message of the command line, or the lines of stdin."""
    if prompt is not None:
        yield prompt
        return
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[str | None] = asyncio.Queue()

    def read() -> None:  # in a daemon thread: a blocking read must not delay the exit
        for line in sys.stdin:
            loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, None)

    threading.Thread(target=read, daemon=True, name="stdin").start()
    while True:
        if sys.stdin.isatty() and not quiet:
            progress.print("> ", end="", style="bold")
        line = await lines.get()  # no deadline: the user may think
        if line is None:
            return
        if line.strip():
            yield line.strip()


def _summary(trajectory: Trajectory) -> str:
    calls = f"{trajectory.calls} calls" if trajectory.calls != 1 else "1 call"
    failed = f", {trajectory.failed_calls} failed" if trajectory.failed_calls else ""
    tokens = f", {trajectory.sampled_tokens} tokens" if trajectory.sampled_tokens else ""
    answer = f"answer: {trajectory.answer}, " if trajectory.answer is not None else ""
    return f"[{answer}{trajectory.stop}, {calls}{failed}{tokens}, {trajectory.wall_s:.1f} s]"


def _too_long(trajectory: Trajectory, options: Options) -> str:
    if trajectory.prompt_ids and not trajectory.turns:
        return (
            f"the prompt has {len(trajectory.prompt_ids)} tokens, the limit of the conversation is "
            f"{options.max_length}: raise --max-length, or try --system none"
        )
    return f"the conversation reached {options.max_length} tokens (--max-length)"


# --------------------------------------------------------------------------- embedded engine


@dataclass(slots=True)
class Streaming:
    """An engine that shows its tokens while they are sampled."""

    engine: EmbeddedEngine
    template: Template
    show: Callable[[str], None]
    turn_ended: Callable[[], None]

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str, deadline_s: float
    ) -> Generation:
        ids: list[int] = []
        shown = 0

        def on_token(tokens: list[int]) -> None:
            nonlocal shown
            ids.extend(tokens)
            text = self.template.turn_text(ids)
            if not text.endswith("\ufffd"):  # otherwise the rest of a character is missing
                self.show(text[shown:])
                shown = len(text)

        generation = await self.engine.generate(
            prompt_ids, sampling, session=session, deadline_s=deadline_s, on_token=on_token
        )
        self.turn_ended()
        return generation

    async def release(self, session: str) -> None:
        await self.engine.release(session)


class EmbeddedSpeaker:
    """A conversation with a local model, exact to the token across messages."""

    def __init__(
        self,
        engine: EmbeddedEngine,
        template: Template,
        environment: EnvironmentProtocol,
        tools: SandboxClient | None,
        options: Options,
    ) -> None:
        self._template, self._options = template, options
        self._output = None if options.as_json else ColouredOutput(Console())
        show = self._output.feed if self._output else lambda _text: None
        end = self._output.end if self._output else lambda: None
        self._loop = AgentLoop(
            environment,
            Streaming(engine, template, show, end),
            tools,
            template,
            AgentConfig(),
        )
        self._last: Trajectory | None = None
        self._count = 0

    async def say(self, text: str) -> Trajectory:
        problem = Problem(f"chat-{self._count}", text, "")
        prompt = self._prompt(problem)
        if self._output is not None and self._count == 0:
            self._output.feed(self._template.prefill)
        self._last = await self._loop.run(
            problem,
            id=f"chat/{self._count}",
            group_id="chat",
            seed=self._options.seed,
            spec=RolloutSpec(
                self._options.sampling, self._options.max_length, self._options.max_turns
            ),
            observer=_observer(self._output),
            prompt_ids=prompt,
            graded=False,
        )
        self._count += 1
        return self._last

    def _prompt(self, problem: Problem) -> tuple[int, ...] | None:
        """None for the first message: the prompt is that of the environment."""
        if self._last is None or not self._last.turns:
            return None
        closed = self._last.turns[-1].sampled_ids[-1] in self._template.stop_ids
        follow_up = self._template.follow_up(problem.prompt, closed=closed)
        return (*self._last.token_ids, *follow_up.ids)


async def _embedded(
    stack: AsyncExitStack,
    directory: Path,
    task: EnvironmentConfig,
    config: CodeEnvConfig,
    options: Options,
    system: str,
) -> EmbeddedSpeaker:
    """Start the engine, and meanwhile load the tokenizer and open the environment."""
    extras.need("torch", "transformers", feature="rstar2 chat")  # the engine is another process
    options = replace(options, max_length=longest(directory, options.max_length))
    from rstar2.engine.embedded import EmbeddedEngine

    engine = EmbeddedEngine(
        directory,
        kv_tokens=options.max_length + 64,
        max_sequences=1,
        max_length=options.max_length,
    )
    stack.push_async_callback(engine.close)
    starting = asyncio.ensure_future(engine.start())
    try:
        template, environment = await asyncio.to_thread(_task, directory, task, system)
        tools = await stack.enter_async_context(open_environment(environment, config))
        await starting
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
    return EmbeddedSpeaker(engine, template, environment, tools, options)


def _task(
    directory: Path, task: EnvironmentConfig, system: str
) -> tuple[Template, EnvironmentProtocol]:
    """The template of a model and the environment of the conversation."""
    from rstar2.agent.template import Template, settings_of
    from rstar2.agent.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(directory)
    config = _settings(settings_of(tokenizer), system)
    environment = _episodic(load_environment(task, config))
    return Template(tokenizer, config, environment.prefill), environment


def _settings(saved: TemplateConfig | None, system: str) -> TemplateConfig:
    if system == "auto":
        return saved or TemplateConfig()
    prefill = saved.prefill_reason if saved is not None else True
    return TemplateConfig.model_validate(
        {"system": system, "instruction": system, "prefill_reason": prefill}
    )


# --------------------------------------------------------------------------- endpoint


class EndpointSpeaker:
    """A conversation with an endpoint that returns text."""

    def __init__(
        self,
        chat_loop: ChatLoop,
        environment: EnvironmentProtocol,
        tools: SandboxClient | None,
        config: TemplateConfig,
        options: Options,
    ) -> None:
        self._chat_loop, self._tools, self._config = chat_loop, tools, config
        self._environment, self._options = environment, options
        self._output = None if options.as_json else ColouredOutput(Console())
        if self._output is not None:
            chat_loop.on_text = self._output.feed
        chat_loop.observer = _observer(self._output, end_turns=True)
        self._count = 0

    async def say(self, text: str) -> Trajectory:
        from rstar2.agent.chat_loop import opening_messages

        problem = Problem(f"chat-{self._count}", text, "")
        environment, agent = self._environment, self._chat_loop.agent
        opening = open_episode(
            environment,
            problem,
            seed=self._options.seed,
            sandbox=self._tools,
            deadline_s=agent.tool_deadline_s,
        )
        async with opening as episode:
            if self._count == 0:
                self._chat_loop.messages.extend(opening_messages(episode, self._config))
            else:
                self._chat_loop.messages.append(Message("user", text))
            id = f"chat/{self._count}"
            self._count += 1
            trajectory = await self._chat_loop.run(
                episode, problem, id=id, group_id="chat", seed=self._options.seed
            )
            return await conclude(environment, episode, trajectory, agent, graded=False)


async def _endpoint(
    stack: AsyncExitStack,
    endpoint: tuple[str, str | None, str | None],
    task: EnvironmentConfig,
    codeenv: CodeEnvConfig,
    options: Options,
    system: str,
) -> EndpointSpeaker:
    """Connect to an endpoint, given by URL, model and key, and open the environment."""
    from rstar2.agent.chat_loop import ChatLoop
    from rstar2.engine.openai import OpenAIChat

    url, served, api_key = endpoint
    config = _settings(None, system)
    environment = _episodic(load_environment(task, config))
    tools = await stack.enter_async_context(open_environment(environment, codeenv))
    model = await stack.enter_async_context(OpenAIChat(url, model=served, api_key=api_key))
    chat_loop = ChatLoop(
        model, AgentConfig(), options.sampling, [], options.max_length, options.max_turns
    )
    return EndpointSpeaker(chat_loop, environment, tools, config, options)


def _observer(
    output: ColouredOutput | None, *, end_turns: bool = False
) -> Callable[[LoopEvent], None]:
    """An observer that shows tool results; with `end_turns` it also ends the turns."""

    def observe(event: LoopEvent) -> None:
        if output is None:
            return
        if isinstance(event, ToolReturned):
            output.feed(f"<tool_response>\n{event.text}\n</tool_response>")
            output.end()
        elif isinstance(event, Replied):
            output.feed(event.text)
            output.end()
        elif end_turns:
            output.end()

    return observe
