"""Typed client of a vLLM server's HTTP interface.

Every call has a deadline (`http.EngineHttp`). A server that has ended, answers 5xx or sends an
invalid response raises EngineError. A 4xx response raises UserError with the server's message,
because a retry, here or on another engine, would not help.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import msgspec

from rstar2.engine.checksums import HeldWeights
from rstar2.engine.http import EngineHttp
from rstar2.engine.vllm_plugin import HELD_WEIGHTS
from rstar2.engine.vllm_weights import all_workers
from rstar2.errors import EngineError, UserError
from rstar2.http_client import Address
from rstar2.types import EngineLoad, Finish, Generation, Sampling, VersionSpan

SHOWN_CHARS = 500
_GAUGES = (
    *("cache_config_info", "kv_cache_usage_perc", "num_requests_running", "num_requests_waiting"),
    *("num_preemptions_total", "iteration_tokens_total_count", "generation_tokens_total"),
    *("prompt_tokens_total", "prompt_tokens_cached_total"),
)
_SAMPLE = re.compile(rf"\n(vllm:(?:{'|'.join(_GAUGES)}))(?:\{{(.*)\}})? (\S+)(?=\n|\Z)")
"""Starts with a fixed text: a server has thousands of lines, and every engine is polled."""
_LABEL = re.compile(r'(\w+)="([^"]*)"')

T = TypeVar("T")


# --------------------------------------------------------------------------- responses


class _Logprob(msgspec.Struct, gc=False):  # one per token: keep them off the garbage collector
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _WeightSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class _CompletionChoice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str
    logprobs: _Logprobs | None = None
    weight_versions: list[_WeightSpan] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Generated(msgspec.Struct):
    choices: list[_CompletionChoice]
    usage: _Usage | None = None
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None


class ServedModel(msgspec.Struct):
    """A model of `/v1/models`."""

    id: str
    max_model_len: int | None = None


class _ServedModels(msgspec.Struct):
    data: list[ServedModel]


class _WeightInfo(msgspec.Struct):
    weight_version: str


class _Success(msgspec.Struct):
    success: bool


class _Workers(msgspec.Struct):
    results: list[dict[str, Any]]


class _Paused(msgspec.Struct):
    is_paused: bool


@dataclass(frozen=True, slots=True)
class ServerGauges:
    """State of the scheduler and its KV cache, from `/metrics`."""

    blocks: int
    """Blocks that requests can use; the server reserves one more."""
    block_tokens: int
    used_share: float
    running: int
    waiting: int
    preemptions: int
    steps: int
    decoded: int
    prefilled: int
    """Prompt tokens computed, without those from the prefix cache."""

    def load(self, kv_tokens: int, version: int) -> EngineLoad:
        """The load of a server with this KV cache and these weights."""
        return EngineLoad(
            kv_used=round(self.used_share * kv_tokens),
            running=self.running,
            waiting=self.waiting,
            preemptions=self.preemptions,
            version=version,
            steps=self.steps,
            decoded=self.decoded,
            prefilled=self.prefilled,
        )


# --------------------------------------------------------------------------- the client


class VllmClient:
    """Client of one server; `close` closes its connections."""

    def __init__(self, name: str, *, url: str | None = None, socket: Path | None = None) -> None:
        assert (url is None) != (socket is None)
        self.name = name
        self.adapter: str | None = None
        """LoRA adapter that all requests use."""
        self._adapters = 0
        if url is not None:
            address = Address.parse(url.rstrip("/"), None, "engine.urls")
        else:
            address = Address("engine", 80, socket=str(socket))
        self._http = EngineHttp(name, address)

    @property
    def unsent(self) -> int:
        """Generations that wait for a connection."""
        return self._http.unsent

    async def close(self) -> None:
        await self._http.close()

    async def _ask(
        self,
        method: str,
        path: str,
        deadline_s: float,
        body: Any = None,
        *,
        patient: bool = False,
        **query: str,
    ) -> bytes:
        """Send one request; returns the body of a success, or raises the matching error."""
        content = b"" if body is None else msgspec.json.encode(body)
        target = f"{path}?{urlencode(query)}" if query else path
        status, answer = await self._http.ask(method, target, content, deadline_s, patient=patient)
        if 200 <= status < 300:
            return answer
        text = answer.decode("utf-8", "replace")[:SHOWN_CHARS]
        message = f"{self.name}: {path} answered {status}: {text}"
        raise (UserError if 400 <= status < 500 else EngineError)(message)

    def _read(self, data: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.MsgspecError as error:
            raise EngineError(f"{self.name}: invalid response: {error}") from error

    # ------------------------------------------------------------------ tokens in, tokens out

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        salt: str,
        deadline_s: float,
        seeded: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> Generation:
        """Sample a continuation; cancelling closes the connection, and vLLM aborts the request.

        `salt` separates prefix caches: only prompts with the same salt share KV. Without `seeded`
        the server draws random numbers for the whole batch, which is faster. `extra` adds vLLM
        sampling parameters.
        """
        body = {
            "token_ids": list(prompt_ids),
            "model": self.adapter,
            "cache_salt": salt,
            "sampling_params": {
                "max_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                # Only the recipe's stop ids end a turn, not the model's EOS unless it is one.
                "stop_token_ids": list(sampling.stop_ids),
                "ignore_eos": True,
                "logprobs": 0,
                "detokenize": False,
                **({"seed": sampling.seed & (2**63 - 1)} if seeded else {}),
                **(extra or {}),
            },
        }
        data = await self._ask("POST", "/inference/v1/generate", deadline_s, body, patient=True)
        answer = self._read(data, _Generated)
        if len(answer.choices) != 1:
            raise EngineError(f"{self.name}: {len(answer.choices)} continuations for one prompt")
        choice = answer.choices[0]
        details = answer.usage.prompt_tokens_details if answer.usage else None
        return Generation(
            token_ids=choice.token_ids,
            logprobs=self._logprobs(choice),
            versions=self._versions(choice),
            finish=self._finish(choice),
            cached_tokens=(details.cached_tokens or 0) if details else 0,
            engine=self.name,
        )

    def _logprobs(self, choice: _CompletionChoice) -> list[float]:
        content = (choice.logprobs.content if choice.logprobs else None) or []
        if [entry.token_id for entry in content] != choice.token_ids:
            raise EngineError(f"{self.name}: logprobs do not match the sampled tokens")
        return [entry.logprob for entry in content]

    def _versions(self, choice: _CompletionChoice) -> tuple[VersionSpan, ...]:
        spans = choice.weight_versions or []
        try:
            return tuple((int(span.version), span.end - span.start) for span in spans)
        except ValueError as error:
            raise EngineError(
                f"{self.name}: it serves weights that rstar2 did not publish: {error}"
            ) from error

    def _finish(self, choice: _CompletionChoice) -> Finish:
        known = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.CANCELLED}
        if choice.finish_reason not in known:
            raise EngineError(f"{self.name}: unknown finish_reason {choice.finish_reason!r}")
        return known[choice.finish_reason]

    async def score(self, token_ids: Sequence[int], *, deadline_s: float) -> list[float]:
        """Logprob of each token after the first, at temperature 1; never from a cache."""
        body = {
            "token_ids": list(token_ids),
            "model": self.adapter,
            "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False},
        }
        data = await self._ask("POST", "/inference/v1/generate", deadline_s, body)
        rows = self._read(data, _Generated).prompt_logprobs or []
        try:
            return [
                float((row or {})[str(token)]["logprob"])
                for token, row in zip(token_ids[1:], rows[1:], strict=True)
            ]
        except (KeyError, ValueError) as error:
            raise EngineError(f"{self.name}: prompt logprobs are incomplete: {error}") from error

    # ------------------------------------------------------------------ control

    async def health(self, deadline_s: float) -> None:
        """Check that the server and its engine are alive."""
        await self._ask("GET", "/health", deadline_s)

    async def models(self, deadline_s: float) -> list[ServedModel]:
        """The models that the server answers for."""
        return self._read(await self._ask("GET", "/v1/models", deadline_s), _ServedModels).data

    async def gauges(self, deadline_s: float) -> ServerGauges:
        data = await self._ask("GET", "/metrics", deadline_s)
        try:
            return read_gauges(data.decode())
        except (KeyError, ValueError) as error:
            raise EngineError(f"{self.name}: /metrics: missing or invalid: {error}") from error

    async def weight_version(self, deadline_s: float) -> int:
        """Version label of the current weights."""
        info = self._read(await self._ask("GET", "/weight_info", deadline_s), _WeightInfo)
        try:
            return int(info.weight_version)
        except ValueError as error:
            raise EngineError(
                f"{self.name}: it serves weights {info.weight_version!r}, not published by rstar2"
            ) from error

    async def label(self, version: int, deadline_s: float) -> None:
        """Set the version label of the current weights."""
        body = {"new_version": str(version)}
        await self._ask("POST", "/update_weight_version", deadline_s, body)

    async def pause(self, deadline_s: float) -> None:
        """Abort running requests, which return their tokens (CANCELLED); new requests wait."""
        await self._ask("POST", "/pause", deadline_s, mode="abort")

    async def resume(self, deadline_s: float) -> None:
        await self._ask("POST", "/resume", deadline_s)

    async def paused(self, deadline_s: float) -> bool:
        return self._read(await self._ask("GET", "/is_paused", deadline_s), _Paused).is_paused

    async def reload(self, path: Path, deadline_s: float) -> None:
        """Load the weights of a model directory into every worker."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        await self._ask("POST", "/collective_rpc", deadline_s, body)

    async def sleep(self, deadline_s: float) -> None:
        """Move the weights to the host and drop the KV cache; needs --enable-sleep-mode."""
        await self._ask("POST", "/sleep", deadline_s, level="1", mode="abort")

    async def wake(self, deadline_s: float) -> None:
        """Take back the memory of weights and KV cache."""
        await self._ask("POST", "/wake_up", deadline_s)

    async def load_adapter(self, path: Path, deadline_s: float) -> None:
        """Load a LoRA adapter, use it for all requests, and remove the one before.

        Every adapter has its own name: vLLM reads one that replaces another of the same name from
        its files again for every request.
        """
        self._adapters += 1
        before, name = self.adapter, f"rstar2-{self._adapters}"
        body = {"lora_name": name, "lora_path": str(path)}
        await self._ask("POST", "/v1/load_lora_adapter", deadline_s, body)
        self.adapter = name
        if before is not None:
            await self._ask("POST", "/v1/unload_lora_adapter", deadline_s, {"lora_name": before})

    async def held_weights(self, deadline_s: float) -> HeldWeights:
        """Checksums of the weights in the server's workers; needs our plugin in the server."""
        try:
            data = await self._ask("POST", "/collective_rpc", deadline_s, {"method": HELD_WEIGHTS})
        except EngineError as error:
            raise EngineError(
                f"{self.name}: its weights cannot be checked; start servers of engine.urls with "
                f"RSTAR2_ENGINE=1 and rstar2 installed: {error}"
            ) from error
        return all_workers(self._read(data, _Workers).results)

    async def forget(self, deadline_s: float) -> None:
        """Drop all KV; running requests recompute theirs."""
        data = await self._ask(
            "POST", "/reset_prefix_cache", deadline_s, reset_running_requests="true"
        )
        if not self._read(data, _Success).success:
            raise EngineError(f"{self.name}: the prefix cache could not be reset")

    async def control(self, path: str, deadline_s: float, body: Mapping[str, Any]) -> None:
        """Call one of vLLM's weight-transfer endpoints."""
        await self._ask("POST", path, deadline_s, body)

    async def world_size(self, deadline_s: float) -> int:
        """Number of workers that receive weights."""
        return int(
            self._read(await self._ask("GET", "/get_world_size", deadline_s), dict[str, int])[
                "world_size"
            ]
        )


def read_gauges(text: str) -> ServerGauges:
    """Parse Prometheus text; KeyError names a missing metric."""
    values: dict[str, float] = {}
    labels: dict[str, dict[str, str]] = {}
    for name, pairs, value in _SAMPLE.findall(f"\n{text}"):
        values[name] = values.get(name, 0.0) + float(value)
        labels[name] = dict(_LABEL.findall(pairs))
    cache = labels["vllm:cache_config_info"]
    return ServerGauges(
        blocks=int(cache["num_gpu_blocks"]) - 1,
        block_tokens=int(cache["block_size"]),
        used_share=values["vllm:kv_cache_usage_perc"],
        running=int(values["vllm:num_requests_running"]),
        waiting=int(values["vllm:num_requests_waiting"]),
        preemptions=int(values["vllm:num_preemptions_total"]),
        steps=int(values["vllm:iteration_tokens_total_count"]),
        decoded=int(values["vllm:generation_tokens_total"]),
        prefilled=int(
            values["vllm:prompt_tokens_total"] - values["vllm:prompt_tokens_cached_total"]
        ),
    )
