"""The checks: each asks the machine for facts and says what is wrong, why, and the way out."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from rstar2.gpu_check.facts import (
    CollectiveFacts,
    FlashFacts,
    GpuFacts,
    Machine,
    NotPossibleError,
    NumericsFacts,
    SampleFacts,
    ServerFacts,
    SleepFacts,
    StepFacts,
    TorchFacts,
    UpdateFacts,
)

LOGPROB_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3}
"""Largest difference of a token's logprob between engine and learner, by number format."""
FLASH_TOLERANCE = 0.05
MEAN_TOLERANCE = 0.05
"""Largest mean difference over sampled tokens."""
FREE_SHARE = 0.03
"""Share of a GPU's memory that must stay free at the peak."""


class CheckOutcome(StrEnum):
    """How a check ended."""

    PASSED = "ok"
    FAILED = "FAILED"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Judgement:
    """The judgement of facts: what was seen, and if it is wrong the way out."""

    text: str
    way_out: str = ""
    """Empty if nothing is wrong."""
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class CheckReport:
    """One line of the report."""

    name: str
    outcome: CheckOutcome
    text: str
    way_out: str = ""
    seconds: float = 0.0
    facts: Any = None


@dataclass(frozen=True, slots=True)
class GpuCheck:
    """One check: `measure` asks the machine, `judge` decides."""

    name: str
    measure: Callable[[Machine], Awaitable[Any]]
    judge: Callable[[Any], Judgement]
    needs: tuple[str, ...] = ()
    """Checks without which this one cannot run."""
    deadline_s: float = 120.0

    async def run(self, machine: Machine) -> CheckReport:
        """Measure and judge. What the machine raises is a failure with its known way out."""
        started = time.monotonic()
        facts: Any = None
        try:
            async with asyncio.timeout(self.deadline_s):
                facts = await self.measure(machine)
            verdict = self.judge(facts)
        except NotPossibleError as reason:
            verdict = Judgement(str(reason), skipped=True)
        except TimeoutError:
            verdict = Judgement(
                f"no answer within {self.deadline_s:g} s", way_out("did not answer")
            )
        except Exception as error:  # noqa: BLE001 - whatever it is becomes a line of the report
            text = f"{type(error).__name__}: {error}".strip()
            verdict = Judgement(text, way_out(text))
        wrong = CheckOutcome.SKIPPED if verdict.skipped else CheckOutcome.FAILED
        return CheckReport(
            self.name,
            wrong if verdict.way_out or verdict.skipped else CheckOutcome.PASSED,
            verdict.text,
            verdict.way_out,
            round(time.monotonic() - started, 1),
            msgspec.to_builtins(facts),
        )


async def run_checks(
    checks: Sequence[GpuCheck],
    machine: Machine,
    on_start: Callable[[str], None] = lambda name: None,
    on_done: Callable[[CheckReport], None] = lambda report: None,
) -> list[CheckReport]:
    """Run all checks in order; one whose needs have not passed is skipped."""
    done: dict[str, CheckReport] = {}
    for check in checks:
        missing = [
            need
            for need in check.needs
            if need in done and done[need].outcome is not CheckOutcome.PASSED
        ]
        if missing:
            first = done[missing[0]]
            text = "no GPU" if first.name == "driver" else f"needs {first.name}"
            report = CheckReport(check.name, CheckOutcome.SKIPPED, text)
        else:
            on_start(check.name)
            report = await check.run(machine)
        done[check.name] = report
        on_done(report)
    return list(done.values())


# --------------------------------------------------------------------------- judgements


def judge_gpus(gpus: tuple[GpuFacts, ...]) -> Judgement:
    if not gpus:
        return Judgement(
            "no GPU: nvidia-smi lists none",
            "use a machine with an NVIDIA GPU; in a container start it with --gpus all. "
            "--cpu runs the checks that a CPU can",
        )
    names = ", ".join(f"{gpu.name} {gpu.memory_gb:.0f} GB" for gpu in gpus)
    return Judgement(f"{len(gpus)} GPU(s), driver {gpus[0].driver}: {names}")


