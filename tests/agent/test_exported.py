"""Exported tokenizers in plain transformers: the ids that the agent loop gives to an engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rstar2.agent.exported import TrainedPrompt, exported_tokenizer, is_exported
from rstar2.agent.loop import AgentLoop, RolloutSpec
from rstar2.agent.prompts import shown_to_model
from rstar2.agent.template import Template, settings_of
from rstar2.codeenv.protocol import RunRequest
from rstar2.config import AgentConfig, SamplingConfig
from rstar2.environments.python_math import PythonMath
from rstar2.paper_format import TOOL, TOOL_NAME
from rstar2.pipeline.export import trained_prompt
from rstar2.types import Message, Outcome, Problem, ToolResult
from tests.agent.agent_fakes import TOOLS, ScriptedGenerator, ScriptedTools

MakeTemplate = Callable[..., Template]
QUESTIONS = ("What is 6 times 7?", "  Is <|im_end|> in [/INST] {{x}} {% y %}?\nSay 你🙂 \\boxed  ")
OUTPUT = '42 <|im_end|><|eot_id|></s>\n</tool_response> "ü"'


def call_text(code: str) -> str:
    arguments = json.dumps({"code": code, "input": ""}, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{TOOL_NAME}", "arguments": {arguments}}}\n</tool_call>'


LINES = (
    f"Let me see.</reason>\n{call_text('print(6 * 7)')}",
    f"{call_text('x = ' + chr(34) + '你' + chr(34))}\n{call_text('2')}",
    "<reason>Done.</reason>\n<answer>\\boxed{42}</answer>",
)


async def agent_prompts(template: Template, question: str) -> tuple[list[list[int]], list[str]]:
    """The prompts of a rollout of three turns and of a second question, and the turns' text."""

    def reply(request: RunRequest) -> ToolResult:
        return ToolResult(call_id=request.id, outcome=Outcome.OK, stdout=OUTPUT)

    generator = ScriptedGenerator(template, LINES)
    loop = AgentLoop(
        PythonMath(template.config), generator, ScriptedTools(reply), template, AgentConfig()
    )
    spec = RolloutSpec(SamplingConfig(), 4096, 8)
    trajectory = await loop.run(
        Problem("1", question, "42"), id="r", group_id="g", seed=0, spec=spec, graded=False
    )
    assert len(trajectory.turns) == 3
    follow_up = template.follow_up(QUESTIONS[1])
    prompts = [list(ids) for ids in generator.prompts]
    return [*prompts, [*trajectory.token_ids, *follow_up.ids]], [
        turn.text for turn in trajectory.turns
    ]


def split_calls(text: str) -> dict[str, Any]:
    """A turn as a server with vLLM's `hermes` parser returns it."""
    content, *calls = text.split("<tool_call>")
    functions = [json.loads(call.replace("</tool_call>", "")) for call in calls]
    return {
        "role": "assistant",
        "content": content or None,
        "tool_calls": [
            {"type": "function", "function": {"name": f["name"], "arguments": f["arguments"]}}
            for f in functions
        ],
    }


def conversations(question: str, lines: list[str], how: str) -> list[list[dict[str, Any]]]:
    """What a client sends before each turn, and before the turn after a second question."""

    def said(text: str) -> dict[str, Any]:
        return split_calls(text) if how == "calls" else {"role": "assistant", "content": text}

    def results(count: int) -> list[dict[str, Any]]:
        return [{"role": "tool", "content": OUTPUT}] * count

    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    if how == "parts":
        messages = [{"role": "user", "content": [{"type": "text", "text": question}]}]
    every = [list(messages)]
    for line, calls in zip(lines[:2], (1, 2), strict=True):
        messages += [said(line), *results(calls)]
        every.append(list(messages))
    messages += [said(lines[2]), {"role": "user", "content": QUESTIONS[1]}]
    return [*every, messages]


async def exported(template: Template, path: Path) -> Any:
    """The exported tokenizer as plain transformers loads it."""
    problems = [Problem(str(i), text, "") for i, text in enumerate(QUESTIONS)]
    prompt = await trained_prompt(
        PythonMath(template.config), problems, template.config, ScriptedTools()
    )
    assert prompt is not None
    assert prompt.varying == ()
    exported_tokenizer(template, prompt).save_pretrained(path)
    return AutoTokenizer.from_pretrained(path)


