"""The whole recipe in miniature, every part real: it runs, is recorded, and survives kill -9."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from rstar2.record import is_finished, read_evaluations, read_events, read_groups, read_metrics
from rstar2.report.summary import percent
from rstar2.tool_text import tool_text
from tests.e2e.driving import drive, timeless

pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow]

WATCHED = """
    reward accuracy/even accuracy/odd tool_errors response_length turns truncated no_answer
    groups/drawn groups/used groups/dropped groups/refilled groups/surplus rollouts/drawn
    rollouts/lost
    entropy grad_norm lr loss time/generate time/tools time/grade time/learn time/publish
    time/step tokens_per_s engine/kv_share engine/idle_share weights/probe_gap
""".split()  # noqa: SIM905


def figures(run: Path) -> list[dict[str, Any]]:
    """Every recorded step without its clocks."""
    return [timeless(line) for line in read_metrics(run)]


def sampled(run: Path) -> dict[str, list[Any]]:
    """Every recorded token and its logprob, by group."""
    return {
        line.group.id: [
            (t.token_ids, t.logprobs, t.reward and t.reward.value) for t in line.group.trajectories
        ]
        for stage in ("short", "hard")
        for line in read_groups(run, stage)
    }


def test_every_stage_is_recorded_once(finished: Path) -> None:
    steps = [(m["stage"], m["step"]) for m in read_metrics(finished)]
    assert steps == [
        *(("sft", n) for n in range(1, 25)),
        ("short", 1),
        ("short", 2),
        ("filter-hard", 1),
        ("hard", 1),
        ("hard", 2),
    ]
    assert is_finished(finished)
    made = {(e.stage, e.mode): e for e in read_evaluations(finished)}
    assert set(made) == {(s, m) for s in ("sft", "short", "hard") for m in ("greedy", "sampled")}
    assert all(e.accuracy.count == 8 for e in made.values())


def test_steps_report_what_people_watch(finished: Path) -> None:
    (step, *_) = [m for m in read_metrics(finished) if m["stage"] == "short"]
    for name in WATCHED:
        assert name in step, name
    assert step["groups/used"] == 2
    assert step["rollouts/lost"] == 0


def test_weights_advance_with_every_step_and_rollouts_know_theirs(finished: Path) -> None:
    versions = {
        (line.stage, line.step): {t.segments[0].oldest_version for t in line.group.trajectories}
        for stage in ("short", "hard")
        for line in read_groups(finished, stage)
    }
    assert versions == {("short", 1): {1}, ("short", 2): {2}, ("hard", 1): {3}, ("hard", 2): {4}}


def test_exports_load_in_transformers(finished: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for stage in ("sft", "short", "hard"):
        model = AutoModelForCausalLM.from_pretrained(finished / "exports" / stage)
        tokenizer = AutoTokenizer.from_pretrained(finished / "exports" / stage)
        ids: Any = tokenizer.apply_chat_template(
            [{"role": "user", "content": "coin 44"}], return_tensors="pt", return_dict=True
        )
        assert model(**ids).logits.isfinite().all()


def test_exports_prompt_as_they_were_trained(finished: Path) -> None:
    """Plain transformers gives the recorded prompts, turn by turn, and stops where a turn ends."""
    from transformers import AutoTokenizer, GenerationConfig

    export = finished / "exports" / "hard"
    tokenizer: Any = AutoTokenizer.from_pretrained(export)
    first = later = 0
    for stage in ("eval-hard-sampled", "short", "hard"):
        for line in read_groups(finished, stage):
            for trajectory in line.group.trajectories:
                messages = [{"role": "user", "content": line.group.problem.prompt}]
                expected = list(trajectory.prompt_ids)
                for number, turn in enumerate(trajectory.turns):
                    rendered = tokenizer.apply_chat_template(
                        messages, add_generation_prompt=True, return_dict=True
                    )
                    assert rendered["input_ids"] == expected
                    first, later = first + (number == 0), later + (number > 0)
                    said = tokenizer.decode(turn.sampled_ids[:-1])
                    if tokenizer.encode(said) != list(turn.sampled_ids[:-1]):
                        break  # other tokens for the same text: the agent loop alone keeps them
                    if not all(result.outcome.succeeded for result in turn.results):
                        break  # the loop cuts long tracebacks to agent.response_tokens
                    expected += [*turn.sampled_ids, *turn.response_ids]
                    messages.append({"role": "assistant", "content": said})
                    messages += [{"role": "tool", "content": tool_text(r)} for r in turn.results]
    assert first > 16
    assert later > 0
    stops = GenerationConfig.from_pretrained(export).eos_token_id
    assert tokenizer.convert_ids_to_tokens(stops) == ["<|im_end|>"]
    assert len({file.stat().st_mode & 0o777 for file in export.iterdir()}) == 1
    card = (export / "README.md").read_text()
    accuracy = next(
        e for e in read_evaluations(finished) if (e.stage, e.mode) == ("hard", "greedy")
    )
    assert f"| greedy | 8 held-out | {percent(accuracy.accuracy.mean)} |" in card
    assert "license: mit" in card


def test_killed_again_and_again_it_ends_with_the_same_numbers(
    finished: Path, tmp_path: Path
) -> None:
    """In a step, in a checkpoint write, between stages: every step once, number for number."""
    run = tmp_path / "run"
    for moment in ("checkpoint:1", "step:short:2", "stage:eval-short", "step:hard:2"):
        assert drive(tmp_path / "data", run, moment) == -signal.SIGKILL, moment
        assert not is_finished(run)
    assert drive(tmp_path / "data", run) == 0
    assert [e["event"] for e in read_events(run)].count("resumed") == 4
    assert figures(run) == figures(finished)
    assert sampled(run) == sampled(finished)
    mine, theirs = read_evaluations(run), read_evaluations(finished)
    assert [(e.stage, e.mode, e.accuracy, e.kinds) for e in mine] == [
        (e.stage, e.mode, e.accuracy, e.kinds) for e in theirs
    ]


def test_evaluations_and_a_plateau_leave_training_as_it_is(finished: Path, tmp_path: Path) -> None:
    """Evaluated after every step, killed once, its first stage ended early: the same training."""
    run = tmp_path / "run"
    assert drive(tmp_path / "data", run, "step:short:2", "evaluated") == -signal.SIGKILL
    assert drive(tmp_path / "data", run, "never", "evaluated") == 0
    assert sampled(run) == sampled(finished)
    lines = figures(run)
    trained = [{k: v for k, v in m.items() if not k.startswith("evaluation/")} for m in lines]
    assert trained == figures(finished)
    evaluated = {(m["stage"], m["step"]) for m in lines if "evaluation/greedy" in m}
    assert evaluated == {("short", 1), ("short", 2), ("hard", 1)}
    made = {(e.stage, e.mode): e for e in read_evaluations(run)}
    assert made["base", "greedy"].accuracy.mean < made["sft", "sampled"].accuracy.mean
    (last,) = [m for m in lines if (m["stage"], m["step"]) == ("short", 2)]
    assert last["evaluation/sampled"] == made["short", "sampled"].accuracy.mean
    (plateau,) = [e for e in read_events(run) if e["event"] == "plateau"]
    rewards = [m["reward"] for m in lines if m["stage"] == "short"]
    assert (plateau["stage"], plateau["step"], plateau["values"]) == ("short", 2, rewards)


def processes_of(run: Path) -> list[str]:
    """Command lines of living processes that descend from a driven run."""
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"RSTAR2_TEST_RUN={run}\0".encode() in (process / "environ").read_bytes():
                processes.append((process / "cmdline").read_text().replace("\0", " "))
        except (OSError, PermissionError):  # it ended while we looked, or is not ours
            continue
    return processes


def test_sigterm_saves_the_last_step_and_leaves_no_process(finished: Path, tmp_path: Path) -> None:
    """Without periodic checkpoints: the step before the signal is saved, and is not run again."""
    run = tmp_path / "run"
    assert drive(tmp_path / "data", run, "term:sft:10", "rare") == 3
    assert processes_of(run) == []
    last = read_events(run)[-1]
    assert (last["event"], last["phase"]) == ("checkpoint", "sft")
    assert 10 <= last["step"] == read_metrics(run)[-1]["step"] < 24
    assert drive(tmp_path / "data", run, "term:short:2", "rare") == 3
    assert processes_of(run) == []
    sft = [m for m in figures(finished) if m["stage"] == "sft"]
    assert [m for m in figures(run) if m["stage"] == "sft"] == sft
    assert [m["step"] for m in read_metrics(run) if m["stage"] == "short"] == [1]
    last = read_events(run)[-1]
    assert (last["event"], last["phase"], last["step"]) == ("checkpoint", "short", 1)
    assert drive(tmp_path / "data", run, "stage:eval-short", "rare") == -signal.SIGKILL
    assert "rewound" not in [e["event"] for e in read_events(run)]
    steps = [m for m in figures(finished) if m["stage"] == "short"]
    assert [m for m in figures(run) if m["stage"] == "short"] == steps
