"""`rstar2 chat`: colours, what is refused, and a real conversation with a tiny model."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rstar2.cli import main
from rstar2.cli.chat import chat_environment
from rstar2.cli.chat_output import ColouredOutput
from rstar2.cli.model_directory import known_questions, longest, model_directory
from rstar2.errors import UserError
from rstar2.types import StopReason, Trajectory, decode


def paint(pieces: list[str], *, colour: bool) -> str:
    out = io.StringIO()
    system: Literal["standard"] | None = "standard" if colour else None
    output = ColouredOutput(Console(file=out, force_terminal=colour, color_system=system, width=40))
    for piece in pieces:
        output.feed(piece)
    output.end()
    return out.getvalue()


@given(
    st.lists(st.sampled_from(["<", "<re", "ason>", "</answer>", "<answer>", "a < b", "\n", "[b]"]))
)
def test_painting_changes_no_text(pieces: list[str]) -> None:
    assert paint(pieces, colour=False) == "".join(pieces) + "\n"


@given(st.integers(0, 40))
def test_a_tag_is_recognised_wherever_the_stream_is_cut(cut: int) -> None:
    text = "<reason>a</reason>\n<answer>b</answer>"
    whole = paint([text], colour=True)
    assert "\x1b[2m<reason>" in whole
    assert "\x1b[1;32m<answer>" in whole
    pieces = paint([text[:cut], text[cut:]], colour=True)
    assert styled(pieces) == styled(whole)


CALL = {"name": "python", "arguments": {"code": "x = 6\nprint(x * 7)\n", "input": ""}}


@given(st.integers(0, 90))
def test_a_tool_call_is_shown_as_its_program(cut: int) -> None:
    text = f"<reason>so</reason>\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
    shown = "<reason>so</reason>\n<tool_call>\nx = 6\nprint(x * 7)\n</tool_call>\n"
    assert paint([text[:cut], text[cut:]], colour=False) == shown
    coloured = paint([text[:cut], text[cut:]], colour=True)
    assert "".join(character for character, _ in styled(coloured)) == shown


@pytest.mark.parametrize("call", ["{not JSON", '{"name": "f", "arguments": {"x": 1}}', "[]"])
def test_other_calls_are_shown_as_they_are(call: str) -> None:
    text = f"<tool_call>\n{call}\n</tool_call>"
    assert paint([text], colour=False) == text + "\n"
    assert paint([text[:-3]], colour=False) == text[:-3] + "\n"  # cut off: nothing is lost


def styled(text: str) -> list[tuple[str, str]]:
    """Every visible character with its style, whatever the runs are."""
    characters: list[tuple[str, str]] = []
    style = ""
    for escape, character in re.findall(r"\x1b\[([0-9;]*)m|([^\x1b])", text):
        if character:
            characters.append((character, style))
        else:
            style = "" if escape == "0" else escape
    return characters


def test_only_the_tiny_model_of_the_embedded_task_knows_so_little(
    tmp_path: Path, tiny_dir: Path
) -> None:
    shutil.copytree(tiny_dir, tmp_path / "model")
    knows = known_questions(tmp_path / "model")
    assert knows is not None
    assert knows("What is 30 choose 4?")
    assert not knows("Who are you?")
    export = tmp_path / "run" / "exports" / "stage1"
    export.parent.mkdir(parents=True)
    (tmp_path / "model").rename(export)
    recipe = tmp_path / "run" / "recipe.yaml"
    recipe.write_text("environment: {use: python-math}\nrl: {problems: null}\n")
    assert known_questions(export) is not None
    recipe.write_text("environment: {use: cities:env}\n")
    assert known_questions(export) is None
    recipe.write_text("rl: {problems: mine.jsonl}\n")
    assert known_questions(export) is None
    config = json.loads((export / "config.json").read_text())
    (export / "config.json").write_text(json.dumps(config | {"hidden_size": 2048}))
    assert known_questions(export) is None


def test_a_model_is_asked_in_the_environment_that_it_was_trained_in(tmp_path: Path) -> None:
    run = tmp_path / "run"
    export = run / "exports" / "stage1"
    export.mkdir(parents=True)
    (run / "environment.json").write_text("{}")
    assert chat_environment("auto", None).use == "python-math"
    assert chat_environment("auto", tmp_path).use == "python-math"  # no run made it
    recipe = "name: mine\nsft: null\nenvironment: {use: 'cities:env', folder: %s}\n"
    (run / "recipe.yaml").write_text(recipe % tmp_path)
    assert chat_environment("auto", export).use == "cities:env"
    assert chat_environment("python-math", export).use == "python-math"
    about = {"environment": {"name": "cities", "use": "cities", "made_from": {}}}
    (run / "environment.json").write_text(json.dumps(about))
    (run / "recipe.yaml").write_text(recipe.replace("cities:env", "cities") % tmp_path)
    with pytest.raises(UserError, match=r"exists only in Python: chat there with rstar2\.Agent"):
        chat_environment("auto", export)


@pytest.mark.parametrize(
    "arguments",
    [[], ["--model", "a", "--url", "http://x"], ["--model", "/nonexistent"],
     ["--url", "http://x", "--system", "mine"]],
)  # fmt: skip
def test_what_cannot_work_is_refused_at_once(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["chat", *arguments, "hello"])
    assert exit_.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_a_run_directory_stands_for_the_export_of_its_last_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="no config"):
        model_directory(tmp_path)
    (tmp_path / "recipe.yaml").write_text(
        "rl: {stages: [{name: short}, {name: long}, {name: hard}]}"
    )
    for name in ("long", "best", "short", "sft"):
        export = tmp_path / "exports" / name
        export.mkdir(parents=True)
        (export / "config.json").write_text('{"max_position_embeddings": 64}')
    os.utime(tmp_path / "exports" / "long", (1, 1))  # as after a copy
    last = model_directory(tmp_path)
    assert last.name == "long"
    assert f"model: {last}" in capsys.readouterr().err
    assert model_directory(last) == last
    assert (longest(last, 100), longest(last, 32)) == (64, 32)
    (last / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        longest(last, 100)


def test_exports_that_the_recipe_does_not_know_are_not_chosen_by_chance(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("rl: {stages: []}")
    for name in ("a", "b"):
        (tmp_path / "exports" / name).mkdir(parents=True)
        (tmp_path / "exports" / name / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"exports \(a, b\) are not stages .*such as .*exports/a"):
        model_directory(tmp_path)


@pytest.mark.slow
def test_a_tiny_model_chats(
    tiny_dir: Path, served_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["chat", "--model", str(tiny_dir), "--system", "none", "--max-length", "64"]
    arguments += ["--codeenv", served_url]
    with pytest.raises(SystemExit) as exit_:
        main([*arguments, "--json", "What is 6 times 7?"])
    assert exit_.value.code == 0
    (line,) = capsys.readouterr().out.splitlines()
    trajectory = decode(line, Trajectory)
    assert len(trajectory.token_ids) <= 64
    assert trajectory.stop in (StopReason.MAX_LENGTH, StopReason.NO_ANSWER)
    assert json.loads(line)["group_id"] == "chat"
