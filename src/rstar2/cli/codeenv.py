"""`rstar2 codeenv`: serve the code environment, run one program in it, measure it."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from rstar2 import extras
from rstar2.cli.limit_options import limit_options
from rstar2.cli.waiting import waiting
from rstar2.codeenv import deadlines
from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.codeenv.protocol import RunRequest
from rstar2.config import CodeEnvConfig
from rstar2.config.codeenv import TOKEN_VARIABLE, URL_VARIABLE, WarmUp
from rstar2.errors import UserError
from rstar2.types import Limits, ToolResult, encode

PORT = 8088
MCP_PORT = 8089
CONFIG = CodeEnvConfig()

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Run untrusted Python in a jail: as a server, or one program from the command line.",
)

Isolation = Annotated[
    str,
    typer.Option(
        help="Isolation level: auto takes the best one that this machine supports; strict "
        "(namespaces) or portable fail to start if unavailable. See `rstar2 doctor`.",
    ),
]
Url = Annotated[
    str,
    typer.Option(
        envvar=URL_VARIABLE,
        help="Use the server at this URL instead of starting one for this command.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Packages = Annotated[
    str,
    typer.Option(
        help="Installed packages, separated by commas, that programs find imported; an entry with "
        "a slash is a directory of wheels, as in ./wheels."
    ),
]
WarmUpPrograms = Annotated[
    list[Path] | None,
    typer.Option(help="Program that interpreters run once before they serve."),
]
Python = Annotated[
    str,
    typer.Option(help="Interpreter that runs programs; install NumPy, SymPy and SciPy there."),
]
Slots = Annotated[
    int, typer.Option(help="Number of calls executed in parallel; 0 means cores + 1.", min=0)
]
Sessions = Annotated[int, typer.Option(help="Maximum number of open sessions.", min=0)]
SessionTtlS = Annotated[
    float, typer.Option(help="Seconds after which an unused session is closed.")
]
SessionMemoryMb = Annotated[int, typer.Option(help="Memory limit in MB of a session.", min=64)]
SessionScratchMb = Annotated[
    int,
    typer.Option(
        help="Scratch space in MB of a session with its branches (portable: of each of them).",
        min=1,
    ),
]
ReuseMb = Annotated[
    int,
    typer.Option(
        help="Memory in MB for results that may be reused by calls that name a group; 0 reuses "
        "none.",
        min=0,
    ),
]
Queue = Annotated[
    int, typer.Option(help="Maximum number of waiting calls; further ones get status 429.", min=1)
]
Connections = Annotated[
    int, typer.Option(help="Maximum number of connections that are kept open.", min=8)
]
TokenFile = Annotated[
    Path | None, typer.Option(help=f"File that contains the token (or set {TOKEN_VARIABLE}).")
]


@app.command()
@functools.partial(limit_options, parameter="caps", prefix="max")
@limit_options
def serve(
    host: Annotated[
        str, typer.Option(help="Address to listen on; a token is required beyond loopback.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 chooses a free one.", min=0, max=65535)
    ] = PORT,
    isolation: Isolation = "auto",
    slots: Slots = 0,
    queue: Queue = CONFIG.queue,
    connections: Connections = CONFIG.connections,
    token_file: TokenFile = None,
    sessions: Sessions = CONFIG.sessions,
    session_ttl_s: SessionTtlS = CONFIG.session_ttl_s,
    session_memory_mb: SessionMemoryMb = CONFIG.session_memory_mb,
    session_scratch_mb: SessionScratchMb = CONFIG.session_scratch_mb,
    reuse_mb: ReuseMb = CONFIG.reuse_mb,
    limits: Limits = Limits(),
    caps: Limits = Limits(),
    packages: Packages = "",
    warmup: WarmUpPrograms = None,
    python: Python = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON on stdout when ready.")
    ] = False,
) -> None:
    """Serve the code environment over HTTP until Ctrl-C or SIGTERM.

    \b
    rstar2 codeenv serve                      on http://127.0.0.1:8088
    curl -s localhost:8088/v1/run -d '{"id": "1", "code": "print(1+1)"}'
    curl -s localhost:8088/health

    Also implements code-judge's /run/batch, /run/long-batch and SandboxFusion's /run_code.
    Limits such as --wall-s apply to calls that request none; --max-wall-s and the like are the
    highest values that a call may request. After the first signal, running calls have 10 s to
    finish; a second signal ends them at once.
    """
    from rstar2.codeenv.server.serve import serve as run_server
    from rstar2.codeenv.wire import ServerReady

    default, cap = _served_limits(limits, caps)
    config = _config(
        host=host, port=port, isolation=isolation, slots=slots, queue=queue,
        connections=connections, token=_token(token_file), sessions=sessions,
        session_ttl_s=session_ttl_s, session_memory_mb=session_memory_mb,
        session_scratch_mb=session_scratch_mb, reuse_mb=reuse_mb, default=default, cap=cap,
        python=python,
        packages=tuple(name.strip() for name in packages.split(",") if name.strip()),
        warm_up_programs=tuple(str(path) for path in warmup or ()),
    )  # fmt: skip

    def say(ready: ServerReady) -> None:
        if as_json:
            typer.echo(encode(ready).decode())
        typer.echo(
            f"code environment at {ready.url}: {ready.isolation} isolation, {ready.slots} slots"
            f"{', token required' if config.token else ''}; Ctrl-C stops it",
            err=True,
        )

    asyncio.run(run_server(config, on_ready=say))


@app.command()
@limit_options
def run(
    file: Annotated[str, typer.Argument(help="Program to run, or - for stdin.")],
    stdin: Annotated[
        Path | None, typer.Option(help="File that the program reads as stdin.")
    ] = None,
    as_json: AsJson = False,
    isolation: Isolation = "auto",
    url: Url = "",
    limits: Limits = Limits(),
) -> None:
    """Run one program in the jail and show its result.

    \b
    rstar2 codeenv run solution.py --stdin input.txt --wall-s 2
    echo 'import sympy; sympy.factorint(2**64 - 1)' | rstar2 codeenv run -

    Its output goes to stdout, its errors and the summary to stderr; the value of a last expression
    is shown when nothing was printed. The exit code is 0 if the program succeeded, else 1.
    """
    limits = _with_cpu(limits)
    call = RunRequest(
        f"cli-{secrets.token_hex(8)}",
        sys.stdin.read() if file == "-" else _read(Path(file), "FILE"),
        "" if stdin is None else _read(stdin, "--stdin"),
        limits,
        deadline_s=deadlines.COMMAND_QUEUE_S + (limits.wall_s or 60.0),
    )
    result = asyncio.run(_run_one(call, _client_config(url, isolation, slots=1, warm_up="never")))
    if as_json:
        typer.echo(encode(result).decode())
    else:
        _show(result)
    raise typer.Exit(0 if result.outcome.succeeded else 1)


async def _run_one(call: RunRequest, config: CodeEnvConfig) -> ToolResult:
    async with _client(config) as client:
        return await client.run(call)


@app.command()
@limit_options
def mcp(
    http: Annotated[
        bool, typer.Option("--http", help="Serve over HTTP instead of stdin and stdout.")
    ] = False,
    host: Annotated[
        str, typer.Option(help="Address for --http; a token is required beyond loopback.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port for --http; 0 chooses a free one.", min=0, max=65535)
    ] = MCP_PORT,
    token_file: Annotated[
        Path | None, typer.Option(help=f"File that contains the token (or set {TOKEN_VARIABLE}).")
    ] = None,
    url: Url = "",
    isolation: Isolation = "auto",
    slots: Slots = 0,
    sessions: Sessions = CONFIG.sessions,
    session_ttl_s: SessionTtlS = CONFIG.session_ttl_s,
    session_memory_mb: SessionMemoryMb = CONFIG.session_memory_mb,
    limits: Limits = Limits(),
) -> None:
    """Serve the code environment to MCP clients, as the tools `python` and `python_session`.

    \b
    rstar2 codeenv mcp                        over stdin and stdout, for desktop clients
    rstar2 codeenv mcp --http                 at http://127.0.0.1:8089/mcp

    The command starts a code environment of its own, or uses the one at --url. `python` runs each
    program afresh; `python_session` keeps variables for one conversation.
    """
    extras.need("mcp", feature="rstar2 codeenv mcp")
    from rstar2 import mcp as serving
    from rstar2.codeenv.server.serve import check_exposure

    limits = _with_cpu(limits)
    token = _token(token_file)
    listen = _config(host=host, port=port, token=token)
    config = _config(
        urls=(url,) if url else (), token=os.environ.get(TOKEN_VARIABLE), isolation=isolation,
        slots=slots, sessions=sessions, session_ttl_s=session_ttl_s,
        session_memory_mb=session_memory_mb, cap=_raised(CONFIG.cap, limits),
    )  # fmt: skip

    if http:
        check_exposure(listen)  # before seconds pass

    async def main() -> None:
        async with _client(config) as client:
            # A limit that the server refuses is this command's mistake, not that of a model.
            await client.run(RunRequest(f"cli-{secrets.token_hex(8)}", "", limits=limits))
            if not http:
                tools = serving.PythonTools(client, limits, session_ttl_s, serving.STDIO)
                return await serving.serve_stdio(tools)
            tools = serving.PythonTools(client, limits, session_ttl_s)
            return await serving.serve_http(tools, listen, session_ttl_s, say)

    def say(address: str) -> None:
        shown = ", token required" if token else ""
        typer.echo(f"MCP at {address}{shown}; Ctrl-C stops it", err=True)

    asyncio.run(main())


@app.command()
def bench(
    seconds: Annotated[float, typer.Option(help="Seconds to measure each program.", min=0.1)] = 3.0,
    concurrency: Annotated[int, typer.Option(help="Number of calls in flight.", min=1)] = 64,
    slots: Annotated[
        int, typer.Option(help="Slots of the local server; 0 means cores + 1.", min=0)
    ] = 0,
    isolation: Isolation = "auto",
    url: Url = "",
    as_json: AsJson = False,
) -> None:
    """Measure calls per second and latency of small programs.

    The calls go through HTTP. benchmarks/codeenv.py compares the figures with other ways to run
    Python.
    """
    from rich.console import Console
    from rich.table import Table

    from rstar2.codeenv.client.bench import PROGRAMS, measure

    async def main() -> list[dict[str, Any]]:
        config = _client_config(url, isolation, slots=slots)
        rows = []
        async with _client(config) as client:
            with _progress(len(PROGRAMS)) as advance:
                for name, code in PROGRAMS.items():
                    figures = await measure(client, code, seconds, concurrency)
                    rows.append({"program": name, **figures})
                    advance(name)
            for row in rows:
                row["isolation"] = client.isolation
        return rows

    rows = asyncio.run(main())
    if as_json:
        typer.echo(encode({"name": "codeenv bench", "rows": rows}).decode())
        return
    table = Table("program", "calls/s", "p50 ms", "p99 ms", "failed", box=None)
    for row in rows:
        table.add_row(
            row["program"], f"{row['calls_per_s']:.0f}", f"{row['p50_ms']:.1f}",
            f"{row['p99_ms']:.1f}", str(row["infrastructure"]),
        )  # fmt: skip
    Console().print(table)
    typer.echo(f"{concurrency} calls in flight, {rows[0]['isolation']} isolation", err=True)


# --------------------------------------------------------------------------- helpers


def _config(**settings: Any) -> CodeEnvConfig:
    """A checked configuration; a validation error of pydantic becomes one line."""
    from pydantic import ValidationError

    try:
        return CodeEnvConfig(**settings)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{field}: {first['input']!r}: {first['msg']}") from error


def _client_config(
    url: str, isolation: str, slots: int, warm_up: WarmUp = "before"
) -> CodeEnvConfig:
    return _config(
        urls=(url,) if url else (),
        isolation=isolation,
        slots=slots,
        warm_up=warm_up,
        token=os.environ.get(TOKEN_VARIABLE),
    )


def _served_limits(given: Limits, highest: Limits) -> tuple[Limits, Limits]:
    """Default limits and caps of a server, from its options; a default never exceeds its cap."""
    given, highest = _with_cpu(given), _with_cpu(highest)
    default, cap = {}, {}
    for field in dataclasses.fields(Limits):
        name, option = field.name, "--" + field.name.replace("_", "-")
        asked, most = getattr(given, name), getattr(highest, name)
        for text, value in ((option, asked), (f"--max-{option[2:]}", most)):
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"{text}: {value} must be above 0")
        cap[name] = getattr(CONFIG.cap, name) if most is None else most
        default[name] = min(getattr(CONFIG.default, name), cap[name]) if asked is None else asked
        if default[name] > cap[name]:
            raise UserError(
                f"{option}: {asked} is above the highest value that a call may request "
                f"({cap[name]}): lower it, or raise --max-{option[2:]}"
            )
    return Limits(**default), Limits(**cap)


def _raised(cap: Limits, limits: Limits) -> Limits:
    """Caps that allow the given limits."""
    return Limits(
        **{
            field.name: max(getattr(cap, field.name), getattr(limits, field.name) or 0)
            for field in dataclasses.fields(Limits)
        }
    )


def _with_cpu(limits: Limits) -> Limits:
    """A wall-time limit is also the CPU-time limit, unless that is given."""
    return limits if limits.cpu_s is not None else dataclasses.replace(limits, cpu_s=limits.wall_s)


def _token(path: Path | None) -> str | None:
    if path is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    token = _read(path, "--token-file").strip()
    if not token:
        raise UserError(f"--token-file: {path} is empty; put a long random string into it")
    return token


def _read(path: Path, field: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{field}: cannot read {path}: {error}") from error


@asynccontextmanager
async def _client(config: CodeEnvConfig) -> AsyncIterator[CodeEnvClient]:
    what = "connecting to" if config.urls else "starting"
    with waiting(f"{what} a code environment"):
        client = await CodeEnvClient.start(config)
    async with client:
        yield client


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr: `with _progress(n) as advance: advance(label)`."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("measuring", total=total)
        yield lambda label: shown.update(task, advance=1, description=label)


def _show(result: ToolResult) -> None:
    """Print the program's streams, then one line about the call."""
    if result.stdout:
        typer.echo(_printable(result.stdout, sys.stdout), nl=not result.stdout.endswith("\n"))
    if result.value is not None:
        typer.echo(_printable(result.value, sys.stdout))
    for text in (result.stderr, result.traceback):
        if text:
            typer.echo(_printable(text, sys.stderr), err=True, nl=not text.endswith("\n"))
    colour = "green" if result.outcome.succeeded else "red"
    facts = [f"{result.wall_s:.3f} s", f"{result.cpu_s:.3f} s CPU", f"{result.peak_mb:.0f} MB"]
    if result.truncated:
        facts.append("output truncated")
    facts.append(f"{result.isolation or 'no'} isolation")
    typer.echo(f"{_styled(str(result.outcome), fg=colour)} · " + " · ".join(facts), err=True)
    if result.message and not result.outcome.succeeded:
        typer.echo(_styled(result.message, dim=True), err=True)


def _styled(text: str, **style: Any) -> str:
    """Text in a style, unless NO_COLOR is set; a stream that is no terminal drops styles."""
    return text if os.environ.get("NO_COLOR") else typer.style(text, **style)


def _printable(text: str, stream: Any) -> str:
    """On a terminal, show control characters of an untrusted program instead of sending them."""
    if not stream.isatty():
        return text
    return "".join(
        c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text
    )
