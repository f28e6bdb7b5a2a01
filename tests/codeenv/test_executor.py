"""Call table, executor and the real jail: results, limits, deadlines, idempotence, verification."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from rstar2.codeenv.protocol import RunRequest, VerifyRequest
from rstar2.codeenv.server.calls import CallTable
from rstar2.codeenv.server.executor import WorkerExecutor
from rstar2.codeenv.wire import Refusal
from rstar2.config import CodeEnvConfig
from rstar2.errors import QueueFullError, UserError
from rstar2.types import Limits, Outcome, ToolResult
from tests.codeenv.levels import PATIENT, levels

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
FUNCTIONS = {"echo": "json:dumps", "forever": "signal:pause", "gone": "no_such_module:f"}
_ids = itertools.count()


@pytest_asyncio.fixture(params=levels(), scope="module", loop_scope="module")
async def table(request: pytest.FixtureRequest) -> AsyncIterator[CallTable]:
    config = CodeEnvConfig(slots=2, queue=50, sessions=4, warm_up="never", default=PATIENT)
    executor = WorkerExecutor(config, request.param, FUNCTIONS)
    await executor.start()
    table = CallTable(executor, config, "test")
    yield table
    await table.close(1.0)
    await executor.close()


@pytest.fixture
def executor(table: CallTable) -> WorkerExecutor:
    assert isinstance(table.executor, WorkerExecutor)
    return table.executor


async def run(table: CallTable, code: str, stdin: str = "", **limits: float) -> ToolResult:
    request = RunRequest(f"t{next(_ids)}", code, stdin, Limits(**limits))  # type: ignore[arg-type]
    result = await table.call(request)
    assert result.call_id == request.id
    assert result.isolation == table.health().isolation
    return result


async def test_printed_text_is_the_result(table: CallTable) -> None:
    result = await run(table, "print('hello')\n'not shown'")
    assert (result.outcome, result.stdout, result.value) == (Outcome.OK, "hello\n", None)
    assert result.exit_code == 0
    assert result.cpu_s > 0


async def test_last_expression_is_shown_when_nothing_was_printed(table: CallTable) -> None:
    result = await run(table, "x = 20\nx + 22")
    assert (result.outcome, result.value) == (Outcome.OK, "42")


@pytest.mark.parametrize(
    "code", ["x = 1", "None", "1 + 1;", "import sys\nsys.exit(0)", "# nothing"]
)
async def test_nothing_to_show_is_no_output(table: CallTable, code: str) -> None:
    assert (await run(table, code)).outcome is Outcome.NO_OUTPUT


async def test_traceback_has_the_programs_own_lines_only(table: CallTable) -> None:
    result = await run(
        table, "import json\ndef parse(text):\n    return json.loads(text)\nparse('{')"
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


async def test_chained_exceptions_are_shown_in_order(table: CallTable) -> None:
    result = await run(table, "try:\n    1 / 0\nexcept ZeroDivisionError:\n    {}['k']")
    first, second = result.traceback.split("During handling of the above exception")
    assert "ZeroDivisionError" in first
    assert "KeyError: 'k'" in second


async def test_syntax_error_shows_the_offending_line(table: CallTable) -> None:
    result = await run(table, "x = 1\nprint(x")
    assert result.outcome is Outcome.SYNTAX_ERROR
    assert "print(x" in result.traceback
    assert "^" in result.traceback
    assert "line 2" in result.message


async def test_stdin_is_provided(table: CallTable) -> None:
    assert (await run(table, "print(int(input()) + int(input()))", "20\n22\n")).stdout == "42\n"


async def test_large_stdin_arrives_whole(table: CallTable) -> None:
    result = await run(table, "import sys\nprint(len(sys.stdin.read()))", "x" * 300_000)
    assert result.stdout == "300000\n"


async def test_warm_modules_work(table: CallTable) -> None:
    result = await run(
        table,
        "import numpy as np, sympy, mpmath\nfrom scipy import optimize\n"
        "x = sympy.symbols('x')\n"
        "print(sympy.solve(x**2 - 5*x + 6), np.linalg.det(np.eye(2)), mpmath.mp.dps)\n"
        "print(round(optimize.brentq(lambda t: t * t - 2, 0, 2), 6))",
    )
    assert result.stdout == "[2, 3] 1.0 15\n1.414214\n", result


async def test_main_guard_and_pickling_work(table: CallTable) -> None:
    result = await run(
        table,
        "import pickle\nclass P:\n    pass\n"
        "if __name__ == '__main__':\n    print(type(pickle.loads(pickle.dumps(P()))).__name__)",
    )
    assert result.stdout == "P\n"


async def test_scratch_files_work_within_a_call(table: CallTable) -> None:
    result = await run(table, "open('f.txt', 'w').write('hi')\nprint(open('f.txt').read())")
    assert result.stdout == "hi\n"


async def test_limits_above_the_cap_are_lowered(table: CallTable) -> None:
    result = await run(table, "bytearray(6 << 30)", memory_mb=1_000_000)
    assert (result.outcome, "4096 MB" in result.message) == (Outcome.MEMORY, True)


async def test_unusual_limits_get_a_jail_of_their_own(table: CallTable) -> None:
    code = "n = 0\nfor i in range(3):\n    n += open(f'{i}', 'wb').write(bytes(5 << 20))\nprint(n)"
    assert (await run(table, code, scratch_mb=40)).stdout == f"{15 << 20}\n"
    beyond = await run(table, code + "\nimport time; time.sleep(20)", wall_s=40.0, scratch_mb=8)
    assert beyond.outcome in (Outcome.EXCEPTION, Outcome.KILLED)


async def test_same_id_is_executed_once(table: CallTable) -> None:
    request = RunRequest("same", "import random\nprint(random.random())")
    first, second = await asyncio.gather(table.call(request), table.call(request))
    third = await table.call(request)
    assert first.stdout == second.stdout == third.stdout


async def test_deadline_counts_the_time_in_the_queue(table: CallTable) -> None:
    busy = [asyncio.create_task(run(table, "while True: pass")) for _ in range(2)]
    while table.busy < 2:  # noqa: ASYNC110 (the table offers no event)
        await asyncio.sleep(0.01)
    late = await table.call(RunRequest("late", "print(1)", deadline_s=0.2))
    assert late.outcome is Outcome.INFRASTRUCTURE
    assert "deadline" in late.message
    for task in busy:
        task.cancel()
    await asyncio.gather(*busy, return_exceptions=True)


async def test_program_cut_short_by_the_deadline_is_not_blamed(table: CallTable) -> None:
    result = await table.call(RunRequest("short", "while True: pass", deadline_s=0.3))
    assert result.outcome is Outcome.INFRASTRUCTURE


async def test_full_queue_is_refused_with_a_time_to_come_back(table: CallTable) -> None:
    requests = [RunRequest(f"q{i}", "import time; time.sleep(0.01)") for i in range(60)]
    results = await asyncio.gather(*(table.call(r) for r in requests), return_exceptions=True)
    refused = [r for r in results if isinstance(r, Refusal)]
    assert len(refused) == 8
    assert {r.wire.code for r in refused} == {"queue_full"}
    assert all((r.wire.retry_after_s or 0) > 0 for r in refused)
    assert sum(isinstance(r, ToolResult) for r in results) == 52


async def test_many_calls_are_never_mixed_up(table: CallTable) -> None:
    tasks = [run(table, f"print({i} * 7)") for i in range(50)]
    assert [r.stdout for r in await asyncio.gather(*tasks)] == [f"{i * 7}\n" for i in range(50)]


async def test_source_beyond_the_limit_is_the_callers_error(table: CallTable) -> None:
    with pytest.raises(UserError, match="at most"):
        await run(table, "#" * (33 << 20))


async def test_stats_count_outcomes(table: CallTable) -> None:
    before = table.health().completed.get("exception", 0)
    await run(table, "1 / 0")
    stats = table.health()
    assert stats.completed["exception"] == before + 1
    assert (stats.isolation, stats.slots, stats.busy) == (table.health().isolation, 2, 0)


# --------------------------------------------------------------------------- verification


async def test_failures_at_exit_are_written_to_stderr_and_change_nothing(
    table: CallTable,
) -> None:
    writer = "import sys\nclass Writer:\n    def write(self, text): return len(text)\n"
    result = await run(table, f"{writer}sys.stdout = Writer()\n40 + 2")
    assert (result.outcome, result.value) == (Outcome.OK, "42")
    assert "ignored at exit: AttributeError: 'Writer' object has no attribute" in result.stderr


async def test_closed_streams_cause_no_error_at_exit(table: CallTable) -> None:
    result = await run(table, "import sys\nsys.stdout.close()\n6 * 7")
    assert (result.outcome, result.value, result.stderr) == (Outcome.OK, "42", "")


async def test_trusted_function_returns_its_value(table: CallTable) -> None:
    result = await table.call(VerifyRequest("v1", "echo", {"obj": [1, None]}, deadline_s=60))
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
    table: CallTable,
    executor: WorkerExecutor,
    function: str,
    arguments: dict[str, object],
    error: str,
) -> None:
    await executor.workers.zygote("verify")
    await table.call(VerifyRequest(f"v{next(_ids)}", "echo", {"obj": 1}))  # a worker is ready now
    deadline_s = 3.0 if error == "timeout" else 60.0
    request = VerifyRequest(f"v{next(_ids)}", function, arguments, deadline_s=deadline_s)
    result = await table.call(request)
    assert (result.error, result.infrastructure) == (error, False), result
    assert result.message


# --------------------------------------------------------------------------- sessions


async def step(table: CallTable, session: str, code: str, **limits: float) -> ToolResult:
    return await table.call(
        RunRequest(f"s{next(_ids)}", code, limits=Limits(**limits), session=session)  # type: ignore[arg-type]
    )


async def test_session_keeps_state_and_rolls_back_failures(table: CallTable) -> None:
    session = (await table.executor.open_session(None, None)).id
    assert (await step(table, session, "x = [1]\ndef f(): return x")).outcome is Outcome.NO_OUTPUT
    assert (await step(table, session, "x.append(2)\nundefined")).outcome is Outcome.EXCEPTION
    endless = await step(table, session, "x.append(3)\nwhile True: pass", wall_s=60.0, cpu_s=0.3)
    assert endless.outcome is Outcome.TIMEOUT
    assert (await step(table, session, "f()")).value == "[1]"
    await table.executor.close_session(session)
    with pytest.raises(UserError, match="no session"):
        await step(table, session, "x")


async def test_branches_are_independent(table: CallTable) -> None:
    session = (await table.executor.open_session("trunk", None)).id
    await step(table, session, "x = 1")
    branch = await table.executor.branch_session(session, "limb")
    assert (branch.id, branch.parent) == ("limb", "trunk")
    await step(table, session, "x += 10")
    await step(table, "limb", "x += 100")
    assert (await step(table, session, "x")).value == "11"
    assert (await step(table, "limb", "x")).value == "101"
    await table.executor.close_session(session)
    assert (await step(table, "limb", "x")).value == "101"
    await table.executor.close_session("limb")


async def test_session_reads_stdin_and_prints_in_every_call(table: CallTable) -> None:
    session = (await table.executor.open_session(None, None)).id
    for word in ("one", "two"):
        request = RunRequest(f"s{next(_ids)}", "print(input())", f"{word}\nrest", session=session)
        assert (await table.call(request)).stdout == f"{word}\n"
    await table.executor.close_session(session)


async def test_sessions_expire_without_use(table: CallTable) -> None:
    session = (await table.executor.open_session(None, 0.2)).id
    while table.health().sessions:  # noqa: ASYNC110 (sessions offer no event)
        await asyncio.sleep(0.05)
    with pytest.raises(UserError, match="expired"):
        await step(table, session, "1")


async def test_session_count_is_limited(table: CallTable) -> None:
    opened = [(await table.executor.open_session(None, None)).id for _ in range(4)]
    with pytest.raises(QueueFullError, match="4 sessions"):
        await table.executor.open_session(None, None)
    for session in opened:
        await table.executor.close_session(session)


async def test_session_id_cannot_be_taken_twice(table: CallTable) -> None:
    await table.executor.open_session("mine", None)
    with pytest.raises(UserError, match="exists"):
        await table.executor.open_session("mine", None)
    await table.executor.close_session("mine")


async def test_calls_that_wait_for_their_session_hold_no_slot(table: CallTable) -> None:
    session = (await table.executor.open_session(None, None)).id
    code = "import time; time.sleep(1000)"
    limits = Limits(wall_s=60, cpu_s=60)
    waiting = [
        asyncio.create_task(
            table.call(RunRequest(f"w{next(_ids)}", code, limits=limits, session=session))
        )
        for _ in range(3)
    ]
    while table.busy == 0:  # noqa: ASYNC110 (the table offers no event)
        await asyncio.sleep(0.01)
    assert (await table.call(RunRequest(f"p{next(_ids)}", "print(1)"))).stdout == "1\n"
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await table.executor.close_session(session)


async def test_session_memory_is_limited(table: CallTable) -> None:
    session = (await table.executor.open_session(None, None)).id
    result = await step(table, session, "x = bytearray(2 << 30)")
    assert (result.outcome, "1024 MB" in result.message) == (Outcome.MEMORY, True)
    await table.executor.close_session(session)