def judge_torch(torch: TorchFacts) -> Judgement:
    if torch.cuda is None:
        return Judgement(
            f"torch {torch.version} is a CPU build",
            "install the CUDA build: pip install torch --index-url "
            "https://download.pytorch.org/whl/cu128",
        )
    if not torch.devices:
        return Judgement(
            f"torch {torch.version} for CUDA {torch.cuda} sees no GPU",
            "the driver is too old for this CUDA (update it, or install torch for an older CUDA), "
            "or CUDA_VISIBLE_DEVICES hides all GPUs",
        )
    missing = [c for c in torch.capabilities if not _has_kernels(c, torch.architectures)]
    if missing:
        return Judgement(
            f"torch {torch.version} has no kernels for {missing[0]}: it has "
            f"{', '.join(torch.architectures)}",
            "install a build of torch for this GPU (a newer torch, or another CUDA version)",
        )
    if not torch.bfloat16:
        return Judgement(
            "the GPU has no bfloat16",
            "set model.dtype and learner.dtype to float32, or use a GPU since Ampere (sm_80)",
        )
    return Judgement(f"torch {torch.version}, CUDA {torch.cuda}, {torch.devices} device(s)")


def _has_kernels(capability: str, architectures: Sequence[str]) -> bool:
    """Kernels run on their own architecture and on later ones of the same generation."""
    own = re.fullmatch(r"sm_(\d+)(\d)", capability)
    if own is None or not architectures:
        return True
    for name in architectures:
        built = re.fullmatch(r"(?:sm|compute)_(\d+)(\d)[a-z]?", name)
        if built is None:
            continue
        if name.startswith("compute") and int(built[1] + built[2]) <= int(own[1] + own[2]):
            return True
        if built[1] == own[1] and int(built[2]) <= int(own[2]):
            return True
    return False


def judge_collective(facts: CollectiveFacts) -> Judgement:
    expected = facts.ranks * (facts.ranks + 1) / 2
    if facts.sum != expected:
        return Judgement(
            f"{facts.backend} {facts.version}: an all-reduce over {facts.ranks} rank(s) gave "
            f"{facts.sum:g} instead of {expected:g}",
            "peer-to-peer copies are wrong on this machine: set NCCL_P2P_DISABLE=1, and check "
            "IOMMU and ACS settings",
        )
    return Judgement(
        f"{facts.backend} {facts.version}: {facts.ranks} rank(s), {facts.gb_per_s:.1f} GB/s"
    )


def judge_flash(facts: FlashFacts) -> Judgement:
    if facts.version is None:
        text = "flash-attn is not installed: the learner uses torch's attention"
        return Judgement(text, skipped=True)
    if not facts.gap <= FLASH_TOLERANCE:
        return Judgement(
            f"flash-attn {facts.version} differs from torch's attention by {facts.gap:.3g}",
            "it was built for another torch or GPU: reinstall it, or remove it (pip uninstall "
            "flash-attn) to use torch's attention",
        )
    return Judgement(f"flash-attn {facts.version}, {facts.gap:.2g} from torch's attention")


def judge_server(facts: ServerFacts) -> Judgement:
    if facts.kv_tokens < 4096:
        return Judgement(
            f"vLLM {facts.version} has room for {facts.kv_tokens} tokens of KV only",
            "free the GPU's memory (nvidia-smi lists its processes), or raise "
            "engine.gpu_memory_share",
        )
    return Judgement(
        f"vLLM {facts.version} started in {facts.seconds:.0f} s, KV cache of "
        f"{facts.kv_tokens:,} tokens"
    )


def judge_numerics(facts: NumericsFacts) -> Judgement:
    tolerance = LOGPROB_TOLERANCE[facts.dtype]
    seen = (
        f"{facts.dtype}: engine and learner differ by {facts.gap:.2g} (the learner's own rounding "
        f"is {facts.rounding:.2g})"
    )
    if not facts.gap <= tolerance:
        return Judgement(
            f"{seen}, more than {tolerance:g}",
            "the engine computes another model: check that vLLM and transformers support it, and "
            "compare with engine.arguments [--enforce-eager]",
        )
    return Judgement(seen)


