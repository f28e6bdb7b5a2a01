"""Print how large and how entangled a checkout of rstar2 is, so that two versions can be compared.

    python scripts/tree_report.py [TREE]               sizes and names, read from the source
    python scripts/tree_report.py [TREE] --call        also trace one `print(1+1)`
    python scripts/tree_report.py [TREE] --step        also trace one learning step (minutes)

TREE is the root of a checkout and defaults to this one. Tracing needs TREE/.venv with that
checkout installed in it. What is counted:

- files and lines: `*.py` under src/rstar2, per folder; all lines count.
- shared class names: names that more than one class statement in src/ uses. A leading underscore
  makes no difference.
- modules per call: modules of rstar2.codeenv that a Python function call enters between
  `client.run(...)` and its result, in the client's process and in the server's process. Methods
  that dataclasses generate count for the module of their class. The server is warm: it has
  executed the same program before. Zygotes, workers and the jailed call are other processes and
  do not count. Version 0.1 has 17.
- functions per step: distinct functions of rstar2 (file and qualified name; lambdas,
  comprehensions, generator expressions and generated methods excluded) that the process of
  `rstar2 train tiny` enters between the records of two consecutive RL steps: collect, resample,
  learn and publish. Engines and the code environment are other processes and do not count.

Both traces use `sys.setprofile` in every thread, which sees calls of Python functions only.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 1800.0
GENERATED = "<string>"
"""The file name of methods that dataclasses generate."""
SMALL = (
    *("sft.steps=320", "evaluation.count=8", "evaluation.samples=1", "rl.prompts_per_step=8"),
    *("rl.count=64", "codeenv.slots=2"),
)


# --------------------------------------------------------------------------- read the source


def sources(tree: Path) -> list[Path]:
    return sorted((tree / "src" / "rstar2").rglob("*.py"))


def folder_sizes(tree: Path) -> dict[str, tuple[int, int]]:
    """Folder -> (files, lines); modules at the top count under their own name."""
    sizes: dict[str, tuple[int, int]] = {}
    for path in sources(tree):
        name = path.relative_to(tree / "src" / "rstar2").parts[0]
        files, lines = sizes.get(name, (0, 0))
        sizes[name] = (files + 1, lines + path.read_text(encoding="utf-8").count("\n"))
    return sizes


def shared_class_names(tree: Path) -> list[str]:
    names: Counter[str] = Counter()
    for path in sources(tree):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                names[node.name.lstrip("_")] += 1
    return sorted(name for name, count in names.items() if count > 1)


def module_of(tree: Path, class_name: str) -> str:
    """The module that defines a class, wherever this version keeps it."""
    for path in sources(tree):
        if f"\nclass {class_name}" in path.read_text(encoding="utf-8"):
            return ".".join(path.relative_to(tree / "src").with_suffix("").parts)
    raise SystemExit(f"{tree} has no class {class_name}")


# --------------------------------------------------------------------------- trace a process


class Tracer:
    """Records which functions of rstar2 are entered while `on` is true, in every thread."""

    def __init__(self) -> None:
        self.entered: set[tuple[str, str, str]] = set()
        """Module, file name and qualified name of every function entered."""
        self.on = False
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        module = str(frame.f_globals.get("__name__", ""))
        if self.on and event == "call" and module.startswith("rstar2."):
            code = frame.f_code
            self.entered.add((module, code.co_filename, code.co_qualname))

    def codeenv_modules(self) -> list[str]:
        return sorted({name for name, _, _ in self.entered if name.startswith("rstar2.codeenv.")})


def written_functions(entered: set[tuple[str, ...]]) -> set[tuple[str, str]]:
    """Module and name of the functions with a `def` of their own."""
    written = (entry for entry in entered if entry[1] != GENERATED)
    return {(module, name) for module, _, name in written if not name.endswith(">")}


def traced_server(tree: Path, output: Path) -> None:
    """Serve the code environment; SIGUSR1 starts recording, SIGUSR2 writes what was entered."""
    tracer = Tracer()

    def start(number: int, frame: FrameType | None) -> None:
        tracer.on = True

    def stop(number: int, frame: FrameType | None) -> None:
        tracer.on = False
        output.with_suffix(".part").write_text(json.dumps(tracer.codeenv_modules()))
        output.with_suffix(".part").rename(output)

    signal.signal(signal.SIGUSR1, start)
    signal.signal(signal.SIGUSR2, stop)
    sys.argv = ["rstar2", "codeenv", "serve", "--port", "0", "--slots", "1", "--json"]
    import_module("rstar2.cli").main()


def traced_call(tree: Path, output: Path) -> None:
    """Run `print(1+1)` four times and write the modules that the last call enters."""
    served = output.with_name("server.json")
    command = [sys.executable, __file__, str(tree), "--traced-server", str(served)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            client_modules = asyncio.run(_call(tree, url, server.pid))
            _wait_for(served)
        finally:
            server.terminate()
    server_modules = json.loads(served.read_text())
    output.write_text(json.dumps({"client": client_modules, "server": server_modules}))


async def _call(tree: Path, url: str, server: int) -> list[str]:
    client_class = import_module(module_of(tree, "CodeEnvClient")).CodeEnvClient
    request = import_module(module_of(tree, "RunRequest")).RunRequest
    config = import_module("rstar2.config").CodeEnvConfig(urls=(url,))
    tracer = Tracer()
    async with await client_class.start(config) as client:
        for name in ("first", "second", "third"):  # the server is warm, connections are open
            await client.run(request(name, "print(1+1)", deadline_s=300.0))
        os.kill(server, signal.SIGUSR1)
        tracer.on = True
        result = await client.run(request("traced", "print(1+1)", deadline_s=300.0))
        tracer.on = False
        os.kill(server, signal.SIGUSR2)
        assert result.stdout == "2\n", result
    sys.setprofile(None)
    return tracer.codeenv_modules()


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} was not written within {DEADLINE_S:.0f} s")
        time.sleep(0.05)


def train(run: Path) -> list[str]:
    settings = [part for setting in SMALL for part in ("--set", setting)]
    return ["rstar2", "train", "tiny", "--run", str(run), *settings]


def traced_step(tree: Path, output: Path) -> None:
    """Train the tiny recipe to its first RL step, resume it traced, write the functions entered.

    The traced step lies between the records of two steps, the second and third after resuming.
    """
    run = output.with_name("run")
    first = [sys.executable, "-m", *train(run)]
    with subprocess.Popen(first, stdout=subprocess.DEVNULL) as untraced:
        _wait_for_step(run, 1)
        untraced.terminate()
    tracer = Tracer()

    def watch() -> None:
        start = max(_recorded_steps(run), default=0) + 2
        _wait_for_step(run, start)
        tracer.on = True
        _wait_for_step(run, start + 1)
        tracer.on = False
        output.write_text(json.dumps(sorted(tracer.entered)))
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    sys.argv = train(run)
    runpy.run_module("rstar2", run_name="__main__")


def _wait_for_step(run: Path, step: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while step not in _recorded_steps(run):
        if time.monotonic() > deadline:
            raise TimeoutError(f"step {step} was not recorded within {DEADLINE_S:.0f} s")
        time.sleep(0.01)


def _recorded_steps(run: Path) -> set[int]:
    """Steps of the first RL stage in the run's metrics."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}") and '"stage1"' in line]
    return {row["step"] for row in rows if row.get("stage") == "stage1"}


