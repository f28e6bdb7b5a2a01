"""An MCP server with one tool, for `mcp_friends.yaml`; any other MCP server works the same way."""

from __future__ import annotations

import hashlib

from mcp.server.mcpserver import MCPServer

server = MCPServer("friends")


@server.tool()
def friends(a: int, b: int) -> str:
    """Whether two people, by their numbers, are friends: yes or no."""
    return answer(a, b)


def answer(a: int, b: int) -> str:
    """Nobody can guess it: only the server knows."""
    digest = hashlib.sha256(f"{min(a, b)} {max(a, b)}".encode()).digest()
    return "yes" if digest[0] % 2 else "no"


if __name__ == "__main__":
    server.run("stdio")
