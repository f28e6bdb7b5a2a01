"""The model card of an export: how to use it, how it was trained, results, licence of the base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from rstar2.report.summary import Summary, percent, summarise

TOOL_PARSER = "hermes"
"""vLLM's built-in parser for `<tool_call>` with JSON inside."""
_BUILT_IN = {
    "tiny": ("a model of rstar2, initialised from the seed", "mit"),
    "smollm2": ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0"),
    "gemma3-270m": ("google/gemma-3-270m", "gemma"),
}
"""Models that rstar2 makes itself: what they are, and their licence."""


def model_card(run: Path, stage: str) -> str:
    """The card as Markdown, with the evaluations that the run has recorded so far."""
    summary = summarise(run)
    base, licence = base_model(str(_section(summary, "model").get("path", "")))
    parts = [
        _front_matter(summary, base, licence),
        f"# {summary.recipe.get('name')}, after {summary.label(stage)}\n",
        "Trained with [rstar2](https://pypi.org/project/rstar2/) "
        f"{summary.environment.get('rstar2', '')}: agentic reinforcement learning (GRPO-RoC).\n",
        _usage(summary),
        _training(summary, stage, base),
        _results(summary, stage),
        _licence(base, licence),
    ]
    return "\n".join(parts)


def base_model(path: str) -> tuple[str, str]:
    """Name and licence of the model that training started from; the licence may be unknown."""
    if path in _BUILT_IN:
        return _BUILT_IN[path]
    card = Path(path) / "README.md"
    if not card.is_file():
        return path, ""
    front = card.read_text(encoding="utf-8", errors="replace").split("---\n")
    try:
        values = yaml.safe_load(front[1]) if len(front) > 2 and not front[0] else {}
    except yaml.YAMLError:
        values = {}
    licence = values.get("license") if isinstance(values, dict) else None
    return path, str(licence or "")


def _section(summary: Summary, name: str) -> dict[str, Any]:
    section = summary.recipe.get(name)
    return section if isinstance(section, dict) else {}


def _front_matter(summary: Summary, base: str, licence: str) -> str:
    values: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rstar2", "agent", "tool-use", "reinforcement-learning"],
    }
    if licence:
        values["license"] = licence
    path = _section(summary, "model").get("path", "")
    if path not in _BUILT_IN and not Path(path).exists():
        values["base_model"] = base
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---\n"


def _usage(summary: Summary) -> str:
    length = _section(summary, "evaluation").get("max_length", 512)
    return f"""## Use

The chat template writes the prompt that the model was trained with: system text, tools and the
beginning of the first turn. Give it the question alone.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(DIRECTORY)
model = AutoModelForCausalLM.from_pretrained(DIRECTORY)
messages = [{{"role": "user", "content": QUESTION}}]
prompt = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
output = model.generate(**prompt, max_new_tokens={length}, do_sample=False)
print(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :]))
```

The model calls tools: run the call and append the turn and a message of role `tool` with its
output, then generate again. `rstar2 chat --model DIRECTORY` does this. vLLM serves the model with
its tool calls parsed:

```bash
vllm serve DIRECTORY --enable-auto-tool-choice --tool-call-parser {TOOL_PARSER}
```

Clients pass `tools` to get parsed calls. A system message of the client replaces the trained one.
"""


def _training(summary: Summary, stage: str, base: str) -> str:
    recipe, environment = summary.recipe, _section(summary, "environment")
    rl, sft = _section(summary, "rl"), _section(summary, "sft")
    own = f"problems of the environment {environment.get('use', 'python-math')}"
    rows = [
        ("recipe", f"{recipe.get('name')}, seed {recipe.get('seed')}"),
        ("base model", base),
        ("environment", str(environment.get("use", "python-math"))),
    ]
    if sft:
        data = sft.get("data") or "demonstrations of the environment"
        rows.append(("SFT", f"{summary.sft.last if summary.sft else 0} steps, {data}"))
    for curve in summary.stages:
        rows.append((curve.name, f"{curve.last} RL steps, {rl.get('problems') or own}"))
        if curve.name == stage:
            break
    if stage == "sft":
        rows = [row for row in rows if row[0] not in {curve.name for curve in summary.stages}]
    rows.append(("loss", str(_section(summary, "rl").get("loss", {}).get("kind", "clip"))))
    rows.append(("resampling", str(rl.get("roc", {}).get("variant", "roc"))))
    lines = [f"| {name} | {value} |" for name, value in rows]
    return "\n".join(["## Training", "", "| | |", "|---|---|", *lines, ""])


def _results(summary: Summary, stage: str) -> str:
    lines = ["## Results", ""]
    shown = [e for (name, _), e in summary.evaluations.items() if name == stage]
    if not shown:
        return "\n".join([*lines, "Not evaluated yet.", ""])
    lines += [
        "| mode | problems | accuracy | 95% interval | tool errors |",
        "|---|---|---|---|---|",
    ]
    for one in shown:
        errors = "-" if one.tool_errors is None else percent(one.tool_errors)
        low, high = percent(one.accuracy.low), percent(one.accuracy.high)
        lines.append(
            f"| {one.mode} | {one.accuracy.count} held-out | {percent(one.accuracy.mean)} "
            f"| {low} to {high} | {errors} |"
        )
    return "\n".join([*lines, ""])


def _licence(base: str, licence: str) -> str:
    text = (
        f"The base model ({base}) has the licence `{licence}`."
        if licence
        else f"The licence of the base model ({base}) was not recorded in its files: read its "
        "page before you publish this model."
    )
    return f"## Licence\n\n{text}\n"
