"""verl: the sandbox as a native tool of multi-turn rollouts.

In verl's tool configuration (`actor_rollout_ref.rollout.multi_turn.tool_config_path`):

    tools:
      - class_name: verl_tool.SandboxTool
        config: {type: native, url: "http://sandbox:8088", wall_s: 10}

Without `url` each rollout worker starts a sandbox of its own. verl shows exceptions of a tool to
the model; to stop on an outage instead, watch `rstar2_codeenv_calls_total` (docs/trainers.md).
"""

from __future__ import annotations

from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from rstar2 import AsyncSandbox
from rstar2.tool_text import tool_text

SCHEMA = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Execute a Python program and return what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program to execute."}},
            "required": ["code"],
        },
    },
}


class SandboxTool(BaseTool):
    """Runs every call afresh; calls of all rollouts of a worker share one client."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        schema = tool_schema or OpenAIFunctionToolSchema.model_validate(SCHEMA)
        super().__init__(config, schema)
        self.box = AsyncSandbox(
            config.get("url"), token=config.get("token"), wall_s=config.get("wall_s", 10.0)
        )

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **_: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        result = await self.box.run(str(parameters.get("code", "")))
        failed = float(result.outcome.failed)
        return ToolResponse(text=tool_text(result)), 0.0, {"tool_failed": failed}
