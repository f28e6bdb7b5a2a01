"""The examples for trainers, each with the real package from PyPI and the real sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.chat_server import chat_server
from tests.commands import codeenv_command

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "trainers"


@pytest.fixture
def url(served_url: str) -> str:
    return served_url


@contextlib.contextmanager
def example(name: str, url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """An example as a module, with its sandbox at `url`."""
    monkeypatch.setenv("RSTAR2_CODEENV_URL", url)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module(name)
    try:
        yield module
    finally:
        del sys.modules[name]


def test_every_example_is_short_and_tested() -> None:
    source = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 60, path
        assert f'"{path.stem}' in source, f"{path} has no test"


# --------------------------------------------------------------------------- TRL


def taught(module: ModuleType) -> tuple[Any, Any]:
    """The tiny model, overfitted to one conversation that calls the tool, and its tokenizer."""
    import torch
    from trl.chat_template_utils import qwen3_template

    from rstar2.learner.tiny import make_model, make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.response_template = qwen3_template  # our chat template has Qwen3's tool calls
    model = make_model(0, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    function = {"name": "python", "arguments": {"code": "print(6*7)"}}
    conversation: list[dict[str, Any]] = [
        {"role": "user", "content": "What is 6*7?"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": "python", "content": "42"},
        {"role": "assistant", "content": "It is 42."},
    ]
    render: Any = tokenizer.apply_chat_template
    ids = render(conversation, tools=[module.python], return_dict=False)
    prompt = render(
        conversation[:1], tools=[module.python], return_dict=False, add_generation_prompt=True
    )
    inputs = torch.tensor([ids])
    labels = inputs.clone()
    labels[:, : len(prompt)] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(200):
        loss = model(input_ids=inputs, labels=labels).loss
        if loss.item() < 0.05:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, tokenizer


@pytest.mark.filterwarnings("default")  # of TRL and accelerate, about themselves
def test_a_grpo_step_of_trl_calls_the_sandbox(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with example("trl_grpo", url, monkeypatch) as module, module.box:
        model, tokenizer = taught(module)
        trainer = module.train(
            model, tokenizer, output_dir=str(tmp_path), max_steps=1, use_cpu=True, bf16=False,
            per_device_train_batch_size=2, num_generations=2, max_completion_length=128,
            temperature=0.05, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        (step, _) = trainer.state.log_history
        assert step["tools/call_frequency"] == 1.0
        assert step["tools/failure_frequency"] == 0.0
        assert step["rewards/correct/mean"] == 1.0
        assert "ZeroDivisionError" in module.python("1/0")


def test_an_outage_stops_trl(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from rstar2 import CodeEnvError

    class DownSandbox:
        def run(self, code: str) -> None:
            raise CodeEnvError("no server is up")

    with example("trl_grpo", url, monkeypatch) as module:
        monkeypatch.setattr(module, "box", DownSandbox())
        with pytest.raises(SystemExit, match="no server is up"):
            module.python("1")


# --------------------------------------------------------------------------- verifiers


def completion(message: dict[str, Any]) -> Response:
    finish = "tool_calls" if "tool_calls" in message else "stop"
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return JSONResponse(
        {"id": "c", "object": "chat.completion", "created": 0, "model": "scripted",
         "choices": [choice], "usage": usage}
    )  # fmt: skip


async def solve(request: Request) -> Response:
    """A model that computes the power with the tool and then answers with its output."""
    body = await request.json()
    last = body["messages"][-1]
    if last["role"] == "user":
        base = last["content"].split("digits of ")[1].split("^")[0]
        names = {tool["function"]["name"] for tool in body["tools"]}
        assert names == {"python", "python_session"}
        arguments = json.dumps({"code": f"print({base}**{base} % 1000)"})
        function = {"name": "python", "arguments": arguments}
        call = {"id": "1", "type": "function", "function": function}
        return completion({"content": None, "tool_calls": [call]})
    content = last["content"]
    text = content if isinstance(content, str) else content[0]["text"]
    return completion({"content": f"It is \\boxed{{{text}}}."})


async def models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [{"id": "scripted", "object": "model"}]})


@pytest.mark.filterwarnings("default")  # of verifiers and its clients, about themselves
async def test_episodes_of_verifiers_call_the_sandbox(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vf = importlib.import_module("verifiers.v1")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with (
        codeenv_command("mcp", "--http", "--port", "0", "--url", url) as mcp_url,
        example("verifiers_tools", url, monkeypatch),
    ):
        monkeypatch.setenv("RSTAR2_MCP_URL", mcp_url)
        agent = {"runtime": {"type": "subprocess"}, "harness": {"id": "chat_harness"}}
        env = vf.load_environment(
            vf.resolve_env_config({"taskset": {"id": "verifiers_tools"}, "agent": agent})
        )
        async with chat_server(models, solve) as endpoint, env.serving():
            client = vf.EvalClientConfig(base_url=endpoint + "/v1", api_key_var="NO_KEY")
            context = vf.ModelContext(model="scripted", client=client)
            tasks = list(env.taskset.take(3))
            episodes = await asyncio.gather(*(env.run_episode(task, context) for task in tasks))
        for episode in episodes:
            assert episode.ok, episode.errors
            assert [trace.reward for trace in episode.traces] == [1.0]


# --------------------------------------------------------------------------- SkyRL, slime


def test_an_environment_of_skyrl_gym_calls_the_sandbox(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    skyrl_gym = importlib.import_module("skyrl_gym")
    with example("skyrl_tools", url, monkeypatch) as module, module.box:
        skyrl_gym.register(id="sandbox-math", entry_point="skyrl_tools:SandboxMathEnv")
        extras = {"reward_spec": {"ground_truth": "42"}}
        env = skyrl_gym.make("sandbox-math", env_config={}, extras=extras)
        prompt, _ = env.init([{"role": "user", "content": "What is 6*7?"}])
        assert prompt[0]["role"] == "user"
        step = env.step("I compute: <python>print(6*7)</python>")
        assert (step["done"], step["observations"][0]["content"]) == (
            False, "<output>\n42\n</output>",
        )  # fmt: skip
        wrong = env.step("<python>1/0</python>")
        assert "ZeroDivisionError" in wrong["observations"][0]["content"]
        end = env.step("It is \\boxed{42}.")
        assert (end["done"], end["reward"]) == (True, 1.0)


async def test_the_registry_of_slimes_retool_example(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slime is on no index: these are the calls of its generate_with_retool.py."""
    with example("slime_tool_sandbox", url, monkeypatch) as module:
        registry = module.tool_registry
        names = [spec["function"]["name"] for spec in registry.get_tool_specs()]
        assert names == ["code_interpreter"]
        assert module.TOOL_CONFIGS["max_turns"] > 0
        async with registry.box, module.SEMAPHORE:
            answer = await registry.execute_tool("code_interpreter", {"code": "print(6*7)"})
            assert answer == "42"
            error = await registry.execute_tool("code_interpreter", {"code": "1/0"})
            assert "ZeroDivisionError" in error
            assert "not found" in await registry.execute_tool("bash", {"code": "ls"})


# --------------------------------------------------------------------------- SandboxFusion


def test_the_client_of_sandbox_fusion(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with example("sandbox_fusion_client", url, monkeypatch) as module:
        program = "print(int(input()) * 7)"
        assert module.score(program, "6", "42\n", url) == 1.0
        assert module.score(program, "7", "42\n", url) == 0.0
        assert module.score("1/0", "", "42\n", url) == 0.0
