"""The Dockerfile of the sandbox: what it copies and runs exists, and the server runs as it would
there: as an ordinary user, without namespaces."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from rstar2 import Outcome, Sandbox, cli
from tests.container import USER

ROOT = Path(__file__).resolve().parents[1]
PORT = "8088"


def instructions() -> list[tuple[str, str]]:
    """Keyword and arguments of each instruction, continued lines joined."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (keyword.upper(), rest.strip())
        for keyword, _, rest in (line.partition(" ") for line in joined.splitlines() if line)
    ]


def arguments(keyword: str) -> list[str]:
    return [rest for name, rest in instructions() if name == keyword]


def entrypoint() -> list[str]:
    (command,) = arguments("ENTRYPOINT")
    words: list[str] = json.loads(command)
    return words


def test_every_source_of_a_copy_exists_and_is_not_ignored() -> None:
    kept = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    }
    sources = set()
    for rest in arguments("COPY"):
        if not rest.startswith("--from="):
            sources |= set(rest.split()[:-1])
    assert sources == kept
    assert [source for source in sources if not (ROOT / source).exists()] == []


def test_every_known_instruction_is_spelt_right() -> None:
    known = {
        *("FROM", "WORKDIR", "COPY", "RUN", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"),
    }
    assert {keyword for keyword, _ in instructions()} == known


def test_the_command_parses_and_uses_the_exposed_port() -> None:
    program, group, command, *options = entrypoint()
    assert (program, group, command) == ("rstar2", "codeenv", "serve")
    root = typer.Context(typer.main.get_command(cli.app))
    serve = cli.load(group).get_command(root, command)
    parsed = serve.make_context(command, [*options]).params
    assert (parsed["host"], str(parsed["port"]), parsed["isolation"]) == (
        *("0.0.0.0", PORT),
        "portable",
    )
    assert arguments("EXPOSE") == [PORT]
    assert f":{PORT}/health" in arguments("HEALTHCHECK")[0]


def test_the_server_is_not_root() -> None:
    (user,) = arguments("USER")
    assert user not in ("root", "0")
    order = [keyword for keyword, _ in instructions()]
    assert order.index("USER") < order.index("ENTRYPOINT")


def test_the_base_image_has_a_supported_python() -> None:
    versions = {re.fullmatch(r"python:(\d+\.\d+)-slim( AS build)?", t) for t in arguments("FROM")}
    assert None not in versions
    assert {match[1] for match in versions if match} <= {"3.11", "3.12", "3.13"}


# --------------------------------------------------------------------------- as it runs there


@pytest.fixture(scope="module")
def container() -> Iterator[tuple[str, str]]:
    """URL and token of a server that was started as in the container."""
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch).chmod(0o777)
        yield from serve_as_in_a_container(Path(scratch))


def serve_as_in_a_container(scratch: Path) -> Iterator[tuple[str, str]]:
    token = secrets.token_hex(8)
    command = [sys.executable, "-m", *entrypoint(), "--port", "0", "--slots", "1", "--json"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "container.py"), *command],
        stdout=subprocess.PIPE,
        cwd="/",
        env={"PATH": os.defpath, "TMPDIR": str(scratch), "RSTAR2_CODEENV_TOKEN": token},
        text=True,
    )
    assert process.stdout is not None
    ready = process.stdout.readline()
    if not ready:
        process.communicate(timeout=60)
        pytest.fail("the server ended before it was ready; its message is on stderr")
    url = json.loads(ready)["url"].replace("0.0.0.0", "127.0.0.1")
    yield url, token
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert list(scratch.iterdir()) == []


@pytest.mark.slow
def test_programs_run_as_in_a_container(container: tuple[str, str]) -> None:
    url, token = container
    with Sandbox(url, token=token) as box:
        assert box.isolation == "portable"
        result = box.run(
            "import os, sympy\nprint(os.getuid(), sympy.factorint(91))\n"
            "open('out', 'w').write(open('in').read())",
            files={"in": b"kept"},
        )
        assert result.files == {"out": b"kept"}
        user = USER if os.geteuid() == 0 else os.geteuid()
        assert result.stdout == f"{user} {{7: 1, 13: 1}}\n"
        spawned = box.run("import subprocess; subprocess.run(['true'])")
        assert spawned.outcome is Outcome.EXCEPTION
        assert box.run("open('/etc/hostname').read()").outcome is Outcome.EXCEPTION
        with box.session() as session:
            session.run("x = 1")
            assert session.run("print(x)").stdout == "1\n"


@pytest.mark.slow
def test_the_health_check_of_the_image_passes(container: tuple[str, str]) -> None:
    url, _ = container
    (check,) = arguments("HEALTHCHECK")
    _, program, code = json.loads(check[check.index("[") :])
    assert program == "-c"
    code = code.replace(f"http://127.0.0.1:{PORT}", url)
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
