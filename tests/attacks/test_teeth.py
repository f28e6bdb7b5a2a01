"""The attacks can succeed: the same programs, in the cell but outside the jail, get through."""

from __future__ import annotations

import pytest

from tests.attacks.attacker import Cell

VARIANTS = ("strict",)

ATTACKS = {
    "secret file": "print('PWNED', open('<secret_file>').read())",
    "environment": "import os\nprint('PWNED', os.environ['RSTAR2_TEST_SECRET'])",
    "abstract socket": "import socket\ns = socket.socket(socket.AF_UNIX)\n"
    "s.connect('\\0rstar2-canary')\nprint('PWNED')",
    "tcp": "import socket\nsocket.create_connection(('127.0.0.1', <tcp>), 2)\nprint('PWNED')",
    "signal": "import os\nos.kill(<victim>, 0)\nprint('PWNED')",
    "proc": "print('PWNED', open('/proc/self/environ').read())",
    "open directory": "import os\nopen('<open_directory>/p', 'w').write('x')\n"
    "os.unlink('<open_directory>/p')\nprint('PWNED')",
    "memory of the service": "with open('/proc/<server>/mem', 'rb') as f:\n"
    "    f.seek(<secret_address>)\n    assert b'canary-' in f.read(64)\n    print('PWNED')",
    "namespaces": "import ctypes\nassert ctypes.CDLL(None).unshare(0x20000) == 0\nprint('PWNED')",
    "memfd": "import os\nos.memfd_create('x')\nprint('PWNED')",
}
CONTACTS = ("abstract socket", "tcp")
"""Attacks that a listening canary must have noticed."""


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_works_outside_the_jail(shared_cell: Cell, name: str) -> None:
    output = shared_cell.ask("unjailed", code=shared_cell.fill(ATTACKS[name]))
    assert "PWNED" in output, output
    shared_cell.ask("forgive", contacts=int(name in CONTACTS))


def test_no_memory_is_shared_between_calls(shared_cell: Cell) -> None:
    """Writable shared mappings of a worker would let one call write into the next.

    Only root can read the mappings.
    """
    assert shared_cell.run("print(1)")["outcome"] == "ok"
    assert shared_cell.ask("shared_mappings") == []
