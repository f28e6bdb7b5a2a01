"""Attacks on the network: nothing beyond the call's own process can be reached."""

from __future__ import annotations

import pytest

from tests.attacks.attacker import Cell


def test_tcp_to_loopback_is_refused(cell: Cell) -> None:
    cell.gets_nothing(
        "import socket\ns = socket.create_connection(('127.0.0.1', <tcp>), 2)\nprint('PWNED')"
    )


def test_udp_to_loopback_is_refused(cell: Cell) -> None:
    cell.gets_nothing(
        "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "s.sendto(b'x', ('127.0.0.1', <udp>))\nprint('PWNED')"
    )


def test_listening_is_refused(cell: Cell) -> None:
    cell.gets_nothing(
        "import socket\ns = socket.socket()\ns.bind(('0.0.0.0', 0))\ns.listen()\nprint('PWNED')"
    )


@pytest.mark.parametrize(
    ("family", "kind"),
    [(2, 3), (17, 3), (16, 3), (38, 5), (40, 1), (10, 1), (31, 1), (29, 3), (44, 3)],
    ids=["raw", "packet", "netlink", "alg", "vsock", "inet6", "bluetooth", "can", "xdp"],
)
def test_exotic_socket_is_refused(cell: Cell, family: int, kind: int) -> None:
    cell.gets_nothing(f"import socket\nsocket.socket({family}, {kind})\nprint('PWNED')")


def test_abstract_unix_socket_of_the_service_is_out_of_reach(cell: Cell) -> None:
    cell.gets_nothing(
        "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('\\0rstar2-canary')\n"
        "print('PWNED')"
    )


def test_unix_socket_file_of_the_service_is_out_of_reach(cell: Cell) -> None:
    cell.gets_nothing(
        "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('<unix_path>')\nprint('PWNED')"
    )


@pytest.mark.parametrize("address", ["<datagrams>", "\\0rstar2-datagrams", "/dev/log"])
@pytest.mark.parametrize("kind", [1, 2, 3, 5], ids=["stream", "datagram", "raw", "packet"])
def test_socket_of_a_pair_reaches_only_its_peer(cell: Cell, kind: int, address: str) -> None:
    """Datagram sockets can send to any address, although they belong to a pair."""
    cell.gets_nothing(
        f"import socket\na, b = socket.socketpair(socket.AF_UNIX, {kind})\n"
        f"for send in (lambda: a.sendto(b'x', '{address}'),\n"
        f"             lambda: a.sendmsg([b'x'], [], 0, '{address}')):\n"
        "    try:\n        send()\n    except OSError as error:\n        print(error.errno)\n"
        "        continue\n"
        "    b.setblocking(False)\n"
        "    try:\n        b.recv(1)\n    except BlockingIOError:\n        print('PWNED')"
    )


def test_names_cannot_be_resolved(cell: Cell) -> None:
    cell.gets_nothing("import socket\nprint('PWNED', socket.getaddrinfo('example.com', 80))")


def test_socketpair_inside_a_call_works_for_asyncio(cell: Cell) -> None:
    result = cell.run("import asyncio\nasync def f():\n    return 5\nprint(asyncio.run(f()))")
    assert result["stdout"] == "5\n"


def test_raw_socket_system_call_is_refused(cell: Cell) -> None:
    cell.gets_nothing(
        "import ctypes, platform\n"
        "number = {'x86_64': 41, 'aarch64': 198}[platform.machine()]\n"
        "if ctypes.CDLL(None).syscall(number, 2, 1, 0) >= 0:\n    print('PWNED')"
    )
