"""Every command of README and docs: it parses, and it runs in a fresh checkout unless a mark in the
page says why not. The run that the pages call runs/tiny-seed0 is the quickstart with few steps."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import typer
from typer._click.exceptions import MissingParameter, NoArgsIsHelpError, UsageError

from rstar2.config import load_recipe
from rstar2.config.load import find_recipe
from rstar2.errors import UserError
from tests import forked_cli
from tests.doc_commands import (
    PAGES,
    ROOT,
    DocCommand,
    all_commands,
    commands,
    parse,
    unlabelled,
)

COMMANDS = all_commands()


def distinct(found: Iterable[DocCommand]) -> list[DocCommand]:
    """A command that several pages print is checked once, where it is printed first."""
    return list({shlex.join(c.words): c for c in reversed([*found])}.values())[::-1]


RUN = distinct(c for c in COMMANDS if not (c.mention or c.not_run or c.placeholder))

SMALL = (
    *("engine.count=1", "codeenv.slots=1", "codeenv.warm_up=never", "sft.steps=4"),
    *("sft.optimizer.warmup_steps=1", "rl.optimizer.warmup_steps=0", "rl.prompts_per_step=2"),
    *("rl.roc.drawn=4", "rl.roc.kept=2", "rl.count=8", "rl.stages.stage1.steps=1"),
    *("rl.stages.stage2.steps=1", "rl.stages.stage3.steps=1", "evaluation.count=2"),
    *("rl.stages.stage3.difficulty.samples=1", "evaluation.samples=1", "evaluation.greedy=false"),
)
"""Settings of the quickstart that make it end after seconds; its stages and files are the same."""

KNOWN = {
    *("docker", "curl", "vllm", "pre-commit", "echo", "source", "git", "cd", "python", "python3"),
    *("sbatch", "kubectl", "ray", "tensorboard", "wandb", "trackio", "cat", "lm_eval", "bfcl"),
}
"""Programs of others that the pages use."""

SERVERS = ("view", "codeenv serve", "codeenv mcp --http")
"""Commands that serve until they are stopped. A free port replaces their usual one."""


def named(command: DocCommand) -> str:
    return f"{command.page}:{command.line}"


# --------------------------------------------------------------------------- finding


def test_commands_are_found_in_blocks_tables_and_text() -> None:
    text = (
        "Run `rstar2 doctor` first.\n\n<!-- not run `docker`: no engine -->\n```bash\n"
        "rstar2 plan tiny \\\n  --cluster 1x4090  # estimate\ndocker build .\n```\n\n"
        "| task | command |\n|---|---|\n| a | `rstar2 view` or `make x` <!-- not run: b --> |\n"
    )
    found = list(commands("page.md", text))
    assert [(c.words, c.mention, c.not_run) for c in found] == [
        (["rstar2", "doctor"], True, None),
        (["rstar2", "plan", "tiny", "--cluster", "1x4090"], False, None),
        (["docker", "build", "."], False, "no engine"),
        (["rstar2", "view"], False, "b"),
        (["make", "x"], False, "b"),
    ]


def test_commands_stand_in_shell_blocks() -> None:
    """A command in a block without a language, or indented, would be run by no test."""
    unseen = [
        f"{page.relative_to(ROOT)}:{number}: {line}"
        for page in PAGES
        for number, line in unlabelled(page.read_text(encoding="utf-8"))
        if re.match(r"(\S*/)?(rstar2|make|pip|docker) +[a-z.'-]", line.lstrip("$ "))
    ]
    assert [line for line in unseen if "reference/cli.md" not in line] == []  # synopses


def test_the_pages_have_commands() -> None:
    assert len(RUN) > 20
    assert sum(c.page == "README.md" for c in COMMANDS) > 10


# --------------------------------------------------------------------------- parsing


@pytest.mark.parametrize("command", distinct(COMMANDS), ids=named)
def test_the_command_exists(command: DocCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sub-commands, options, make targets, scripts and extras that a page names exist."""
    monkeypatch.chdir(ROOT)
    program, *rest = command.words
    program = Path(program).name
    if program == "rstar2":
        parses(command, ["0" if re.fullmatch("[A-Z]", word) else word for word in rest])
    elif program == "make":
        done = subprocess.run(["make", "-n", *rest], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    elif program == "python" and "/" in rest[0]:  # others are files of other projects
        script = (ROOT / rest[0]).read_text(encoding="utf-8")
        options = {word for word in rest[1:] if word.startswith("--")}
        assert {word for word in options if word not in script} == set()
    elif program == "pip":
        extras = re.findall(r"rstar2\[([\w,]+)\]", " ".join(rest))
        declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        names = {name for group in extras for name in group.split(",")}
        assert names <= declared["project"]["optional-dependencies"].keys()
    else:
        assert program in KNOWN


def parses(command: DocCommand, words: list[str]) -> None:
    """A sentence may name a command without its arguments, or as a synopsis with [--options]."""
    try:
        parse(words)
    except typer.Exit:  # --help
        pass
    except UsageError as error:
        shortened = isinstance(error, MissingParameter | NoArgsIsHelpError) or "[" in command.text
        shortened = shortened or "requires an argument" in error.format_message()
        if not (command.mention and shortened):
            pytest.fail(error.format_message())
    train = words[0] in ("train", "sft") and len(words) > 1 and not command.placeholder
    if train and "--help" not in words:
        settings = [words[n + 1] for n, word in enumerate(words) if word in ("--set", "-s")]
        try:
            find_recipe(words[1])
        except UserError:
            page = (ROOT / command.page).read_text(encoding="utf-8")
            written = f"--write-recipe {words[1]}" in page or f"Save this as `{words[1]}`" in page
            assert command.mention or written
        else:
            load_recipe(words[1], settings)


def test_the_recipes_that_pages_print_load(tmp_path: Path) -> None:
    """Blocks of YAML that begin with `extends` are complete recipes."""
    blocks = [
        block
        for page in sorted((ROOT / "docs").rglob("*.md"))
        for block in re.findall(r"```yaml\n(extends:.*?)```", page.read_text("utf-8"), re.DOTALL)
    ]
    assert len(blocks) >= 2
    for block in blocks:
        file = tmp_path / "recipe.yaml"
        file.write_text(block if "name:" in block else f"name: mine\n{block}")
        load_recipe(file)


# --------------------------------------------------------------------------- running


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh copy of the repository, with the run of the quickstart and the files that a reader
    brings along."""
    root = tmp_path_factory.mktemp("clone") / "rstar2"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True, timeout=60,
    ).stdout.decode()  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, root / name)
    settings = [word for setting in SMALL for word in ("--set", setting)]
    output = root.parent / "quickstart.txt"
    code = forked_cli.run(["quickstart", *settings], root, output)
    assert code == 0, output.read_text()
    return root


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


BROUGHT = {
    "gsm8k/train.jsonl": '{"question": "Two and three apples?", "answer": "2+3\\n#### 5"}\n',
    "math500.jsonl": '{"problem": "What is $1+1$?", "answer": "2", "subject": "Algebra"}\n',
    "program.py": "print(6 * 7)\n",
    "my_problems.jsonl": "".join(
        f'{{"prompt": "What is {n} + {n}?", "answer": "{2 * n}"}}\n' for n in range(40)
    ),
    **dict(zip(("mine.jsonl", "h100.json"), blocks("docs/scheduler.md", "json"), strict=True)),
    "a100.json": blocks("docs/scheduler.md", "json")[1],
}
"""Files that the pages expect the reader to have."""


@pytest.fixture(scope="module")
def reader(checkout: Path) -> Path:
    """The checkout after the reader has done what the pages say in words."""
    for name, text in BROUGHT.items():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(text)
    for name in ("roc-seed0", "grpo-seed0", "uniform", "ablation/roc-seed0", "evidence/roc-seed0"):
        (checkout / "runs" / name).parent.mkdir(exist_ok=True)
        (checkout / "runs" / name).symlink_to(checkout / "runs" / "tiny-seed0")
    (checkout / "cities.py").write_text(blocks("docs/environments.md", "python")[0])
    (checkout / "cities.jsonl").write_text(
        "".join(
            f'{{"prompt": "How many people lived in Rome {n} years ago?", "answer": "{n}"}}\n'
            for n in range(40)
        )
    )
    return checkout


@pytest.fixture
def stopped_at_the_end() -> Iterator[list[BaseProcess]]:
    processes: list[BaseProcess] = []
    yield processes
    for process in processes:
        if process.is_alive():
            process.terminate()
        process.join(60)


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN, ids=named)
def test_the_command_runs(
    command: DocCommand, reader: Path, tmp_path: Path, stopped_at_the_end: list[BaseProcess]
) -> None:
    program, *words = command.words
    line = " ".join(words)
    if "|" in words or program not in ("rstar2", "make"):
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        done = subprocess.run(
            ["bash", "-c", command.text],
            cwd=reader, env={**os.environ, "PATH": path}, capture_output=True, text=True,
            timeout=forked_cli.DEADLINE_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    elif program == "make":
        done = subprocess.run(
            ["make", *words], cwd=reader, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
    elif line.startswith(SERVERS):
        assert serves([*words, "--port", "0"], reader, tmp_path / "printed", stopped_at_the_end)
    else:
        output = tmp_path / "printed"
        code = forked_cli.run(words, reader, output)
        assert code == 0, output.read_text()


def serves(words: list[str], reader: Path, output: Path, processes: list[BaseProcess]) -> bool:
    """Whether the command prints its address, and ends well when it is stopped."""
    os.mkfifo(output)
    process = forked_cli.start(words, reader, output)
    processes.append(process)
    printed = ""
    with output.open() as lines:
        for line in lines:
            printed += line
            if "http://" in line:
                break
        process.terminate()
        printed += lines.read()
    process.join(forked_cli.DEADLINE_S)
    assert process.exitcode in (0, 143), printed
    return "http://" in printed


def test_every_reason_is_one_of_a_few() -> None:
    """A reason names what is missing here, so that a new kind of it is a decision."""
    reasons = {c.not_run for c in COMMANDS if c.not_run}
    unknown = {r for r in reasons if not r.startswith(tuple(REASONS))}
    assert unknown == set(), f"use one of {REASONS}"
    tests = [ROOT / r.removeprefix("tested in ") for r in reasons if r.startswith("tested in ")]
    assert [str(path) for path in tests if not path.is_file()] == []


REASONS = (
    *(
        "installs packages",
        "takes ",
        "needs a GPU",
        "needs Docker",
        "needs the network",
    ),
    *("needs another server", "needs a cluster", "runs the tests", "tested in"),
)
"""What the marks of the pages begin with."""
