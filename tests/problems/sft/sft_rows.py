"""One row of every publisher, in its exact schema, with invented content."""

from __future__ import annotations

import json
from typing import Any

NEWS = {
    "name": "get_news_headlines",
    "description": "Get the latest news headlines",
    "parameters": {
        "type": "object",
        "properties": {"country": {"type": "string", "description": "Where"}},
        "required": ["country"],
    },
}
PASSWORD = {"name": "make_password", "description": "Make one", "parameters": {}}
TRENDS = {
    "name": "Market Trends API",
    "description": "Trends of the market",
    "parameters": {
        "type": "dict",
        "properties": {
            "trend_type": {"type": "string", "enum": ["GAINERS", "LOSERS"]},
            "limit": {"type": "int", "default": 5},
        },
        "required": ["trend_type"],
    },
    "required": None,
}

TOOLACE: dict[str, Any] = {
    "system": (
        "You are an expert in composing functions. You are given a question and a set of possible "
        "functions. \nThe current time is 2024-03-01 12:00:00.Here is a list of functions in JSON "
        "format that you can invoke:\n" + json.dumps([TRENDS]) + ". \nShould you decide to return "
        "the function call(s). \nPut it in the format of [func1(params_name=params_value, "
        "params_name2=params_value2...), func2(params)]\n\nNO other text MUST be included. \n"
    ),
    "conversations": [
        {"from": "user", "value": "Which shares rose and which fell?"},
        {
            "from": "assistant",
            "value": '[Market Trends API(trend_type="GAINERS"), '
            'Market Trends API(trend_type="LOSERS", limit=3)]',
        },
        {"from": "tool", "value": '[{"name": "Market Trends API", "results": {}}]'},
        {"from": "assistant", "value": "None rose and none fell."},
    ],
}

APIGEN: dict[str, Any] = {
    "system": "# Retail agent policy\n\nYou help customers.",
    "tools": json.dumps([NEWS, PASSWORD]),
    "conversations": [
        {"from": "human", "value": "Hello, what is new in Peru?"},
        {"from": "gpt", "value": "One moment, please. May I look?"},
        {"from": "human", "value": "Yes."},
        {
            "from": "function_call",
            "value": '{"name": "get_news_headlines", "arguments": {"country": "Peru"}}',
        },
        {"from": "observation", "value": '{"headlines": []}'},
        {
            "from": "function_call",
            "value": '{"name": "make_password", "arguments": "{}"}',
        },
        {"from": "observation", "value": "hunter2"},
        {"from": "gpt", "value": "Nothing is new."},
    ],
}

GLAIVE: dict[str, Any] = {
    "system": "SYSTEM: You are a helpful assistant with access to the following functions. "
    "Use them if required -\n" + json.dumps(NEWS, indent=4) + "\n\n"
    + json.dumps(PASSWORD, indent=4) + "\n\n",
    "chat": "USER: What is new in France?\n\n\n"
    "ASSISTANT: I shall look. <functioncall> "
    "{\"name\": \"get_news_headlines\", \"arguments\": '{\"country\": \"France\"}'} "
    "<|endoftext|>\n\n\n"
    'FUNCTION RESPONSE: {"headlines": ["A", "B"]}\n\n\n'
    "ASSISTANT: Two things:\n\n1. A\n\n2. B <|endoftext|>\n\n\n"
    "USER: Thanks!\n\n\nASSISTANT: You are welcome! <|endoftext|>\n\n\n",
}  # fmt: skip

MAGICODER: dict[str, Any] = {
    "lang": "python",
    "raw_index": 107864,
    "index": 218,
    "seed": "def f():\n    pass\n",
    "openai_fingerprint": "fp_1",
    "problem": "Write a function that reverses a string.",
    "solution": "It can be sliced.\n\n```python\ndef back(s):\n    return s[::-1]\n```\n\nDone.",
}
EVOL: dict[str, Any] = {
    "instruction": "Print a greeting.",
    "response": "```python\nprint('hello')\n```",
}

TULU: dict[str, Any] = {
    "id": "personahub_1",
    "prompt": "Describe a garden in three words, all in lower case.",
    "messages": [
        {"role": "user", "content": "Describe a garden in three words, all in lower case."},
        {"role": "assistant", "content": "green, quiet, wet"},
    ],
    "constraints": ["change case:all lower case"],
}

NEMOTRON: dict[str, Any] = {
    "input": [{"role": "user", "content": "Tell me about tea."}],
    "output": "Tea is made of leaves.",
    "category": "chat",
    "license": "cc-by-4.0",
    "reasoning": "off",
    "generator": "Llama-3.3-70B-Instruct",
    "used_in_training": "yes",
    "version": "v1.1",
    "system_prompt": "detailed thinking off",
}
NEMOTRON_V1: dict[str, Any] = {
    **NEMOTRON,
    "input": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\ndetailed thinking off"
    "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nTell me about tea.<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "output": "Tea is made of leaves.<|eot_id|>",
}

MESSAGES: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "News?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "get_news_headlines", "arguments": '{"country": "US"}'},
                }
            ],
        },
        {"role": "tool", "content": "[]"},
        {"role": "assistant", "content": "None."},
    ],
    "tools": [{"type": "function", "function": NEWS}],
}

ROWS: dict[str, dict[str, Any]] = {
    "toolace": TOOLACE,
    "apigen": APIGEN,
    "glaive": GLAIVE,
    "magicoder": MAGICODER,
    "tulu": TULU,
    "nemotron": NEMOTRON,
    "messages": MESSAGES,
}
