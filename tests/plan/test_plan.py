"""Plans: memory and time follow from data sheets and assumptions, and problems are reported."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rstar2.cli import app, main
from rstar2.config import Recipe, load_recipe
from rstar2.errors import UserError
from rstar2.model_config import ModelShape
from rstar2.plan import GPUS, Assumptions, find_shape, make_plan, parse_cluster
from rstar2.plan.estimate import Roofline, layout_of
from rstar2.plan.memory import learner_memory
from rstar2.plan.propose import propose
from rstar2.plan.transfer import weight_seconds
from rstar2.plan.workload import draw_lengths, stage_loads


@pytest.fixture(scope="module")
def paper() -> Recipe:
    return load_recipe("rstar2-agent-14b").recipe


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Qwen/Qwen3-14B-Base", 14.77), ("Qwen/Qwen3-1.7B-Base", 1.72), ("Qwen/Qwen3-8B", 8.19)],
)
def test_shapes_have_the_published_parameter_counts(name: str, billions: float) -> None:
    assert find_shape(name).parameters / 1e9 == pytest.approx(billions, abs=0.01)


def test_a_models_own_configuration_comes_first(tmp_path: Path) -> None:
    config = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "vocab_size": 100,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = find_shape(str(tmp_path))
    assert shape.head_dim == 16
    assert shape.kv_numbers == 2 * 2 * 2 * 16
    assert shape.parameters == 2 * (64 * 16 * 12 + 3 * 64 * 128) + 6400
    with pytest.raises(UserError, match="neither a directory"):
        find_shape("nobody/knows-this")


def test_clusters_are_written_in_two_ways() -> None:
    flat, nodes = parse_cluster("64xMI300X"), parse_cluster("4x2xrtx4090", cores_per_node=16)
    assert (flat.gpus, flat.nodes, flat.gpu) == (64, 8, GPUS["MI300X"])
    assert (nodes.gpus, nodes.nodes, nodes.cores) == (8, 4, 64)
    for wrong in ("MI300X", "8xTPU", "0xH100", "8 H100"):
        with pytest.raises(UserError):
            parse_cluster(wrong)


def test_the_papers_run_comes_out_at_under_a_week(paper: Recipe) -> None:
    plan = make_plan(paper, parse_cluster("64xMI300X"))
    assert not plan.problems
    assert 2 < plan.total_s / 86400 < 9
    assert sum(s.load.steps for s in plan.stages) == 510
    assert plan.stages[0].load.drawn >= 16_384
    assert all(s.step_s == pytest.approx(s.generate_s + s.tools_s + s.learn_s + s.sync_s)
               for s in plan.stages)  # fmt: skip
    slow = replace(plan.cluster.gpu, train_mfu=plan.cluster.gpu.train_mfu / 2)
    slower = make_plan(paper, replace(plan.cluster, gpu=slow))
    fixed = plan.assume.learn_fixed_s
    for before, after in zip(plan.stages, slower.stages, strict=True):
        assert after.learn_s - fixed == pytest.approx(2 * (before.learn_s - fixed))
        assert after.generate_s == before.generate_s


def test_one_step_of_an_engine_by_hand(paper: Recipe) -> None:
    cluster, assume = parse_cluster("8xH100"), Assumptions(step_overhead_s=0.0)
    shape = find_shape(paper.model.path)
    roofline = Roofline(paper, cluster, shape, layout_of(paper), assume, 10**6)
    weights, kv = 2 * shape.parameters, 163_840
    assert 2 * shape.kv_numbers == kv, "40 layers x 8 heads x 128 x keys and values x 2 bytes"
    seconds = (weights + kv * 1000) / (3.35e12 * assume.decode_bandwidth)
    assert roofline.step(1, 1000) == pytest.approx(seconds)
    assert roofline.step(4096, 0) == pytest.approx(2 * shape.parameters * 4096 / (989e12 * 0.6))
    one = roofline.decoding([10], held=4)
    assert one == pytest.approx(10 * roofline.step(1, assume.prompt_tokens + 5))
    together, in_turn = roofline.decoding([50] * 4, held=4), roofline.decoding([50] * 4, held=1)
    assert together < in_turn / 2, "decoding is bound by reading weights"


def test_drawn_lengths_have_the_mean_and_keep_the_limit(paper: Recipe) -> None:
    assume = Assumptions()
    for load in stage_loads(paper, assume):
        lengths = draw_lengths(2000, load, assume)
        assert sum(lengths) / 2000 == pytest.approx(load.mean_completion, rel=0.02)
        assert max(lengths) <= load.max_length - assume.prompt_tokens
        assert lengths == draw_lengths(2000, load, assume)


@pytest.mark.slow
def test_the_simulator_agrees_with_the_closed_form(paper: Recipe) -> None:
    cluster = parse_cluster("512xMI300X")
    closed, simulated = make_plan(paper, cluster), make_plan(paper, cluster, simulated=True)
    for mine, theirs in zip(closed.stages, simulated.stages, strict=True):
        assert theirs.generate_s == pytest.approx(mine.generate_s, rel=0.35)


def test_what_does_not_fit_is_reported_with_a_remedy() -> None:
    recipe = load_recipe("qwen3-1.7b-1gpu").recipe
    plan = make_plan(recipe, parse_cluster("1x4090"))
    assert not plan.learner.fits
    assert "use more GPUs (--write-recipe FILE writes a layout" in plan.problems[0]
    two = propose(recipe, parse_cluster("2x4090"))
    assert make_plan(two, parse_cluster("2x4090")).learner.fits
    with pytest.raises(UserError, match="does not fit 1 x 4090 in any layout: a GPU needs"):
        propose(recipe, parse_cluster("1x4090"))


def test_the_layout_is_that_of_the_recipe(paper: Recipe) -> None:
    """64 engines and ranks, whatever the cluster; the plan says if they are too many or too few."""
    for count in ("64xMI300X", "8xMI300X", "512xMI300X"):
        layout = make_plan(paper, parse_cluster(count)).layout
        assert (layout.engines, layout.tensor_parallel, layout.ranks) == (64, 1, 64)
    (problem,) = make_plan(paper, parse_cluster("8xMI300X")).problems
    assert "the recipe needs 64 GPUs (engine.count = 64 of 1, learner.ranks = 64)" in problem
    one = load_recipe("rstar2-agent-14b", ["engine.count=1"]).recipe
    assert make_plan(one, parse_cluster("64xMI300X")).layout.engines == 1
    apart = load_recipe(
        "rstar2-agent-14b",
        ["cluster.colocate=false", "cluster.gpus_per_engine=2", "engine.count=16"],
    ).recipe
    assert make_plan(apart, parse_cluster("64xMI300X")).layout.gpus == 96


def test_an_engine_keeps_its_memory_while_the_learner_works(paper: Recipe) -> None:
    shared = make_plan(paper, parse_cluster("64xMI300X"))
    assert shared.learner.parts["engine on the same GPU"] > 100
    assert shared.learner.total == pytest.approx(shared.engine.total)
    assert 0.5 < shared.engine_share < 0.9


def test_a_share_that_leaves_the_learner_too_little_is_a_problem() -> None:
    for share, fits in ((0.3, True), (0.9, False)):
        sets = [f"engine.gpu_memory_share={share}"]
        recipe = load_recipe("rstar2-agent-14b", sets).recipe
        problems = make_plan(recipe, parse_cluster("64xMI300X")).problems
        assert (not problems) is fits
    assert "engine.gpu_memory_share = 0.9 is 172.8 GB" in problems[0]


def test_disk_of_checkpoints(paper: Recipe) -> None:
    """Weights and two moments in float32; with LoRA those of the adapters."""
    plan = make_plan(paper, parse_cluster("64xMI300X"))
    assert plan.checkpoint_gb == pytest.approx(177, abs=1)
    assert plan.checkpoints == paper.record.keep_checkpoints + 1
    lora = make_plan(load_recipe("qwen3-1.7b-lora-24gb").recipe, parse_cluster("1x4090"))
    assert 0.1 < lora.checkpoint_gb < 1


def test_disk_of_rollouts_by_hand(paper: Recipe) -> None:
    """The paper's recipe keeps half of the rollouts: 8,192 a step."""
    plan = make_plan(paper, parse_cluster("64xMI300X"), Assumptions(tool_share=0.0))
    first = plan.stages[0]
    assert paper.record.trajectories == "kept"
    assert first.record_gb == pytest.approx(8192 * first.load.mean_completion * (15 + 4.5) / 1e9)
    whole = load_recipe("rstar2-agent-14b", ["record.trajectories=all"]).recipe
    assert make_plan(whole, plan.cluster).rollouts_gb > 2 * plan.rollouts_gb
    nothing = load_recipe("rstar2-agent-14b", ["record.trajectories=none"]).recipe
    assert make_plan(nothing, plan.cluster).rollouts_gb == 0


