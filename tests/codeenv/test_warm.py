"""Warm interpreters: calls reach the one that has their imports, and one that dies is replaced."""

from __future__ import annotations

import asyncio
import base64
import ctypes
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from rstar2.codeenv.jail import warmup, zygote
from rstar2.codeenv.protocol import RunRequest
from rstar2.codeenv.server import probe
from rstar2.codeenv.server.executor import WorkerExecutor
from rstar2.codeenv.server.packages import InterpreterSetup
from rstar2.codeenv.server.workers import lightest_flavour
from rstar2.codeenv.server.zygotes import ZygotePool
from rstar2.config import CodeEnvConfig
from rstar2.errors import CodeEnvError
from rstar2.types import Limits, Outcome, ToolResult

slow = pytest.mark.slow
in_module_loop = pytest.mark.asyncio(loop_scope="module")
_ids = itertools.count()
GENEROUS = Limits(wall_s=60.0, cpu_s=60.0)
WARM = "import sys\nprint(any(name.startswith('sym' + 'py') for name in sys.modules))\n"
"""Prints whether SymPy was imported before the program ran."""


def encoded(code: str) -> str:
    """A program as the release's client sends it: decoded and executed by a wrapper."""
    text = base64.b64encode(code.encode()).decode()
    return f'import base64\nexec(base64.b64decode("{text}".encode()).decode(), {{}})\n'


@pytest.mark.parametrize(
    ("code", "flavour"),
    [
        ("print(1)", "plain"),
        ("import numpy as np", "numpy"),
        ("from sympy import *", "base"),
        ("import scipy.stats", "scipy"),
        ("import numpy as np\nnp.random.rand(3)", "scipy"),
        (encoded("print(1)"), "plain"),
        (encoded("import numpy"), "numpy"),
        (encoded("import sympy"), "base"),
        (encoded(encoded("import sympy")), "plain"),  # left to the hand-over
        ("base64.b64decode('A' * 17)\n'AAAAAAAAAAAAAAAAA'", "plain"),  # no valid base64
    ],
)
def test_flavour_is_chosen_by_the_modules_that_a_program_mentions(code: str, flavour: str) -> None:
    assert lightest_flavour(code.encode()) == flavour


def test_program_is_handed_to_warmer_flavours_only() -> None:
    assert warmup.warmer("plain", "numpy") == "numpy"
    assert warmup.warmer("numpy", "sympy") == "base"
    assert warmup.warmer("base", "scipy") == "scipy"
    assert warmup.warmer("base", "numpy") is None
    assert warmup.warmer("scipy", "sympy") is None
    assert warmup.warmer("plain", "json") is None
    assert warmup.warm_elsewhere("scipy") == frozenset()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def executor() -> AsyncIterator[WorkerExecutor]:
    """An executor whose flavours are all warm."""
    level = probe.resolve("auto").level
    executor = WorkerExecutor(CodeEnvConfig(slots=2), level)
    await executor.start()
    for flavour in warmup.FLAVOURS:
        await executor.workers.zygote(flavour)
    yield executor
    await executor.close()


async def run(executor: WorkerExecutor, code: str, stdin: str = "") -> ToolResult:
    request = RunRequest(f"w{next(_ids)}", code, stdin, GENEROUS)
    return await executor.run(request, asyncio.get_running_loop().time() + 120)


@slow
@in_module_loop
async def test_every_program_of_the_warm_up_succeeds(executor: WorkerExecutor) -> None:
    for flavour, link in executor.workers.zygotes.items():
        assert (flavour, link.ready["missing"], link.ready["failed"]) == (flavour, {}, [])


@slow
@in_module_loop
async def test_warm_up_leaves_global_settings_alone(executor: WorkerExecutor) -> None:
    code = (
        "import decimal, sys, mpmath, numpy, sympy\n"
        "print(decimal.getcontext().prec, mpmath.mp.dps, numpy.get_printoptions()['precision'])\n"
        "print(sympy.symbols('x')**2 / 2, sys.displayhook is sys.__displayhook__)"
    )
    assert (await run(executor, code)).stdout == "28 15 8\nx**2/2 True\n"


@slow
@in_module_loop
@pytest.mark.parametrize(
    "hidden",
    [
        WARM + "__import__('sym' + 'py')",
        WARM + "import importlib\nimportlib.import_module('sym' + 'py')",
        encoded(WARM + "import sympy"),
        encoded(encoded(WARM + "import sympy")),
        WARM + "exec(bytes(c ^ 1 for c in b'hlqnsu!rxlqx'))",
    ],
)
async def test_hidden_import_finds_the_module_warm(executor: WorkerExecutor, hidden: str) -> None:
    result = await run(executor, hidden)
    assert (result.outcome, result.stdout) == (Outcome.OK, "True\n"), result


@slow
@in_module_loop
async def test_program_that_imports_more_and_more_reaches_the_richest_interpreter(
    executor: WorkerExecutor,
) -> None:
    code = "for name in ('num' + 'py', 'sym' + 'py', 'sci' + 'py.special'):\n    __import__(name)\n"
    code += "import sys\nprint('started')"
    before = "import sys\nprint('sci' + 'py.special' in sys.modules)\n"
    assert (await run(executor, before + code)).stdout == "True\nstarted\n"


