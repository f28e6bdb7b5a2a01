"""Processes that a program forks end as in a plain interpreter, and never speak for their call."""

from __future__ import annotations

from tests.attacks.attacker import Cell

CHILD_RAISES = """
import os
child = os.fork()
if child == 0:
    raise ValueError('in the child')
print('status', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
CHILD_HAS_A_VALUE = """
import os
child = os.fork()
if child:
    os.waitpid(child, 0)
'child' if child == 0 else 'parent'
"""


def test_child_that_raises_does_not_decide_the_outcome(cell: Cell) -> None:
    result = cell.run(CHILD_RAISES)
    if not cell.forks:
        assert result["outcome"] == "exception"
        return
    assert (result["outcome"], result["stdout"]) == ("ok", "status 1\n"), result
    assert "ValueError: in the child" in result["stderr"]


def test_value_of_a_child_is_not_the_value_of_the_call(cell: Cell) -> None:
    result = cell.run(CHILD_HAS_A_VALUE)
    if not cell.forks:
        assert result["outcome"] == "exception"
        return
    assert (result["outcome"], result["value"]) == ("ok", "'parent'"), result


def test_file_of_a_program_stays_when_its_child_ends(cell: Cell) -> None:
    code = (
        "import os\nchild = os.fork()\nif child:\n    os.waitpid(child, 0)\n"
        "    print(os.path.exists(__file__))"
    )
    result = cell.run(code)
    if cell.forks:
        assert (result["outcome"], result["stdout"]) == ("ok", "True\n"), result