@pytest.mark.parametrize(
    ("cluster", "sets", "parts"),
    [
        ("1xH100", [], {"write": 60.0, "load": 15.0, "fixed": 5.0}),
        ("16xH100", [], {"write": 60.0, "copies to nodes": 30.0, "load": 15.0, "fixed": 5.0}),
        ("16xH100", ["engine.weight_transfer=nccl"], {"GPU to GPU": 0.6, "fixed": 5.0}),
        ("8xH100", ["engine.weight_transfer=nccl"], {"GPU to GPU": 30 / 450, "fixed": 5.0}),
        ("1xH100", ["learner.dtype=float32"], {"write": 120.0, "load": 30.0, "fixed": 5.0}),
    ],
)
def test_seconds_of_a_weight_update_by_hand(
    cluster: str, sets: list[str], parts: dict[str, float]
) -> None:
    """15B parameters in bfloat16 are 30 GB: written at 0.5 GB/s, copied at 1, loaded at 2."""
    shape = ModelShape(5000, 0, 1, 1, 1, 1, 3_000_000, tied=True)
    assert shape.parameters == pytest.approx(15e9, rel=1e-6)
    recipe = load_recipe("rstar2-agent-14b", sets).recipe
    seconds = weight_seconds(recipe, shape, parse_cluster(cluster), Assumptions())
    assert seconds == pytest.approx(parts, rel=1e-5)