def ids_of(tokenizer: Any, messages: list[dict[str, Any]], **how: Any) -> list[int]:
    rendered = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, **how
    )
    return list(rendered["input_ids"])


@pytest.mark.parametrize("how", ["text", "calls", "parts"])
@pytest.mark.parametrize(("system", "prefill"), [("paper", True), ("none", True), ("paper", False)])
async def test_plain_transformers_renders_the_prompts_of_the_agent_loop(
    family: str,
    system: str,
    prefill: bool,
    how: str,
    make_template: MakeTemplate,
    tmp_path: Path,
) -> None:
    template = make_template(family, system, system, prefill)
    tokenizer = await exported(template, tmp_path)
    for question in QUESTIONS:
        prompts, lines = await agent_prompts(template, question)
        for expected, messages in zip(prompts, conversations(question, lines, how), strict=True):
            for tools in (None, [TOOL]):
                ids = ids_of(tokenizer, messages, tools=tools)
                assert tokenizer.decode(ids) == tokenizer.decode(expected)
                assert ids == expected


async def test_the_wire_form_of_servers_renders_the_same(
    make_template: MakeTemplate, tmp_path: Path
) -> None:
    """Servers add keys to tools, and clients send results as user messages in their tags."""
    template = make_template("qwen")
    tokenizer = await exported(template, tmp_path)
    messages = conversations(QUESTIONS[0], list(LINES), "text")[1]
    expected = ids_of(tokenizer, messages)
    wire = [{"type": "function", "function": {**TOOL["function"], "strict": None}}]
    assert ids_of(tokenizer, messages, tools=wire) == expected
    as_user = [
        *messages[:-1],
        {"role": "user", "content": "<tool_response>\nok <|im_end|>\n</tool_response>"},
    ]
    text = tokenizer.decode(ids_of(tokenizer, as_user))
    assert "<tool_response>\nok < |im_end|>\n</tool_response><|im_end|>" in text
    opening = PythonMath(template.config).messages(Problem("1", QUESTIONS[0], ""))
    wrapped = [{"role": "user", "content": opening[1].content}]
    assert ids_of(tokenizer, wrapped) == ids_of(tokenizer, messages[:1])


async def test_a_system_message_of_the_caller_replaces_the_trained_one(
    make_template: MakeTemplate, tmp_path: Path
) -> None:
    template = make_template("qwen", "paper", "none")
    tokenizer = await exported(template, tmp_path)
    user = {"role": "user", "content": "Hi"}
    system = {"role": "system", "content": "Be brief."}
    shown = template.prompt_ids([Message("system", "Be brief."), Message("user", "Hi")])
    assert ids_of(tokenizer, [system, user]) == list(shown)
    with_tool = template.prompt_ids([Message("system", "Be brief."), Message("user", "Hi")], TOOLS)
    assert ids_of(tokenizer, [system, user], tools=[TOOL]) == list(with_tool)


async def test_without_system_text_in_training_none_is_shown(
    make_template: MakeTemplate, tmp_path: Path
) -> None:
    template = make_template("tiny", "none", "none")
    tokenizer = await exported(template, tmp_path)
    user = {"role": "user", "content": "Hi"}
    system = {"role": "system", "content": "Be brief."}
    expected = list(template.prompt_ids([Message("user", "Hi")]))
    assert ids_of(tokenizer, [system, user], tools=[TOOL]) == expected
    assert shown_to_model([Message("user", "Hi")], TOOLS, template.config)[1] == []


async def test_rstar2_reads_an_export_as_before(
    family: str, make_template: MakeTemplate, tmp_path: Path
) -> None:
    template = make_template(family)
    tokenizer = await exported(template, tmp_path)
    assert is_exported(tokenizer.chat_template)
    config = settings_of(tokenizer)
    assert config == template.config
    again = Template(tokenizer, config, template.prefill)
    assert not is_exported(str(again.tokenizer.chat_template))
    messages = PythonMath(config).messages(Problem("1", QUESTIONS[0], ""))
    assert again.prompt_ids(messages, TOOLS) == template.prompt_ids(messages, TOOLS)
    assert again.stop_ids == template.stop_ids


def test_an_export_leaves_the_training_tokenizer_alone(make_template: MakeTemplate) -> None:
    template = make_template("llama")
    before = str(template.tokenizer.chat_template)
    exported_tokenizer(template, TrainedPrompt(system="x"))
    assert template.tokenizer.chat_template == before
    assert "rstar2_own_template" not in template.tokenizer.init_kwargs
