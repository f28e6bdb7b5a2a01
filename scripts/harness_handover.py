"""Verify that an exported checkpoint works unchanged with the official harnesses.

    python scripts/harness_handover.py EXPORT --vllm .venv-vllm/bin/python --harness VENV/bin/python

starts a real vLLM server for the export, with vLLM's hermes parser for tool calls, and runs two
checks: a chat completion must return parsed `tool_calls`, and lm-eval's IFEval must finish on the
same server. Without --rows IFEval uses a few rows of its published schema that are written here,
so that nothing is downloaded. The exit code is 0 only if both succeed. With --attempts 0 it runs
IFEval alone, also for a model that calls no tools. The script itself needs only the standard
library; the two interpreters are given by path:

    --vllm     has vllm (on a CPU: scripts/install_vllm.py)
    --harness  has `lm-eval[api,ifeval]`
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

MODEL, LOG = "policy", "server.log"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "execute_python_code_with_standard_io",
        "description": "Execute Python code with standard input and return its standard output.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string"}, "input": {"type": "string"}},
            "required": ["code", "input"],
        },
    },
}
METRICS = (
    "prompt_level_strict_acc",
    "inst_level_strict_acc",
    "prompt_level_loose_acc",
    "inst_level_loose_acc",
)
"""What lm-eval reports of IFEval."""


def ifeval_rows() -> list[dict[str, Any]]:
    """Rows in the schema of google/IFEval, written for this script."""
    made: list[tuple[str, list[str], list[dict[str, Any]]]] = [
        (
            "Describe a lighthouse. Do not use any commas in your answer.",
            ["punctuation:no_comma"],
            [{}],
        ),
        (
            "Say why bread rises. Write in lower case letters only, in English.",
            ["change_case:english_lowercase"],
            [{}],
        ),
        (
            "Name three rivers. Your answer must have at least 2 placeholders in square brackets.",
            ["detectable_content:number_placeholders"],
            [{"num_placeholders": 2}],
        ),
        (
            "Write about rain and mention the words cloud and umbrella.",
            ["keywords:existence"],
            [{"keywords": ["cloud", "umbrella"]}],
        ),
        (
            "What is 12 times 12? Wrap your whole answer in double quotation marks.",
            ["startend:quotation"],
            [{}],
        ),
        (
            "Tell me about the moon without commas and with a title in double angular brackets.",
            ["punctuation:no_comma", "detectable_format:title"],
            [{}, {}],
        ),
    ]
    return [
        {"key": 9000 + n, "prompt": prompt, "instruction_id_list": ids, "kwargs": kwargs}
        for n, (prompt, ids, kwargs) in enumerate(made)
    ]


# --------------------------------------------------------------------------- the server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def as_trained(export: Path, folder: Path) -> list[str]:
    """Arguments that make the server prompt the policy as in training, if not by default.

    A policy that never read tool signatures (recipes with `template.system: none`) is confused by
    them: it knows its one tool without them. Requests still carry `tools`, for the parser.
    """
    known = json.loads((export / "tokenizer_config.json").read_text())
    settings = known.get("rstar2_template", {})
    heads = []
    if settings.get("system") == "none":
        heads.append("{%- set tools = none -%}")
    if settings.get("prefill_reason"):
        heads.append("{%- set prefill_reason = true -%}")
    if not heads:
        return []
    file = folder / "chat_template.jinja"
    file.write_text("\n".join([*heads, (export / "chat_template.jinja").read_text()]))
    return ["--chat-template", str(file)]


def start_server(options: argparse.Namespace, port: int, folder: Path) -> subprocess.Popen[bytes]:
    """Run the command of docs/evaluation.md on a free port."""
    log = folder / LOG
    words = [
        *(options.vllm, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(options.export), "--served-model-name", MODEL),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--max-model-len", str(options.max_length)),
        *as_trained(options.export, folder),
        *options.vllm_argument,
    ]
    print("$", " ".join(words), flush=True)
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"} | dict(os.environ)
    return subprocess.Popen(
        words,
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )


def wait_ready(server: subprocess.Popen[bytes], base: str, deadline_s: float, log: Path) -> None:
    """Wait until the server answers, has ended, or the deadline has passed."""
    ends = time.monotonic() + deadline_s
    while time.monotonic() < ends:
        if server.poll() is not None:
            sys.exit(f"the server ended with {server.returncode}:\n{tail(log)}")
        try:
            with urllib.request.urlopen(f"{base}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1.0)
    sys.exit(f"the server was not ready in {deadline_s:g} s:\n{tail(log)}")


def tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def stop_server(server: subprocess.Popen[bytes]) -> None:
    """End the server and everything that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, number)
            server.wait(20)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            print("the server does not end in order; it is killed", file=sys.stderr)


