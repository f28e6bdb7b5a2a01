"""Files of a call: given to the program, returned from its working directory, bounded both ways."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Mapping

import pytest
import pytest_asyncio

from rstar2.codeenv import wire
from rstar2.codeenv.protocol import RunRequest
from rstar2.codeenv.server.calls import CallTable
from rstar2.codeenv.server.executor import WorkerExecutor
from rstar2.codeenv.sizes import MAX_FILES, MAX_FILES_BYTES
from rstar2.codeenv.wire import Refusal
from rstar2.config import CodeEnvConfig
from rstar2.types import Limits, Outcome, ToolResult
from tests.codeenv.levels import PATIENT, levels

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
_ids = itertools.count()


@pytest_asyncio.fixture(params=levels(), scope="module", loop_scope="module")
async def table(request: pytest.FixtureRequest) -> AsyncIterator[CallTable]:
    config = CodeEnvConfig(slots=1, warm_up="never", default=PATIENT)
    executor = WorkerExecutor(config, request.param)
    await executor.start()
    table = CallTable(executor, config, "test")
    yield table
    await table.close(1.0)
    await executor.close()


async def run(
    table: CallTable,
    code: str,
    files: Mapping[str, bytes] | None = None,
    collect: bool = True,
    **limits: float,
) -> ToolResult:
    """One call, checked as a request over HTTP is."""
    body = wire.RunIn(
        f"t{next(_ids)}",
        code,
        limits=wire.LimitsIn(**limits),  # type: ignore[arg-type]
        files=dict(files or {}),
        collect=collect,
    )
    sent = wire.read(wire.encode(body), wire.RunIn)
    return await table.call(wire.to_run(sent, table.config.cap))


async def test_a_program_reads_files_and_returns_those_that_it_made(table: CallTable) -> None:
    given = {"data.csv": b"a,b\n1,2\n", "deep/er/raw.bin": bytes(range(256)), "empty": b""}
    code = (
        "import os\nprint(open('data.csv').read(), len(open('deep/er/raw.bin', 'rb').read()))\n"
        "print(os.path.getsize('empty'))\n"
        "os.mkdir('out')\nopen('out/sum.txt', 'w').write('3')\nopen('note', 'w').write('ü')"
    )
    result = await run(table, code, given)
    assert (result.outcome, result.message) == (Outcome.OK, "")
    assert result.stdout == "a,b\n1,2\n 256\n0\n"
    assert result.files == {"note": "ü".encode(), "out/sum.txt": b"3"}
    assert not result.truncated


async def test_a_changed_input_is_returned_and_an_unchanged_one_is_not(table: CallTable) -> None:
    given = {"kept": b"same", "grown": b"1", "rewritten": b"2", "gone": b"3"}
    code = (
        "import os\nopen('grown', 'a').write('1')\nopen('rewritten', 'w').write('2')\n"
        "os.remove('gone')"
    )
    assert (await run(table, code, given)).files == {"grown": b"11"}


async def test_files_of_one_call_are_gone_in_the_next(table: CallTable) -> None:
    await run(table, "open('mine', 'w').write('x')", {"given/file": b"x"})
    result = await run(
        table, "import os\nprint([n for n in os.listdir() if n in ('mine', 'given')])"
    )
    assert (result.stdout, result.files) == ("[]\n", {})


async def test_nothing_is_returned_unless_it_was_asked_for(table: CallTable) -> None:
    result = await run(table, "open('x', 'w').write('x');", collect=False)
    assert (result.outcome, result.files) == (Outcome.NO_OUTPUT, {})


async def test_files_are_returned_when_the_program_fails(table: CallTable) -> None:
    code = "open('partial', 'w').write('so far')\n"
    failed = await run(table, code + "1/0")
    assert (failed.outcome, failed.files) == (Outcome.EXCEPTION, {"partial": b"so far"})
    late = await run(table, code + "while True: pass", wall_s=60.0, cpu_s=0.3)
    assert (late.outcome, late.files) == (Outcome.TIMEOUT, {"partial": b"so far"})


async def test_links_and_special_files_are_not_followed(table: CallTable) -> None:
    code = (
        "import os\nopen('real', 'w').write('mine')\n"
        "os.symlink('/etc/passwd', 'link')\nos.symlink('/', 'root')\nos.symlink('.', 'loop')\n"
        "try:\n    os.mkfifo('pipe')\nexcept OSError:\n    print('no pipes here')"
    )
    result = await run(table, code)
    assert result.outcome.succeeded
    assert result.files == {"real": b"mine"}


async def test_a_link_in_place_of_an_input_does_not_lead_outside(table: CallTable) -> None:
    """The worker opens every part of a path without following links."""
    await run(table, "import os\nos.symlink('/', 'data')")
    result = await run(table, "print(open('data/x').read())", {"data/x": b"inside"})
    assert result.stdout == "inside\n"


async def test_too_many_files_are_counted(table: CallTable) -> None:
    result = await run(
        table, f"for i in range({MAX_FILES + 6}): open(f'{{i:03}}', 'w').write(str(i))"
    )
    assert list(result.files) == [f"{i:03}" for i in range(MAX_FILES)]
    assert result.truncated.files == 6
    assert "6 files were not returned" in result.message
    assert result.outcome is Outcome.NO_OUTPUT


async def test_a_file_that_is_too_large_is_counted(table: CallTable) -> None:
    code = (
        f"open('large', 'wb').truncate({MAX_FILES_BYTES + 1})\nopen('small', 'w').write('s')\n"
        "open('sparse', 'wb').truncate(1 << 24)"
    )
    result = await run(table, code, file_mb=64, scratch_mb=64)
    assert set(result.files) == {"small"} or set(result.files) == {"small", "sparse"}
    assert result.truncated.files == 3 - len(result.files)


async def test_a_directory_without_end_is_not_walked(table: CallTable) -> None:
    code = "import os\nfor i in range(100):\n    os.mkdir('d')\n    os.chdir('d')\nopen('f', 'w')"
    result = await run(table, code)
    assert result.files == {}
    assert result.truncated.files == 1
    assert (await run(table, "print(1)")).stdout == "1\n"


async def test_names_that_are_not_text_are_counted(table: CallTable) -> None:
    result = await run(table, "open(b'\\xff', 'w').write('x')\nopen('ok', 'w').write('y')")
    assert (result.files, result.truncated.files) == ({"ok": b"y"}, 1)


async def test_files_above_scratch_are_refused(table: CallTable) -> None:
    with pytest.raises(Refusal, match="do not fit into the call's scratch_mb of 1"):
        await run(table, "1", {"big": bytes(2 << 20)}, scratch_mb=1)


async def test_files_that_cannot_be_written_are_refused_with_the_reason(table: CallTable) -> None:
    session = (await table.executor.open_session(None, None)).id
    code = "import os\nos.mkdir('data')\nos.symlink('/', 'link')"
    await table.call(RunRequest(f"t{next(_ids)}", code, session=session))
    for path, reason in (("data", "Is a directory"), ("link/x", "Not a directory")):
        request = RunRequest(f"t{next(_ids)}", "1", session=session, files={path: b"x"})
        result = await table.call(request)
        assert (result.outcome, result.exit_code) == (Outcome.BAD_ARGUMENTS, 0)
        assert f"could not be written ({reason}); rename them" in result.message
    await table.executor.close_session(session)


@pytest.mark.parametrize(
    "name",
    ["", "/etc/passwd", "../up", "a/../b", "a//b", ".", "a/", "nul\0", 300 * "x", 17 * "d/" + "f"],
)
async def test_a_path_outside_is_refused_by_name(name: str) -> None:
    with pytest.raises(Refusal, match="files: ") as refused:
        wire.to_run(wire.RunIn("a", "1", files={name: b""}), Limits())
    assert refused.value.wire.field == "files"
    assert repr(name) in str(refused.value)


async def test_too_much_is_refused() -> None:
    for files in (
        {str(i): b"" for i in range(MAX_FILES + 1)},
        {"big": bytes(MAX_FILES_BYTES + 1)},
        {"a": b"", "a/b": b""},
    ):
        with pytest.raises(Refusal, match="files: "):
            wire.to_run(wire.RunIn("a", "1", files=files), Limits())


async def test_other_files_make_another_call(table: CallTable) -> None:
    first = RunRequest("same", "print(open('x').read())", files={"x": b"1"})
    assert (await table.call(first)).stdout == "1\n"
    assert (await table.call(first)).stdout == "1\n"
    with pytest.raises(Refusal, match="already used"):
        await table.call(RunRequest("same", "print(open('x').read())", files={"x": b"2"}))
