"""Invariants 1 to 3 of one trajectory, over random conversations, tokenizers and failures."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rstar2.agent.episodes import LoopEvent, ToolReturned, TurnSampled
from rstar2.agent.loop import AgentLoop, RolloutSpec
from rstar2.agent.template import Template
from rstar2.codeenv.protocol import RunRequest
from rstar2.config import AgentConfig, SamplingConfig
from rstar2.environments.python_math import PythonMath
from rstar2.errors import CodeEnvError, DeadlineError, EngineError, InvariantError, QueueFullError
from rstar2.paper_format import TOOL_NAME
from rstar2.types import (
    Finish,
    Generation,
    Outcome,
    Problem,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    decode,
    encode,
)
from tests.agent.agent_fakes import ScriptedGenerator, ScriptedTools, prompt_of

PROBLEM = Problem("p", "What is 6 times 7?", "42")
ANSWER = "</reason>\n<answer>\\boxed{42}</answer>"
SECRET = "boom-at-10.0.0.7"
"""The message of our own failures; no prompt may contain it."""
MakeTemplate = Callable[..., Template]


def call(code: str) -> str:
    body = json.dumps({"name": TOOL_NAME, "arguments": {"code": code, "input": ""}})
    return f"<tool_call>\n{body}\n</tool_call>"


def plain_call(call_id: str) -> ToolCall:
    return ToolCall(id=call_id, name=TOOL_NAME, arguments={"code": "1"})


async def roll(
    generator: ScriptedGenerator,
    tools: ScriptedTools,
    *,
    agent: AgentConfig | None = None,
    max_length: int = 4000,
    max_turns: int = 10,
    observer: Callable[[LoopEvent], None] | None = None,
) -> Trajectory:
    environment = PythonMath(generator.template.config)
    loop = AgentLoop(environment, generator, tools, generator.template, agent or AgentConfig())
    return await loop.run(
        PROBLEM,
        id="g/3",
        group_id="g",
        seed=11,
        spec=RolloutSpec(SamplingConfig(), max_length, max_turns),
        observer=observer,
        graded=False,
    )


def check_invariants(trajectory: Trajectory, generator: ScriptedGenerator) -> None:
    """What holds for every trajectory, however it ended."""
    ids = tuple(trajectory.prompt_ids)
    for index, turn in enumerate(trajectory.turns):
        assert generator.prompts[index] == ids
        assert len(turn.sampled_ids) == len(turn.logprobs) == sum(n for _, n in turn.versions)
        ids += (*turn.sampled_ids, *turn.response_ids)
    assert trajectory.token_ids == ids
    if len(generator.prompts) > len(trajectory.turns):  # the turn that the engine lost
        assert generator.prompts[-1] == ids
    sampled = [i for i, m in zip(ids, trajectory.mask, strict=True) if m]
    assert sampled == [i for turn in trajectory.turns for i in turn.sampled_ids]
    assert len(trajectory.logprobs) == len(ids)
    assert generator.released == [trajectory.id]
    assert not generator.open
    assert (trajectory.failure is not None) == trajectory.stop.infrastructure
    assert trajectory.reward is None
    seen = [generator.template.decode(prompt) for prompt in generator.prompts]
    assert not any(SECRET in text for text in [*seen, trajectory.text])
    assert decode(encode(trajectory), Trajectory) == trajectory


# --------------------------------------------------------------------------- one way at a time


async def test_call_read_answer(make_template: MakeTemplate) -> None:
    template = make_template("tiny", "none", "none")
    generator = ScriptedGenerator(template, [f"Hm.\n{call('6 * 7')}", ANSWER])
    tools = ScriptedTools()
    events: list[LoopEvent] = []
    trajectory = await roll(generator, tools, observer=events.append)
    check_invariants(trajectory, generator)
    assert trajectory.stop is StopReason.ANSWERED
    assert (trajectory.answer, trajectory.answer_tags) == ("42", 1)
    first, last = trajectory.turns
    assert first.results[0].call_id == first.calls[0].id == tools.requests[0].id
    assert template.decode(first.response_ids).count("ran 6 * 7") == 1
    assert last.response_ids == ()
    assert [type(event) for event in events] == [TurnSampled, ToolReturned, TurnSampled]
    assert trajectory.text.startswith("Hm.\n<tool_call>")
    assert trajectory.text.endswith(ANSWER)


async def test_every_turn_has_a_seed_of_its_own_that_can_be_repeated(
    make_template: MakeTemplate,
) -> None:
    template = make_template("tiny", "none", "none")
    seeds = []
    for _ in range(2):
        generator = ScriptedGenerator(template, [call("1"), call("2"), ANSWER])
        await roll(generator, ScriptedTools())
        seeds.append([sampling.seed for sampling in generator.samplings])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3


@pytest.mark.parametrize(
    ("lines", "max_turns", "stop", "executed"),
    [
        (["no tags at all"], 10, StopReason.NO_ANSWER, 0),
        (["<answer>\\boxed{1}"], 10, StopReason.NO_ANSWER, 0),
        (["<answer>no box</answer>"], 10, StopReason.ANSWERED, 0),
        ([call("1"), call("2")], 2, StopReason.MAX_TURNS, 1),
        (["<tool_call>{"] * 3, 10, StopReason.INVALID_CALLS, 0),
        (["<tool_call>{" * 3], 10, StopReason.INVALID_CALLS, 0),
        (["<tool_call>{", "<tool_call>{", call("1"), *["<tool_call>{"] * 3], 10,
         StopReason.INVALID_CALLS, 1),
        ([call("1") * 6, ANSWER], 10, StopReason.ANSWERED, 4),
    ],
)  # fmt: skip
async def test_reasons_to_stop(
    lines: list[str], max_turns: int, stop: StopReason, executed: int, make_template: MakeTemplate
) -> None:
    generator = ScriptedGenerator(make_template("tiny", "none", "none"), lines)
    tools = ScriptedTools()
    trajectory = await roll(generator, tools, max_turns=max_turns)
    check_invariants(trajectory, generator)
    assert trajectory.stop is stop
    assert len(tools.requests) == executed


async def test_calls_that_are_none_come_back_as_their_error(make_template: MakeTemplate) -> None:
    template = make_template("tiny", "none", "none")
    generator = ScriptedGenerator(template, ["<tool_call>{oops</tool_call>", ANSWER])
    trajectory = await roll(generator, ScriptedTools())
    assert [result.outcome for result in trajectory.results] == [Outcome.BAD_JSON]
    assert (trajectory.calls, trajectory.failed_calls) == (1, 1)
    assert "not valid" in template.decode(trajectory.turns[0].response_ids)


async def test_a_turn_cut_by_length_ends_the_rollout_and_runs_nothing(
    make_template: MakeTemplate,
) -> None:
    template = make_template("tiny", "none", "none")
    generator = ScriptedGenerator(template, [call("1" * 200)])
    tools = ScriptedTools()
    trajectory = await roll(generator, tools, max_length=60)
    check_invariants(trajectory, generator)
    assert trajectory.stop is StopReason.MAX_LENGTH
    assert len(trajectory.token_ids) == 60
    assert not tools.requests


async def test_a_response_that_does_not_fit_ends_the_rollout(make_template: MakeTemplate) -> None:
    template = make_template("tiny", "none", "none")
    room = len(prompt_of(template, PROBLEM)) + len(template.encode_turn(call("1")))
    result = ToolResult("c", Outcome.OK, stdout="ran 1")
    whole = len(template.response([result], [plain_call("c")]).ids)
    for spare in (0, 1):
        generator = ScriptedGenerator(template, [call("1"), "x" * 50])
        trajectory = await roll(generator, ScriptedTools(), max_length=room + whole + spare)
        check_invariants(trajectory, generator)
        assert trajectory.stop is StopReason.MAX_LENGTH
        assert len(trajectory.turns) == 1 + spare
        assert bool(trajectory.turns[0].response_ids) == bool(spare)
        assert len(trajectory.turns[0].results) == 1


async def test_a_prompt_that_does_not_fit_samples_nothing(make_template: MakeTemplate) -> None:
    generator = ScriptedGenerator(make_template("tiny", "none", "none"), [])
    trajectory = await roll(generator, ScriptedTools(), max_length=5)
    assert (trajectory.stop, trajectory.turns) == (StopReason.MAX_LENGTH, ())
    assert generator.released == ["g/3"]


async def test_long_tool_output_is_cut_in_tokens(make_template: MakeTemplate) -> None:
    template = make_template("qwen")
    generator = ScriptedGenerator(template, [call("1"), ANSWER])
    tools = ScriptedTools(lambda r: ToolResult(r.id, Outcome.OK, stdout="7 " * 5000))
    trajectory = await roll(generator, tools, agent=AgentConfig(response_tokens=32))
    empty = template.response([ToolResult("c", Outcome.OK)], [plain_call("c")]).ids
    assert len(trajectory.turns[0].response_ids) <= len(empty) + 32


async def test_an_open_turn_gets_a_masked_end(make_template: MakeTemplate) -> None:
    template = make_template("tiny", "none", "none")
    lines = [call("1"), ANSWER]
    generator = ScriptedGenerator(template, lines, spell=template.encode)
    trajectory = await roll(generator, ScriptedTools())
    check_invariants(trajectory, generator)
    first = trajectory.turns[0]
    assert first.sampled_ids[-1] not in template.stop_ids
    assert first.response_ids[0] in template.stop_ids


async def test_an_answer_in_tool_output_is_not_the_models(make_template: MakeTemplate) -> None:
    template = make_template("qwen", "none", "none")
    generator = ScriptedGenerator(template, [call("1"), "I give up."])
    tools = ScriptedTools(lambda r: ToolResult(r.id, Outcome.OK, stdout=ANSWER))
    trajectory = await roll(generator, tools)
    assert trajectory.stop is StopReason.NO_ANSWER
    assert (trajectory.answer, trajectory.answer_tags) == (None, 0)


# --------------------------------------------------------------------------- infrastructure


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (EngineError(SECRET), "engine"),
        (DeadlineError(SECRET), "deadline"),
        (ConnectionResetError(SECRET), "connection"),
    ],
)
async def test_a_dying_engine_is_a_named_failure(
    error: Exception, name: str, make_template: MakeTemplate
) -> None:
    generator = ScriptedGenerator(
        make_template("tiny"), [call("1"), ANSWER], fail_at=1, error=error
    )
    trajectory = await roll(generator, ScriptedTools())
    check_invariants(trajectory, generator)
    assert trajectory.stop is StopReason.ENGINE_FAILED
    assert trajectory.failure is not None
    assert trajectory.failure.name == name
    assert len(trajectory.turns) == 1


@pytest.mark.parametrize("error", [CodeEnvError(SECRET), QueueFullError(SECRET, 1.0)])
async def test_a_dying_tool_server_never_reaches_the_model(
    error: Exception, make_template: MakeTemplate
) -> None:
    generator = ScriptedGenerator(make_template("tiny"), [call("1") + call("2"), ANSWER])
    trajectory = await roll(generator, ScriptedTools(fail_at=1, error=error))
    check_invariants(trajectory, generator)
    assert trajectory.stop is StopReason.TOOL_FAILED
    assert len(generator.prompts) == 1
    assert [r.outcome for r in trajectory.results] == [Outcome.OK]
    assert trajectory.turns[0].response_ids == ()


async def test_an_infrastructure_outcome_is_not_the_models(make_template: MakeTemplate) -> None:
    generator = ScriptedGenerator(make_template("tiny"), [call("1"), ANSWER])
    tools = ScriptedTools(lambda r: ToolResult(r.id, Outcome.INFRASTRUCTURE, message=SECRET))
    trajectory = await roll(generator, tools)
    assert trajectory.stop is StopReason.TOOL_FAILED
    assert (trajectory.calls, trajectory.failed_calls) == (0, 0)
    assert trajectory.turns[0].response_ids == ()


async def test_the_result_of_another_call_is_refused(make_template: MakeTemplate) -> None:
    generator = ScriptedGenerator(make_template("tiny"), [call("1"), ANSWER])
    tools = ScriptedTools(lambda r: ToolResult("other", Outcome.OK, stdout="1"))
    trajectory = await roll(generator, tools)
    assert trajectory.stop is StopReason.TOOL_FAILED
    assert not list(trajectory.results)


def _with(generation: Generation, **changes: object) -> Generation:
    return replace(generation, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda g: _with(g, logprobs=g.logprobs[1:]),
        lambda g: _with(g, logprobs=(math.nan, *g.logprobs[1:])),
        lambda g: _with(g, versions=((0, len(g.token_ids) + 1),)),
        lambda g: _with(g, token_ids=(), logprobs=(), versions=()),
        lambda g: _with(g, token_ids=tuple(g.token_ids) * 100, logprobs=tuple(g.logprobs) * 100,
                        versions=((0, 100 * len(g.token_ids)),)),
        lambda g: _with(g, entropies=(0.0,)),
    ],
)  # fmt: skip
async def test_an_engine_that_answers_nonsense_has_failed(
    spoil: Callable[[Generation], Generation], make_template: MakeTemplate
) -> None:
    class Spoiler(ScriptedGenerator):
        async def generate(self, *args: object, **kwargs: object) -> Generation:
            return spoil(await super().generate(*args, **kwargs))  # type: ignore[arg-type]

    generator = Spoiler(make_template("tiny", "none", "none"), [ANSWER])
    trajectory = await roll(generator, ScriptedTools(), max_length=400)
    assert trajectory.stop is StopReason.ENGINE_FAILED
    assert trajectory.turns == ()


async def test_a_request_given_up_by_the_engine_is_cancelled(make_template: MakeTemplate) -> None:
    class Quitter(ScriptedGenerator):
        async def generate(self, *args: object, **kwargs: object) -> Generation:
            whole = await super().generate(*args, **kwargs)  # type: ignore[arg-type]
            return replace(whole, finish=Finish.CANCELLED)

    generator = Quitter(make_template("tiny"), [ANSWER])
    trajectory = await roll(generator, ScriptedTools())
    check_invariants(trajectory, generator)
    assert trajectory.stop is StopReason.CANCELLED


async def test_waits_end_although_nobody_answers(
    make_template: MakeTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rstar2.agent.episodes.GRACE_S", 0.0)
    agent = AgentConfig(generate_deadline_s=0.05)
    template = make_template("tiny", "none", "none")
    silent = ScriptedGenerator(template, [ANSWER], hang_at=0)
    trajectory = await roll(silent, ScriptedTools(), agent=agent)
    assert trajectory.stop is StopReason.ENGINE_FAILED
    assert trajectory.failure is not None
    assert trajectory.failure.name == "deadline"
    generator = ScriptedGenerator(template, [call("1"), ANSWER])
    agent = AgentConfig(tool_deadline_s=0.05)
    trajectory = await roll(generator, ScriptedTools(hang_at=0), agent=agent)
    assert trajectory.stop is StopReason.TOOL_FAILED
    check_invariants(trajectory, generator)


async def test_an_engine_that_cannot_release_does_not_spoil_the_rollout(
    make_template: MakeTemplate, caplog: pytest.LogCaptureFixture
) -> None:
    class Dead(ScriptedGenerator):
        async def release(self, session: str) -> None:
            raise EngineError("gone")

    trajectory = await roll(Dead(make_template("tiny"), [ANSWER]), ScriptedTools())
    assert trajectory.stop is StopReason.ANSWERED
    assert "could not be released" in caplog.text


async def test_a_bug_is_raised_and_still_releases(make_template: MakeTemplate) -> None:
    generator = ScriptedGenerator(
        make_template("tiny"), [ANSWER], fail_at=0, error=InvariantError("bug")
    )
    with pytest.raises(InvariantError):
        await roll(generator, ScriptedTools())
    assert generator.released == ["g/3"]


# --------------------------------------------------------------------------- any way


@dataclass(frozen=True)
class Story:
    """A random rollout: what the model says, how it spells it, what breaks, and the limits."""

    family: str
    lines: tuple[str, ...]
    spelling: str
    engine_fails: int | None
    tool_fails: int | None
    infrastructure: int | None
    max_length: int
    max_turns: int
    agent: AgentConfig

    def play(self, template: Template) -> tuple[ScriptedGenerator, ScriptedTools]:
        def by_character(text: str) -> tuple[int, ...]:
            ids = (i for char in text for i in template.encode_turn(char)[:-1])
            return (*ids, template.stop_ids[0])

        def reply(request: RunRequest) -> ToolResult:
            if len(tools.requests) - 1 == self.infrastructure:
                return ToolResult(request.id, Outcome.INFRASTRUCTURE, message=SECRET)
            outcome = list(Outcome)[len(request.code) % 8]
            return ToolResult(request.id, outcome, stdout=request.code * 9, traceback="Error: x")

        generator = ScriptedGenerator(
            template,
            [*self.lines, ANSWER],
            spell=by_character if self.spelling == "characters" else None,
            fail_at=self.engine_fails,
            error=EngineError(SECRET),
        )
        tools = ScriptedTools(reply, fail_at=self.tool_fails, error=CodeEnvError(SECRET))
        return generator, tools


LINE = st.lists(
    st.sampled_from(
        [call("print(6 * 7)"), call("1/0 # 你好 🙂"), "<tool_call>\n{", "</tool_call>", "words ",
         "<answer>\\boxed{7}</answer>", "<reason>", "\n\n  ", "<|im_end|>", "<tool_response>"]
    )
    | st.text(max_size=10),
    max_size=4,
).map("".join)  # fmt: skip
MAYBE = st.none() | st.integers(0, 4)
STORIES = st.builds(
    Story,
    family=st.sampled_from(["tiny", "qwen", "llama", "mistral", "phi", "gemma"]),
    lines=st.lists(LINE, max_size=5).map(tuple),
    spelling=st.sampled_from(["canonical", "characters"]),
    engine_fails=MAYBE,
    tool_fails=MAYBE,
    infrastructure=MAYBE,
    max_length=st.integers(60, 900),
    max_turns=st.integers(1, 6),
    agent=st.builds(
        AgentConfig,
        calls_per_turn=st.integers(1, 3),
        invalid_calls=st.integers(1, 3),
        response_tokens=st.integers(16, 64),
    ),
)
ANY = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@ANY
@given(story=STORIES)
def test_invariants_hold_whatever_happens(story: Story, make_template: MakeTemplate) -> None:
    generator, tools = story.play(make_template(story.family, "none", "none"))
    trajectory = asyncio.run(
        roll(
            generator,
            tools,
            agent=story.agent,
            max_length=story.max_length,
            max_turns=story.max_turns,
        )
    )
    check_invariants(trajectory, generator)
    assert len(trajectory.token_ids) <= max(story.max_length, len(trajectory.prompt_ids))
    assert len(trajectory.turns) <= story.max_turns
    asked = [request.id for request in tools.requests]
    executable = {c.id for turn in trajectory.turns for c in turn.calls if c.error is None}
    got = [result.call_id for result in trajectory.results if result.call_id in executable]
    assert len(set(asked)) == len(asked)
    assert got == asked[: len(got)]
    assert len(asked) - len(got) <= story.agent.calls_per_turn  # calls of one turn run together


@ANY
@given(story=STORIES, steps=st.integers(0, 40))
def test_cancelling_at_any_point_releases_everything(
    story: Story, steps: int, make_template: MakeTemplate
) -> None:
    generator, tools = story.play(make_template(story.family, "none", "none"))

    async def cancel() -> None:
        task = asyncio.create_task(
            roll(generator, tools, max_length=story.max_length, max_turns=story.max_turns)
        )
        for _ in range(steps):
            await asyncio.sleep(0)
        started = bool(generator.prompts)
        ended = task.done()
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(outcome, Trajectory) == ended
        if not ended:
            assert isinstance(outcome, asyncio.CancelledError)
        if started:
            assert generator.released == ["g/3"]
        assert not generator.open

    asyncio.run(cancel())