def judge_sample(facts: SampleFacts) -> Judgement:
    if facts.sampled != facts.asked:
        return Judgement(
            f"asked for {facts.asked} tokens with their logprobs, got {facts.sampled}",
            "this vLLM answers /inference/v1/generate in another way: install vllm>=0.32,<0.33",
        )
    if not facts.gap <= MEAN_TOLERANCE:
        return Judgement(
            f"logprobs of {facts.sampled} sampled tokens differ by {facts.gap:.3g} on average from "
            "the learner's",
            "the server reports logprobs of another distribution: it needs --logprobs-mode "
            "processed_logprobs, which rstar2 sets unless engine.arguments override it",
        )
    return Judgement(f"{facts.sampled} tokens, mean difference {facts.gap:.2g}")


def judge_update(facts: UpdateFacts) -> Judgement:
    if facts.before <= facts.tolerance:
        return Judgement(
            f"the weights changed the probe by {facts.before:.2g} only: nothing is proven",
            "this is a fault of the check: please report it",
        )
    if not facts.after <= facts.tolerance:
        return Judgement(
            f"after the update the probe differs by {facts.after:.2g} (before: "
            f"{facts.before:.2g}): the server does not use the new weights",
            "start it without packed or quantised layers, and use engine.weight_transfer: files",
        )
    return Judgement(
        f"probe {facts.after:.2g} after the update, {facts.before:.2g} before, "
        f"{facts.seconds:.1f} s"
    )


def judge_sleep(facts: SleepFacts) -> Judgement:
    freed = facts.asleep_gb - facts.awake_gb
    if freed < 0.1:
        return Judgement(
            f"sleeping freed {freed:.1f} GB",
            "vLLM's sleep mode does not work here: set engine.sleep: false",
        )
    if facts.gap > 1e-3:
        return Judgement(
            f"logprobs differ by {facts.gap:.2g} after waking",
            "the weights did not survive the sleep: set engine.sleep: false",
        )
    return Judgement(
        f"sleeping frees {freed:.1f} GB; awake again, {facts.again_gb:.1f} GB are free"
    )


def judge_step(facts: StepFacts) -> Judgement:
    if not facts.steps or not facts.updates:
        return Judgement(
            f"{facts.steps} RL step(s) with {facts.updates} optimizer update(s)",
            "the step ended without training: the report has its log, please report it",
        )
    if not facts.mismatch <= MEAN_TOLERANCE:
        return Judgement(
            f"engine and learner disagree by {facts.mismatch:.3g} on average about what was "
            "sampled",
            "see `bfloat16` above: the importance weights would cut most of the gradient",
        )
    return Judgement(
        f"{facts.steps} step in {facts.seconds:.0f} s, probe {facts.probe_gap:.2g}, mean "
        f"difference {facts.mismatch:.2g}"
    )


def judge_memory(facts: StepFacts) -> Judgement:
    used = facts.total_gb - facts.least_free_gb
    seen = f"{used:.1f} of {facts.total_gb:.1f} GB at the peak of the step"
    if facts.least_free_gb < FREE_SHARE * facts.total_gb:
        return Judgement(
            seen,
            "lower engine.gpu_memory_share or learner.tokens_per_microbatch, or set engine.sleep: "
            "true",
        )
    return Judgement(seen)


# --------------------------------------------------------------------------- known failures