# --------------------------------------------------------------------------- the table


def measure(tree: Path, what: str) -> Any:
    """Trace in a process of the checkout's own interpreter; return what it wrote."""
    python = tree / ".venv" / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"no {python}: install that checkout first (make install)")
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "entered.json"
        command = [str(python), __file__, str(tree), f"--traced-{what}", str(output)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=directory, env=environment, stdout=subprocess.DEVNULL, timeout=DEADLINE_S
        )
        if not output.exists():
            raise SystemExit(f"the traced {what} ended with {done.returncode} before its result")
        return json.loads(output.read_text())


def report(tree: Path, call: bool, step: bool) -> Iterator[str]:
    sizes = folder_sizes(tree)
    folders = {name: size for name, size in sizes.items() if not name.endswith(".py")}
    top = [size for name, size in sizes.items() if name.endswith(".py")]
    yield "| src/rstar2 | files | lines |"
    yield "|---|---:|---:|"
    yield f"| top level | {len(top)} | {sum(lines for _, lines in top):,} |"
    for name, (files, lines) in folders.items():
        yield f"| {name}/ | {files} | {lines:,} |"
    files = sum(size[0] for size in sizes.values())
    yield f"| all | {files} | {sum(size[1] for size in sizes.values()):,} |"
    yield ""
    shared = shared_class_names(tree)
    yield f"class names used more than once: {len(shared)} {', '.join(shared)}".rstrip()
    if call:
        entered = measure(tree, "call")
        both = sorted({*entered["client"], *entered["server"]})
        yield f"modules that one print(1+1) enters before the worker: {len(both)}"
        for side, modules in entered.items():
            yield f"  {side} ({len(modules)}): {', '.join(modules)}"
    if step:
        entered = {tuple(entry) for entry in measure(tree, "step")}
        functions = written_functions(entered)
        modules = {name for name, _ in functions}
        yield f"functions that one learning step enters in the driver: {len(functions)}"
        yield f"  in {len(modules)} modules; with lambdas and generated code: {len(entered)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tree", nargs="?", type=Path, default=ROOT, help="Root of a checkout.")
    parser.add_argument("--call", action="store_true", help="Trace one print(1+1).")
    parser.add_argument("--step", action="store_true", help="Trace one learning step.")
    internal = {"call": traced_call, "server": traced_server, "step": traced_step}
    for name in internal:
        parser.add_argument(f"--traced-{name}", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    tree = arguments.tree.resolve()
    for name, trace in internal.items():
        if (output := getattr(arguments, f"traced_{name}")) is not None:
            trace(tree, output)
            return
    for line in report(tree, arguments.call, arguments.step):
        print(line)


if __name__ == "__main__":
    main()
