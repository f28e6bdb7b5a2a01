"""What the HTTP servers of rstar2 share: the listening socket, and a server without signals."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from rstar2.errors import UserError

BACKLOG = 1024


class SignalFreeServer(uvicorn.Server):
    """uvicorn without its signal handlers: the program around it decides when it stops."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; raises UserError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's delay off only on sockets that name their protocol; with it every
    # small answer would wait 40 ms for the caller's acknowledgement.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise UserError(
            f"--port: cannot listen on {host}:{port} ({error.strerror or error}); choose another "
            "(0 takes a free one), or stop the process that uses it"
        ) from error
    sock.setblocking(False)
    return sock