WAYS_OUT = (
    (r"No module named 'vllm'|vLLM is not installed", "pip install 'rstar2[vllm]'"),
    (r"No module named '(\w+)'", r"pip install \1, or the extra of rstar2 that has it"),
    (
        r"[Ff]ree memory on device.*less than desired|No available memory for the cache",
        "another process holds the GPU's memory (nvidia-smi lists it): end it, or lower "
        "engine.gpu_memory_share",
    ),
    (
        r"out of memory|OutOfMemory|CUBLAS_STATUS_ALLOC_FAILED",
        "end other processes on the GPU, lower engine.gpu_memory_share or "
        "learner.tokens_per_microbatch, or set engine.sleep: true",
    ),
    (
        r"no kernel image is available|not compiled with .*sm_|unsupported gpu architecture",
        "install builds of torch and vLLM for this GPU's architecture",
    ),
    (
        r"driver version is insufficient|CUDA driver initialization failed|forward compatib",
        "update the NVIDIA driver, or install torch for an older CUDA",
    ),
    (
        r"unrecognized arguments|invalid choice|no such option",
        "this vLLM has other options: install vllm>=0.32,<0.33",
    ),
    (
        r"/(sleep|wake_up|pause|update_weights\w*|inference/\S+) answered 40[45]",
        "this vLLM has other endpoints: install vllm>=0.32,<0.33",
    ),
    (
        r"shared memory|/dev/shm|No space left on device",
        "enlarge /dev/shm: start the container with --shm-size 16g or --ipc host",
    ),
    (
        r"NCCL|ncclInternalError|unhandled (system|cuda) error",
        "run again with NCCL_DEBUG=INFO; NCCL_P2P_DISABLE=1 shows whether peer-to-peer copies "
        "fail, NCCL_SOCKET_IFNAME chooses the network",
    ),
    (
        r"illegal memory access|device-side assert|misaligned address",
        "a kernel is broken for this GPU: remove flash-attn, then try engine.arguments "
        "[--enforce-eager], then another version of vLLM",
    ),
    (r"undefined symbol|cannot open shared object", "reinstall it for the installed torch"),
    (
        r"did not answer|DeadlineError|not ready within|TimeoutExpired",
        "look at the load of the machine (nvidia-smi, top), and run it again; a first start "
        "compiles kernels and can take minutes",
    ),
    (
        r"nvidia-smi.*(failed|couldn't communicate)|NVML",
        "the driver is not loaded: reboot, or reinstall it",
    ),
)
"""Pattern of an error -> the way out; the first that matches counts."""


def way_out(text: str) -> str:
    """The way out of an error; without a known one, where to look."""
    for pattern, advice in WAYS_OUT:
        match = re.search(pattern, text)
        if match:
            return match.expand(advice) if "\\1" in advice else advice
    return "not known to this check: the report has the whole error, please share it"


# --------------------------------------------------------------------------- the list

ENGINE = ("vllm",)
GPU_ONLY = ("driver", "torch", "flash-attn", "sleep", "weights-nccl", "memory")


def all_checks(*, cpu: bool = False) -> list[GpuCheck]:
    """All checks in order; with `cpu`, those that a machine without a GPU can run."""
    on_gpu = () if cpu else ("driver", "torch")
    server = (*on_gpu, *ENGINE)
    checks = [
        GpuCheck("driver", lambda m: m.gpus(), judge_gpus),
        GpuCheck("torch", lambda m: m.torch(), judge_torch, ("driver",)),
        GpuCheck("nccl", lambda m: m.collective(), judge_collective, on_gpu),
        GpuCheck("flash-attn", lambda m: m.flash(), judge_flash, ("driver", "torch")),
        GpuCheck("vllm", lambda m: m.serve(), judge_server, on_gpu, 700.0),
        GpuCheck("bfloat16", lambda m: m.numerics(), judge_numerics, server, 300.0),
        GpuCheck("tokens", lambda m: m.sample(), judge_sample, server, 300.0),
        GpuCheck("weights-files", lambda m: m.update_by_files(), judge_update, server, 600.0),
        GpuCheck("sleep", lambda m: m.sleep(), judge_sleep, ("driver", "torch", *ENGINE), 300.0),
        GpuCheck(
            "weights-nccl", lambda m: m.update_by_nccl(), judge_update, ("driver", "torch", "vllm")
        ),
        GpuCheck("rl-step", lambda m: m.step(), judge_step, server, 1200.0),
        GpuCheck("memory", lambda m: m.step(), judge_memory, ("driver", "torch", "rl-step")),
    ]
    return [check for check in checks if not cpu or check.name not in GPU_ONLY]
