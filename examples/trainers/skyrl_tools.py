"""SkyRL: the sandbox as a tool group of SkyRL-Gym, in place of its PythonCodeExecutorToolGroup.

SkyRL-Gym's own group runs the model's code with the trainer's rights. Register an environment that
uses this one:

    skyrl_gym.register(id="sandbox-math", entry_point="skyrl_tools:SandboxMathEnv")
"""

from __future__ import annotations

import os
import re
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.tools.core import ToolGroup, tool

from rstar2 import Sandbox
from rstar2.tool_text import tool_text

box = Sandbox(os.environ.get("RSTAR2_CODEENV_URL"), wall_s=10)


class SandboxToolGroup(ToolGroup):
    """The tool `python`; an outage raises CodeEnvError."""

    def __init__(self) -> None:
        super().__init__(name="SandboxToolGroup")

    @tool
    def python(self, code: str) -> str:
        return tool_text(box.run(code))


class SandboxMathEnv(BaseTextEnv):
    """The model writes <python>...</python> to compute and \\boxed{...} to answer."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.answer = (extras or {})["reward_spec"]["ground_truth"]
        self.max_turns = (extras or {}).get("max_turns", 4)
        self.init_tool_groups([SandboxToolGroup()])

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        call = re.search(r"<python>(.*?)</python>", action, re.DOTALL)
        if call is None or self.turns >= self.max_turns:
            reward = float(f"\\boxed{{{self.answer}}}" in action)
            return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})
        output = self._execute_tool("SandboxToolGroup", "python", [call.group(1)])
        message = {"role": "user", "content": f"<output>\n{output}\n</output>"}
        return BaseTextEnvStepOutput(observations=[message], reward=0.0, done=False, metadata={})
