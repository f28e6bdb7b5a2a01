"""Runs a program inside the process of its call and writes the record of how it ended.

The outside trusts nothing here: the record contains only what a program may claim about itself. A
program that patches modules can only harm itself. If this code fails, the process ends without a
record and the wait status decides the outcome.
"""

from __future__ import annotations

import _random
import ast
import atexit
import contextlib
import gc
import io
import linecache
import os
import random
import sys
import threading
import traceback
import types
from collections.abc import Sequence
from typing import Any, NoReturn

from rstar2.codeenv.jail import frames
from rstar2.codeenv.jail.frames import Record

FILENAME = "<program>"
PROGRAM_FILE = "program.py"
_SPAWNING = ("multiprocessing.popen_spawn_posix", "multiprocessing.popen_forkserver")
_MAX_FRAMES = 24
_MAX_CHAIN = 4


class OutputFile(io.FileIO):
    """Standard output or error without a buffer: a program that is killed has shown all it printed.

    The first write is recorded. After it `write` is the one of FileIO, without a layer in Python.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.wrote = False
        self.__dict__["write"] = self._first_write

    def _first_write(self, data: Any, /) -> int:
        self.wrote = True
        self.__dict__.pop("write", None)  # the program may have kept this method
        return super().write(data)


_stdout: OutputFile | None = None
"""Under `sys.stdout`, which the program may replace or close. None during the warm-up."""


def prepare_streams() -> None:
    """Create the standard streams on descriptors 0 to 2 once; all calls inherit them."""

    def text(buffer: Any, mode: str, errors: str) -> io.TextIOWrapper:
        stream = io.TextIOWrapper(buffer, "utf-8", errors, write_through=mode == "w")
        stream.mode = mode  # type: ignore[misc]
        return stream

    global _stdout
    _stdout = OutputFile(1)
    stdin = io.BufferedReader(io.FileIO(0, "r", closefd=False))
    sys.stdin = sys.__stdin__ = text(stdin, "r", "replace")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = text(_stdout, "w", "backslashreplace")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = text(OutputFile(2), "w", "backslashreplace")  # type: ignore[misc]


def fresh_main() -> dict[str, Any]:
    """A new `__main__` module; returns its namespace."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    namespace = module.__dict__
    namespace["__builtins__"] = __builtins__
    namespace["__file__"] = FILENAME
    return namespace


def reseed() -> None:
    """Give every call independent random numbers, although all are forked from one process."""
    generator: Any = random._inst
    _random.Random.seed(generator, int.from_bytes(os.urandom(32), "little"))  # in C: few pages
    generator.gauss_next = None
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(int.from_bytes(os.urandom(4), "little"))


def execute(source: str, namespace: dict[str, Any], limit: int) -> Record:
    """Run a program. Its last expression is the value if it printed nothing."""
    source = source.removeprefix("\ufeff")  # as Python reads a file
    lines = _lines(source)
    linecache.cache[FILENAME] = (len(source), None, lines, FILENAME)
    try:
        program, expression = _compile(source)
    except SyntaxError as error:
        return _syntax_error(error, lines)
    except BaseException as error:  # noqa: BLE001 - null bytes, nesting too deep, memory
        return describe(error, source, limit)
    try:
        exec(program, namespace)
        if expression is None:
            return Record(frames.NOTHING)
        value = eval(expression, namespace)
        if value is None or _has_printed() or source.rstrip().endswith(";"):
            return Record(frames.NOTHING)
        return _clipped(frames.VALUE, "", repr(value), limit)
    except SystemExit as error:
        return _exit(error)
    except BaseException as error:  # noqa: BLE001 - any exception of a program is its result
        return describe(error, source, limit)


def _lines(source: str) -> list[str]:
    """The lines of a program as Python counts them."""
    return io.StringIO(source, newline=None).readlines()


def _compile(source: str) -> tuple[types.CodeType, types.CodeType | None]:
    """Compile the program and, separately, its last expression if that may have a value to show.

    Most programs end with a line `print(...)`, which has no value, or with another expression on
    one line. They skip the syntax tree in Python objects, which costs more than the rest of a
    short call.
    """
    text = source.rstrip(" \t\n")
    start = text.rfind("\n") + 1
    if text.startswith("print(", start):
        return _code(source, "exec"), None
    if not text[start : start + 1].isspace() and "\\" not in text[start:] and "\r" not in text:
        try:  # if both parts compile alone, the second one is the last statement
            expression = _code("\n" * text.count("\n") + text[start:], "eval")
            return _code(text[:start], "exec"), expression
        except (SyntaxError, ValueError):
            pass  # the last statement has several lines or no value, or the program is wrong
    tree = ast.parse(source, FILENAME)
    if not tree.body or not isinstance(tree.body[-1], ast.Expr):
        return _code(tree, "exec"), None
    last = ast.Expression(tree.body[-1].value)
    tree.body.pop()
    return _code(tree, "exec"), _code(last, "eval")