@slow
@in_module_loop
async def test_effects_before_a_hand_over_happen_once(executor: WorkerExecutor) -> None:
    code = (
        "import sys\nline = input()\nprint('printed', flush=True)\n"
        "with open('log.txt', 'a') as file:\n    file.write(line + ';')\n"
        "__import__('sym' + 'py')\n"
        "print(open('log.txt').read(), repr(sys.stdin.read()))"
    )
    result = await run(executor, code, "first\nsecond\n")
    assert result.stdout == "printed\nfirst; 'second\\n'\n"


@slow
@in_module_loop
async def test_late_import_is_carried_out_where_the_program_runs(executor: WorkerExecutor) -> None:
    busy = "import time\nwhile time.process_time() < 0.7: pass\n"
    code = f"{busy}__import__('sym' + 'py')\nprint('done')"
    assert (await run(executor, WARM + code)).stdout == "False\ndone\n"


@slow
@in_module_loop
async def test_program_that_had_to_wait_is_still_handed_over(executor: WorkerExecutor) -> None:
    """As on a busy machine: much time has passed, but the program has used little of it."""
    code = "import time\ntime.sleep(0.6)\n__import__('sym' + 'py')\nprint('done')"
    assert (await run(executor, WARM + code)).stdout == "True\ndone\n"


@slow
@in_module_loop
@pytest.mark.parametrize("module", ["sympy", "scipy", "nonsense"])
async def test_forged_hand_over_is_the_programs_own_exit(
    executor: WorkerExecutor, module: str
) -> None:
    code = (
        "import os, struct\n"
        f"os.write(3, struct.pack('<BIQ', ord('H'), {len(module)}, 0) + {module.encode()!r})\n"
        "os._exit(119)"
    )
    result = await run(executor, code)
    assert (result.outcome, result.exit_code) == (Outcome.EXCEPTION, 119)
    assert result.message == "The process exited with code 119."


async def warm_again(executor: WorkerExecutor, flavour: str, pid: int) -> None:
    """Wait until another process serves a flavour."""
    async with asyncio.timeout(300):
        while (await executor.workers.zygote(flavour)).pid == pid:  # noqa: ASYNC110 (no event)
            await asyncio.sleep(0.02)


@slow
@in_module_loop
async def test_dead_flavour_is_restarted_without_a_call(executor: WorkerExecutor) -> None:
    restarts = executor.stats().restarts
    pid = executor.workers.zygotes["numpy"].pid
    os.kill(pid, signal.SIGKILL)
    await warm_again(executor, "numpy", pid)
    assert executor.stats().restarts == restarts + 1
    assert set(executor.stats().warm) == set(warmup.FLAVOURS)
    assert (await run(executor, "import numpy\nprint(numpy.ones(2).sum())")).stdout == "2.0\n"


@slow
async def test_flavour_that_cannot_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    command = zygote.command
    attempts: list[int] = []

    def failing_twice(python: str) -> list[str]:
        attempts.append(1)
        return ["/bin/false"] if len(attempts) < 3 else command(python)

    monkeypatch.setattr(zygote, "command", failing_twice)
    pool = ZygotePool({})
    try:
        with pytest.raises(CodeEnvError, match="plain zygote ended during its warm-up"):
            await pool.get("plain")
        while "plain" not in pool.live:
            await asyncio.gather(pool.get("plain"), return_exceptions=True)
        assert pool.restarts == 2
    finally:
        await pool.close()


@slow
async def test_zygote_that_cannot_be_executed_is_named() -> None:
    pool = ZygotePool({}, InterpreterSetup(python="/no/such/python"))
    try:
        with pytest.raises(CodeEnvError, match="/no/such/python"):
            await pool.get("plain")
    finally:
        await pool.close()


def test_trial_that_raises_stays_in_its_own_process() -> None:
    """Objects are made immortal in a child first. What it raises must not make a second zygote."""
    code = (
        "import sys\nfrom rstar2.codeenv.jail import heap\nsys.version_info = (3, 12)\n"
        "def fail(): raise MemoryError\nheap._immortalize = fail\n"
        "try:\n    heap.immortalize()\nfinally:\n    print('went on', flush=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=120, check=True
    )
    assert done.stdout == "went on\n"


def test_after_holes_are_filled_memory_comes_from_the_end_of_the_heap() -> None:
    """A call that used a free block in the middle would copy that block's page."""
    code = """
import ctypes
from rstar2.codeenv.jail import heap
heap.WarmHeap()
take = lambda: heap._libc.malloc(ctypes.c_size_t(4000))
blocks = [take() for _ in range(50)]
for block in blocks[::2]:
    heap._libc.free(ctypes.c_void_p(block))
assert take() < max(blocks)
heap.fill_holes()
print(take() > max(blocks), flush=True)
import os
os._exit(0)
"""
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("not glibc 2.33 or later")
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=120, check=True
    )
    assert done.stdout == "True\n"
