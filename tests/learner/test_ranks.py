"""Two real ranks (torch.distributed, gloo, FSDP2) against one."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rstar2.config import LossConfig, OptimizerConfig
from rstar2.engine.checksums import bit_sums
from rstar2.errors import CheckpointError, DeadlineError, RankError, RecipeError
from rstar2.learner.group import LearnerGroup
from tests.learner.learner_helpers import (
    ADAMW,
    hold_group,
    local_ranks,
    make_group,
    random_batch,
)

MUON = OptimizerConfig(lr=1e-3, matrix_lr=5e-3, matrix_optimizer="muon")
ROWS = [((1, 2, 3, 4), (0, 1, 0, 1)), ((5, 6, 7), (0, 0, 1)), ((8, 9) * 20, (0, 1) * 20)]


@pytest.fixture(scope="module")
def two(model_dir: Path) -> Iterator[LearnerGroup]:
    with make_group(model_dir, 2) as group:
        yield group


@pytest.fixture
def start(two: LearnerGroup, model_dir: Path, tmp_path: Path) -> LearnerGroup:
    """The shared ranks, put back to the initial weights by a checkpoint of one rank."""
    with make_group(model_dir, 1) as one:
        one.save(tmp_path / "start")
    two.load(tmp_path / "start")
    return two


@pytest.mark.parametrize("optimizer", [ADAMW, MUON])
@pytest.mark.parametrize("members", [4, 1])
def test_two_ranks_equal_one(
    start: LearnerGroup, model_dir: Path, optimizer: OptimizerConfig, members: int
) -> None:
    """Also with fewer sequences than ranks in a mini-batch, where a rank has nothing to do."""
    batch = random_batch(random.Random(2), 2 if members == 1 else 4, members)
    start.reset_optimizer(optimizer)
    loss = LossConfig(kl=0.02, entropy=0.01)
    with make_group(model_dir, 1, optimizer) as one:
        for _ in range(3):
            alone, together = one.rl_step(batch, loss, 2), start.rl_step(batch, loss, 2)
            alone.pop("microbatches")
            together.pop("microbatches")
            assert together == pytest.approx(alone, rel=1e-4, abs=1e-6)
        expected, several = one.state(), start.state()
        assert several.keys() == expected.keys()
        gap = max((several[n] - expected[n]).abs().max().item() for n in several)
        assert gap < 1e-5
        assert start.logprobs([[1, 2, 3], [4, 5], [6]])[2] == []
        pairs = zip(
            start.logprobs([[1, 2, 3], [4, 5]]), one.logprobs([[1, 2, 3], [4, 5]]), strict=True
        )
        assert all(a == pytest.approx(b, abs=1e-5) for a, b in pairs)
        assert start.sft_loss(ROWS) == pytest.approx(one.sft_loss(ROWS), rel=1e-5)
        assert start.sft_step(ROWS)["loss"] == pytest.approx(one.sft_step(ROWS)["loss"], rel=1e-5)


def test_offloaded_ranks_equal_one(model_dir: Path) -> None:
    batch = random_batch(random.Random(2), 4, 4)
    with make_group(model_dir, 2, cpu_offload=True) as two, make_group(model_dir, 1) as one:
        for _ in range(2):
            alone, together = (g.rl_step(batch, LossConfig(), 2) for g in (one, two))
            alone.pop("microbatches")
            together.pop("microbatches")
            assert together == pytest.approx(alone, rel=1e-4, abs=1e-6)
        expected, several = one.state(), two.state()
        assert max((several[n] - expected[n]).abs().max().item() for n in several) < 1e-5


@pytest.mark.parametrize("members", [4, 1])
def test_sequence_ratios_at_a_temperature_on_two_ranks(
    start: LearnerGroup, model_dir: Path, members: int
) -> None:
    """The mean over sequences is over those of all ranks, also if one rank has none."""
    batch = random_batch(random.Random(2), 2 if members == 1 else 4, members)
    start.reset_optimizer(ADAMW)
    loss = LossConfig(kind="gspo")
    with make_group(model_dir, 1) as one:
        for _ in range(2):
            alone, together = one.rl_step(batch, loss, 2, 0.8), start.rl_step(batch, loss, 2, 0.8)
            for name in ("loss", "grad_norm", "ratio/mean", "mismatch/k3"):
                assert together[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6)


def test_an_own_loss_that_fails_leaves_the_group_usable(start: LearnerGroup) -> None:
    batch = random_batch(random.Random(2), 2, 2)
    with pytest.raises(RecipeError, match="module no_such_module cannot be imported"):
        start.rl_step(batch, LossConfig(kind="no_such_module:loss"), 1)
    assert start.sft_loss(ROWS) > 0


def test_checkpoint_moves_between_numbers_of_ranks(
    start: LearnerGroup, model_dir: Path, tmp_path: Path
) -> None:
    batch = random_batch(random.Random(4), 2, 2)
    start.reset_optimizer(MUON)
    start.rl_step(batch, LossConfig(), 2)
    start.save(tmp_path / "two", {"note": "from two ranks"})
    expected = start.rl_step(batch, LossConfig(), 2)
    with make_group(model_dir, 1) as one:
        assert one.load(tmp_path / "two") == {"note": "from two ranks"}
        one.save(tmp_path / "one")
        first = one.rl_step(batch, LossConfig(), 2)
    start.load(tmp_path / "one")
    again = start.rl_step(batch, LossConfig(), 2)
    for metrics in (first, again):
        assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("exported", [True, False])
def test_checksums_of_shards_are_those_of_the_whole_weights(
    start: LearnerGroup, model_dir: Path, exported: bool
) -> None:
    with make_group(model_dir, 1) as one:
        expected = one.weight_sums("bfloat16", exported)
        assert start.weight_sums("bfloat16", exported) == expected
        assert expected == bit_sums(
            {v.data_ptr(): (n, v.bfloat16()) for n, v in reversed(one.state().items())}.values()
        )


def test_user_error_leaves_the_group_usable(start: LearnerGroup, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        start.load(tmp_path / "nowhere")
    assert start.sft_loss(ROWS) > 0


def test_export_of_two_ranks_is_a_transformers_model(start: LearnerGroup, tmp_path: Path) -> None:
    start.export(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = [1, 2, 3, 4, 5]
    logp = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [logp[t - 1, ids[t]].item() for t in range(1, 5)]
    assert start.logprobs([ids])[0] == pytest.approx(expected, abs=1e-5)


class TestDeaths:
    def test_silent_rank_is_a_deadline_and_dead_rank_is_named(self, model_dir: Path) -> None:
        group = make_group(model_dir, 2)
        processes = list(local_ranks(group)._processes)
        victim, other = processes[1].pid, processes[0].pid
        assert victim is not None
        assert other is not None
        os.kill(victim, signal.SIGSTOP)
        threading.Timer(1.0, os.kill, (victim, signal.SIGKILL)).start()
        with pytest.raises(RankError, match="learner rank 1 died in sft_loss"):
            group.sft_loss(ROWS)
        assert not _alive(victim)
        assert not _alive(other)
        with pytest.raises(RankError, match="closed"):
            group.sft_loss(ROWS)
        group.close()

    def test_a_rank_that_hangs_is_noticed_long_before_the_deadline(self, model_dir: Path) -> None:
        group = make_group(model_dir, 2)
        ranks = local_ranks(group)
        group.sft_loss(ROWS)
        victim = ranks._processes[1].pid
        assert victim is not None
        ranks._watch.hang_s = 2.0
        os.kill(victim, signal.SIGSTOP)
        with pytest.raises(RankError, match=r"rank\(s\) \[1\] gave no sign of life.*in sft_loss"):
            group.sft_loss(ROWS)
        assert not _alive(victim)

    def test_deadline(self, model_dir: Path) -> None:
        group = make_group(model_dir, 2)
        group._deadline_s = 0.5
        pids = [p.pid for p in local_ranks(group)._processes if p.pid is not None]
        os.kill(pids[0], signal.SIGSTOP)
        with pytest.raises(DeadlineError, match=r"did not answer sft_loss within 0\.5 s"):
            group.sft_loss(ROWS)
        assert not any(_alive(pid) for pid in pids)

    @pytest.mark.slow
    def test_ranks_end_with_their_parent(self, model_dir: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe(duplex=False)
        parent = context.Process(target=hold_group, args=(model_dir, theirs))
        parent.start()
        theirs.close()
        assert ours.poll(120), "the group did not start"
        pids, rendezvous = ours.recv()
        ours.close()
        assert len(pids) == 2
        assert all(_alive(pid) for pid in pids)
        parent.kill()
        parent.join(120)
        ends = time.monotonic() + 120
        while any(_alive(pid) for pid in pids) and time.monotonic() < ends:
            time.sleep(0.02)
        assert not any(_alive(pid) for pid in pids)
        assert not Path(rendezvous).exists()


def _alive(pid: int) -> bool:
    """Running or stopped, but not a zombie that only waits to be reaped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
