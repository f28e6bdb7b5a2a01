"""Every check against a machine that fails in each known way, and this machine without a GPU."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rstar2.cli import app
from rstar2.cli import gpu_check as command
from rstar2.cli.gpu_check import report_lines, summary, write_report
from rstar2.errors import DeadlineError, EngineError, InfrastructureError
from rstar2.gpu_check import real
from rstar2.gpu_check.checks import (
    GPU_ONLY,
    WAYS_OUT,
    CheckOutcome,
    CheckReport,
    all_checks,
    run_checks,
    way_out,
)
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

ANSWERS: dict[str, Any] = {
    "gpus": (GpuFacts("H100", 80.0, "570.1"), GpuFacts("H100", 80.0, "570.1")),
    "torch": TorchFacts("2.13", "12.8", 2, ("sm_80", "sm_90", "sm_120"), ("sm_90", "sm_90")),
    "collective": CollectiveFacts("nccl", "2.27", 2, 3.0, 180.0),
    "flash": FlashFacts("2.8", 0.004),
    "serve": ServerFacts("0.32.0", 40.0, 300_000, ("--model", "m")),
    "numerics": NumericsFacts("bfloat16", 0.05, 0.04),
    "sample": SampleFacts(64, 64, 0.004),
    "update_by_files": UpdateFacts(1.5, 0.03, 0.3, 2.0),
    "update_by_nccl": UpdateFacts(1.5, 0.03, 0.3, 0.4),
    "sleep": SleepFacts(20.0, 70.0, 20.0, 0.0),
    "step": StepFacts(1, 2, 0.03, 0.004, 60.0, 80.0, 12.0),
}
"""A machine on which everything works."""


class StubMachine:
    """`Machine` with given answers; an exception is raised instead."""

    def __init__(self, **changes: Any) -> None:
        self.answers, self.asked, self.closed = ANSWERS | changes, list[str](), False

    def __getattr__(self, name: str) -> Callable[[], Any]:
        async def answer() -> Any:
            self.asked.append(name)
            value = self.answers[name]
            if isinstance(value, BaseException):
                raise value
            return value

        return answer

    async def close(self) -> None:
        self.closed = True


def checked(machine: StubMachine, *, cpu: bool = False) -> dict[str, CheckReport]:
    reports = asyncio.run(run_checks(all_checks(cpu=cpu), machine))
    return {report.name: report for report in reports}


def test_a_machine_on_which_all_works() -> None:
    machine = StubMachine()
    reports = checked(machine)
    assert {report.outcome for report in reports.values()} == {CheckOutcome.PASSED}
    assert list(reports) == [check.name for check in all_checks()]
    assert summary(list(reports.values())) == "12 ok, 0 failed, 0 skipped"
    assert reports["driver"].facts[0]["name"] == "H100"


FAILURES: list[tuple[str, dict[str, Any], str, str]] = [
    ("driver", {"gpus": ()}, "no GPU", "--gpus all"),
    (
        "driver",
        {"gpus": InfrastructureError("nvidia-smi failed (9): couldn't communicate with NVIDIA")},
        "couldn't communicate",
        "reboot",
    ),
    ("torch", {"torch": TorchFacts("2.13+cpu", None, 0)}, "CPU build", "pip install torch"),
    ("torch", {"torch": TorchFacts("2.13", "12.8", 0)}, "sees no GPU", "driver is too old"),
    (
        "torch",
        {"torch": TorchFacts("2.13", "12.8", 1, ("sm_80", "sm_90"), ("sm_120",))},
        "no kernels for sm_120",
        "build of torch for this GPU",
    ),
    (
        "torch",
        {"torch": TorchFacts("2.13", "12.8", 1, ("sm_75",), ("sm_75",), bfloat16=False)},
        "no bfloat16",
        "float32",
    ),
    (
        "nccl",
        {"collective": InfrastructureError("NCCL error: unhandled system error")},
        "unhandled system error",
        "NCCL_DEBUG=INFO",
    ),
    (
        "nccl",
        {"collective": InfrastructureError("collective failed (1): No space left on device")},
        "No space left",
        "--shm-size",
    ),
    (
        "nccl",
        {"collective": CollectiveFacts("nccl", "2.27", 2, 2.0, 1.0)},
        "gave 2 instead of 3",
        "NCCL_P2P_DISABLE",
    ),
    ("flash-attn", {"flash": FlashFacts("2.8", 0.7)}, "differs", "pip uninstall"),
    (
        "flash-attn",
        {"flash": InfrastructureError("flash_attn_2_cuda.so: undefined symbol: _ZN3c1015")},
        "undefined symbol",
        "reinstall",
    ),
    (
        "flash-attn",
        {"flash": InfrastructureError("CUDA error: no kernel image is available")},
        "no kernel image",
        "architecture",
    ),
    (
        "flash-attn",
        {"flash": InfrastructureError("CUDA error: an illegal memory access was encountered")},
        "illegal memory access",
        "remove flash-attn",
    ),
    ("vllm", {"serve": EngineError("vLLM is not installed")}, "not installed", "rstar2[vllm]"),
    (
        "vllm",
        {"serve": EngineError("api_server.py: error: unrecognized arguments: --enable-scale-out")},
        "unrecognized",
        "vllm>=0.32,<0.33",
    ),
    (
        "vllm",
        {
            "serve": EngineError(
                "ValueError: Free memory on device (3.1/23.6 GiB) on startup is less than desired "
                "GPU memory utilization (0.65, 15.3 GiB)"
            )
        },
        "Free memory",
        "engine.gpu_memory_share",
    ),
    ("vllm", {"serve": EngineError("CUDA out of memory. Tried")}, "out of memory", "engine.sleep"),
    (
        "vllm",
        {"serve": DeadlineError("vllm-0: not ready within 600 s")},
        "not ready",
        "compiles kernels",
    ),
    ("vllm", {"serve": ServerFacts("0.32.0", 40.0, 512, ())}, "512 tokens", "free the GPU"),
    (
        "bfloat16",
        {"numerics": NumericsFacts("bfloat16", 2.5, 0.04)},
        "differ by 2.5",
        "another model",
    ),
    ("bfloat16", {"numerics": NumericsFacts("float32", 0.01, 0.0)}, "more than 0.001", "--enforce"),
    ("bfloat16", {"numerics": NumericsFacts("bfloat16", float("nan"), 0.0)}, "nan", "--enforce"),
    ("tokens", {"sample": SampleFacts(64, 63, 0.0)}, "got 63", "vllm>=0.32"),
    ("tokens", {"sample": SampleFacts(64, 64, 0.4)}, "differ by 0.4", "processed_logprobs"),
    (
        "tokens",
        {"sample": EngineError("vllm-0: /inference/v1/generate answered 404: Not Found")},
        "404",
        "other endpoints",
    ),
    (
        "weights-files",
        {"update_by_files": UpdateFacts(1.5, 1.5, 0.3, 2.0)},
        "does not use the new weights",
        "quantised",
    ),
    (
        "weights-files",
        {"update_by_files": UpdateFacts(0.1, 0.0, 0.3, 2.0)},
        "nothing is proven",
        "report",
    ),
    (
        "weights-nccl",
        {"update_by_nccl": EngineError("the NCCL group was not formed: RuntimeError()")},
        "not formed",
        "NCCL_SOCKET_IFNAME",
    ),
    ("sleep", {"sleep": SleepFacts(20.0, 20.0, 20.0, 0.0)}, "freed 0.0 GB", "engine.sleep: false"),
    ("sleep", {"sleep": SleepFacts(20.0, 70.0, 20.0, 3.0)}, "after waking", "engine.sleep: false"),
    (
        "sleep",
        {"sleep": EngineError("vllm-0: /sleep answered 404: Not Found")},
        "404",
        "other endpoints",
    ),
    ("rl-step", {"step": StepFacts(0, 0, 0.0, 0.0, 1.0)}, "0 optimizer update", "report"),
    ("rl-step", {"step": StepFacts(1, 2, 0.0, 0.4, 1.0, 80, 12)}, "disagree by 0.4", "bfloat16"),
    ("memory", {"step": StepFacts(1, 2, 0.0, 0.0, 1.0, 80.0, 0.5)}, "79.5 of 80.0", "engine.sleep"),
]


@pytest.mark.parametrize(("name", "changes", "why", "advice"), FAILURES)
def test_each_known_failure_is_named_with_its_way_out(
    name: str, changes: dict[str, Any], why: str, advice: str
) -> None:
    report = checked(StubMachine(**changes))[name]
    assert report.outcome is CheckOutcome.FAILED
    assert why in report.text
    assert advice in report.way_out
    assert all(len(line) <= 80 for line in report_lines(report))


def test_every_check_and_every_way_out_has_a_planted_failure() -> None:
    assert {name for name, *_ in FAILURES} == {check.name for check in all_checks()}
    planted = [report_of(*failure) for failure in FAILURES]
    unused = [advice for _, advice in WAYS_OUT if not any(advice in way for way in planted)]
    also = {way_out("DriverError: CUDA driver version is insufficient"), way_out("did not answer")}
    other = [advice for advice in unused if advice not in also and "\\1" not in advice]
    assert other == []
    assert way_out("No module named 'gguf'").startswith("pip install gguf")
    assert "share it" in way_out("something else")


def report_of(name: str, changes: dict[str, Any], why: str, advice: str) -> str:
    return checked(StubMachine(**changes))[name].way_out


def test_without_a_gpu_everything_else_is_skipped_in_order() -> None:
    machine = StubMachine(gpus=())
    reports = checked(machine)
    assert machine.asked == ["gpus"]
    assert reports["driver"].outcome is CheckOutcome.FAILED
    rest = [report for name, report in reports.items() if name != "driver"]
    assert {report.outcome for report in rest} == {CheckOutcome.SKIPPED}
    assert all(report.text == "no GPU" for report in rest)


def test_what_depends_on_a_failed_check_is_skipped_and_the_rest_runs() -> None:
    reports = checked(StubMachine(serve=EngineError("it died")))
    assert reports["rl-step"].text == "needs vllm"
    assert reports["memory"].text == "needs rl-step"
    assert reports["nccl"].outcome is CheckOutcome.PASSED


def test_what_a_machine_cannot_do_is_no_failure() -> None:
    reports = checked(
        StubMachine(update_by_nccl=NotPossibleError("needs two GPUs"), flash=FlashFacts(None))
    )
    assert reports["weights-nccl"].outcome is CheckOutcome.SKIPPED
    assert reports["flash-attn"].outcome is CheckOutcome.SKIPPED
    assert summary(list(reports.values())) == "10 ok, 0 failed, 2 skipped"


def test_a_check_that_hangs_ends_at_its_deadline() -> None:
    class Hanging(StubMachine):
        async def collective(self) -> CollectiveFacts:
            await asyncio.Event().wait()
            raise AssertionError

    checks = [check for check in all_checks() if check.name == "nccl"]
    object.__setattr__(checks[0], "deadline_s", 0.05)
    report = asyncio.run(run_checks(checks, Hanging()))[0]
    assert report.outcome is CheckOutcome.FAILED
    assert "no answer within 0.05 s" in report.text


def test_on_a_cpu_only_what_it_can() -> None:
    reports = checked(StubMachine(gpus=(), torch=TorchFacts("2.13", None, 0)), cpu=True)
    assert not set(GPU_ONLY) & reports.keys()
    assert all(report.outcome is CheckOutcome.PASSED for report in reports.values())


def test_the_report_can_be_shared(tmp_path: Path) -> None:
    reports = list(checked(StubMachine(serve=EngineError("it died"))).values())
    text_file, json_file = write_report(tmp_path / "out", reports)
    text = text_file.read_text()
    assert "FAILED  vllm" in text
    assert "the first to repair: vllm" in text
    values = json.loads(json_file.read_text())
    assert [check["name"] for check in values["checks"]] == [report.name for report in reports]
    assert values["machine"]


def test_the_command_closes_the_machine_and_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = StubMachine(gpus=())
    monkeypatch.setattr(real, "ThisMachine", lambda: machine)
    done = CliRunner().invoke(app, ["gpu-check", "--out", str(tmp_path)])
    assert done.exit_code == 1
    assert machine.closed
    assert "FAILED  driver          no GPU" in done.output
    assert done.output.index("driver") < done.output.index("memory")
    assert command.gpu_check.__doc__


@pytest.mark.parametrize("gpu", [True, False])
def test_the_recipe_of_the_checks_can_work(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    machine = real.ThisMachine()
    recipe = machine._recipe()
    assert (recipe.model.dtype, recipe.engine.sleep) == (
        ("bfloat16", True) if gpu else ("float32", False)
    )
    assert machine._recipe("engine.weight_transfer=nccl").engine.sleep is False
    asyncio.run(machine.close())


@pytest.mark.slow
async def test_a_probe_that_fails_or_is_cancelled_ends(tmp_path: Path) -> None:
    assert await real.output(sys.executable, "-c", "print(1)\nprint(2)") == "1\n2\n"
    with pytest.raises(InfrastructureError, match=r"failed \(1\): .*ZeroDivisionError"):
        await real.output(sys.executable, "-c", "1 / 0")
    with pytest.raises(InfrastructureError, match=r"did not answer within 0\.1 s"):
        await real.output(sys.executable, "-c", "import time; time.sleep(600)", deadline_s=0.1)
    file = tmp_path / "pid"
    code = f"import os, time\nopen({str(file)!r}, 'x').write(f'{{os.getpid()}}\\n')\n"
    probe = asyncio.create_task(real.output(sys.executable, "-c", code + "time.sleep(600)"))
    async with asyncio.timeout(120):
        while not (file.exists() and file.read_text()):  # noqa: ASYNC110 (no event)
            await asyncio.sleep(0.01)
    probe.cancel()
    await asyncio.wait([probe])
    assert not Path(f"/proc/{file.read_text().strip()}").exists()  # noqa: ASYNC240


@pytest.mark.slow
def test_here_for_real(tmp_path: Path) -> None:
    """This machine has no GPU: the collective runs with gloo, the server needs vLLM."""
    machine = real.ThisMachine()

    async def measure() -> tuple[Any, ...]:
        try:
            return await machine.gpus(), await machine.torch(), await machine.collective()
        finally:
            await machine.close()

    gpus, torch, collective = asyncio.run(measure())
    if gpus:
        pytest.skip("this machine has a GPU: run rstar2 gpu-check")
    assert torch.devices == 0
    assert (collective.backend, collective.ranks, collective.sum) == ("gloo", 2, 3.0)
    assert not machine._directory.exists()
