"""Recipes: loading, overriding, provenance, and every way to get one wrong."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path
from typing import Protocol

import pytest

from rstar2.config import Recipe, load_recipe, render_recipe, shipped_recipes
from rstar2.config.preflight import (
    TINY,
    check_data,
    check_memory,
    check_model,
    check_run_directory,
    memory_estimate,
    preflight,
)
from rstar2.errors import RecipeError, UserError


class Write(Protocol):
    """Writes a recipe file and returns its path."""

    def __call__(self, text: str, name: str = "mine.yaml") -> Path: ...


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str, name: str = "mine.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def refusal(name: str | Path, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(name, overrides)
    return str(caught.value)


# --------------------------------------------------------------------------- shipped recipes


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_every_shipped_recipe_loads(name: str) -> None:
    assert load_recipe(name).recipe.rl.stages


def test_the_shipped_recipes_are_found_by_name() -> None:
    assert {"tiny", "rstar2-agent-14b", "qwen3-1.7b-1gpu"} <= shipped_recipes().keys()


def test_the_14b_recipe_holds_the_papers_numbers() -> None:
    recipe = load_recipe("rstar2-agent-14b").recipe
    assert recipe.sft is not None
    assert (recipe.sft.epochs, recipe.sft.batch, recipe.sft.optimizer.lr) == (3, 128, 5e-6)
    rl = recipe.rl
    assert (rl.prompts_per_step, rl.roc.drawn, rl.roc.kept) == (512, 32, 16)
    assert (rl.loss.clip_low, rl.loss.clip_high, rl.loss.kl, rl.loss.entropy) == (0.2, 0.28, 0, 0)
    assert (rl.optimizer.lr, rl.optimizer.warmup_steps, rl.sampling.temperature) == (1e-6, 20, 1)
    assert [(s.steps, s.max_length, s.max_turns) for s in rl.stages] == [
        (300, 8192, 10),
        (85, 12288, 10),
        (125, 12288, 15),
    ]
    assert rl.stages[2].difficulty is not None
    assert rl.stages[2].difficulty.samples == 8
    assert [s.reset_optimizer for s in rl.stages] == [False, False, True]
    evaluation = recipe.evaluation
    assert (evaluation.temperature, evaluation.max_turns, evaluation.samples) == (0.6, 30, 16)


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_the_printed_recipe_loads_to_the_same_values(name: str, write: Write) -> None:
    loaded = load_recipe(name, ["seed=3"])
    assert load_recipe(write(render_recipe(loaded))).recipe == loaded.recipe


# --------------------------------------------------------------------------- precedence


def test_each_value_knows_where_it_came_from(write: Write) -> None:
    path = write("extends: tiny\nname: mine\nrl:\n  roc:\n    drawn: 12\n")
    loaded = load_recipe(path, ["rl.roc.kept=6", "rl.stages.stage2.steps=4"], seed=5)
    recipe = loaded.recipe
    assert (recipe.rl.roc.drawn, recipe.rl.roc.kept, recipe.seed) == (12, 6, 5)
    assert recipe.rl.stages[1].steps == 4
    assert str(loaded.origin("rl.roc.drawn")) == f"{path}:5"
    assert str(loaded.origin("rl.roc.kept")) == "--set"
    assert str(loaded.origin("rl.stages.1.steps")) == "--set"
    assert str(loaded.origin("rl.stages.0.steps")).startswith("tiny.yaml:")
    assert str(loaded.origin("seed")) == "--seed"
    assert str(loaded.origin("rl.loss.clip_low")) == "default"


def test_a_list_replaces_the_list_it_extends(write: Write) -> None:
    path = write("extends: tiny\nrl:\n  stages:\n    - {name: only, steps: 60, max_length: 200}\n")
    loaded = load_recipe(path)
    assert [stage.name for stage in loaded.recipe.rl.stages] == ["only"]
    assert not any(key.startswith("rl.stages.1") for key in loaded.origins)


def test_extending_a_neighbour_and_not_oneself(write: Write) -> None:
    write("extends: tiny\nseed: 4\n", "base.yaml")
    assert load_recipe(write("extends: base.yaml\nname: top\n")).recipe.seed == 4
    assert "circle" in refusal(write("extends: loop.yaml\n", "loop.yaml"))


def test_overrides_are_read_by_the_schemas_type() -> None:
    overrides = ["name=5", "sft=null", "rl.optimizer.lr=3e-4", "rl.loss.sequence_mask=[0.5, 2]"]
    recipe = load_recipe("tiny", [*overrides, "rl.collapse.window=7", "codeenv.urls=[a, b]"]).recipe
    assert (recipe.name, recipe.sft, recipe.rl.optimizer.lr) == ("5", None, 3e-4)
    assert recipe.rl.loss.sequence_mask == (0.5, 2.0)
    assert recipe.rl.collapse is not None
    assert recipe.rl.collapse.window == 7
    assert recipe.codeenv.urls == ("a", "b")


def test_partly_given_limits_keep_the_other_defaults(write: Write) -> None:
    path = write("name: x\ncodeenv:\n  cap: {wall_s: 9}\n")
    cap = load_recipe(path).recipe.codeenv.cap
    assert cap.wall_s == 9
    assert None not in dataclasses.astuple(cap)


# --------------------------------------------------------------------------- wrong recipes


def test_an_unknown_key_names_line_and_nearest(write: Write) -> None:
    path = write("name: x\nrl:\n  roc:\n    drawm: 3\nsedd: 1\ncodeenv:\n  cap:\n    wal_s: 1\n")
    message = refusal(path)
    assert f"{path}:4: rl.roc.drawm is not a setting: did you mean rl.roc.drawn?" in message
    assert f"{path}:5: sedd is not a setting: did you mean seed?" in message
    assert (
        f"{path}:8: codeenv.cap.wal_s is not a setting: did you mean codeenv.cap.wall_s?" in message
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rl.rok.drawn=3", "rl.rok is not a setting: did you mean rl.roc?"),
        ("rl.lr=3", "did you mean rl.optimizer.lr?"),
        ("nonsense=3", "a recipe has name, seed"),
        ("seed", "write it as setting=value"),
        ("rl.stages.stage9.steps=1", "it has stage1, stage2, stage3"),
        ("rl.stages.stage1.stepz=1", "did you mean rl.stages.0.steps?"),
        ("seed.more=1", "not a setting"),
        ("rl.roc.drawn=[", "not valid YAML"),
        ("rl.roc.variant=rco", "should be 'roc', 'flat', 'uniform', 'none' or 'release'"),
        ("rl.roc.drawn=1", "greater than or equal to 2"),
        ("rl.roc.drawn=many", "rl.roc.drawn = 'many' should be a valid integer"),
    ],
)
def test_wrong_overrides(override: str, expected: str) -> None:
    assert expected in refusal("tiny", override)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["rl.roc.kept=32"], "rl.roc.kept = 32 is more than rl.roc.drawn = 16"),
        (["rl.roc.variant=none"], "must equal"),
        (["rl.roc.min_positives=9"], "is more than rl.roc.kept"),
        (["rl.minibatches=25"], "groups are never split"),
        (["rl.sampling.top_p=0.9"], "rl.sampling.top_p = 0.9 draws rollouts from a truncated"),
        (["rl.sampling.top_k=20"], "ratios would be wrong: use 0"),
        (["rl.stages.0.until={plateau: {window: 40}}"], "cannot end before its"),
        (["rl.stages.0.until={plateau: {metric: evaluation/greedy}}"], "set evaluation.every"),
        (["rl.stages.0.name=base"], "not base or sft"),
        (["rl.count=15"], "less than one step draws"),
        (["learner.ranks=100"], "cannot be shared by learner.ranks = 100"),
        (["learner.tokens_per_microbatch=100"], "cannot hold one rollout"),
        (["rl.stages.stage3.max_length=4096"], "longer than model.max_length"),
        (["sft.max_length=4096"], "longer than model.max_length"),
        (["engine.kv_tokens=256"], "cannot hold one rollout"),
        (["agent.response_tokens=400"], "would fill a whole rollout"),
        (["rl.stages.stage2.name=stage1"], "two stages are called 'stage1'"),
        (["rl.stages.stage2.name=eval-x"], "not a valid stage name"),
        (["rl.stages.stage2.name=../../etc"], "not a valid stage name"),
        (["sft.epochs=2"], "both set"),
        (["sft.steps=0"], "both 0"),
        (["sft.optimizer.warmup_steps=100000"], "not shorter than"),
        (["rl.optimizer.betas=[0.9, 1.0]"], "must lie in [0, 1)"),
        (["rl.loss.sequence_mask=[2, 1]"], "increasing pair"),
        (["rl.sampling.temperature=0"], "same rollout every time"),
        (["learner.lora={rank: 8}"], "learner.lora trains none: use adamw"),
        (["learner.cpu_offload=true"], "needs several ranks, and learner.ranks = 1"),
        (["engine.sleep=true"], "needs vLLM servers that rstar2 starts"),
        (["engine.kind=vllm", "engine.lora=adapter"], "engine.lora = adapter needs learner.lora"),
        (["engine.kind=vllm", "engine.quantization=int8"], "is for embedded engines, not for vllm"),
        (
            ["engine.quantization=int8", "rl.loss.importance_cap=null"],
            "needs the importance correction: set rl.loss.importance_cap",
        ),
        (["engine.kind=openai"], "evaluation only"),
        (["engine.urls=[http://x]"], "not used by engine.kind = embedded"),
        (["deterministic=true", "engine.kind=vllm"], "is not possible"),
        (["codeenv.host=0.0.0.0"], "codeenv.token"),
        (["codeenv.default.wall_s=100"], "above codeenv.cap.wall_s"),
        (["agent.tool_deadline_s=1"], "before the call itself may end"),
    ],
)
def test_values_that_cannot_go_together(overrides: list[str], expected: str) -> None:
    message = refusal("tiny", *overrides)
    assert expected in message
    assert "from --set" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: [", ":1: not valid YAML"),
        ("name: a\nname: b\n", ":2: name is set twice"),
        ("- a\n- b\n", "a recipe is a mapping"),
        ("seed: 1\n", "name is missing"),
        ("name: &x [*x]\n", "contains itself"),
        ("name: !!python/object:os.system x\n", ":1: name:"),
        ("name: x\nrl: 5\n", "rl = 5"),
    ],
)
def test_files_that_are_no_recipes(write: Write, text: str, expected: str) -> None:
    assert expected in refusal(write(text))


def test_a_recipe_that_is_not_there_names_those_that_are() -> None:
    message = refusal("tinny")
    assert "did you mean tiny?" in message
    assert "rstar2-agent-14b" in message


# --------------------------------------------------------------------------- this machine


def tiny(*overrides: str) -> Recipe:
    return load_recipe("tiny", overrides).recipe


def test_the_tiny_recipe_can_start_here(tmp_path: Path) -> None:
    preflight(tiny(), tmp_path / "new" / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_taken_port_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RecipeError, match=f"codeenv.port = {port} .* is already in use"):
            preflight(tiny(f"codeenv.port={port}"), tmp_path)


def test_an_unwritable_run_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"):
        check_run_directory(tmp_path / "file" / "run")
    with pytest.raises(UserError, match=r"cannot be written|read-only"):
        check_run_directory(Path("/proc/sys/run"))


def test_a_missing_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match="no such directory"):
        check_model(tiny("model.path=/no/such/model"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecipeError, match=r"has no config\.json"):
        check_model(tiny(f"model.path={tmp_path / 'empty'}"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with pytest.raises(RecipeError, match="cannot be reached"):
        check_model(tiny("model.path=nobody/nothing"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(RecipeError, match="HF_HUB_OFFLINE"):
        check_model(tiny("model.path=nobody/nothing"))


def test_a_model_that_is_too_short_is_refused(tmp_path: Path) -> None:
    config = (
        '{"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,'
        ' "intermediate_size": 128,'
        ' "vocab_size": 100, "max_position_embeddings": 256}'
    )
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(RecipeError, match="256 positions"):
        check_model(tiny(f"model.path={tmp_path}"))
    (tmp_path / "config.json").write_text(config.replace("256", "4096"))
    size = check_model(tiny(f"model.path={tmp_path}"))
    assert size is not None
    assert (size.shape.layers, size.shape.kv_numbers) == (2, 2 * 2 * 4 * 16)
    assert size.shape.vocabulary == 100


def test_too_little_memory_is_refused_naming_the_largest_part() -> None:
    recipe = tiny("engine.kv_tokens=100000000000")
    with pytest.raises(RecipeError, match="GiB of memory") as caught:
        check_memory(recipe, TINY, available=16 << 30)
    assert "engine.kv_tokens" in str(caught.value).splitlines()[1]
    assert sum(memory_estimate(tiny(), TINY).values()) < 4 << 30
    weights = "weights of 2 engine(s)"
    coarse = memory_estimate(tiny("model.dtype=bfloat16"), TINY)
    assert coarse[weights] == memory_estimate(tiny(), TINY)[weights], "plain and packed"


def test_missing_or_too_little_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no such file"):
        check_data("sft.data", str(tmp_path / "gone.jsonl"), tiny())
    few = tmp_path / "few.jsonl"
    few.write_text('{"id": 1}\n' * 5)
    with pytest.raises(RecipeError, match="has 5 problems"):
        check_data("rl.problems", str(few), tiny())


def test_recipes_load_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe("tiny").recipe.name == "tiny"
    assert list(tmp_path.iterdir()) == []
