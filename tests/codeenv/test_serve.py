"""Start of a server: what is refused, and what an owned server reports to its owner."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.codeenv.client.owned import LocalServer
from rstar2.codeenv.server.serve import check_exposure, serve
from rstar2.config import CodeEnvConfig
from rstar2.errors import CodeEnvError, UserError
from rstar2.http_server import bind


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_beyond_loopback_a_token_is_required(host: str) -> None:
    with pytest.raises(UserError, match="token"):
        check_exposure(CodeEnvConfig(host=host))
    check_exposure(CodeEnvConfig(host=host, token="secret"))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    check_exposure(CodeEnvConfig(host=host))


def test_a_taken_port_is_one_clear_error() -> None:
    with bind("127.0.0.1", 0) as taken, pytest.raises(UserError, match="port"):
        bind("127.0.0.1", taken.getsockname()[1])


def test_a_host_that_is_not_ours_is_one_clear_error() -> None:
    with pytest.raises(UserError, match=r"192\.0\.2\.1"):
        bind("192.0.2.1", 0)


def test_the_listening_socket_names_its_protocol() -> None:
    """Else asyncio leaves Nagle's delay on, and every small answer takes 40 ms."""
    with bind("127.0.0.1", 0) as sock:
        assert sock.proto == socket.IPPROTO_TCP


async def test_the_executor_is_not_started_when_the_port_is_taken() -> None:
    class Untouchable:
        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"{name} was used")

    with bind("127.0.0.1", 0) as taken:
        config = CodeEnvConfig(port=taken.getsockname()[1])
        with pytest.raises(UserError, match="port"):
            await serve(config, on_ready=lambda ready: None, executor=Untouchable())  # type: ignore[arg-type]


@pytest.mark.slow
async def test_an_owner_gets_the_error_of_a_server_that_cannot_start() -> None:
    with bind("127.0.0.1", 0) as taken:
        config = CodeEnvConfig(port=taken.getsockname()[1])
        with pytest.raises(UserError, match="port"):
            await CodeEnvClient.start(config)


async def test_an_unwritable_directory_is_one_clear_error() -> None:
    class Homeless:
        async def start(self) -> None:
            raise PermissionError(13, "Permission denied", "/tmp/rstar2-codeenv-1")

        async def close(self) -> None:
            return

    with pytest.raises(CodeEnvError, match=r"TMPDIR.*doctor"):
        await serve(CodeEnvConfig(), on_ready=lambda ready: None, executor=Homeless())  # type: ignore[arg-type]


async def test_a_server_that_dies_at_once_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    server = LocalServer(CodeEnvConfig())
    with pytest.raises(CodeEnvError, match="ended with code 1"):
        await server.start()
    assert not server.running


@pytest.mark.slow
def test_an_owned_server_without_an_owner_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rstar2.codeenv.server.serve"],
        stdin=subprocess.DEVNULL, capture_output=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1
    assert "owner" in json.loads(done.stdout)["message"]
