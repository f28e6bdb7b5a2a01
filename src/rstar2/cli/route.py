"""`rstar2 route`: the scheduler as an HTTP router in front of vLLM servers."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rstar2 import extras
from rstar2.cli.waiting import waiting
from rstar2.config import SchedulerConfig
from rstar2.config.codeenv import LOOPBACK
from rstar2.errors import UserError

if TYPE_CHECKING:
    from rstar2.http_server import AsgiApp
    from rstar2.router.backend import Backend

PORT = 8090
KEY_VARIABLE = "RSTAR2_ROUTE_KEY"


def route(
    urls: Annotated[
        list[str],
        typer.Argument(
            metavar="URL",
            help="vLLM servers, such as http://host:8000; http://token:KEY@host:8000 has a key.",
            show_default=False,
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free one.")
    ] = PORT,
    policy: Annotated[
        str, typer.Option(help="Scheduling policy; `rstar2 simulate --help` lists them.")
    ] = "reserve",
    max_sequences: Annotated[
        int,
        typer.Option(min=1, help="Maximum number of sequences per server, as its --max-num-seqs."),
    ] = 256,
    session_header: Annotated[
        str, typer.Option(help="Header that names the rollout of a request.")
    ] = "x-session-id",
    session_idle_s: Annotated[
        float, typer.Option(min=1, help="Seconds after which an unused session ends.")
    ] = 600.0,
    wait_s: Annotated[
        float,
        typer.Option(min=1, help="Maximum time in seconds that a request waits for a server."),
    ] = 300.0,
    answer_s: Annotated[
        float, typer.Option(min=1, help="Maximum time in seconds without a byte from a server.")
    ] = 3600.0,
    key_file: Annotated[
        Path | None,
        typer.Option(help=f"File with the key that clients must send (or set {KEY_VARIABLE})."),
    ] = None,
) -> None:
    """Route requests to a fleet of vLLM servers with the scheduler of rstar2.

    \b
    rstar2 route http://gpu1:8000 http://gpu2:8000
    curl -s localhost:8090/v1/completions -H 'x-session-id: problem-7/rollout-3' \\
      -H 'content-type: application/json' -d '{"model": "m", "prompt": "1 + 1 ="}'

    Takes OpenAI's /v1/completions and /v1/chat/completions (streams too) and vLLM's
    /inference/v1/generate (token ids). Requests of one session are the turns of one rollout: they
    go to the server that has their prefix. A server that died gets no requests until it answers
    again. Ctrl-C stops the router.
    """
    extras.need("scipy", "starlette", feature="rstar2 route")
    config, key = _scheduler_config(policy), _key(key_file)
    with waiting("loading the router"):
        from rstar2.descriptors import raise_descriptor_limit
        from rstar2.http_server import LocalCallers, bind
        from rstar2.router.app import RouterApp, serve
        from rstar2.router.router import Router, RouterLimits

    backends = _backends(urls, max_sequences, exposed=host not in LOOPBACK and key is None)
    raise_descriptor_limit()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("rstar2.router").setLevel(logging.INFO)
    router = Router(backends, config, RouterLimits(wait_s, answer_s, session_idle_s))
    app: AsgiApp = RouterApp(router, session_header=session_header, key=key)
    if key is None and host in LOOPBACK:
        app = LocalCallers(app)
    with bind(host, port) as sock:
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{sock.getsockname()[1]}"

        def ready() -> None:
            typer.echo(url)
            typer.echo(
                f"routing to {len(router.serving)} of {len(backends)} servers with the policy "
                f"{policy} at {url}   (Ctrl-C stops)",
                err=True,
            )

        asyncio.run(serve(router, app, sock, ready))


def _backends(urls: list[str], max_sequences: int, *, exposed: bool) -> list[Backend]:
    """The servers of the URLs; `exposed`: other machines can use the router without a key."""
    from rstar2.router.backend import Backend

    backends = [Backend(url, max_sequences) for url in urls]
    names = [backend.name for backend in backends]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"URL: {name} is given twice; name every server once")
    if exposed and any(backend.address.authorization for backend in backends):
        raise UserError(
            "--host: other machines could use the keys of the URLs through the router: set a key "
            f"for the router ({KEY_VARIABLE} or --key-file), or remove theirs"
        )
    return backends


def _scheduler_config(policy: str) -> SchedulerConfig:
    from typing import get_args

    known = get_args(SchedulerConfig.model_fields["policy"].annotation)
    if policy not in known:
        raise UserError(f"--policy {policy!r}: choose from {', '.join(known)}")
    return SchedulerConfig.model_validate({"policy": policy})


def _key(file: Path | None) -> str | None:
    """The key that clients must send; None if any client may use the router."""
    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--key-file {file}: it cannot be read: {error}") from error
    if not key:
        raise UserError(f"--key-file {file}: the file is empty")
    return key
