"""A verifiers harness that runs in this process: chat completions with the task's MCP tools."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatHarness"]


class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]  # is untyped
    """The bundled harnesses do the same in a program, which they install with uv."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> vf.ProgramResult:
        _, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "user", "content": prompt}]
        servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
        async with (
            AsyncExitStack() as stack,
            AsyncOpenAI(base_url=endpoint, api_key=secret) as client,
        ):
            tools: list[Any]
            tools, dispatch, connections = await connect_mcp(servers, stack)
            while True:
                answer = await client.chat.completions.create(
                    model=ctx.model, messages=messages, tools=tools
                )
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message.tool_calls:
                    assert call.type == "function"
                    arguments = json.loads(call.function.arguments)
                    text = await call_mcp(connections, dispatch, call.function.name, arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
