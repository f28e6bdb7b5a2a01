"""One cell per variant for all attacks. After each attack the canaries are checked.

With pytest-xdist, all attacks of a variant run in the same process (see tests/conftest.py).
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest

from tests.attacks.attacker import VARIANTS, Cell


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every attack in every variant. A module may name a subset in `VARIANTS`."""
    if "shared_cell" in metafunc.fixturenames:
        wanted = getattr(metafunc.module, "VARIANTS", tuple(VARIANTS))
        parameters = [pytest.param(name, marks=pytest.mark.slow) for name in wanted]
        metafunc.parametrize("shared_cell", parameters, indirect=True, scope="session")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, object]:
    """With RSTAR2_REQUIRE_ATTACKS, an attack that was skipped has failed."""
    report = yield
    if report.skipped and os.environ.get("RSTAR2_REQUIRE_ATTACKS"):
        report.outcome = "failed"
        report.longrepr = f"RSTAR2_REQUIRE_ATTACKS is set, but it was skipped: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def shared_cell(request: pytest.FixtureRequest) -> Iterator[Cell]:
    try:
        cell = Cell(request.param)
    except (ConnectionError, OSError) as error:
        text = f"attacks need a disposable cell ({request.param}): {error}"
        if isinstance(error, TimeoutError):
            pytest.fail(text)
        pytest.skip(text)
    yield cell
    cell.close()
    assert cell.left == []


@pytest.fixture
def cell(shared_cell: Cell) -> Iterator[Cell]:
    """The cell, checked after the attack: it still serves, nothing is harmed or left behind."""
    yield shared_cell
    after = shared_cell.run("print(6 * 7)")
    assert (after["outcome"], after["stdout"]) == ("ok", "42\n")
    assert shared_cell.ask("damage") == []