# --------------------------------------------------------------------------- tool calls


def ask(base: str, body: dict[str, Any], deadline_s: float) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{base}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=deadline_s) as response:
        return dict(json.load(response))


def tool_call(base: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the first sample that calls the tool, as vLLM parsed it; None if none does."""
    for attempt in range(options.attempts):
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": options.question}],
            "tools": [TOOL],
            "tool_choice": "auto",
            "temperature": 1.0,
            "seed": attempt,
            "max_tokens": 160,
        }
        answer = ask(base, body, options.deadline)
        message = answer["choices"][0]["message"]
        for call in message.get("tool_calls") or []:
            arguments = json.loads(call["function"]["arguments"])
            if call["function"]["name"] == TOOL["function"]["name"] and "code" in arguments:
                print(f"tool call (sample {attempt}): {json.dumps(call['function'])}", flush=True)
                print(f"finish_reason: {answer['choices'][0]['finish_reason']}", flush=True)
                return dict(call)
    return None


# --------------------------------------------------------------------------- IFEval


def ifeval_task(folder: Path, rows: Path, harness: str) -> None:
    """lm-eval's own task, with its data from a file."""
    where = subprocess.run(
        [harness, "-c", "import lm_eval, pathlib; print(pathlib.Path(lm_eval.__file__).parent)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout.strip()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ifeval_local.yaml").write_text(
        f"include: {where}/tasks/ifeval/ifeval.yaml\n"
        "task: ifeval_local\n"
        "dataset_path: json\n"
        "dataset_kwargs:\n"
        "  data_files:\n"
        f"    train: {rows}\n"
    )


def run_ifeval(base: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """IFEval through the server; returns lm-eval's results of the task."""
    rows = options.rows
    if rows is None:
        rows = folder / "ifeval.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in ifeval_rows()))
    ifeval_task(folder / "tasks", rows, options.harness)
    url = f"{base}/v1/chat/completions"
    concurrency = f"num_concurrent={options.concurrent},max_retries=1"
    words = [
        *(options.harness, "-m", "lm_eval", "run", "--model", "local-chat-completions"),
        *("--model_args", f"model={MODEL},base_url={url},{concurrency}"),
        *("--tasks", "ifeval_local", "--include_path", str(folder / "tasks")),
        *("--apply_chat_template", "--gen_kwargs", f"max_gen_toks={options.tokens}"),
        *("--output_path", str(folder / "results"), "--log_samples"),
    ]
    print("$", " ".join(words), flush=True)
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        words,
        env=offline | dict(os.environ),
        timeout=options.deadline,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(
            f"lm-eval ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    print(done.stdout.strip(), flush=True)
    (results_file,) = (folder / "results").rglob("results_*.json")
    return dict(json.loads(results_file.read_text())["results"]["ifeval_local"])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("export", type=Path, help="An export of a run (a model directory).")
    parser.add_argument("--vllm", default=sys.executable, help="A Python with vllm.")
    parser.add_argument("--harness", default=sys.executable, help="A Python with lm-eval.")
    parser.add_argument(
        "--rows", type=Path, help="IFEval rows as JSONL; default: a few of our own."
    )
    parser.add_argument("--out", type=Path, help="Keep the output files in this directory.")
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=256, help="Token limit of IFEval answers.")
    parser.add_argument("--question", default="What is 123 times 45?")
    parser.add_argument(
        "--attempts",
        type=int,
        default=16,
        help="Samples to draw until one calls the tool; 0 leaves this check out.",
    )
    parser.add_argument("--concurrent", type=int, default=4, help="IFEval requests at once.")
    parser.add_argument(
        "--deadline", type=float, default=1800.0, help="Deadline of each part in seconds."
    )
    parser.add_argument(
        "--vllm-argument",
        action="append",
        default=[],
        help="An extra argument for the server (repeatable).",
    )
    options = parser.parse_args()
    options.export = options.export.absolute()
    return options


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the server
    with tempfile.TemporaryDirectory(prefix="handover-") as scratch:
        folder = (options.out or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        log, port = folder / LOG, free_port()
        base = f"http://127.0.0.1:{port}"
        server = start_server(options, port, folder)
        try:
            wait_ready(server, base, options.deadline, log)
            call = tool_call(base, options)
            scores = run_ifeval(base, options, folder)
        finally:
            stop_server(server)
    named = {m: v for m in METRICS for k, v in scores.items() if k.split(",")[0] == m}
    print(f"IFEval: {json.dumps(named)}")
    if call is None and options.attempts:
        sys.exit(f"no tool call in {options.attempts} samples")
    if set(named) != set(METRICS):
        sys.exit(f"IFEval did not report {set(METRICS) - set(named)}")
    print("hand-over: ok")


if __name__ == "__main__":
    main()
