"""Reuse of results: which programs count as deterministic, and what the call table makes of it."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import uuid
from collections import Counter
from types import ModuleType

import pytest

from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.codeenv.protocol import ExecutorStats, RunRequest
from rstar2.codeenv.server import determinism, metrics
from rstar2.codeenv.server.calls import CallTable
from rstar2.codeenv.wire import Refusal
from rstar2.config import CodeEnvConfig
from rstar2.types import Limits, Outcome, ToolResult, Truncation
from tests.codeenv.conftest import FakeExecutor, Serve

# --------------------------------------------------------------------------- determinism

DETERMINISTIC = [
    "print(6 * 7)",
    "1/0",
    "from math import *\nprint(comb(48, 5), isqrt(10**20))",
    "import math as m\nprint(f'{m.pi:.3f}', '{:>5} {0!r:{1}}'.format(3, 8))",
    "from fractions import Fraction\nx = Fraction(1, 3)\nprint(x.numerator, type(x).__name__)",
    "import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return 1 if n < 2 else n * f(n - 1)\n"
    "print(f(50))",
    "from functools import lru_cache\n@lru_cache(maxsize=None)\ndef g(n: int) -> int:\n"
    "    return n if n < 2 else g(n - 1) + g(n - 2)\nif __name__ == '__main__':\n    print(g(80))",
    "from collections import Counter, defaultdict\nd = defaultdict(list)\nd['a'].append(1)\n"
    "print(Counter('hello').most_common(2), sorted(d.items(), key=lambda kv: kv[1]))",
    "seen = set()\nfor i in range(9):\n    seen.add(i % 4)\nprint(len(seen), seen)",
    "try:\n    int('x')\nexcept ValueError as e:\n    print('no:', e)\nelse:\n    print('yes')",
    "import itertools\nprint(sum(1 for p in itertools.permutations(range(5)) if p[0] < p[1]))",
    "match (1, 2):\n    case (a, *rest):\n        print(a, rest)",
    "import re\nprint(re.findall(r'\\d+', 'a1b22'))",
    "from decimal import Decimal, getcontext\ngetcontext().prec = 50\nprint(Decimal(2).sqrt())",
]

REFUSED = {
    "import time": "import: time",
    "import random": "import: random",
    "import os.path": "import: os.path",
    "from math import gcd, os": "import: math.os",
    "from . import math": "import: None.math",
    "from statistics import random": "import: statistics.random",
    "from functools import singledispatch": "import: functools.singledispatch",
    "import statistics\nstatistics.random.random()": "attribute: random",
    "import re as r\nprint(r.enum.sys.argv)": "attribute: argv",
    "import sys\nsys.modules": "attribute: modules",
    "import sys\nsys.stdin.read()": "attribute: read",
    "input()": "name: input",
    "open('x')": "name: open",
    "print(id(1))": "name: id",
    "print(hash('a'))": "name: hash",
    "if 0:\n    open = 1\nopen('x')": "name: open",
    "def f(eval): return eval\n": "name: eval",
    "__builtins__": "name: __builtins__",
    "if 0:\n    __builtins__ = 1\n__builtins__": "name: __builtins__",
    "__file__": "name: __file__",
    "__import__('os')": "name: __import__",
    "getattr(1, 'real')": "name: getattr",
    "undefined": "name: undefined",
    "exec('import os')": "name: exec",
    "print(vars(), dir(), globals(), locals())": "name: vars",
    "type('A', (), {})": "name: type",
    "type(*x)": "name: type",
    "try:\n    x = [0] * 10**12\nexcept MemoryError:\n    print('no')": "name: MemoryError",
    "class A: pass": "syntax: ClassDef",
    "async def f(): pass": "syntax: AsyncFunctionDef",
    "match 1:\n    case int(real=x): pass": "syntax: MatchClass",
    "(lambda: 0).__globals__": "attribute: __globals__",
    "(i for i in [1]).gi_frame": "attribute: gi_frame",
    "'{0.__class__}'.format(1)": "attribute: format",
    "'{0[x]}'.format({})": "attribute: format",
    "'{:{0.real}}'.format(1)": "attribute: format",
    "s = '{0.real}'\ns.format(1)": "attribute: format",
    "str.format('{0.real}', 1)": "attribute: format",
    "'{0.real}'.format_map({})": "attribute: format_map",
    "import operator\noperator.attrgetter('real')": "attribute: attrgetter",
    "import typing\ntyping.get_type_hints(print)": "attribute: get_type_hints",
    "1 +": "it cannot be parsed",
    "x = '\0'": "it cannot be parsed",
    "x = 1\n" * 10_000: "it has more than 16384 characters",
}  # fmt: skip


@pytest.mark.parametrize("code", DETERMINISTIC)
def test_a_program_that_observes_only_its_text_is_deterministic(code: str) -> None:
    assert determinism.why_not(code) is None


@pytest.mark.parametrize("code", REFUSED, ids=lambda code: code[:40])
def test_a_program_that_might_observe_more_is_refused(code: str) -> None:
    assert determinism.why_not(code) == REFUSED[code]


@pytest.mark.parametrize(
    "part", ["(", "-", "not ", "a.", "1+", "lambda:", "[", "x if x else ", "f(", "{1:", "x[", "**"]
)
def test_deep_nesting_is_refused_and_not_a_crash(part: str) -> None:
    code = part * (determinism.MAX_CHARS // len(part) - 1) + "1"
    determinism.why_not(code)  # no exception: it may or may not be parsed


def test_no_attribute_leads_from_one_module_to_another() -> None:
    for name in determinism._MODULES:
        module = importlib.import_module(name)
        offered = determinism.ATTRIBUTES & set(dir(module))
        assert not [n for n in offered if isinstance(getattr(module, n), ModuleType)], name


# --------------------------------------------------------------------------- the call table


class NumberingExecutor(FakeExecutor):
    """Prints how often it has executed the code, so that a reused result is recognised."""

    def __init__(self, slots: int = 4) -> None:
        super().__init__(slots)
        self.times: Counter[str] = Counter()
        self.results: dict[str, ToolResult] = {}
        """Other results, by code."""
        self.holding: set[str] = set()
        """Codes that wait for `release`."""
        self.restarts = 0

    async def obey(self, request: RunRequest) -> ToolResult:
        self.times[request.code] += 1
        if request.code in self.holding:
            await self.release.wait()
        given = self.results.get(request.code, ToolResult("", Outcome.OK, wall_s=0.01, peak_mb=9.0))
        shown = given.stdout or f"{self.times[request.code]}"
        return ToolResult(
            request.id, given.outcome, stdout=shown, traceback=given.traceback,
            truncated=given.truncated, wall_s=given.wall_s, cpu_s=given.cpu_s,
            peak_mb=given.peak_mb, files=given.files,
        )  # fmt: skip

    def stats(self) -> ExecutorStats:
        return ExecutorStats("portable", restarts=self.restarts)


def make_table(executor: FakeExecutor, reuse_mb: int = 8) -> CallTable:
    return CallTable(executor, CodeEnvConfig(reuse_mb=reuse_mb), "test")


def asked(id: str, code: str = "print(1)", reuse: str | None = "g", **more: object) -> RunRequest:
    return RunRequest(id, code, reuse=reuse, **more)  # type: ignore[arg-type]


async def test_the_same_program_in_the_same_group_is_answered_from_memory() -> None:
    table = make_table(NumberingExecutor())
    first = await table.call(asked("a"))
    again = await table.call(asked("b"))
    assert (first.call_id, first.stdout) == ("a", "1")
    assert (again.call_id, again.stdout, again.server) == ("b", "1", "test")
    assert dict(table.reuse.counts) == {"hit": 1, "miss": 1, "refused": 0}
    assert 'rstar2_codeenv_reuse_total{result="hit"} 1' in metrics.render(table)


@pytest.mark.parametrize(
    "other",
    [
        asked("b", reuse=None),
        asked("b", reuse="other"),
        asked("b", code="print(1) "),
        asked("b", limits=Limits(wall_s=1.0)),
        asked("b", stdin="x"),
        asked("b", files={"x": b""}),
        asked("b", collect=True),
    ],
)
async def test_a_call_that_differs_is_executed(other: RunRequest) -> None:
    executor = NumberingExecutor()
    table = make_table(executor)
    await table.call(asked("a"))
    await table.call(other)
    assert executor.executed == {"a": 1, "b": 1}
    assert table.reuse.counts["hit"] == 0


async def test_a_call_with_input_is_never_kept() -> None:
    table = make_table(NumberingExecutor())
    for id in ("a", "b"):
        await table.call(asked(id, stdin="x"))
        await table.call(asked(id + "f", files={"x": b"1"}))
    assert dict(table.reuse.counts) == {"hit": 0, "miss": 0, "refused": 4}


@pytest.mark.parametrize(
    "result",
    [
        ToolResult("", Outcome.TIMEOUT),
        ToolResult("", Outcome.MEMORY),
        ToolResult("", Outcome.KILLED),
        ToolResult("", Outcome.OUTPUT_LIMIT),
        ToolResult("", Outcome.INFRASTRUCTURE),
        ToolResult("", Outcome.OK, stdout="<function f at 0x7f12>"),
        ToolResult("", Outcome.EXCEPTION, traceback="KeyError: <map object at 0X7F>"),
        ToolResult("", Outcome.OK, truncated=Truncation(stdout=1)),
        ToolResult("", Outcome.OK, files={"x": b""}),
        ToolResult("", Outcome.OK, wall_s=2.6),
        ToolResult("", Outcome.OK, cpu_s=2.6),
        ToolResult("", Outcome.OK, peak_mb=300.0),
    ],
)
async def test_a_result_that_might_differ_next_time_is_not_kept(result: ToolResult) -> None:
    executor = NumberingExecutor()
    executor.results["print(1)"] = result
    table = make_table(executor)
    for id in ("a", "b"):
        await table.call(asked(id))
    assert executor.executed == {"a": 1, "b": 1}
    assert table.reuse.bytes == 0


async def test_an_exception_is_kept() -> None:
    executor = NumberingExecutor()
    executor.results["1/0"] = ToolResult("", Outcome.EXCEPTION, traceback="ZeroDivisionError: x")
    table = make_table(executor)
    await table.call(asked("a", "1/0"))
    again = await table.call(asked("b", "1/0"))
    assert (again.outcome, again.traceback) == (Outcome.EXCEPTION, "ZeroDivisionError: x")
    assert executor.executed == {"a": 1}


async def test_a_program_that_is_not_deterministic_is_executed_each_time() -> None:
    table = make_table(NumberingExecutor())
    code = "import time\nprint(time.time())"
    results = [await table.call(asked(id, code)) for id in "abc"]
    assert [result.stdout for result in results] == ["1", "2", "3"]
    assert dict(table.reuse.counts) == {"hit": 0, "miss": 0, "refused": 3}


async def test_without_memory_nothing_is_reused() -> None:
    executor = NumberingExecutor()
    table = make_table(executor, reuse_mb=0)
    for id in ("a", "b"):
        await table.call(asked(id))
    assert executor.executed == {"a": 1, "b": 1}


async def test_memory_is_bounded_and_the_longest_unused_result_goes_first() -> None:
    executor = NumberingExecutor()
    table = make_table(executor, reuse_mb=1)
    programs = [f"print({i})" for i in range(4)]
    for program in programs:
        executor.results[program] = ToolResult("", Outcome.OK, stdout=100_000 * "x")
    for number, i in enumerate((0, 1, 0, 2)):  # 0 was used after 1; three do not fit
        await table.call(asked(f"first-{number}", programs[i]))
    assert table.reuse.bytes <= 1 << 20
    executed = dict(executor.times)
    await table.call(asked("zero", programs[0]))
    assert executor.times["print(0)"] == executed["print(0)"]
    await table.call(asked("one", programs[1]))
    assert executor.times["print(1)"] == executed["print(1)"] + 1


async def test_new_interpreters_forget_what_earlier_ones_gave() -> None:
    executor = NumberingExecutor()
    table = make_table(executor)
    await table.call(asked("a"))
    executor.restarts += 1
    assert (await table.call(asked("b"))).stdout == "2"
    assert (await table.call(asked("c"))).stdout == "2"
    executor.holding.add("print(2)")
    running = asyncio.create_task(table.call(asked("d", "print(2)")))
    await until_running(executor, "d")
    executor.restarts += 1  # while it runs: it may have run in either
    executor.release.set()
    await running
    await table.call(asked("e", "print(2)"))
    assert executor.times["print(2)"] == 2


async def until_running(executor: FakeExecutor, *ids: str) -> None:
    async with asyncio.timeout(120):
        while not executor.running.issuperset(ids):  # noqa: ASYNC110 (it offers no event)
            await asyncio.sleep(0)


async def test_equal_calls_that_arrive_together_are_executed_once() -> None:
    executor = NumberingExecutor()
    executor.holding.add("print(1)")
    table = make_table(executor)
    calls = [asyncio.create_task(table.call(asked(id))) for id in "abcdef"]
    await until_running(executor, "a")
    executor.release.set()
    results = await asyncio.gather(*calls)
    assert [(r.call_id, r.stdout) for r in results] == [(id, "1") for id in "abcdef"]
    assert executor.executed == {"a": 1}
    assert dict(table.reuse.counts) == {"hit": 5, "miss": 1, "refused": 0}


async def test_calls_that_wait_for_a_result_that_cannot_be_reused_are_executed() -> None:
    executor = NumberingExecutor()
    executor.holding.add("print(1)")
    executor.results["print(1)"] = ToolResult("", Outcome.TIMEOUT)
    table = make_table(executor)
    calls = [asyncio.create_task(table.call(asked(id))) for id in "abc"]
    await until_running(executor, "a")
    executor.release.set()
    results = await asyncio.gather(*calls)
    assert {result.outcome for result in results} == {Outcome.TIMEOUT}
    assert executor.executed == {"a": 1, "b": 1, "c": 1}


async def test_calls_that_wait_for_one_that_is_cancelled_are_executed() -> None:
    executor = NumberingExecutor()
    executor.holding.add("print(1)")
    table = make_table(executor)
    calls = [asyncio.create_task(table.call(asked(id))) for id in "ab"]
    await until_running(executor, "a")
    calls[0].cancel()
    await asyncio.wait([calls[0]])
    await until_running(executor, "b")
    executor.release.set()
    assert (await calls[1]).stdout == "2"
    assert executor.executed == {"a": 1, "b": 1}


async def test_a_reused_result_belongs_to_its_id_like_any_other() -> None:
    table = make_table(NumberingExecutor())
    await table.call(asked("a"))
    reused = await table.call(asked("b"))
    assert await table.call(asked("b")) == reused
    assert table.metrics.replayed == 1
    with pytest.raises(Refusal, match="already used for another request"):
        await table.call(asked("b", "print(2)"))


async def test_the_client_sends_the_group(serve: Serve) -> None:
    executor = NumberingExecutor()
    async with (
        serve(executor) as server,
        await CodeEnvClient.start(CodeEnvConfig(urls=(server.url,))) as client,
    ):
        results = [await client.run(asked(id)) for id in "ab"]
        assert [(r.call_id, r.stdout) for r in results] == [("a", "1"), ("b", "1")]
        assert server.table.reuse.counts["hit"] == 1


# --------------------------------------------------------------------------- the real jail

PROGRAMS = [
    *DETERMINISTIC,
    "[i * i for i in range(5)]",
    "x = 1",
    "print('before')\n{}['missing']",
    "def f(n):\n    return f(n + 1)\nf(0)",
    "raise ValueError('no', 7)",
    "print({'a', 'b', 'c', 'dd', 'ee', 'ff'})",
    "import sys\nsys.exit(3)",
    "print('x' * 300)\nassert '\\d' == 1, 'text on stderr too'",
]
NEVER_REUSED = [
    "import random; print(random.random())",
    "import time; print(time.time_ns())",
    "def f(): pass\nprint(f, map(f, []))",
    "print('x' * 20_000)",
]


def shown(result: ToolResult) -> dict[str, object]:
    """A result without its id and what was measured."""
    measured = ("call_id", "wall_s", "cpu_s", "peak_mb", "queue_s")
    return {k: v for k, v in dataclasses.asdict(result).items() if k not in measured}


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_reused_result_is_the_one_that_a_new_execution_gives() -> None:
    """With one interpreter for all programs: a new one would forget the results of the others."""
    limits = Limits(wall_s=60.0, cpu_s=60.0)
    config = CodeEnvConfig(slots=1, warm_up="never")
    async with await CodeEnvClient.start(config) as client:

        async def run(code: str, reuse: str | None) -> ToolResult:
            return await client.run(asked(uuid.uuid4().hex, code, reuse, limits=limits))

        for code in PROGRAMS:
            plain, first, again = [await run(code, group) for group in (None, "g", "g")]
            assert shown(plain) == shown(first) == shown(again)
            assert (again.wall_s, again.cpu_s) == (first.wall_s, first.cpu_s), code  # not measured
            assert len({plain.call_id, first.call_id, again.call_id}) == 3
        for code in NEVER_REUSED:
            first, again = [await run(code, "g") for _ in range(2)]
            assert (again.wall_s, again.cpu_s) != (first.wall_s, first.cpu_s), code
