"""The pool against the real jail: results, limits, deadlines, idempotence, verification."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from rstar2.codeenv.protocol import RunRequest, VerifyRequest
from rstar2.codeenv.server import probe
from rstar2.codeenv.server.executor import Pool
from rstar2.config import CodeEnvConfig
from rstar2.errors import IsolationError, QueueFullError, UserError
from rstar2.types import Limits, Outcome, ToolResult

pytestmark = pytest.mark.asyncio(loop_scope="module")
FUNCTIONS = {"echo": "json:dumps", "forever": "signal:pause", "gone": "no_such_module:f"}
_ids = itertools.count()


def levels() -> list[str]:
    try:
        best = probe.resolve("auto").level
    except IsolationError:
        return []
    return ["strict", "portable"] if best == "strict" else ["portable"]


@pytest_asyncio.fixture(params=levels(), scope="module", loop_scope="module")
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[Pool]:
    pool = Pool(CodeEnvConfig(slots=2, queue=50, sessions=4), request.param, FUNCTIONS)
    await pool.start()
    yield pool
    await pool.close(1.0)


async def run(pool: Pool, code: str, stdin: str = "", **limits: float) -> ToolResult:
    request = RunRequest(f"t{next(_ids)}", code, stdin, Limits(**limits))  # type: ignore[arg-type]
    result = await pool.run(request)
    assert result.call_id == request.id
    assert result.isolation == pool.isolation
    return result


async def test_printed_text_is_the_result(pool: Pool) -> None:
    result = await run(pool, "print('hello')\n'not shown'")
    assert (result.outcome, result.stdout, result.value) == (Outcome.OK, "hello\n", None)
    assert result.exit_code == 0
    assert result.cpu_s > 0


async def test_last_expression_is_shown_when_nothing_was_printed(pool: Pool) -> None:
    result = await run(pool, "x = 20\nx + 22")
    assert (result.outcome, result.value) == (Outcome.OK, "42")


@pytest.mark.parametrize(
    "code", ["x = 1", "None", "1 + 1;", "import sys\nsys.exit(0)", "# nothing"]
)
async def test_nothing_to_show_is_no_output(pool: Pool, code: str) -> None:
    assert (await run(pool, code)).outcome is Outcome.NO_OUTPUT


async def test_traceback_has_the_programs_own_lines_only(pool: Pool) -> None:
    result = await run(
        pool, "import json\ndef parse(text):\n    return json.loads(text)\nparse('{')"
    )
    assert result.outcome is Outcome.EXCEPTION
    assert result.message.startswith("json.decoder.JSONDecodeError: ")
    lines = result.traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1:5] == [
        '  File "<program>", line 4, in <module>',
        "    parse('{')",
        '  File "<program>", line 3, in parse',
        "    return json.loads(text)",
    ]
    assert "decoder.py" not in result.traceback


async def test_chained_exceptions_are_told_in_order(pool: Pool) -> None:
    result = await run(pool, "try:\n    1 / 0\nexcept ZeroDivisionError:\n    {}['k']")
    first, second = result.traceback.split("During handling of the above exception")
    assert "ZeroDivisionError" in first
    assert "KeyError: 'k'" in second


async def test_syntax_error_shows_the_offending_line(pool: Pool) -> None:
    result = await run(pool, "x = 1\nprint(x")
    assert result.outcome is Outcome.SYNTAX_ERROR
    assert "print(x" in result.traceback
    assert "^" in result.traceback
    assert "line 2" in result.message


async def test_stdin_is_provided(pool: Pool) -> None:
    assert (await run(pool, "print(int(input()) + int(input()))", "20\n22\n")).stdout == "42\n"


async def test_large_stdin_arrives_whole(pool: Pool) -> None:
    result = await run(pool, "import sys\nprint(len(sys.stdin.read()))", "x" * 300_000)
    assert result.stdout == "300000\n"


async def test_warm_modules_work(pool: Pool) -> None:
    result = await run(
        pool,
        "import numpy as np, sympy, mpmath\nfrom scipy import optimize\n"
        "x = sympy.symbols('x')\n"
        "print(sympy.solve(x**2 - 5*x + 6), np.linalg.det(np.eye(2)), mpmath.mp.dps)\n"
        "print(round(optimize.brentq(lambda t: t * t - 2, 0, 2), 6))",
        wall_s=30.0,
        cpu_s=30.0,
    )
    assert result.stdout == "[2, 3] 1.0 15\n1.414214\n", result


async def test_main_guard_and_pickling_work(pool: Pool) -> None:
    result = await run(
        pool,
        "import pickle\nclass P:\n    pass\n"
        "if __name__ == '__main__':\n    print(type(pickle.loads(pickle.dumps(P()))).__name__)",
    )
    assert result.stdout == "P\n"


async def test_scratch_files_work_within_a_call(pool: Pool) -> None:
    result = await run(pool, "open('f.txt', 'w').write('hi')\nprint(open('f.txt').read())")
    assert result.stdout == "hi\n"


async def test_limits_above_the_cap_are_lowered(pool: Pool) -> None:
    result = await run(pool, "bytearray(6 << 30)", memory_mb=1_000_000)
    assert (result.outcome, "4096 MB" in result.message) == (Outcome.MEMORY, True)


async def test_unusual_limits_get_a_jail_of_their_own(pool: Pool) -> None:
    code = "n = 0\nfor i in range(3):\n    n += open(f'{i}', 'wb').write(bytes(5 << 20))\nprint(n)"
    assert (await run(pool, code, scratch_mb=40)).stdout == f"{15 << 20}\n"
    assert (await run(pool, code + "\nimport time; time.sleep(1)", scratch_mb=8)).outcome in (
        Outcome.EXCEPTION,
        Outcome.KILLED,
    )


async def test_same_id_is_executed_once(pool: Pool) -> None:
    request = RunRequest("same", "import random\nprint(random.random())")
    first, second = await asyncio.gather(pool.run(request), pool.run(request))
    third = await pool.run(request)
    assert first.stdout == second.stdout == third.stdout


async def test_deadline_counts_the_time_in_the_queue(pool: Pool) -> None:
    busy = [asyncio.create_task(run(pool, "while True: pass", wall_s=1.0)) for _ in range(2)]
    await asyncio.sleep(0.05)
    late = await pool.run(RunRequest("late", "print(1)", deadline_s=0.2))
    assert late.outcome is Outcome.INFRASTRUCTURE
    assert "deadline" in late.message
    assert [r.outcome for r in await asyncio.gather(*busy)] == [Outcome.TIMEOUT] * 2


async def test_program_cut_short_by_the_deadline_is_not_blamed(pool: Pool) -> None:
    result = await pool.run(RunRequest("short", "while True: pass", deadline_s=0.3))
    assert result.outcome is Outcome.INFRASTRUCTURE


async def test_full_queue_is_refused_with_a_time_to_come_back(pool: Pool) -> None:
    requests = [RunRequest(f"q{i}", "import time; time.sleep(0.01)") for i in range(60)]
    results = await asyncio.gather(*(pool.run(r) for r in requests), return_exceptions=True)
    refused = [r for r in results if isinstance(r, QueueFullError)]
    assert len(refused) == 8
    assert all(r.retry_after_s > 0 for r in refused)
    assert sum(isinstance(r, ToolResult) for r in results) == 52


async def test_many_calls_are_never_mixed_up(pool: Pool) -> None:
    tasks = [run(pool, f"print({i} * 7)") for i in range(50)]
    assert [r.stdout for r in await asyncio.gather(*tasks)] == [f"{i * 7}\n" for i in range(50)]


async def test_source_beyond_the_limit_is_the_callers_error(pool: Pool) -> None:
    with pytest.raises(UserError, match="at most"):
        await run(pool, "#" * (33 << 20))


async def test_stats_count_outcomes(pool: Pool) -> None:
    before = pool.stats().completed.get("exception", 0)
    await run(pool, "1 / 0")
    stats = pool.stats()
    assert stats.completed["exception"] == before + 1
    assert (stats.isolation, stats.slots, stats.busy) == (pool.isolation, 2, 0)


# --------------------------------------------------------------------------- verification


async def test_what_fails_at_the_end_of_a_program_is_told_and_changes_nothing(pool: Pool) -> None:
    writer = "import sys\nclass Writer:\n    def write(self, text): return len(text)\n"
    result = await run(pool, f"{writer}sys.stdout = Writer()\n40 + 2")
    assert (result.outcome, result.value) == (Outcome.OK, "42")
    assert "ignored at exit: AttributeError: 'Writer' object has no attribute" in result.stderr


async def test_closed_streams_have_nothing_left_to_say(pool: Pool) -> None:
    result = await run(pool, "import sys\nsys.stdout.close()\n6 * 7")
    assert (result.outcome, result.value, result.stderr) == (Outcome.OK, "42", "")


async def test_trusted_function_returns_its_value(pool: Pool) -> None:
    result = await pool.verify(VerifyRequest("v1", "echo", {"obj": [1, None]}, deadline_s=60))
    assert (result.value, result.error) == ("[1, null]", None)


@pytest.mark.parametrize(
    ("function", "arguments", "error"),
    [
        ("forever", {}, "timeout"),
        ("nobody", {}, "unknown_function"),
        ("gone", {}, "unknown_function"),
        ("echo", {"nope": 1}, "bad_arguments"),
        ("echo", {"obj": 1, "indent": "a", "cls": 5}, "exception"),
    ],
)
async def test_failed_verification_is_named(
    pool: Pool, function: str, arguments: dict[str, object], error: str
) -> None:
    await pool.stock.zygote("verify")
    request = VerifyRequest(f"v{next(_ids)}", function, arguments, deadline_s=3.0)
    result = await pool.verify(request)
    assert (result.error, result.infrastructure) == (error, False), result
    assert result.message


# --------------------------------------------------------------------------- sessions


async def step(pool: Pool, session: str, code: str, **limits: float) -> ToolResult:
    return await pool.run(
        RunRequest(f"s{next(_ids)}", code, limits=Limits(**limits), session=session)  # type: ignore[arg-type]
    )


async def test_session_keeps_state_and_rolls_back_failures(pool: Pool) -> None:
    session = (await pool.open_session(None, None)).id
    assert (await step(pool, session, "x = [1]\ndef f(): return x")).outcome is Outcome.NO_OUTPUT
    assert (await step(pool, session, "x.append(2)\nundefined")).outcome is Outcome.EXCEPTION
    assert (await step(pool, session, "x.append(3)\nwhile True: pass", wall_s=0.3)).outcome is (
        Outcome.TIMEOUT
    )
    assert (await step(pool, session, "f()")).value == "[1]"
    await pool.close_session(session)
    with pytest.raises(UserError, match="no session"):
        await step(pool, session, "x")


async def test_branches_go_their_own_ways(pool: Pool) -> None:
    session = (await pool.open_session("trunk", None)).id
    await step(pool, session, "x = 1")
    branch = await pool.branch_session(session, "limb")
    assert (branch.id, branch.parent) == ("limb", "trunk")
    await step(pool, session, "x += 10")
    await step(pool, "limb", "x += 100")
    assert (await step(pool, session, "x")).value == "11"
    assert (await step(pool, "limb", "x")).value == "101"
    await pool.close_session(session)
    assert (await step(pool, "limb", "x")).value == "101"
    await pool.close_session("limb")


async def test_session_reads_stdin_and_prints_in_every_call(pool: Pool) -> None:
    session = (await pool.open_session(None, None)).id
    for word in ("one", "two"):
        request = RunRequest(f"s{next(_ids)}", "print(input())", f"{word}\nrest", session=session)
        assert (await pool.run(request)).stdout == f"{word}\n"
    await pool.close_session(session)


async def test_sessions_expire_without_use(pool: Pool) -> None:
    session = (await pool.open_session(None, 0.2)).id
    for _ in range(100):
        if pool.stats().sessions == 0:
            break
        await asyncio.sleep(0.05)
    with pytest.raises(UserError, match="expired"):
        await step(pool, session, "1")


async def test_session_count_is_limited(pool: Pool) -> None:
    opened = [(await pool.open_session(None, None)).id for _ in range(4)]
    with pytest.raises(QueueFullError, match="4 sessions"):
        await pool.open_session(None, None)
    for session in opened:
        await pool.close_session(session)


async def test_session_id_cannot_be_taken_twice(pool: Pool) -> None:
    await pool.open_session("mine", None)
    with pytest.raises(UserError, match="exists"):
        await pool.open_session("mine", None)
    await pool.close_session("mine")


async def test_session_memory_is_limited(pool: Pool) -> None:
    session = (await pool.open_session(None, None)).id
    result = await step(pool, session, "x = bytearray(2 << 30)")
    assert (result.outcome, "1024 MB" in result.message) == (Outcome.MEMORY, True)
    await pool.close_session(session)
