"""`rstar2 train`, `quickstart` and `sft`: what is refused, what a run prints, how it is stopped."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from rstar2.cli import COMMANDS, main
from rstar2.cli.train import Pipeline, again, execute, next_steps
from rstar2.config import Recipe, load_recipe
from rstar2.config.preflight import check_supported
from rstar2.errors import EngineError, RecipeError
from rstar2.pipeline.progress import ProgressView, StageKind
from rstar2.problems.arithmetic import is_known_question
from rstar2.record import RunDirectory, read_events, read_metrics
from rstar2.types import Estimate, Evaluation

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def rstar2(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any) -> Run:
    """Call the command in an empty directory; (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(list(words))
        out, err = capfd.readouterr()
        return int(caught.value.code or 0), out, err

    return call


def tiny(*overrides: str) -> Recipe:
    return load_recipe("tiny", ["sft.steps=21", *overrides]).recipe


async def small_run(recipe: Recipe, run: RunDirectory, view: ProgressView) -> None:
    """A pipeline that only records: two steps of SFT and an evaluation."""
    run.rewind("sft", 0)
    view.stage("sft", StageKind.SFT, 2)
    for step in (1, 2):
        run.metrics("sft", step, {"loss": 1.0 / step, "time/step": 0.5})
        view.step(step, {"loss": 1.0 / step})
    for mode in ("greedy", "sampled"):
        accuracy = Estimate(0.3, 0.2, 0.4, 100)
        made = Evaluation("sft", 2, mode, accuracy, {"gcd": accuracy}, 0.2, 0.3, 50.0, 2.0, 0.0)
        run.evaluation(made)
        view.evaluation(made)


# --------------------------------------------------------------------------- refused


def wrong_recipes(tmp_path: Path, port: int) -> list[tuple[list[str], str]]:
    (tmp_path / "bad.yaml").write_text("extends: tiny\nrl:\n  roc:\n    drawm: 4\n")
    (tmp_path / "file").touch()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine.py").write_text("def loss(terms, config): ...")
    (tmp_path / "own" / "recipe.yaml").write_text("extends: tiny\nrl: {loss: {kind: 'mine:los'}}\n")
    row = '{"prompt": "q", "answer": "x+1", "grader": "%s"}\n'
    (tmp_path / "grader.jsonl").write_text((row % "math") * 48 + row % "exact")
    (tmp_path / "truth.jsonl").write_text(row % "integer")
    return [
        (["tiny", "--set", "rl.problems=grader.jsonl"], "grader = 'exact' is unknown"),
        (
            [
                "tiny",
                "--set",
                "rl.problems=null",
                "--set",
                "environment.args.problems=grader.jsonl",
            ],
            "grader.jsonl:49: problem 49: grader = 'exact' is unknown",
        ),
        (["tiny", "--set", "environment.use=python-maths"], "did you mean python-math?"),
        (["tiny", "--set", "evaluation.problems=truth.jsonl"], "truth.jsonl:1: problem 1: answer"),
        (["bad.yaml"], "bad.yaml:4: rl.roc.drawm is not a setting: did you mean rl.roc.drawn?"),
        (["tiny", "--set", "rl.stages.stage3.max_length=9999"], "longer than model.max_length"),
        (["tiny", "--set", "model.path=/no/such/model"], "no such directory"),
        (["tiny", "--set", "engine.kv_tokens=900000000000"], "GiB of memory"),
        (["tiny", "--set", f"codeenv.port={port}"], "is already in use"),
        (["tiny", "--run", "file/run"], "is a file"),
        (["tiny", "--run", "/proc/run"], "cannot be written"),
        (["tinny"], "did you mean tiny?"),
        (
            ["tiny", "--set", "rl.advantage=rlo"],
            "rl.advantage = 'rlo' is not known: did you mean rloo?",
        ),
        (
            ["tiny", "--set", "rl.loss.kind=ppo"],
            "use clip, gspo, cispo, or your own as module:function",
        ),
        (
            ["own/recipe.yaml"],
            "rl.loss.kind = mine:los: mine has no function los: did you mean loss?",
        ),
        (["tiny", "--set", "rl.problems=gone.jsonl"], "no such file"),
    ]


def test_wrong_recipes_get_one_message_and_leave_nothing(
    rstar2: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        cases = wrong_recipes(tmp_path, taken.getsockname()[1])
        before = sorted(tmp_path.rglob("*"))
        for words, expected in cases:
            code, out, err = rstar2("train", *words)
            assert (code, out) == (2, "")
            assert expected in err
            assert err.count("error: ") == 1
            assert "Traceback" not in err
        assert sorted(tmp_path.rglob("*")) == before


def test_refusing_a_recipe_does_not_import_torch(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom rstar2.cli import main\n"
        "try:\n    main(['train', 'tiny', '--set', 'rl.roc.kept=99'])\n"
        "except SystemExit as end:\n    assert end.code == 2\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=300)
    assert list(tmp_path.iterdir()) == []


def test_sft_needs_an_sft_stage(rstar2: Run) -> None:
    code, _, err = rstar2("sft", "tiny", "--set", "sft=null")
    assert code == 2
    assert "has no SFT stage" in err


# --------------------------------------------------------------------------- shown


def test_dry_run_prints_each_value_with_its_origin(rstar2: Run, tmp_path: Path) -> None:
    code, out, _ = rstar2("train", "tiny", "--dry-run", "--set", "rl.roc.kept=4", "--seed", "7")
    assert code == 0
    lines = {
        line.split("#")[0].strip(): line.split("#")[1].strip()
        for line in out.splitlines()
        if "#" in line
    }
    assert lines["kept: 4"] == "--set"
    assert lines["seed: 7"] == "--seed"
    assert lines["drawn: 16"].startswith("tiny.yaml:")
    assert lines["clip_high: 0.28"] == "default"
    assert list(tmp_path.iterdir()) == []


def test_dry_run_of_a_recipe_for_another_machine_still_prints_it(rstar2: Run) -> None:
    code, out, err = rstar2("train", "rstar2-agent-14b", "--dry-run")
    assert code == 0
    assert "prompts_per_step: 512" in out
    assert "could not start here" in err


def test_help_lists_what_there_is_and_version_works(rstar2: Run) -> None:
    code, out, _ = rstar2("--help")
    assert code == 0
    for name in ("quickstart", "train", "sft"):
        assert name in out
    assert rstar2("--version")[1].startswith("rstar2 ")
    for name in ("quickstart", "train", "sft"):
        code, out, _ = rstar2(name, "--help")
        assert code == 0
        assert "--fresh" in out
    code, _, err = rstar2("trian")
    assert code == 2
    assert "trian" in err


# --------------------------------------------------------------------------- run


def test_a_run_ends_with_table_and_report(tmp_path: Path, capfd: Any) -> None:
    execute(tiny(), tmp_path / "run", pipeline=small_run)
    out, err = capfd.readouterr()
    assert "30.0%" in out
    assert "sft 2/2" not in out  # progress is for stderr
    assert "sft: greedy 30.0%" in err
    assert (tmp_path / "run" / "report.html").exists()
    names = [event["event"] for event in read_events(tmp_path / "run")]
    assert names == ["started", "finished"]


def test_json_is_all_there_is_on_stdout(tmp_path: Path, capfd: Any) -> None:
    execute(tiny(), tmp_path / "run", json=True, pipeline=small_run)
    result = json.loads(capfd.readouterr().out)
    assert result["run"] == str(tmp_path / "run")
    assert [e["mode"] for e in result["evaluations"]] == ["greedy", "sampled"]
    assert Path(result["report"]).exists()


async def forbidden(recipe: Recipe, run: RunDirectory, view: ProgressView) -> None:
    pytest.fail("a finished run was started again")


def test_a_finished_run_says_so_and_fresh_starts_it_again(tmp_path: Path, capfd: Any) -> None:
    execute(tiny(), tmp_path, pipeline=small_run)
    capfd.readouterr()
    execute(tiny(), tmp_path, pipeline=forbidden)
    out, err = capfd.readouterr()
    assert "already finished" in err.replace("\n", " ")
    assert "30.0%" in out
    with pytest.raises(RecipeError, match="seed: 0 -> 1"):
        execute(tiny("seed=1"), tmp_path, pipeline=forbidden)
    execute(tiny("seed=1"), tmp_path, fresh=True, pipeline=small_run)
    assert len(read_metrics(tmp_path)) == 2


def stopped_by(number: signal.Signals) -> Pipeline:
    async def pipeline(recipe: Recipe, run: RunDirectory, view: ProgressView) -> None:
        run.metrics("sft", 1, {"loss": 1.0})
        os.kill(os.getpid(), number)
        await asyncio.Event().wait()

    return pipeline


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_in_order_and_says_how_to_resume(
    tmp_path: Path, capfd: Any, number: signal.Signals
) -> None:
    with pytest.raises(typer.Exit) as caught:
        execute(tiny(), tmp_path, pipeline=stopped_by(number))
    assert caught.value.exit_code == 128 + number
    assert "To resume: " in capfd.readouterr().err
    assert read_events(tmp_path)[-1]["event"] == "stopped"
    execute(tiny(), tmp_path, pipeline=small_run)
    assert [m["step"] for m in read_metrics(tmp_path)] == [1, 2]


def test_losing_an_engine_to_the_same_signal_is_no_failure(tmp_path: Path, capfd: Any) -> None:
    async def pipeline(recipe: Recipe, run: RunDirectory, view: ProgressView) -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            raise BrokenPipeError("the engine got the signal too")

    with pytest.raises(typer.Exit) as caught:
        execute(tiny(), tmp_path, pipeline=pipeline)
    assert caught.value.exit_code == 130
    assert "To resume: " in capfd.readouterr().err


def test_log_messages_go_to_a_file(tmp_path: Path, capfd: Any) -> None:
    async def pipeline(recipe: Recipe, run: RunDirectory, view: ProgressView) -> None:
        logging.getLogger("asyncio").warning("socket.send() raised exception.")

    execute(tiny(), tmp_path, pipeline=pipeline)
    assert "socket.send()" not in capfd.readouterr().err
    assert "WARNING asyncio: socket.send()" in (tmp_path / "log.txt").read_text()


def test_a_failed_run_is_recorded_and_lets_the_directory_go(tmp_path: Path) -> None:
    async def failing(recipe: Recipe, run: RunDirectory, view: ProgressView) -> None:
        raise EngineError("engine 0 is gone")

    with pytest.raises(EngineError):
        execute(tiny(), tmp_path, pipeline=failing)
    last = read_events(tmp_path)[-1]
    assert (last["event"], last["error"]) == ("failed", "EngineError")
    execute(tiny(), tmp_path, pipeline=small_run)


async def refuses(recipe: Recipe, run: RunDirectory, view: ProgressView) -> None:
    """A pipeline that finds out that the recipe cannot work."""
    raise RecipeError("model.path: no tokenizer found there")


async def fails_later(recipe: Recipe, run: RunDirectory, view: ProgressView) -> None:
    """A pipeline that fails after its first step."""
    run.metrics("sft", 1, {"loss": 1.0})
    await refuses(recipe, run, view)


def test_a_refused_recipe_leaves_no_directory_and_the_corrected_one_runs(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(RecipeError, match="no tokenizer"):
        execute(tiny(), run, pipeline=refuses)
    assert not run.exists()
    execute(tiny("seed=5"), run, pipeline=small_run)
    assert read_metrics(run)


def test_a_run_with_steps_is_never_removed(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no tokenizer"):
        execute(tiny(), tmp_path / "run", pipeline=fails_later)
    assert len(read_metrics(tmp_path / "run")) == 1


def test_next_steps_work_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first line puts the command on PATH, if it is not there; the others are commands."""
    run = tmp_path / "runs" / "my run"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    first, *commands = re.findall(r"^  (.*?)  +# ", next_steps(run), re.MULTILINE)
    program = f"{first} && command -v rstar2"
    located = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=60)
    assert located.stdout.strip() == str(Path(sys.executable).parent / "rstar2")
    for words in map(shlex.split, commands):
        assert words[0] == "rstar2"
        assert words[1] in COMMANDS
        assert "runs/my run" in words
    assert is_known_question(shlex.split(commands[0])[-1])
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    assert "source " not in next_steps(run)


def test_the_hint_to_install_vllm_names_a_make_target() -> None:
    recipe = tiny("engine.kind=vllm")
    with pytest.raises(RecipeError) as refused:
        check_supported(recipe)
    (target,) = re.findall(r"make (\S+)", str(refused.value))
    root = Path(__file__).resolve().parents[2]
    dry = ["make", "--dry-run", "--always-make", target]
    done = subprocess.run(dry, cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "install_vllm.py" in done.stdout


def test_the_command_to_resume_does_not_start_again() -> None:
    words = ["/usr/bin/rstar2", "quickstart", "--fresh", "--set", "name=a b"]
    assert again(words) == ["rstar2", "quickstart", "--set", "name=a b"]
