"""slime: the sandbox in slime's ReTool example.

Use this file instead of slime's `examples/retool/tool_sandbox.py`. `generate_with_retool.py`
imports the three public names and calls `tool_registry.execute_tool`. Set RSTAR2_CODEENV_URL to
servers that all rollout workers share; without it each worker starts a sandbox of its own.

An outage raises CodeEnvError, which ends the rollout; it is never an observation for the model.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from rstar2 import AsyncSandbox
from rstar2.tool_text import tool_text

TOOL_CONFIGS = {"max_turns": 16, "max_tool_calls": 16, "tool_concurrency": 256}
SEMAPHORE = asyncio.Semaphore(TOOL_CONFIGS["tool_concurrency"])


class ToolRegistry:
    """The interface of slime's class of this name."""

    def __init__(self) -> None:
        self.box = AsyncSandbox(os.environ.get("RSTAR2_CODEENV_URL"), wall_s=30, memory_mb=1024)

    def get_tool_specs(self) -> list[dict[str, Any]]:
        code = {"type": "string", "description": "The Python code to execute"}
        function = {
            "name": "code_interpreter",
            "description": "A tool for executing Python code in a safe sandbox environment.",
            "parameters": {"type": "object", "properties": {"code": code}, "required": ["code"]},
        }
        return [{"type": "function", "function": function}]

    async def execute_tool(self, tool_name: str, arguments: dict[str, Any]) -> str:
        if tool_name != "code_interpreter":
            return f"Error: Tool '{tool_name}' not found"
        return tool_text(await self.box.run(str(arguments.get("code", ""))))


tool_registry = ToolRegistry()