def _code(source: str | ast.Module | ast.Expression, mode: str) -> types.CodeType:
    """Compile without the `__future__` imports of this module."""
    code: types.CodeType = compile(source, FILENAME, mode, dont_inherit=True)
    return code


def _has_printed() -> bool:
    """Flush standard output; True if the program has printed anything."""
    stream = sys.__stdout__
    with contextlib.suppress(OSError, ValueError):  # closed by the program
        if stream is not None:
            stream.flush()
    return _stdout is not None and _stdout.wrote


def _clipped(kind: int, message: str, text: str, limit: int) -> Record:
    """Keep only both ends of a text that is far too long; the server truncates it exactly."""
    keep = 2 * limit + 1000
    if len(text) > 2 * keep:
        cut = len(text) - 2 * keep
        return Record(kind, message[:2000], text[:keep] + text[-keep:], cut)
    return Record(kind, message[:2000], text)


def _exit(error: SystemExit) -> Record:
    code = error.code
    if code is None or code == 0:
        return Record(frames.NOTHING)
    if isinstance(code, int):
        return Record(frames.EXIT, f"SystemExit: {int(code)}", str(int(code) & 0xFF))
    return Record(frames.EXIT, f"SystemExit: {_text(code)[:1000]}", "1")


def _text(value: object) -> str:
    """str(value) where `__str__` may be hostile."""
    try:
        return str(str(value))
    except BaseException as error:  # noqa: BLE001 - a hostile __str__ may raise anything
        return f"<{type(value).__name__} with a __str__ that raised {type(error).__name__}>"


def _syntax_error(error: SyntaxError, lines: list[str]) -> Record:
    name = type(error).__name__
    line = error.lineno or 0
    text = lines[line - 1].rstrip("\n") if 0 < line <= len(lines) else ""
    shown = [f'  File "{FILENAME}", line {line}']
    if text.strip():
        stripped = text.strip()
        shown.append(f"    {stripped[:500]}")
        column = (error.offset or 1) - 1 - (len(text) - len(text.lstrip()))
        if 0 <= column <= len(stripped) and column < 500:
            end = (error.end_offset or 0) if error.end_lineno == line else 0
            width = max(1, min(end - (error.offset or 0), len(stripped) - column))
            shown.append("    " + " " * column + "^" * width)
    message = f"{name}: {error.msg}"
    return Record(frames.SYNTAX, f"{message} (line {line})", "\n".join([*shown, message]))


def describe(error: BaseException, source: str, limit: int) -> Record:
    """An exception as Python prints it, reduced to the program's own lines."""
    kind = frames.MEMORY if isinstance(error, MemoryError) else frames.EXCEPTION
    lines = _lines(source)
    parts: list[str] = []
    link: BaseException | None = error
    joint = ""
    for _ in range(_MAX_CHAIN):
        if link is None:
            break
        if isinstance(link, BaseExceptionGroup):  # Python's own text, with all that led to it
            parts.append(_group(link) + joint)
            break
        parts.append(_one(link, lines) + joint)
        if link.__cause__ is not None:
            joint = "\n\nThe above exception was the direct cause of the following exception:\n\n"
            link = link.__cause__
        elif link.__context__ is not None and not link.__suppress_context__:
            joint = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
            link = link.__context__
        else:
            break
    return _clipped(kind, headline(error), "".join(reversed(parts)), limit)


def headline(error: BaseException) -> str:
    """`TypeName: text`, as the last line of a traceback."""
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    if isinstance(error, SyntaxError):
        return f"{name}: {error.msg} (line {error.lineno})"
    text = _text(error)
    return f"{name}: {text}" if text else name


def _one(error: BaseException, lines: list[str]) -> str:
    shown = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename == FILENAME:
            number = trace.tb_lineno
            shown.append(f'  File "{FILENAME}", line {number}, in {code.co_name}')
            if 0 < number <= len(lines):
                shown.append(f"    {lines[number - 1].strip()[:500]}")
        trace = trace.tb_next
    if len(shown) > 2 * _MAX_FRAMES:
        left_out = len(shown) // 2 - _MAX_FRAMES
        marker = f"  [... {left_out} more frames ...]"
        shown = [*shown[:_MAX_FRAMES], marker, *shown[-_MAX_FRAMES:]]
    text = "\n".join([headline(error), *_notes(error)])
    return "\n".join(["Traceback (most recent call last):", *shown, text]) if shown else text


