"""Functions as tools: their schema, and what every result and error becomes."""

from __future__ import annotations

import asyncio
import enum
import threading
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest

import rstar2
from rstar2.environments.tools import MAX_CHARS, FunctionTool
from rstar2.errors import InfrastructureError, UserError
from rstar2.tool_text import tool_text
from rstar2.types import Outcome, ToolCall, ToolResult


class Unit(enum.Enum):
    PEOPLE = "people"
    MILLIONS = "millions"


@rstar2.tool
def population(city: str, year: int = 2020, unit: Unit = Unit.PEOPLE) -> int:
    """How many people live in a city.

    city: its English name,
      as in an atlas
    year: the year of the census
    """
    return len(city) * year if unit is Unit.PEOPLE else 0


def run(
    tool: FunctionTool, arguments: dict[str, Any] | None = None, deadline_s: float = 30.0
) -> ToolResult:
    call = ToolCall("c", tool.spec.name, arguments or {})
    return asyncio.run(tool.open(None).call(call, deadline_s))


# --------------------------------------------------------------------------- schemas


def test_the_schema_comes_from_signature_and_docstring() -> None:
    assert population.spec.description == "How many people live in a city."
    assert population.spec.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "its English name, as in an atlas"},
            "year": {"type": "integer", "description": "the year of the census", "default": 2020},
            "unit": {"type": "string", "enum": ["people", "millions"], "default": "people"},
        },
        "required": ["city"],
    }
    assert population("Rome") == 4 * 2020, "it is still a function"


def test_types_have_schemas() -> None:
    @rstar2.tool(name="all_types")
    def every(
        a: list[int],
        b: dict[str, float],
        c: str | None,
        d: Literal["x", "y"],
        e: Annotated[float, "a share"],
        f: list[Literal[1, 2]] | None = None,
        g: bool = False,
        h: Any = None,
    ) -> None:
        """Takes everything.

        Args:
            a (list): some numbers
        """

    assert every.spec.name == "all_types"
    assert every.spec.parameters["properties"] == {
        "a": {"type": "array", "items": {"type": "integer"}, "description": "some numbers"},
        "b": {"type": "object", "additionalProperties": {"type": "number"}},
        "c": {"type": ["string", "null"]},
        "d": {"type": "string", "enum": ["x", "y"]},
        "e": {"type": "number", "description": "a share"},
        "f": {
            "anyOf": [
                {"type": "array", "items": {"type": "integer", "enum": [1, 2]}},
                {"type": "null"},
            ]
        },
        "g": {"type": "boolean", "default": False},
        "h": {},
    }
    assert every.spec.description == "Takes everything."


def no_type(x) -> None:  # type: ignore[no-untyped-def]
    """A tool."""


def strange(x: complex) -> None:
    """A tool."""


def many(*names: str) -> None:
    """A tool."""


def keyed(x: dict[int, str]) -> None:
    """A tool."""


