"""Which trajectories get a reward, which a named failure, and which stay unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from rstar2.codeenv.protocol import VerifyRequest, VerifyResult
from rstar2.errors import CodeEnvError, DataError, DeadlineError
from rstar2.reward.grade import GRADERS, MAX_ANSWER_CHARS, check_gold, grade, judge, rejected_golds
from rstar2.types import Failure, Problem, StopReason, Trajectory


class FakeVerifier:
    """A scripted verifier that records its requests."""

    def __init__(self, reply: Callable[[VerifyRequest], VerifyResult] | Exception) -> None:
        self.reply = reply
        self.requests: list[VerifyRequest] = []

    async def verify(self, request: VerifyRequest) -> VerifyResult:
        self.requests.append(request)
        await asyncio.sleep(0)
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply(request)


def says(value: object) -> FakeVerifier:
    return FakeVerifier(lambda request: VerifyResult(request.id, value))


def trajectory(
    answer: str | None, stop: StopReason = StopReason.ANSWERED, failure: Failure | None = None
) -> Trajectory:
    return Trajectory("t", "p", "g", 0, (1,), (), stop, answer=answer, failure=failure)


def problem(answer: str, grader: str = "math") -> Problem:
    return Problem("p", "?", answer, grader)


@pytest.mark.parametrize(
    ("answer", "truth", "grader", "value"),
    [
        ("42", "42", "integer", 1.0),
        ("42.0", "42", "integer", 1.0),
        ("43", "42", "integer", 0.0),
        ("", "42", "integer", 0.0),
        ("1,000", "1000", "math", 1.0),
        ("41", "42", "math", 0.0),
        ("\\text{Evelyn}", "\\text{Evelyn}", "math", 1.0),
        ("10.0", "10", "number", 1.0),
        ("$-3.50$", "-3.5", "number", 1.0),
        ("1,000", "1000", "number", 1.0),
        ("40 + 2", "42", "number", 0.0),
        ("\\frac{84}{2}", "42", "number", 0.0),
        ("84/2", "42", "number", 0.0),
        ("(b)", "B", "choice", 1.0),
        ("C", "B", "choice", 0.0),
    ],
)
async def test_what_needs_no_algebra_is_graded_at_once(
    answer: str, truth: str, grader: str, value: float
) -> None:
    verifier = says(None)
    graded = await grade(trajectory(answer), problem(truth, grader), verifier, 1.0)
    assert graded.reward is not None
    assert (graded.reward.value, graded.reward.answer, graded.reward.grader) == (
        value,
        answer,
        grader,
    )
    assert not verifier.requests


@pytest.mark.parametrize("verdict", [True, False])
async def test_algebra_is_left_to_the_verifier(verdict: bool) -> None:
    verifier = says(verdict)
    graded = await grade(trajectory("\\frac{84}{2}"), problem("42"), verifier, 1.5)
    assert graded.reward is not None
    assert graded.reward.value == float(verdict)
    (request,) = verifier.requests
    assert (request.function, request.deadline_s) == ("math", 1.5)
    assert request.arguments == {"answer": "\\frac{84}{2}", "truth": "42"}


@pytest.mark.parametrize(
    "answer",
    ["\\$42", "42\\%", "42^\\circ", "42\\text{ cm}", "x=42", "\\frac{84}{2}", "6 \\cdot 7"],
)
async def test_an_integer_in_another_notation_is_left_to_the_verifier(answer: str) -> None:
    verifier = says(True)
    graded = await grade(trajectory(answer), problem("42", "integer"), verifier, 1.0)
    assert graded.reward is not None
    assert (graded.reward.value, graded.reward.grader) == (1.0, "integer")
    (request,) = verifier.requests
    assert request.function == "math"
    assert request.arguments == {"answer": answer, "truth": "42"}


async def test_the_verifier_reads_an_integer_truth_without_separators() -> None:
    verifier = says(True)
    await grade(trajectory("\\$1000"), problem("1,000", "integer"), verifier, 1.0)
    assert verifier.requests[0].arguments["truth"] == "1000"


@pytest.mark.parametrize(("answer", "value"), [("42", 1.0), ("41", 0.0), ("x", 1.0)])
async def test_a_verdict_is_a_number(answer: str, value: float) -> None:
    judged = await judge(answer, problem("42"), says(True), 1.0, id="t")
    assert (type(judged), judged) == (float, value)


async def test_the_id_of_a_check_covers_what_is_checked() -> None:
    verifier = says(True)
    for answer in ("x", "x", "y"):
        await grade(trajectory(answer), problem("z"), verifier, 1.0)
    first, again, other = (request.id for request in verifier.requests)
    assert first == again != other


@pytest.mark.parametrize(
    ("answer", "stop"),
    [
        (None, StopReason.NO_ANSWER),
        (None, StopReason.ANSWERED),
        (None, StopReason.MAX_TURNS),
        (None, StopReason.INVALID_CALLS),
        ("42", StopReason.MAX_LENGTH),
        ("4" * (MAX_ANSWER_CHARS + 1), StopReason.ANSWERED),
    ],
)
async def test_no_answer_and_truncation_earn_nothing(answer: str | None, stop: StopReason) -> None:
    verifier = says(True)
    graded = await grade(trajectory(answer, stop), problem("42"), verifier, 1.0)
    assert graded.reward is not None
    assert graded.reward.value == 0.0
    assert not verifier.requests


@pytest.mark.parametrize("stop", [s for s in StopReason if s.infrastructure])
async def test_infrastructure_is_never_graded(stop: StopReason) -> None:
    lost = trajectory("42", stop, Failure("engine", "gone"))
    assert await grade(lost, problem("42"), says(True), 1.0) is lost


@pytest.mark.parametrize(
    ("verifier", "name"),
    [
        (
            FakeVerifier(lambda r: VerifyResult(r.id, error="timeout", message="5 s")),
            "grader_timeout",
        ),
        (FakeVerifier(lambda r: VerifyResult(r.id, error="exception")), "grader_exception"),
        (FakeVerifier(lambda r: VerifyResult("other", True)), "grader_nonsense"),
        (FakeVerifier(lambda r: VerifyResult(r.id, "yes")), "grader_nonsense"),
        (FakeVerifier(CodeEnvError("no server")), "grader_code_env"),
        (FakeVerifier(DeadlineError("late")), "grader_deadline"),
        (FakeVerifier(ConnectionRefusedError("no")), "grader_connection"),
    ],
)
async def test_a_failing_grader_is_a_named_failure_and_no_reward(
    verifier: FakeVerifier, name: str
) -> None:
    graded = await grade(trajectory("x"), problem("y"), verifier, 1.0)
    assert graded.reward is None
    assert graded.failure is not None
    assert graded.failure.name == name


async def test_a_silent_verifier_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(FakeVerifier):
        async def verify(self, request: VerifyRequest) -> VerifyResult:
            await asyncio.Event().wait()
            raise AssertionError

    monkeypatch.setattr("rstar2.reward.grade.GRACE_S", 0.0)
    graded = await grade(trajectory("x"), problem("y"), Silent(CodeEnvError("")), 0.05)
    assert graded.failure is not None
    assert graded.failure.name == "grader_deadline"


@pytest.mark.parametrize(
    ("answer", "grader"),
    [("42", "exact"), ("4 2", "integer"), ("\\pi", "integer"), ("Z", "choice"), (" ", "math")],
)
def test_problems_that_no_answer_satisfies_are_refused(answer: str, grader: str) -> None:
    with pytest.raises(DataError, match="problem p"):
        check_gold(problem(answer, grader))


def test_a_refused_gold_names_place_field_and_way_out() -> None:
    with pytest.raises(DataError) as unknown:
        check_gold(problem("42", "itneger"), "p.jsonl:7")
    assert str(unknown.value) == (
        "p.jsonl:7: problem p: grader = 'itneger' is unknown: did you mean 'integer'? "
        "The graders are choice, integer, math, number"
    )
    with pytest.raises(DataError) as unreadable:
        check_gold(problem("\\pi", "integer"), "p.jsonl:7")
    assert str(unreadable.value) == (
        "p.jsonl:7: problem p: answer = '\\\\pi' cannot be checked by grader = 'integer', which "
        "expects an integer literal such as 42: correct the answer, choose another grader "
        "(choice, integer, math, number) or remove the problem"
    )


def test_good_golds_pass() -> None:
    for answer, grader in (("42", "integer"), ("\\pi", "math"), ("3.5", "number"), ("B", "choice")):
        assert grader in GRADERS
        check_gold(problem(answer, grader))


async def test_rejected_golds_are_listed_with_why() -> None:
    def reply(request: VerifyRequest) -> VerifyResult:
        truth = request.arguments["truth"]
        if truth == "slow":
            return VerifyResult(request.id, error="timeout", message="5 s")
        return VerifyResult(request.id, truth == "fine")

    problems = [problem("fine"), problem("odd"), problem("slow"), problem("7", "integer")]
    rejected = await rejected_golds(problems, FakeVerifier(reply), 1.0)
    assert [(p.answer, why) for p, why in rejected] == [
        ("odd", "not accepted"),
        ("slow", "grader_timeout: 5 s"),
    ]
