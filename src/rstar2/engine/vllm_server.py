"""One vLLM API server as a supervised child process.

Guarantees:
- The server listens on a Unix socket in a private directory: only this user can reach its control
  endpoints, and it uses no port.
- `vllm_supervisor` leads its process group, and ends the whole group when the server or this
  process ends, even by kill -9.
- `stop` returns when the group is empty and the directory is removed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rstar2.child import LINE_CHARS, Child, tail
from rstar2.engine.vllm_plugin import ENGINE, PACKED
from rstar2.engine.vllm_supervisor import end_group
from rstar2.errors import EngineError
from rstar2.http_client import LocalResourceError

STOP_S = 30.0
"""Time limit for the supervisor to end its group."""
CAUSE_LINES = 30
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `--max-lora-rank` that vLLM accepts."""
STEP_TOKENS = 2048
"""Minimum of `--max-num-batched-tokens` for a server on a CPU."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of one server."""

    model: str
    kv_tokens: int | None
    """KV cache in tokens; None lets vLLM use its share of the GPU's memory."""
    max_sequences: int
    max_length: int
    dtype: str = "float32"
    block_tokens: int = 32
    threads: int = 1
    cores: tuple[int, ...] = ()
    """CPU cores that the server is pinned to; empty for any."""
    packed_linears: bool = False
    """Keep vLLM's packing of linear layers, which makes weight updates wrong on CPUs."""
    lora_rank: int | None = None
    """Rank of the adapters that the server loads at run time; None: it loads none."""
    sleep_mode: bool = False
    """Whether the server can give back the GPU's memory for a time."""
    memory_share: float | None = None
    """Share of the GPU's memory that the server may use; None leaves it to vLLM."""
    weight_backend: str | None = None
    """Backend of vLLM's weight transfer (`nccl`); None to load weights from files."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the server; they come last and override the others."""
    environment: Mapping[str, str] = field(default_factory=dict)


def arguments_of(settings: ServerSettings, socket: Path) -> list[str]:
    """The command line of the API server."""
    arguments = [
        *("--model", settings.model, "--uds", str(socket), "--dtype", settings.dtype),
        *("--max-model-len", str(settings.max_length)),
        *("--max-num-seqs", str(settings.max_sequences)),
        *("--generation-config", "vllm"),  # ignore the model's own sampling defaults
        *("--logprobs-mode", "processed_logprobs"),
        *("--enable-scale-out", "--enable-prompt-tokens-details"),
        *("--disable-uvicorn-access-log", "--seed", "0"),
    ]
    if settings.kv_tokens is not None:
        # vLLM never assigns block 0, so it needs one block more.
        blocks = settings.kv_tokens // settings.block_tokens + 1
        arguments += ["--block-size", str(settings.block_tokens), "--enforce-eager"]
        arguments += ["--num-gpu-blocks-override", str(blocks)]
        # With chunked prefill, vLLM rewinds the random generator of a seeded request. CPU
        # generators do not support that, and the engine would crash.
        arguments += ["--no-enable-chunked-prefill"]
        arguments += ["--max-num-batched-tokens", str(max(STEP_TOKENS, settings.max_length))]
    if settings.memory_share is not None:
        arguments += ["--gpu-memory-utilization", f"{settings.memory_share:.3f}"]
    if settings.sleep_mode:
        arguments += ["--enable-sleep-mode"]
    if settings.lora_rank is not None:
        rank = next(size for size in LORA_RANKS if size >= settings.lora_rank)
        arguments += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(rank)]
    if settings.weight_backend is not None:
        arguments += ["--weight-transfer-config", f'{{"backend": "{settings.weight_backend}"}}']
    return [*arguments, *settings.arguments]


def environment_of(settings: ServerSettings, directory: Path) -> dict[str, str]:
    """The environment of the API server and its children."""
    threads = str(settings.threads)
    on_cpu = settings.kv_tokens is not None
    return {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0" if settings.lora_rank is None else "1",
        "VLLM_RPC_BASE_PATH": str(directory),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # By default every server would pin its threads to the same first cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1" if Path(settings.model).is_dir() else "0",
        # Otherwise the first request waits for a C++ compiler to speed up one small helper.
        "TORCH_COMPILE_DISABLE": "1" if on_cpu else "0",
        ENGINE: "1",
        PACKED: "1" if settings.packed_linears else "0",
        **settings.environment,
    }


class VllmServer:
    """The process group of one server and its private directory."""

    def __init__(self, name: str, settings: ServerSettings) -> None:
        self.name, self.settings = name, settings
        self._directory: Path | None = None
        self._child: Child | None = None

    @property
    def socket(self) -> Path:
        assert self._directory is not None
        return self._directory / "http"

    @property
    def pid(self) -> int | None:
        """Process id of the supervisor, and id of its group."""
        return None if self._child is None else self._child.pid

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.running

    def start(self) -> None:
        """Start the server without waiting for it; it ends when the calling thread ends."""
        if self._child is not None:
            raise EngineError(f"{self.name}: stop the old server before starting a new one")
        try:
            directory = self._directory = _private_directory()
            self._child = self._start(directory)
        except OSError as error:
            if self._directory is not None:
                shutil.rmtree(self._directory, ignore_errors=True)
                self._directory = None
            raise LocalResourceError(f"{self.name}: no server could be started: {error}") from error

    def _start(self, directory: Path) -> Child:
        command = [sys.executable, "-m", "rstar2.engine.vllm_supervisor"]
        if self.settings.cores:
            command += ["--cores", ",".join(map(str, self.settings.cores))]
        command += ["--", *arguments_of(self.settings, self.socket)]
        return Child(
            self.name,
            command,
            parent_death_signal=signal.SIGTERM,
            grace_s=STOP_S,
            environment=environment_of(self.settings, directory),
            log=directory / "log",
            kills_group=False,  # resource trackers need time, see `end_group`
        )

    def post_mortem(self) -> str:
        """How the server ended, and its last log lines."""
        if self._child is None:
            return "not started"
        return f"server {self._child.describe_end()}; its last output:\n{self.tail()}"

    def tail(self) -> str:
        """The first errors in the server's log, without repetitions, and its last lines."""
        if self._directory is None or not (self._directory / "log").exists():
            return ""
        log = self._directory / "log"
        with log.open(encoding="utf-8", errors="replace") as lines:
            errors = (line.rstrip()[:LINE_CHARS] for line in lines if " ERROR " in line)
            causes = [line for line in errors if not line.startswith("(APIServer")][:CAUSE_LINES]
        return "\n".join([*causes, "...", tail(log)] if causes else [tail(log)])

    async def stop(self) -> None:
        """End every process of the group and remove the directory; idempotent."""
        child, directory = self._child, self._directory
        self._child = self._directory = None
        try:
            if child is not None:
                await asyncio.shield(asyncio.create_task(_end(child)))
        finally:
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)


def _private_directory() -> Path:
    """A temporary directory with a path short enough for Unix sockets (107 bytes in total)."""
    default = tempfile.gettempdir()
    parent = default if len(default) <= 40 else "/tmp"
    return Path(tempfile.mkdtemp(prefix="rstar2-vllm-", dir=parent))


async def _end(supervisor: Child) -> None:
    """Ask the supervisor to end its group; if it was killed or cannot, end the group here."""
    await supervisor.stop()
    await asyncio.to_thread(end_group, supervisor.pid)
