"""One cell per variant for all attacks. After each attack the canaries are checked.

With pytest-xdist, all attacks of a variant run in the same process (see tests/conftest.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.attacks.attacker import VARIANTS, Cell


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every attack in every variant. A module may name a subset in `VARIANTS`."""
    if "shared_cell" in metafunc.fixturenames:
        wanted = getattr(metafunc.module, "VARIANTS", tuple(VARIANTS))
        parameters = [pytest.param(name, marks=pytest.mark.slow) for name in wanted]
        metafunc.parametrize("shared_cell", parameters, indirect=True, scope="session")


@pytest.fixture(scope="session")
def shared_cell(request: pytest.FixtureRequest) -> Iterator[Cell]:
    try:
        cell = Cell(request.param)
    except (ConnectionError, OSError) as error:
        text = f"attacks need a disposable cell ({request.param}): {error}"
        if os.environ.get("RSTAR2_REQUIRE_ATTACKS") or isinstance(error, TimeoutError):
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
