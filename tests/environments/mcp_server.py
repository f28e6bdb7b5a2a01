"""A real MCP server for tests; run as `python mcp_server.py`, it speaks on stdin and stdout."""

from __future__ import annotations

import operator
import os
import time

from mcp import MCPError
from mcp.server.mcpserver import MCPServer

server = MCPServer("test")
POPULATION = {"Oslo": 709_037, "Bergen": 291_940}


@server.tool()
def population(city: str) -> int:
    """How many people live in a city of Norway."""
    return POPULATION[city]


@server.tool()
def calculate(expression: str) -> str:
    """The value of two numbers with an operator between them, as in 7*6."""
    operators = {"+": operator.add, "-": operator.sub, "*": operator.mul, "%": operator.mod}
    sign = next(sign for sign in operators if sign in expression)
    a, b = expression.split(sign)
    return str(operators[sign](int(a), int(b)))


@server.tool()
def process() -> int:
    """The process id of this server."""
    return os.getpid()


@server.tool()
def slow() -> str:
    """Takes very long."""
    time.sleep(60)
    return "late"


@server.tool()
def huge() -> str:
    """Two megabytes."""
    return "x" * 2_000_000


@server.tool()
def nothing() -> None:
    """Returns nothing."""


@server.tool()
def over_quota() -> None:
    """Answers with a JSON-RPC error of its own."""
    raise MCPError(-31999, "the quota is used up")


@server.tool()
def leave() -> None:
    """Ends the server."""
    os._exit(3)


if __name__ == "__main__":
    server.run("stdio")
