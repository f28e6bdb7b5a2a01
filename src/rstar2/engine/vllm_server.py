"""One vLLM API server as a child of ours: started, watched, stopped, and never left behind.

Promises:
- The server listens on a Unix socket in a private directory: its control endpoints can be reached
  by this user only, and no port is taken.
- `vllm_supervisor` leads its process group, and ends all of the group when the server or this
  process ends, also by kill -9.
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

STOP_S = 30.0
"""How long the supervisor may take to end its group."""
CAUSE_LINES = 30
STEP_TOKENS = 2048
"""Tokens that a server on a CPU computes in one step, at least."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What one server is started with."""

    model: str
    kv_tokens: int | None
    """KV cache in tokens; None leaves it to vLLM (its share of the GPU's memory)."""
    max_sequences: int
    max_length: int
    dtype: str = "float32"
    block_tokens: int = 32
    threads: int = 1
    cores: tuple[int, ...] = ()
    """Cores that the server is bound to; empty: any."""
    packed_linears: bool = False
    """Leave vLLM's packing of linear layers on. Weight updates are then wrong on CPUs."""
    weight_backend: str | None = None
    """Backend of vLLM's weight transfer (`nccl`); None: weights come as files."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the server, last and so with the last word."""
    environment: Mapping[str, str] = field(default_factory=dict)


def arguments_of(settings: ServerSettings, socket: Path) -> list[str]:
    """The command line of the API server."""
    words = [
        *("--model", settings.model, "--uds", str(socket), "--dtype", settings.dtype),
        *("--max-model-len", str(settings.max_length)),
        *("--max-num-seqs", str(settings.max_sequences)),
        *("--generation-config", "vllm"),  # sampling is ours alone, whatever the model ships
        *("--logprobs-mode", "processed_logprobs"),
        *("--enable-scale-out", "--enable-prompt-tokens-details"),
        *("--disable-uvicorn-access-log", "--seed", "0"),
    ]
    if settings.kv_tokens is not None:
        # Block 0 is never given out, so it takes one more than the cache is to hold.
        blocks = settings.kv_tokens // settings.block_tokens + 1
        words += ["--block-size", str(settings.block_tokens), "--enforce-eager"]
        words += ["--num-gpu-blocks-override", str(blocks)]
        # A prompt that is computed in parts makes vLLM turn back the generator of a seeded request,
        # which generators of CPUs cannot: the engine would die of it.
        words += ["--no-enable-chunked-prefill"]
        words += ["--max-num-batched-tokens", str(max(STEP_TOKENS, settings.max_length))]
    if settings.weight_backend is not None:
        words += ["--weight-transfer-config", f'{{"backend": "{settings.weight_backend}"}}']
    return [*words, *settings.arguments]


def environment_of(settings: ServerSettings, directory: Path) -> dict[str, str]:
    """The environment of the API server and its children."""
    threads = str(settings.threads)
    on_cpu = settings.kv_tokens is not None
    return {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": str(directory),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # By default every server would bind its threads to the same first cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1" if Path(settings.model).is_dir() else "0",
        # Else the first request waits for a C++ compiler that makes one small helper faster.
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
        """The supervisor's process; also the id of the group."""
        return None if self._child is None else self._child.pid

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.running

    def start(self) -> None:
        """Begin to start the server. From the loop's thread: the kernel ties its life to it."""
        if self._child is not None:
            raise EngineError(f"{self.name}: stop the old server before a new one is started")
        self._directory = _private_directory()
        command = [sys.executable, "-m", "rstar2.engine.vllm_supervisor"]
        if self.settings.cores:
            command += ["--cores", ",".join(map(str, self.settings.cores))]
        command += ["--", *arguments_of(self.settings, self.socket)]
        self._child = Child(
            self.name,
            command,
            parent_death_signal=signal.SIGTERM,
            grace_s=STOP_S,
            environment=environment_of(self.settings, self._directory),
            log=self._directory / "log",
            kills_group=False,  # resource trackers need time, see `end_group`
        )

    def post_mortem(self) -> str:
        """How the server ended, and the end of its log."""
        if self._child is None:
            return "not started"
        return f"server {self._child.describe_end()}; its last output:\n{self.tail()}"

    def tail(self) -> str:
        """The first errors in the server's log, repetitions left out, and its last lines."""
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
    """A temporary directory whose name leaves room for names of sockets (107 bytes in all)."""
    usual = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="rstar2-vllm-", dir=usual if len(usual) <= 40 else "/tmp"))


async def _end(supervisor: Child) -> None:
    """Ask the supervisor to end its group; if it was killed or cannot, end the group here."""
    await supervisor.stop()
    await asyncio.to_thread(end_group, supervisor.pid)
