"""`python-math`, the task of the paper: mathematics with a Python tool and a boxed answer.

The model reasons in <reason> tags, runs Python as often as it likes, and answers with
`<answer>\\boxed{...}</answer>`. The reward is 1 if the boxed content equals the truth, else 0
(`reward/`); the format penalty is the paper's. By default the problems are those of the embedded
arithmetic task.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from rstar2.config import TemplateConfig
from rstar2.environments.base import Answer, SandboxClient, ToolSpec
from rstar2.environments.python_tool import OpenPython, python_spec
from rstar2.errors import InvariantError, RecipeError
from rstar2.paper_format import (
    ANSWER_CLOSE,
    ANSWER_OPEN,
    INSTRUCTION,
    REASON_OPEN,
    SYSTEM,
    answer_of,
    count_answer_tags,
    format_penalty,
    last_answer,
)
from rstar2.problems.arithmetic import sft_conversations
from rstar2.problems.chains import ChainText, chain_conversations
from rstar2.problems.load import ARITHMETIC, load_problems
from rstar2.reward.grade import grade
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


class PythonMath:
    """The paper's task, with the problems of a file or of the embedded arithmetic task."""

    name = "python-math"
    needs_sandbox = True

    def __init__(
        self,
        template: TemplateConfig | None = None,
        *,
        problems: str = ARITHMETIC,
        level: int = 1,
        sft: Mapping[str, Any] | None = None,
        penalise_text_after_answer: bool = False,
    ) -> None:
        """`level` is that of the embedded task; `sft` has the fields of `ChainText` (level 2)."""
        if level not in (1, 2):
            raise RecipeError(f"environment.args.level = {level}: the levels are 1 and 2")
        if level == 1 and sft:
            raise RecipeError("environment.args.sft describes the SFT text of level 2; set level")
        known = [field.name for field in fields(ChainText)]
        for name in sft or ():
            if name not in known:
                raise RecipeError(
                    f"environment.args.sft.{name} is not a setting; known are {', '.join(known)}"
                )
        self._template = template or TemplateConfig()
        self._problems = problems
        self._level = level
        self._text = ChainText(**(sft or {}))
        self._penalise_text_after_answer = penalise_text_after_answer

    @property
    def prefill(self) -> str:
        return REASON_OPEN if self._template.prefill_reason else ""

    def problems(self, split: Split, count: int | None, seed: int) -> Sequence[Problem]:
        """Problems of the embedded task by split; a file has no splits."""
        return load_problems(self._problems, split, count=count, seed=seed, level=self._level)

    def demonstrations(self, count: int, seed: int) -> Iterator[Conversation]:
        """Conversations that teach the format of the embedded task."""
        if self._level == 2:
            return chain_conversations(count, seed, self._text)
        return sft_conversations(count, seed)

    async def open(
        self, problem: Problem, *, seed: int, sandbox: SandboxClient | None
    ) -> PythonMathEpisode:
        if sandbox is None:
            raise InvariantError("python-math needs the code environment")
        return PythonMathEpisode(problem, self.messages(problem), sandbox)

    def messages(self, problem: Problem) -> tuple[Message, ...]:
        """What the model reads first."""
        user = problem.prompt.strip()
        if self._template.instruction == "paper":
            user = INSTRUCTION.format(problem=user)
        return Message("system", SYSTEM), Message("user", user)

    def format_penalty(self, trajectory: Trajectory) -> float:
        """The paper's p_format: answer tags must occur once.

        With `penalise_text_after_answer`, 1 as well if text follows the last answer.
        """
        if self._penalise_text_after_answer and trajectory.turns:
            _, _, after = trajectory.turns[-1].text.rpartition(ANSWER_CLOSE)
            if ANSWER_CLOSE in trajectory.turns[-1].text and after.strip():
                return 1.0
        return format_penalty(trajectory.answer_tags, len(trajectory.turns))

    async def close(self) -> None:
        """Nothing is shared by episodes."""


@dataclass(frozen=True, slots=True)
class PythonMathEpisode:
    """One problem; every call runs in a fresh interpreter."""

    problem: Problem
    messages: tuple[Message, ...]
    sandbox: SandboxClient

    tools: ClassVar[tuple[ToolSpec, ...]] = (python_spec(),)
    answer_tags: ClassVar[tuple[str, str] | None] = (ANSWER_OPEN, ANSWER_CLOSE)

    async def call(self, call: ToolCall, deadline_s: float) -> ToolResult:
        """Run the code of a call."""
        return await OpenPython(self.sandbox).call(call, deadline_s)

    async def reply(self, turns: Sequence[Turn]) -> None:
        """A turn without a call is the last one."""

    def answer(self, turns: Sequence[Turn]) -> Answer:
        """The boxed content of the last complete answer."""
        text, complete = None, False
        for turn in turns:
            complete = last_answer(turn.text) is not None
            if complete:
                text = answer_of(turn.text)
        return Answer(text, sum(count_answer_tags(turn.text) for turn in turns), complete)

    async def reward(self, trajectory: Trajectory, deadline_s: float) -> Reward | Failure:
        """1 if the answer equals the truth, else 0."""
        graded = await grade(trajectory, self.problem, self.sandbox, deadline_s)
        outcome = graded.failure or graded.reward
        if outcome is None:
            raise InvariantError(f"{trajectory.id}: neither a reward nor a failure")
        return outcome

    async def close(self) -> None:
        """Nothing is held."""
