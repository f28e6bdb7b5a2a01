"""Attacks on the scratch space itself: nothing that a call does to it reaches the next call."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from tests.attacks.attacker import Cell

INNOCENT = """
import fcntl, os
for place in ('.', '/dev/shm'):
    try:
        info = os.stat(place)
    except OSError:
        continue
    times = 'changed' if 1 in (info.st_mtime, info.st_atime) else 'kept'
    print(oct(info.st_mode), info.st_uid == os.getuid(), times)
with open('mine', 'w') as file:
    file.write('x')
os.makedirs('a/b')
fcntl.flock(os.open('.', os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
fcntl.flock(0, fcntl.LOCK_EX | fcntl.LOCK_NB)
print(sorted(os.listdir('.')), os.getcwd() == os.path.realpath('.'), os.get_blocking(0))
"""
"""Uses scratch and describes its state; every call must see the same."""

HARMFUL = {
    "mode": "os.chmod('.', 0)",
    "mode of its path": "os.chmod(os.getcwd(), 0)",
    "mode by descriptor": "os.fchmod(os.open('.', os.O_RDONLY), 0)",
    "unreadable": "os.chmod('.', 0o300)",
    "set-group-id": "os.chmod('.', 0o2777)",
    "mode after a file": "open('left', 'w').close()\nos.mkdir('d')\nos.chmod('.', 0)",
    "mode of shared memory": "os.chmod('/dev/shm', 0)",
    "file in shared memory": "open('/dev/shm/left', 'w').close()\nos.chmod('/dev/shm', 0o400)",
    "times": "os.utime('.', (1, 1))",
    "times after a file": "open('left', 'w').close()\nos.unlink('left')\nos.utime('.', (1, 1))",
    "owner": "os.chown('.', 12345, 12345)",
    "attribute": "os.setxattr('.', 'user.left', b'x')",
    "access list": "os.setxattr('.', 'system.posix_acl_default', bytes(28))",
    "rename": "os.rename(os.getcwd(), os.getcwd() + 'x')",
    "rename of the parent": "p = os.path.dirname(os.getcwd())\nos.rename(p, p + 'x')",
    "removal": "os.rmdir(os.getcwd())",
    "exchange": "os.mkdir('x')\nos.rename('x', os.getcwd())",
    "locked directory": "os.mkdir('x')\nopen('x/f', 'w').close()\nos.chmod('x', 0)",
    "directory without a mode": "os.mkdir('x', 0)",
    "directory that cannot be listed": "os.mkdir('x', 0o300)\nopen('x/f', 'w').close()",
    "directory that cannot be written": "os.umask(0)\nos.mkdir('x', 0o700)\nos.mkdir('x/y')\n"
    "os.chmod('x', 0o500)",
    "link to the root": "os.symlink('/', 'x')\nos.symlink('.', 'y')\nos.symlink('y', 'z')",
    "lock": "import fcntl\nfcntl.flock(os.open('.', os.O_RDONLY), fcntl.LOCK_EX)",
    "lock of standard input": "import fcntl\nfcntl.flock(0, fcntl.LOCK_EX)",
    "flags of standard input": "os.set_blocking(0, False)",
    "names that are no text": "open(b'\\xff\\xfe\\n', 'w').close()\nos.mkdir(b'\\x80')",
    "many names": "for i in range(1500):\n    open(f'f{i}', 'w').close()",
    "pipes and sockets": "import socket\nos.mkfifo('p')\ns = socket.socket(socket.AF_UNIX)\n"
    "s.bind('s')",
}


@pytest.mark.parametrize("name", HARMFUL)
def test_scratch_is_the_same_in_the_next_call(cell: Cell, name: str) -> None:
    before = cell.run(INNOCENT)
    assert before["outcome"] == "ok", before
    result = cell.run("import os\n" + HARMFUL[name])
    assert result["outcome"] in ("no_output", "exception", "killed"), result
    assert result["attempts"] == 1
    for _ in range(3):
        after = cell.run(INNOCENT)
        assert (after["outcome"], after["stdout"]) == ("ok", before["stdout"]), after


DEEP = {
    "chain": "while True:\n    os.mkdir('d')\n    os.chdir('d')",
    "chain that cannot be listed": "while True:\n    os.mkdir('d', 0o300)\n    os.chdir('d')",
    "long names": "while True:\n    os.mkdir('d' * 250)\n    os.chdir('d' * 250)",
    "chain with files": "while True:\n    os.mkdir('d')\n    os.chdir('d')\n"
    "    os.mkdir('e')\n    open('f', 'w').close()",
    "swapped": "import threading\nos.makedirs('a/b')\n"
    "def swap():\n    while True:\n        os.rename('a', 'c')\n        os.rename('c', 'a')\n"
    "threading.Thread(target=swap, daemon=True).start()\n"
    "here = os.open('a/b', os.O_RDONLY)\n"
    "while True:\n    os.mkdir('d', dir_fd=here)\n"
    "    new = os.open('d', os.O_RDONLY, dir_fd=here)\n    os.close(here)\n    here = new",
}


@pytest.mark.parametrize("name", DEEP)
def test_endless_nesting_ends_as_the_fault_of_the_program(cell: Cell, name: str) -> None:
    result = cell.run("import os\n" + DEEP[name], wall_s=20.0, cpu_s=20.0)
    assert result["outcome"] in ("exception", "killed", "timeout"), result
    assert result["attempts"] == 1
    assert cell.run("import os\nprint(os.listdir('.'))")["outcome"] == "ok"


def test_deep_tree_that_a_dead_server_left_is_removed_at_the_next_start(cell: Cell) -> None:
    assert cell.ask("sweep_leftovers") == []


def test_directory_that_cannot_be_counted_ends_the_call(cell: Cell) -> None:
    """In portable a program could hide files from the check of its size."""
    result = cell.gets_nothing(
        "import os, time\nos.mkdir('x', 0o300)\ndata = bytes(1 << 20)\n"
        "for i in range(100):\n    open(f'x/f{i}', 'wb').write(data)\n"
        "time.sleep(30)\nprint('PWNED')",
        scratch_mb=16,
    )
    assert result["outcome"] in ("exception", "killed")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make device files")
def test_file_locks_outside_the_cell_have_no_effect_in_it(cell: Cell) -> None:
    """Several cells run at the same time, and programs lock their standard input, /dev/null."""
    with Path("/dev/null").open() as outside:
        fcntl.flock(outside, fcntl.LOCK_SH)
        result = cell.run("import fcntl\nfcntl.flock(0, fcntl.LOCK_EX | fcntl.LOCK_NB)\nprint(1)")
    assert result["stdout"] == "1\n", result