def test_an_adapter_is_a_small_update() -> None:
    sets = ["engine.lora=adapter"]
    recipe = load_recipe("qwen3-1.7b-lora-24gb", sets).recipe
    plan = make_plan(recipe, parse_cluster("1x4090"))
    merged = make_plan(load_recipe("qwen3-1.7b-lora-24gb").recipe, plan.cluster)
    assert plan.weights_s["write"] < merged.weights_s["write"] / 10


LLAMA_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


@pytest.mark.parametrize(
    ("model", "gpus", "parallel", "length", "published_s"),
    [("llama", 16, 1, 1060, 97.7), ("Qwen/Qwen3-32B", 32, 4, 3206, 393.0)],
)
def test_step_times_are_near_published_ones(
    model: str, gpus: int, parallel: int, length: int, published_s: float, tmp_path: Path
) -> None:
    """NeMo RL 0.4, on-policy GRPO on H100 (its docs/about/performance-summary.md).

    2,048 rollouts a step in four mini-batches, at most 4,096 tokens, mean length as given.
    The mean prompt is not published; 200 tokens are assumed.
    """
    if model == "llama":
        (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
        model = str(tmp_path)
    prompt = 200
    sets = [
        f"model.path={model}",
        "rl.prompts_per_step=64",
        "rl.roc={variant: none, drawn: 32, kept: 32}",
        "rl.minibatches=4",
        "rl.stages=[{name: only, steps: 100, max_length: 4096, max_turns: 1}]",
        f"engine.count={gpus // parallel}",
        f"cluster.gpus_per_engine={parallel}",
        f"learner.ranks={gpus}",
        "learner.tokens_per_microbatch=8192",
        "engine.sleep=true",
        "engine.weight_transfer=nccl",
    ]
    assume = Assumptions(
        first_length=(length - prompt) / 4096,
        prompt_tokens=prompt,
        tool_share=0.0,
        calls_per_rollout=0.0,
        extra_groups=0.0,
    )
    plan = make_plan(
        load_recipe("rstar2-agent-14b", sets).recipe, parse_cluster(f"{gpus}xH100"), assume
    )
    assert not plan.problems
    assert plan.stages[0].step_s == pytest.approx(published_s, rel=0.2)


@pytest.mark.parametrize(
    ("recipe", "cluster"),
    [
        ("qwen3-1.7b-1gpu", "2x4090"),
        ("qwen3-1.7b-1gpu", "1xA100-80"),
        ("rstar2-agent-14b", "8xH100"),
        ("rstar2-agent-14b", "64xMI300X"),
    ],
)
def test_a_written_recipe_loads_and_its_plan_is_the_same(
    recipe: str, cluster: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    runner = CliRunner()
    words = ["--cluster", cluster, "--json"]
    done = runner.invoke(app, ["plan", recipe, *words, "--write-recipe", str(file)])
    assert done.exit_code == 0, done.output
    again = runner.invoke(app, ["plan", str(file), *words])
    assert again.exit_code == 0, again.output
    proposed, read = json.loads(done.stdout), json.loads(again.stdout)
    assert read["plan"]["layout"] == proposed["plan"]["layout"]
    assert read["total_s"] == proposed["total_s"]
    written = load_recipe(file).recipe
    used = make_plan(written, parse_cluster(cluster)).layout
    assert used.gpus <= parse_cluster(cluster).gpus
    if used.colocated:
        assert written.engine.gpu_memory_share is not None


@pytest.mark.parametrize(
    "name", ["L4", "A10", "A100-40", "A100-80GB", "L40S", "RTX 3090", "5090", "MI325X", "B200"]
)
def test_gpus_that_people_own_are_known(name: str) -> None:
    assert parse_cluster(f"2x{name}").gpus == 2


def test_slow_code_environments_are_counted(paper: Recipe) -> None:
    assume = Assumptions(calls_per_core_s=0.01)
    plan = make_plan(paper, parse_cluster("64xMI300X"), assume)
    assert any("cores for its tool calls" in problem for problem in plan.problems)
    stage = plan.stages[0]
    waited = stage.load.calls(assume) / (plan.cluster.cores * 0.01) - stage.generate_s
    assert stage.tools_s == pytest.approx(waited + 2.75 * 0.3)


def test_the_command_prints_a_plan_and_sets_its_exit_code() -> None:
    runner = CliRunner()
    words = ["plan", "rstar2-agent-14b", "--cluster", "64xMI300X"]
    done = runner.invoke(app, words)
    assert done.exit_code == 0, done.output
    for part in ("generate", "KV cache holds", "RL, 510 steps", "total time if", "train_mfu"):
        assert part in done.output
    body = json.loads(runner.invoke(app, [*words, "--json", "-a", "call_s=1"]).stdout)
    assert body["plan"]["assume"]["call_s"] == 1
    assert body["total_s"] > 86400
    assert runner.invoke(app, ["plan", "qwen3-1.7b-1gpu", "--cluster", "1x4090"]).exit_code == 1


def test_invalid_options_get_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["-s", "model.path=Qwen/Qwen3-1.7B"]
    for words, part in (
        (["-a", "speed=2"], "--assume speed"),
        (["-a", "call_s"], "write NAME=NUMBER"),
        (["-a", "prefill_mfu=0"], "more than 0, at most 1"),
        (["-a", "tool_share=1.5"], "0 or more, at most 1"),
        (["-a", "problems=nan"], "it must be a number"),
        (["--cluster", "2xABC"], "unknown GPU"),
        (model, "rl.stages.0.max_length = 176 leaves no room"),
        ([*model, "-a", "prompt_tokens=320"], "rl.stages.0.max_length = 176 leaves no room"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["plan", "tiny", "--cluster", "1x4090", *words])
        assert end.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert part in error
    tiny = load_recipe("tiny", ["model.path=Qwen/Qwen3-1.7B", "rl.stages=[]"]).recipe
    with pytest.raises(UserError, match=r"evaluation\.max_length = 320 leaves no room"):
        make_plan(tiny, parse_cluster("1x4090"))
    short = load_recipe("tiny", ["model.path=Qwen/Qwen3-1.7B"]).recipe
    assert make_plan(short, parse_cluster("1xH200"), Assumptions(prompt_tokens=40)).total_s > 0


DOCS = Path(__file__).resolve().parents[2] / "docs" / "cluster.md"


def test_the_plans_in_the_docs_are_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan on the page is what its command prints today."""
    shown = re.findall(
        r"`rstar2 (plan [^`]*)`:\n\n```\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL
    )
    assert len(shown) == 3
    monkeypatch.chdir(tmp_path)
    for command, text in shown:
        printed = CliRunner().invoke(app, command.split()).stdout
        assert all(len(line) <= 80 for line in printed.splitlines()), command
        assert printed.partition("assumptions (change")[0].rstrip() == text.rstrip(), command


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "offload"), [(1, False), (8, False), (8, True)])
def test_memory_of_the_learner_is_within_a_tenth_of_fake_devices(ranks: int, offload: bool) -> None:
    """The formula against the learner's own step on fake CUDA devices."""
    from rstar2.learner.measure import run_step

    shape = replace(find_shape("Qwen/Qwen3-8B"), layers=4)
    recipe = load_recipe(
        "rstar2-agent-14b",
        [
            f"learner.ranks={ranks}",
            "learner.tokens_per_microbatch=12288",
            f"learner.cpu_offload={str(offload).lower()}",
        ],
    ).recipe
    parts = learner_memory(recipe.learner, shape, ranks)
    measured = run_step(shape, recipe.learner)
    assert sum(parts.values()) == pytest.approx(measured.peak, rel=0.1)


@pytest.mark.slow
def test_the_command_shows_measured_memory_beside_the_formula(tmp_path: Path) -> None:
    from rstar2.learner.measure import run_step, write_config

    shape = ModelShape(64, 1, 4, 2, 16, 128, 50_000)
    write_config(shape, tmp_path)
    words = ["plan", "qwen3-1.7b-1gpu", "--cluster", "1x4090", "-s", f"model.path={tmp_path}"]
    done = CliRunner().invoke(app, [*words, "--measure-memory"])
    assert done.exit_code == 0, done.output
    (shown,) = re.findall(r"a rank alone: ([\d.]+) by its own step on fake GPUs", done.output)
    measured = run_step(shape, load_recipe("qwen3-1.7b-1gpu").recipe.learner).peak
    assert float(shown) == pytest.approx(measured, abs=0.051)


def test_the_formula_is_within_a_tenth_of_what_fake_devices_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The table of the docs: its formula column is current, and near the measured one."""
    monkeypatch.syspath_prepend(str(DOCS.parents[1] / "scripts"))
    script = importlib.import_module("gpu_memory")
    rows = script.recorded()
    assert rows.keys() == set(script.ROWS)
    assert script.PAGE.read_text(encoding="utf-8") == script.shown(rows)
    for row, measured in rows.items():
        assert row.formula() == pytest.approx(measured, rel=0.1), row
