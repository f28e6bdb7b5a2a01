"""Programs behave in the jail as they do in a plain interpreter."""

from __future__ import annotations

import asyncio
import base64
import itertools
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rstar2.codeenv.protocol import RunRequest
from rstar2.codeenv.server import probe
from rstar2.codeenv.server.executor import WorkerExecutor
from rstar2.config import CodeEnvConfig
from rstar2.types import Limits, Outcome, ToolResult

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
_ids = itertools.count()

PROGRAMS = {
    "source of a function": """\
import inspect
def double(x):
    return 2 * x  # twice
print(inspect.getsource(double), inspect.getsourcelines(double)[1])
""",
    "source of a class and a method": """\
import inspect
class Point:
    '''A point.'''
    def norm(self):
        return 1
print(inspect.getsource(Point), inspect.getsource(Point.norm), inspect.getdoc(Point))
""",
    "source after a form feed": "import inspect\n\x0c\ndef f():\n    return '\x0c'\n"
    "print(ascii(inspect.getsource(f)))\n",
    "byte order mark": "\ufeffprint('marked')\n",
    "own file": "print(open(__file__).read())\nimport os\nprint(os.path.isabs(__file__))\n",
    "name of the file": "import os, sys\nprint(os.path.basename(__file__), sys.argv)\n",
    "user": "import getpass\nprint(len(getpass.getuser()) > 0)\n",
    "home": "import os, pathlib\nprint(str(pathlib.Path.home()) == os.path.expanduser('~'))\n",
    "own traceback": """\
import traceback
def f():
    raise ValueError('inner')
try:
    f()
except ValueError:
    print(traceback.format_exc().splitlines()[-2].strip())
""",
    "carriage returns": "x = 1\r\nprint('one')\r\nprint(x)\r\n",
    "annotations": "def f(x: int): pass\nprint(f.__annotations__)\n",
    "docstring": "'''What this is.'''\nimport __main__\nprint(__main__.__doc__, __name__)\n",
}
SPAWNED = """\
import multiprocessing as mp
def square(x):
    return x * x
if __name__ == '__main__':
    with mp.get_context('spawn').Pool(1) as pool:
        print(pool.map(square, range(4)))
"""
RAISING = {
    "notes": """\
error = ValueError('wrong')
error.add_note('first note')
error.add_note('second note\\nof two lines')
raise error
""",
    "notes that are no list": "error = KeyError(1)\nerror.__notes__ = 7\nraise error\n",
    "notes of a cause": """\
try:
    error = KeyError('k')
    error.add_note('which key')
    raise error
except KeyError as error:
    raise ValueError('wrong') from error
""",
    "group": """\
raise ExceptionGroup('several', [ValueError('a'), ExceptionGroup('in', [TypeError('b')])])
""",
    "group with notes": """\
first = ValueError('a')
first.add_note('about a')
try:
    1 / 0
except ZeroDivisionError:
    raise ExceptionGroup('several', [first])
""",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def executor() -> AsyncIterator[WorkerExecutor]:
    executor = WorkerExecutor(CodeEnvConfig(slots=2), probe.resolve("auto").level)
    await executor.start()
    yield executor
    await executor.close()


async def jailed(executor: WorkerExecutor, code: str) -> ToolResult:
    limits = Limits(wall_s=60.0, cpu_s=60.0)
    request = RunRequest(f"f{next(_ids)}", code, limits=limits)
    return await executor.run(request, asyncio.get_running_loop().time() + 120)


async def plain(code: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """The same program as a file in a fresh interpreter."""
    file = directory / "program.py"
    file.write_bytes(code.encode())
    command = [sys.executable, "program.py"]
    return await asyncio.to_thread(
        subprocess.run, command, cwd=directory, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("name", PROGRAMS)
async def test_program_prints_what_it_prints_in_a_plain_interpreter(
    executor: WorkerExecutor, name: str, tmp_path: Path
) -> None:
    expected = await plain(PROGRAMS[name], tmp_path)
    assert expected.returncode == 0, expected.stderr
    result = await jailed(executor, PROGRAMS[name])
    assert (result.outcome, result.stdout) == (Outcome.OK, expected.stdout), result


@pytest.mark.parametrize("hidden", [False, True])
async def test_processes_can_be_spawned_where_processes_are_allowed(
    executor: WorkerExecutor, tmp_path: Path, hidden: bool
) -> None:
    """Also by a program whose text does not say so."""
    if not all(link.spec.forks for link in executor.workers.links):
        pytest.skip("calls may not start processes here")
    encoded = base64.b64encode(SPAWNED.encode()).decode()
    program = f"import base64\nexec(base64.b64decode('{encoded}'))\n" if hidden else SPAWNED
    expected = await plain(program, tmp_path)
    assert expected.stdout == "[0, 1, 4, 9]\n"
    result = await jailed(executor, program)
    assert (result.outcome, result.stdout) == (Outcome.OK, expected.stdout), result
    left = await jailed(executor, "import os\nprint('program.py' in os.listdir('.'))")
    assert left.stdout == "False\n"


def essential(text: str) -> list[str]:
    """A traceback without frames, carets and indentation: exceptions, notes and groups."""
    lines = [line.replace("|", "").strip() for line in text.splitlines()]
    shown = [line for line in lines if line and not line.startswith(("File ", "^", "~"))]
    return [line for line in shown if not line.startswith(("raise ", "1 / 0", "Traceback"))]


@pytest.mark.parametrize("name", RAISING)
async def test_exception_shows_what_a_plain_interpreter_shows(
    executor: WorkerExecutor, name: str, tmp_path: Path
) -> None:
    expected = await plain(RAISING[name], tmp_path)
    result = await jailed(executor, RAISING[name])
    assert result.outcome is Outcome.EXCEPTION
    assert essential(result.traceback) == essential(expected.stderr)
    assert len(essential(expected.stderr)) > 1