def _notes(error: BaseException) -> list[str]:
    """The notes of an exception (`add_note`), as Python prints them."""
    notes = getattr(error, "__notes__", ())
    if not isinstance(notes, list | tuple):
        return [_text(notes)]
    return [line for note in notes[:_MAX_FRAMES] for line in _text(note).split("\n")]


def _group(error: BaseException) -> str:
    """An exception group as Python prints it, reduced to the program's own lines."""
    shown = traceback.TracebackException.from_exception(error)
    todo = [shown]
    while todo:
        part = todo.pop()
        part.stack[:] = [frame for frame in part.stack if frame.filename == FILENAME]
        linked = [part.__cause__, part.__context__, *(part.exceptions or ())]
        todo.extend(link for link in linked if link is not None)
    return "".join(shown.format()).rstrip("\n")


def finish(record: Record, result_fd: int) -> None:
    """End as an interpreter would (join threads, run exit hooks, flush), then write the record.

    A program that succeeded without a value writes no record: its exit status is enough.
    """
    _end_interpreter()
    if record.kind != frames.NOTHING:
        write_record(record, result_fd)


def leave_child(record: Record) -> NoReturn:
    """End a process that the program forked and that ran to the end of the program.

    It ends as in a plain interpreter. The record of the call is its parent's to write.
    """
    _end_interpreter()
    if record.kind in (frames.EXCEPTION, frames.SYNTAX, frames.MEMORY):
        with contextlib.suppress(OSError):  # closed by the program
            os.write(2, f"{record.text}\n".encode("utf-8", "backslashreplace"))
    os._exit(exit_code(record))


def _end_interpreter() -> None:
    """Join threads, run exit hooks and flush."""
    if len(threading._active) > 1:  # type: ignore[attr-defined]
        _at_exit(threading._shutdown)  # type: ignore[attr-defined]
    _at_exit(atexit._run_exitfuncs)
    flush()


def exit_code(record: Record) -> int:
    """The exit code of a process whose program ended so."""
    if record.kind == frames.EXIT:
        return int(record.text)
    return 1 if record.kind in (frames.EXCEPTION, frames.SYNTAX, frames.MEMORY) else 0


def flush() -> None:
    """Flush everything that the program printed."""
    _at_exit(_flush, sys.__stdout__)
    _at_exit(_flush, sys.__stderr__)
    for stream, original in ((sys.stdout, sys.__stdout__), (sys.stderr, sys.__stderr__)):
        if stream is not original:
            _at_exit(_flush, stream)


def _flush(stream: Any) -> None:
    """Flush a stream as an interpreter does at exit; a missing or closed stream is skipped."""
    if stream is not None and not getattr(stream, "closed", False):
        stream.flush()


def write_record(record: Record, result_fd: int) -> None:
    """Write the record to the pipe that the worker reads."""
    data = memoryview(record.pack())
    while data:
        data = data[os.write(result_fd, data) :]


def _at_exit(function: Any, *args: Any) -> None:
    """Run one exit hook. The result is already decided: an exception is written to stderr and
    otherwise ignored.

    Hooks of the program may raise anything and may have closed standard error.
    """
    try:
        function(*args)
    except BaseException as error:  # noqa: BLE001 - see above
        with contextlib.suppress(OSError):
            os.write(
                2, f"Exception ignored at exit: {headline(error)}\n".encode("utf-8", "replace")
            )


class ProgramFile:
    """The program as a file in scratch, which exists only if the program needs it.

    `spawn` and `forkserver` import a program from its file. Their modules are imported when the
    first process is about to start, so this is an entry of `sys.meta_path` that waits for that.
    """

    def __init__(self, source: str, namespace: dict[str, Any]) -> None:
        self.source = source
        self.namespace = namespace
        self.path: str | None = None
        if "__file__" in source or any(name in sys.modules for name in _SPAWNING):
            self.write()
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> None:
        """Write the file if a process is about to be spawned; others find the module."""
        if name in _SPAWNING and self.path is None:
            self.write()

    def write(self) -> None:
        path = os.path.join(os.getcwd(), PROGRAM_FILE)
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(self.source)
        except OSError:  # the caller's own file of this name, or no space left
            return
        self.namespace["__file__"] = self.path = path

    def remove(self) -> None:
        if self.path is not None:
            with contextlib.suppress(OSError):  # the program removed it
                os.unlink(self.path)


def run_program(source: str, namespace: dict[str, Any], limit: int, result_fd: int) -> int:
    """Run a plain call in a process that is set up; returns its exit code."""
    gc.enable()
    reseed()
    file = ProgramFile(source, namespace)
    pid = os.getpid()
    record = execute(source, namespace, limit)
    if os.getpid() != pid:
        leave_child(record)
    finish(record, result_fd)
    file.remove()
    return exit_code(record)
