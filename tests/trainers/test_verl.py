"""The tool for verl, loaded and called as verl's agent loop does, with the package from PyPI.

verl needs Ray and refuses our version of transformers, so `make test-cluster` installs it without
its requirements and runs this file.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.commands import codeenv_command

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="verl needs Ray: make test-cluster"),
]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "trainers"


@pytest.mark.filterwarnings("default")  # of verl and its dependencies, about themselves
async def test_the_agent_loop_of_verl_can_call_the_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from verl.tools.tool_registry import initialize_tools_from_config

    with codeenv_command("serve", "--port", "0", "--slots", "1") as url:
        config = tmp_path / "tools.yaml"
        config.write_text(
            'tools:\n  - class_name: "verl_tool.SandboxTool"\n'
            f'    config: {{type: native, url: "{url}", wall_s: 20}}\n'
        )
        (tool,) = initialize_tools_from_config(str(config))
        assert tool.name == "python"
        async with tool.box:
            for code, text, failed in (
                ("print(6*7)", "42", 0.0),
                ("1/0", "ZeroDivisionError", 1.0),
            ):
                instance, _ = await tool.create()
                response, reward, metrics = await tool.execute(instance, {"code": code})
                await tool.release(instance)
                assert text in response.text
                assert (reward, metrics) == (0.0, {"tool_failed": failed})
