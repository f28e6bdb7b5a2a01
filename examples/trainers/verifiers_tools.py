"""verifiers (and prime-rl): a taskset whose tasks may call `python` and `python_session`.

verifiers reaches tools through MCP, so the code environment needs no adapter:

    rstar2 codeenv mcp --http                                    # http://127.0.0.1:8089/mcp
    RSTAR2_MCP_URL=http://127.0.0.1:8089/mcp eval verifiers_tools

Written for verifiers 0.4, whose older `ToolEnv` no longer exists.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["PowersTaskset"]


class PythonTools(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    """The tools of a running MCP server, under their own names."""

    TOOL_PREFIX = None


class PowersData(vf.TaskData):
    answer: str


class PowersTask(vf.Task[PowersData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(f"\\boxed{{{self.data.answer}}}" in trace.last_reply)


class PowersTaskset(vf.Taskset[PowersTask, vf.TasksetConfig]):
    """The last three digits of large powers: hard by hand, one line of Python."""

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        url = os.environ.get("RSTAR2_MCP_URL", "http://127.0.0.1:8089/mcp")
        return [PythonTools(vf.SharedToolsetConfig(url=url))]

    def load(self) -> Iterator[PowersTask]:
        for base in range(3, 40):
            question = f"What are the last three digits of {base}^{base}? Answer in \\boxed{{}}."
            data = PowersData(prompt=question, answer=f"{base**base % 1000}")
            yield PowersTask(data, self.config.task)
