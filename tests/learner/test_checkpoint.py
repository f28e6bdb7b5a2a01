"""Checkpoints: exact, bounded, whole or absent."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from rstar2.config import LossConfig, OptimizerConfig
from rstar2.errors import CheckpointError
from rstar2.learner.checkpoint import META, STATE, CheckpointStore, TornError, read_meta
from rstar2.learner.learner import Learner
from rstar2.types import Batch
from tests.learner.learner_helpers import PROBE, make_learner, random_batch, write_forever

MUON = OptimizerConfig(lr=1e-3, warmup_steps=5, schedule="cosine", matrix_optimizer="muon")


def train(learner: Learner, batch: Batch, steps: int) -> list[dict[str, float]]:
    return [learner.rl_step(batch, LossConfig(kl=0.01), 2) for _ in range(steps)]


@pytest.mark.parametrize("optimizer", [OptimizerConfig(lr=1e-3, warmup_steps=5), MUON])
def test_resumed_run_equals_uninterrupted_one(
    model_dir: Path, batch: Batch, tmp_path: Path, optimizer: OptimizerConfig
) -> None:
    straight = make_learner(model_dir, optimizer)
    expected = train(straight, batch, 4)

    first = make_learner(model_dir, optimizer)
    train(first, batch, 2)
    torch.manual_seed(77)
    random.seed(77)
    CheckpointStore(tmp_path).save(2, first, {"stage": "one", "order": [3, 1, 2]})
    noise = torch.rand(3), random.random()

    second = make_learner(model_dir, OptimizerConfig())
    saved = CheckpointStore(tmp_path).latest()
    assert saved is not None
    assert (saved.step, saved.state) == (2, {"stage": "one", "order": [3, 1, 2]})
    second.load(saved.path)
    assert torch.equal(torch.rand(3), noise[0])
    assert random.random() == noise[1]
    assert train(second, batch, 2) == expected[2:]
    assert all(torch.equal(v, straight.state()[n]) for n, v in second.state().items())


class TestStore:
    def test_keeps_the_last_and_replaces_the_same_step(
        self, model_dir: Path, tmp_path: Path
    ) -> None:
        store, learner = CheckpointStore(tmp_path, keep=2), make_learner(model_dir)
        assert store.latest() is None
        for step in (1, 5, 12):
            store.save(step, learner, {"step": step})
        store.save(12, learner, {"again": True})
        assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000005", "step-00000012"]
        saved = store.latest()
        assert saved is not None
        assert saved.state == {"again": True}

    @pytest.mark.parametrize(
        "harm", ["no_meta", "half_meta", "short_file", "lost_file", "flipped_bit"]
    )
    def test_torn_checkpoint_is_skipped_with_a_warning(
        self, model_dir: Path, tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        store, learner = CheckpointStore(tmp_path), make_learner(model_dir)
        store.save(1, learner, {"good": True})
        path = store.save(2, learner, {"good": False})
        part = next((path / STATE).glob("*.distcp"))
        if harm == "no_meta":
            (path / META).unlink()
        elif harm == "half_meta":
            (path / META).write_text((path / META).read_text()[:100])
        elif harm == "short_file":
            part.write_bytes(part.read_bytes()[:-10])
        elif harm == "flipped_bit":
            content = bytearray(part.read_bytes())
            content[len(content) // 2] ^= 1
            part.write_bytes(content)
        else:
            part.unlink()
        with caplog.at_level(logging.WARNING, logger="rstar2.checkpoint"):
            saved = store.latest()
        assert saved is not None
        assert saved.state == {"good": True}
        assert "torn" in caplog.text
        assert len(saved.torn) == 1
        if harm != "flipped_bit":  # contents are compared once, by the store
            with pytest.raises(TornError, match="step-00000002 is torn"):
                learner.load(path)

    def test_a_run_whose_checkpoints_are_all_torn_does_not_start_again(
        self, model_dir: Path, tmp_path: Path
    ) -> None:
        store = CheckpointStore(tmp_path)
        path = store.save(1, make_learner(model_dir), {})
        (path / META).unlink()
        with pytest.raises(
            CheckpointError, match=r"no checkpoint in .* can be used .*step-00000001"
        ):
            store.latest()

    def test_checkpoints_of_earlier_versions_have_no_checksums(
        self, model_dir: Path, tmp_path: Path
    ) -> None:
        store = CheckpointStore(tmp_path)
        path = store.save(1, make_learner(model_dir), {"old": True})
        meta = json.loads((path / META).read_text())
        del meta["checksums"]
        (path / META).write_text(json.dumps(meta))
        saved = store.latest()
        assert saved is not None
        assert saved.state == {"old": True}

    def test_foreign_checkpoint_is_an_error_by_name(self, tmp_path: Path) -> None:
        (tmp_path / "step-00000003").mkdir()
        (tmp_path / "step-00000003" / META).write_text('{"format": "other"}')
        with pytest.raises(CheckpointError, match="not written by rstar2"):
            CheckpointStore(tmp_path).latest()

    def test_checkpoint_of_another_model_is_refused(
        self, model_dir: Path, qwen_dir: Path, tmp_path: Path
    ) -> None:
        make_learner(model_dir).save(tmp_path / "c")
        with pytest.raises(CheckpointError, match=r"another model: lm_head\.weight is None there"):
            make_learner(qwen_dir).load(tmp_path / "c")

    def test_newer_format_and_missing_path_are_named(self, model_dir: Path, tmp_path: Path) -> None:
        make_learner(model_dir).save(tmp_path / "c")
        meta = json.loads((tmp_path / "c" / META).read_text())
        (tmp_path / "c" / META).write_text(json.dumps(meta | {"version": 99}))
        with pytest.raises(CheckpointError, match="checkpoint version 99"):
            read_meta(tmp_path / "c")
        with pytest.raises(CheckpointError, match="no checkpoint at"):
            read_meta(tmp_path / "nowhere")


def kill_while_writing(writer: BaseProcess, directory: Path, delay_s: float) -> None:
    """SIGKILL a process that is certainly within a write: it is stopped, looked at, then killed."""
    assert writer.pid is not None
    ends = time.monotonic() + 300
    while time.monotonic() < ends:
        if not list(directory.glob(".*.writing")):
            time.sleep(0.0005)
            continue
        time.sleep(delay_s)
        os.kill(writer.pid, signal.SIGSTOP)
        if list(directory.glob(".*.writing")):
            writer.kill()
            writer.join(120)
            return
        os.kill(writer.pid, signal.SIGCONT)
    raise AssertionError("the writer was never seen within a write")


@pytest.mark.slow
def test_kill_during_writes_never_leaves_a_torn_latest(model_dir: Path, tmp_path: Path) -> None:
    """SIGKILL at several moments of a write; each time the latest is whole and loads."""
    directory = tmp_path / "c"
    store, learner = CheckpointStore(directory, keep=3), make_learner(model_dir)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rstar2.learner.group"])
    for delay_s in (0.0, 0.003, 0.01):
        ours, theirs = context.Pipe(duplex=False)
        writer = context.Process(target=write_forever, args=(model_dir, directory, theirs))
        writer.start()
        theirs.close()
        assert ours.poll(300), "the writer made no progress"
        complete = ours.recv()
        kill_while_writing(writer, directory, delay_s)
        ours.close()
        saved = store.latest()
        assert saved is not None
        assert saved.step >= complete
        learner.load(saved.path)
        assert learner.sft_loss(PROBE) == saved.state["loss"]
    store.save(10_000, learner, {})
    assert not list(directory.glob(".*")), "what killed writers left is removed"


def test_samples_are_what_they_were(batch: Batch) -> None:
    assert random_batch(random.Random(0)) == batch