def silent(x: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_type, "tool no_type: parameter x has no type"),
        (strange, "tool strange: parameter x has type <class 'complex'>"),
        (many, r"parameter \*names has no schema"),
        (keyed, "parameter x: the keys of a dict must be str"),
        (silent, "tool silent has no docstring"),
    ],
)
def test_a_schema_that_cannot_be_derived_names_the_parameter(
    function: Callable[..., Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        rstar2.tool(function)


# --------------------------------------------------------------------------- results


def returning(value: object) -> FunctionTool:
    @rstar2.tool
    def give() -> Any:
        """Give a value."""
        return value

    return give


@pytest.mark.parametrize(
    ("value", "outcome", "text"),
    [
        ("Rome", Outcome.OK, "Rome"),
        (42, Outcome.OK, "42"),
        ({"b": 1, "a": [None, 2.5]}, Outcome.OK, '{"a":[null,2.5],"b":1}'),
        (None, Outcome.NO_OUTPUT, "(no output)"),
        ("", Outcome.NO_OUTPUT, "(no output)"),
        ("\ud800", Outcome.OK, "?"),
        (ToolResult("other", Outcome.TIMEOUT, message="slow"), Outcome.TIMEOUT, "slow"),
    ],
)
def test_results_become_text(value: object, outcome: Outcome, text: str) -> None:
    result = run(returning(value))
    assert (result.call_id, result.outcome, tool_text(result)) == ("c", outcome, text)


def test_a_huge_result_is_cut_with_a_note() -> None:
    result = run(returning("a" * 10_000_000 + "z"))
    assert len(result.stdout) < MAX_CHARS + 100
    assert f"[... {10_000_001 - MAX_CHARS} characters left out ...]" in result.stdout
    assert result.stdout.endswith("z")
    assert result.truncated.stdout == 10_000_001 - MAX_CHARS


@pytest.mark.parametrize("value", [b"raw", object(), {1: object()}])
def test_a_result_that_is_neither_text_nor_json_is_the_tools_bug(value: object) -> None:
    with pytest.raises(TypeError, match="tool give returned"):
        run(returning(value))


def test_an_exception_is_data_with_a_trimmed_traceback() -> None:
    @rstar2.tool
    def fail(x: int) -> int:
        """Fail."""
        table: dict[int, int] = {}
        return table[x]

    result = run(fail, {"x": 5})
    assert result.outcome is Outcome.EXCEPTION
    assert result.traceback.startswith('Traceback (most recent call last):\n  File "test_tools.py"')
    assert result.traceback.endswith("return table[x]\nKeyError: 5")
    assert "rstar2" not in result.traceback


@pytest.mark.parametrize("error", [SystemExit(3), StopIteration("end"), RecursionError("deep")])
def test_every_exception_is_data(error: BaseException) -> None:
    @rstar2.tool
    def fail() -> None:
        """Fail."""
        raise error

    assert run(fail).outcome is Outcome.EXCEPTION


def test_an_async_function_is_a_tool_too() -> None:
    @rstar2.tool
    async def wait(x: float) -> float:
        """Wait."""
        await asyncio.sleep(0)
        return x

    assert run(wait, {"x": 3}).stdout == "3.0", "an integer becomes the float of the signature"


def test_arguments_are_converted_to_the_signatures_types() -> None:
    assert run(population, {"city": "Rome", "unit": "millions"}).stdout == "0"

    @rstar2.tool
    def total(numbers: list[int]) -> int:
        """Add."""
        return sum(numbers)

    assert run(total, {"numbers": [1, 2]}).stdout == "3"
    wrong = run(total, {"numbers": [1, "2"]})
    assert wrong.outcome is Outcome.BAD_ARGUMENTS
    assert "Expected `int`, got `str`" in wrong.message


def test_a_tool_that_hangs_times_out_at_its_own_deadline() -> None:
    release = threading.Event()

    @rstar2.tool(timeout_s=0.05)
    def hang() -> None:
        """Hang."""
        release.wait(60)

    @rstar2.tool(timeout_s=0.05)
    async def sleep() -> None:
        """Hang."""
        await asyncio.sleep(60)

    for tool in (hang, sleep):
        result = run(tool)
        assert result.outcome is Outcome.TIMEOUT
        assert "gave no result within 0.05 s" in tool_text(result)
    release.set()


def test_a_time_out_inside_the_tool_is_its_own_exception() -> None:
    @rstar2.tool
    def fetch() -> None:
        """Fetch."""
        raise TimeoutError("the site is slow")

    result = run(fetch)
    assert result.outcome is Outcome.EXCEPTION
    assert "TimeoutError: the site is slow" in result.traceback


def test_threads_that_hang_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rstar2.environments.tools.ABANDONED", 2)
    release = threading.Event()

    @rstar2.tool(timeout_s=0.01)
    def hang() -> None:
        """Hang."""
        release.wait(60)

    assert [run(hang).outcome for _ in range(2)] == [Outcome.TIMEOUT] * 2
    with pytest.raises(InfrastructureError, match="2 calls still run after their deadline"):
        run(hang)
    release.set()


def test_an_infrastructure_error_is_raised() -> None:
    @rstar2.tool
    def gone() -> None:
        """Fail."""
        raise rstar2.InfrastructureError("the database is down")

    with pytest.raises(InfrastructureError, match="database is down"):
        run(gone)


# --------------------------------------------------------------------------- sandboxed


OUTSIDE = 3


def test_a_sandboxed_tool_must_stand_alone() -> None:
    def uses_outside(x: int) -> int:
        """Add."""
        return x + OUTSIDE

    with pytest.raises(UserError, match="uses OUTSIDE from outside"):
        rstar2.tool(sandboxed=True)(uses_outside)

    async def waits() -> None:
        """Wait."""

    with pytest.raises(UserError, match="not async"):
        rstar2.tool(sandboxed=True)(waits)
