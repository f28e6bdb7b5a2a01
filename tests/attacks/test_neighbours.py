"""Attacks on other calls through what all processes of a user share: calls beside them go on."""

from __future__ import annotations

import pytest

from tests.attacks.attacker import LONG, MARK, Cell, Result

KEPT = "\nmark()\ntime.sleep(1000)"
HOGS = {
    "pipes": "import fcntl, os\nheld = []\ntry:\n    while True:\n"
    "        held.append(os.pipe())\n        fcntl.fcntl(held[-1][0], 1031, 1 << 20)\n"
    "except OSError:\n    pass",
    "descriptors in flight": "import os, socket\nheld = []\ntry:\n    while True:\n"
    "        held.append(socket.socketpair())\n"
    "        socket.send_fds(held[-1][0], [b'x'], [0] * 200)\n"
    "except OSError:\n    pass",
    "threads": "import threading\nthreading.stack_size(32768)\ntry:\n    while True:\n"
    "        threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    "except RuntimeError:\n    pass",
    "queued signals": "import ctypes, os, signal, struct\n"
    "signal.pthread_sigmask(signal.SIG_BLOCK, range(34, 64))\n"
    "libc = ctypes.CDLL(None)\nvalue = ctypes.c_void_p(1)\n"
    "while libc.sigqueue(os.getpid(), 40, value) == 0:\n    pass",
    "locks": "import fcntl, os, sys\nheld = []\n"
    "for path in (os.__file__, sys.executable, '/dev/null', '/', '/usr/lib', '.'):\n"
    "    try:\n        held.append(os.open(path, os.O_RDONLY))\n"
    "        fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)\n    except OSError:\n"
    "        pass",
    "leases": "import fcntl, os, sys\nheld = []\n"
    "for path in (os.__file__, sys.executable):\n"
    "    held.append(os.open(path, os.O_RDONLY))\n"
    "    try:\n        fcntl.fcntl(held[-1], 1024, 0)\n        print('PWNED')\n"
    "    except OSError:\n        pass",
    "memory": "held = []\ntry:\n    while True:\n        held.append(bytearray(1 << 20))\n"
    "except MemoryError:\n    pass",
    "sockets": "import socket\nheld = []\ntry:\n    while True:\n"
    "        held.append(socket.socketpair())\n        held[-1][0].setblocking(False)\n"
    "        try:\n            while True:\n                held[-1][0].send(bytes(1 << 16))\n"
    "        except BlockingIOError:\n            pass\nexcept OSError:\n    pass",
    "files": "import os\nheld = []\ntry:\n    while True:\n"
    "        held.append(os.open('.', os.O_RDONLY))\nexcept OSError:\n    pass",
    "timers": "import ctypes\nlibc = ctypes.CDLL(None)\nheld = []\n"
    "while True:\n    timer = ctypes.c_void_p()\n"
    "    if libc.timer_create(1, None, ctypes.byref(timer)):\n        break\n"
    "    held.append(timer)",
}
NEIGHBOUR = """
import json, os, sys, tempfile, threading
text = sys.stdin.read()
with tempfile.NamedTemporaryFile() as file:
    file.write(bytes(1 << 16))
reader, writer = os.pipe()
os.write(writer, b'x' * 4096)
print(len(text), len(os.read(reader, 4096)))
"""


def endless(cell: Cell, hog: str) -> dict[str, object]:
    """A hog that keeps all that it can get."""
    return {"code": f"import time\n{MARK}{cell.fill(hog)}{KEPT}", "limits": LONG}


def beside(cell: Cell, hog: str, orders: list[dict[str, object]]) -> list[Result]:
    """Run `orders` once the hog holds all that it can get."""
    answer = cell.ask("runs_beside", endless=endless(cell, hog), orders=orders)
    assert answer["endless_still_runs"]
    results: list[Result] = answer["results"]
    return results


@pytest.mark.parametrize("name", HOGS)
def test_neighbours_of_a_hog_go_on(cell: Cell, name: str) -> None:
    order: dict[str, object] = {"code": NEIGHBOUR, "stdin": "y" * 60_000, "limits": LONG}
    for result in beside(cell, HOGS[name], [order] * 2):
        assert (result["outcome"], result["stdout"]) == ("ok", "60000 4096\n"), result
        assert result["attempts"] == 1


@pytest.mark.parametrize("name", ["pipes", "descriptors in flight", "threads", "queued signals"])
def test_session_beside_a_hog_keeps_its_state(cell: Cell, name: str) -> None:
    session = cell.ask("open")
    first = {"code": "x = 5", "session": session, "limits": LONG}
    code = f"y = {'z' * 20_000!r}\nprint(x, len(y))"
    second = {"code": code, "session": session, "limits": LONG}
    results = beside(cell, HOGS[name], [first]) + beside(cell, HOGS[name], [second])
    assert results[1]["stdout"] == "5 20000\n", results
    cell.ask("close_session", session=session)


@pytest.mark.parametrize("name", HOGS)
def test_session_opens_beside_a_hog(cell: Cell, name: str) -> None:
    session = cell.ask("open_beside", endless=endless(cell, HOGS[name]))
    result = cell.run("print(1)", session=session)
    assert result["stdout"] == "1\n", result
    cell.ask("close_session", session=session)
