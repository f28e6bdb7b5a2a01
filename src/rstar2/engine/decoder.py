"""The forward pass of Llama, Qwen and Gemma 3 models over our own KV cache, in fused operations.

Tokens of all sequences are packed into one [N, hidden] tensor; only attention distinguishes
sequences. A `Segment` locates their KV: a decode segment is one new token for each of the first
rows of a slab, a prefill segment is a run of tokens of one row.

Weights, rotary frequencies and formulas are those of transformers; only the order of floating-point
sums differs. Rows of the q and k projections are permuted so that the two halves of a rotary pair
are adjacent and RoPE is one complex multiplication. Queries and keys are permuted alike, so their
dot products do not change. Sliding layers mask older keys, whose KV stays in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file

from rstar2.engine.checksums import HeldWeights, bit_sums
from rstar2.engine.projections import Projection, RmsNorm
from rstar2.engine.slabs import Slab
from rstar2.errors import UserError
from rstar2.model_config import (
    FULL,
    GEMMA3,
    SLIDING,
    DecoderConfig,
    RopeConfig,
    UndescribedModelError,
    read_model_config,
    unreadable_weights,
)

KNOWN = ("llama", "qwen2", "qwen3", GEMMA3)
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer, fused: q, k and v in one matrix, gate and up in another."""

    input_norm: RmsNorm
    qkv: Projection
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None
    out: Projection
    out_norm: RmsNorm | None
    """Norm of what attention adds."""
    mlp_norm: RmsNorm
    gate_up: Projection
    down: Projection
    down_norm: RmsNorm | None
    """Norm of what the feed-forward network adds."""

    def named(self, names: Mapping[str, str], at: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Its tensors by their names in checksums."""
        for field, name in names.items():
            held: Projection | RmsNorm | None = getattr(self, field)
            if held is None:
                continue
            yield f"{at}{name}.weight", held.weight
            if isinstance(held, Projection) and held.bias is not None:
                yield f"{at}{name}.bias", held.bias


LAYER_NAMES = {
    "input_norm": "input_layernorm",
    "qkv": "self_attn.qkv_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate_up": "mlp.gate_up_proj",
    "down": "mlp.down_proj",
}
"""Names of the fields of LayerWeights in checksums."""
GEMMA_LAYER_NAMES = LAYER_NAMES | {
    "out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "down_norm": "post_feedforward_layernorm",
}
"""The same for Gemma, in which Llama's name of one norm is that of another."""


@dataclass(frozen=True, slots=True)
class DecodeSegment:
    """One new token for each of rows 0..n-1 of a slab, at `positions`; tokens first..first+n-1."""

    slab: Slab
    first: int
    rows: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    """[n * kv_heads, 1, reach]: 0 for visible keys, -inf beyond a row's length."""
    window_mask: torch.Tensor
    """The same for sliding layers: also -inf before a row's window."""


@dataclass(frozen=True, slots=True)
class PrefillSegment:
    """`count` new tokens of one row from position `start`; tokens first..first+count-1."""

    slab: Slab
    first: int
    row: int
    start: int
    count: int


Segment = DecodeSegment | PrefillSegment


def read_decoder_config(model: Path) -> DecoderConfig:
    """Read a model's configuration; UserError if this engine cannot run the model."""
    try:
        config = read_model_config(model)
    except UndescribedModelError as error:
        if error.architecture in KNOWN:
            raise
        raise _unsupported(model, error.architecture) from error
    if config.architecture not in KNOWN:
        raise _unsupported(model, config.architecture)
    if config.activation not in ACTIVATIONS:
        known = " or ".join(ACTIVATIONS)
        raise UserError(f"model: {model} has hidden_act {config.activation!r}, not {known}")
    if other := set(config.layer_types) - {FULL, SLIDING}:
        raise UserError(
            f"model: {model} has layers of type {min(other)!r}, not {FULL} or {SLIDING}"
        )
    if config.softcap is not None:
        raise UserError(f"model: {model} has soft-capped logits, which are not supported")
    return config


def _unsupported(model: Path, architecture: str) -> UserError:
    return UserError(
        f"model: {model} is of type {architecture!r}; the embedded engine runs "
        f"{', '.join(KNOWN)}. Use engine.kind: vllm for others."
    )


def read_weights(model: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory's safetensors files, by their transformers names."""
    files = sorted(model.glob("*.safetensors"))
    if not files:
        raise UserError(f"model: {model} has no .safetensors file; save it with save_pretrained")
    state: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            state.update(load_file(file))
        except (SafetensorError, OSError) as error:
            raise UserError(unreadable_weights(file, error)) from error
    return state


def rotary_table(config: DecoderConfig, rope: RopeConfig, length: int) -> torch.Tensor:
    """cos + i sin per (position, pair); transformers computes non-default frequencies."""
    head_dim = config.shape.head_dim
    if rope.kind in LENGTH_DEPENDENT_ROPE or rope.rotated_share != 1.0:
        raise UserError(
            f"model: {rope.kind!r} RoPE over {rope.rotated_share:.0%} of a head is not supported"
        )
    factor = 1.0
    if rope.kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / rope.theta**exponents
    else:
        from transformers import AutoConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        if rope.kind not in ROPE_INIT_FUNCTIONS:
            raise UserError(f"model: RoPE of type {rope.kind!r} is not known to transformers")
        if config.sliding_rope is not None:
            raise UserError(f"model: RoPE of type {rope.kind!r} by layer is not supported")
        full = AutoConfig.from_pretrained(config.directory, local_files_only=True)
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope.kind](full)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    return torch.complex(angles.cos() * factor, angles.sin() * factor)


class Decoder:
    """A model's weights and its forward pass."""

    def __init__(
        self,
        config: DecoderConfig,
        state: Mapping[str, torch.Tensor],
        *,
        max_length: int,
        device: torch.device,
        dtype: torch.dtype,
        int8: bool = False,
    ) -> None:
        if int8 and device.type != "cpu":
            raise UserError("engine.quantization = int8 runs on CPUs: use none on a GPU")
        shape = self.shape = config.shape
        self._int8 = int8
        self._eps = config.norm_eps
        self._gemma = config.architecture == GEMMA3
        self._qk_norm = config.architecture in ("qwen3", GEMMA3)
        self.device = device
        self.dtype = dtype
        self._table = rotary_table(config, config.rope, max_length).to(device)
        self._sliding_table = self._table
        if config.sliding_rope is not None:
            self._sliding_table = rotary_table(config, config.sliding_rope, max_length).to(device)
        self._sliding = [kind == SLIDING for kind in config.layer_types or (FULL,) * shape.layers]
        self.window = config.sliding_window
        """Keys that a query of a sliding layer sees; None if no layer slides."""
        self._activation = ACTIVATIONS[config.activation]
        self._scale = (config.query_scale or shape.head_dim) ** -0.5
        # Rounded to the weights' format, as in transformers.
        embedding_scale = torch.tensor(shape.hidden**0.5, dtype=dtype).item()
        self._embedding_scale = embedding_scale if self._gemma else None
        pairs = torch.arange(shape.head_dim).view(2, -1).t().reshape(-1)
        self._pairs = pairs.to(device)
        self.install(state)

    def install(self, state: Mapping[str, torch.Tensor]) -> None:
        """Install new weights, or raise UserError and keep the old ones."""
        shape = self.shape
        take = _StateReader(state, self.device, self.dtype)
        embedding = take("model.embed_tokens.weight", shape.vocabulary, shape.hidden)
        norm = self._norm(take("model.norm.weight", shape.hidden))
        head = embedding if shape.tied else take("lm_head.weight", shape.vocabulary, shape.hidden)
        layers = [self._layer(take, f"model.layers.{i}.") for i in range(shape.layers)]
        if take.unused - {"lm_head.weight"}:
            raise UserError(f"weights: unknown tensors {sorted(take.unused)[:3]}")
        self.embedding, self.norm, self.layers = embedding, norm, layers
        self.head = Projection(head, None)

    def held_weights(self) -> HeldWeights:
        """Checksums of the installed tensors under the names of their fused parts."""
        tensors = [
            ("model.embed_tokens.weight", self.embedding),
            ("model.norm.weight", self.norm.weight),
        ]
        if self.head.weight is not self.embedding:
            tensors.append(("lm_head.weight", self.head.weight))
        for index, layer in enumerate(self.layers):
            names = GEMMA_LAYER_NAMES if self._gemma else LAYER_NAMES
            tensors += layer.named(names, f"model.layers.{index}.")
        return HeldWeights(str(self.dtype).removeprefix("torch."), bit_sums(tensors))

    def _norm(self, weight: torch.Tensor) -> RmsNorm:
        return RmsNorm(weight, self._eps, plus_one=self._gemma)

    def _layer(self, take: _StateReader, at: str) -> LayerWeights:
        shape = self.shape
        names = GEMMA_LAYER_NAMES if self._gemma else LAYER_NAMES

        projection = partial(Projection, int8=self._int8)

        def norm(field: str) -> RmsNorm:
            return self._norm(take(f"{at}{names[field]}.weight", shape.hidden))

        def paired(name: str, heads: int) -> tuple[torch.Tensor, torch.Tensor | None]:
            rows = heads * shape.head_dim
            order = torch.arange(rows, device=self.device).view(heads, -1)[:, self._pairs].view(-1)
            bias = take.optional(f"{at}self_attn.{name}.bias", rows)
            weight = take(f"{at}self_attn.{name}.weight", rows, shape.hidden)
            return weight[order], None if bias is None else bias[order]

        q, q_bias = paired("q_proj", shape.heads)
        k, k_bias = paired("k_proj", shape.kv_heads)
        values = shape.kv_heads * shape.head_dim
        v = take(f"{at}self_attn.v_proj.weight", values, shape.hidden)
        v_bias = take.optional(f"{at}self_attn.v_proj.bias", values)
        gate = take(f"{at}mlp.gate_proj.weight", None, shape.hidden)
        up = take(f"{at}mlp.up_proj.weight", None, shape.hidden)
        gate_up_biases = [
            take.optional(f"{at}mlp.{name}.bias", None) for name in ("gate_proj", "up_proj")
        ]
        q_norm = k_norm = None
        if self._qk_norm:
            q_weight = take(f"{at}self_attn.q_norm.weight", shape.head_dim)[self._pairs]
            k_weight = take(f"{at}self_attn.k_norm.weight", shape.head_dim)[self._pairs]
            q_norm, k_norm = self._norm(q_weight), self._norm(k_weight)
        return LayerWeights(
            input_norm=norm("input_norm"),
            qkv=projection(torch.cat((q, k, v)), _cat_biases((q_bias, k_bias, v_bias))),
            q_norm=q_norm,
            k_norm=k_norm,
            out=projection(
                take(f"{at}self_attn.o_proj.weight", shape.hidden, shape.heads * shape.head_dim),
                take.optional(f"{at}self_attn.o_proj.bias", shape.hidden),
            ),
            out_norm=norm("out_norm") if self._gemma else None,
            mlp_norm=norm("mlp_norm"),
            gate_up=projection(torch.cat((gate, up)), _cat_biases(gate_up_biases)),
            down=projection(
                take(f"{at}mlp.down_proj.weight", shape.hidden, None),
                take.optional(f"{at}mlp.down_proj.bias", shape.hidden),
            ),
            down_norm=norm("down_norm") if self._gemma else None,
        )

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, segments: Sequence[Segment]
    ) -> torch.Tensor:
        """Run the packed tokens and write their KV; returns the last hidden states [N, hidden]."""
        x = F.embedding(ids, self.embedding)
        if self._embedding_scale is not None:
            x = x * self._embedding_scale
        rotation = self._table.index_select(0, positions).unsqueeze(1)
        sliding_rotation = rotation
        if self._sliding_table is not self._table:
            sliding_rotation = self._sliding_table.index_select(0, positions).unsqueeze(1)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(layer.input_norm(x)).view(x.shape[0], -1, self.shape.head_dim)
            self._rotate(qkv, layer, sliding_rotation if self._sliding[index] else rotation)
            outs = [self._attend(index, qkv, segment) for segment in segments]
            mixed = outs[0] if len(outs) == 1 else torch.cat(outs)
            x = _added(x, layer.out, mixed, layer.out_norm)
            gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, dim=-1)
            x = _added(x, layer.down, self._activation(gate).mul_(up), layer.down_norm)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the given hidden states."""
        return self.head(self.norm(hidden))

    def _rotate(self, qkv: torch.Tensor, layer: LayerWeights, rotation: torch.Tensor) -> None:
        """Apply qk-norm (where the model has it) and RoPE in place; values are unchanged."""
        shape = self.shape
        if layer.q_norm is not None and layer.k_norm is not None:
            heads, both = shape.heads, shape.heads + shape.kv_heads
            qkv[:, :heads] = layer.q_norm(qkv[:, :heads])
            qkv[:, heads:both] = layer.k_norm(qkv[:, heads:both])
        qk = qkv[:, : shape.heads + shape.kv_heads]
        pairs = qk.unflatten(-1, (-1, 2))
        if self.dtype is torch.float32:
            torch.view_as_complex(pairs).mul_(rotation)
        else:  # torch has no half-precision complex type for this
            turned = torch.view_as_complex(pairs.float()) * rotation
            qk.copy_(torch.view_as_real(turned).flatten(-2))

    def _attend(self, index: int, qkv: torch.Tensor, segment: Segment) -> torch.Tensor:
        """Write the segment's keys and values, then attend; [tokens, heads * head_dim]."""
        shape = self.shape
        heads, kv_heads, head_dim = shape.heads, shape.kv_heads, shape.head_dim
        if isinstance(segment, DecodeSegment):
            cache, n = segment.slab.decoding(index), segment.rows.shape[0]
            part = qkv[segment.first : segment.first + n]
            fresh = part[:, heads:].view(n, 2, kv_heads, head_dim)
            cache.rows[:, segment.rows, :, segment.positions] = fresh
            q = part[:, :heads].reshape(n * kv_heads, heads // kv_heads, head_dim)
            mask = segment.window_mask if self._sliding[index] else segment.mask
            scores = torch.baddbmm(mask, q, cache.keys, alpha=self._scale)
            out = torch.bmm(torch.softmax(scores, dim=-1), cache.values)
            return out.view(n, heads * head_dim)
        cache = segment.slab.layer(index)
        count, end = segment.count, segment.start + segment.count
        part = qkv[segment.first : segment.first + count]
        fresh = part[:, heads:].view(count, 2, kv_heads, head_dim).permute(1, 2, 0, 3)
        cache.rows[:, segment.row, :, segment.start : end] = fresh
        keys, values = cache.rows[:, segment.row, None, :, :end].unbind(0)
        seen = None
        window = self.window if self._sliding[index] else None
        if window is not None and end > window:
            seen = torch.ones(count, end, dtype=torch.bool, device=qkv.device)
            seen = seen.tril_(segment.start).triu_(segment.start - window + 1)
        elif segment.start and count > 1:
            seen = torch.ones(count, end, dtype=torch.bool, device=qkv.device).tril_(segment.start)
        out = F.scaled_dot_product_attention(
            part[:, :heads].transpose(0, 1)[None],
            keys,
            values,
            attn_mask=seen,
            is_causal=seen is None and count > 1,
            scale=self._scale,
            enable_gqa=heads != kv_heads,
        )
        return out[0].transpose(0, 1).reshape(count, heads * head_dim)


@torch.inference_mode()
def score(decoder: Decoder, ids: npt.NDArray[np.int64], chunk: int) -> list[float]:
    """Logprob of each token after the first at temperature 1, `chunk` tokens at a time.

    Uses the same forward pass as generation, in a temporary row outside the KV budget.
    """
    shape, device = decoder.shape, decoder.device
    slab = Slab(
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        length=len(ids),
        head_dim=shape.head_dim,
        device=device,
        dtype=decoder.dtype,
    )
    row = slab.add(0)
    tokens = torch.from_numpy(ids).to(device)
    out: list[float] = []
    for start in range(0, len(ids) - 1, chunk):
        end = min(start + chunk, len(ids) - 1)
        segment = PrefillSegment(slab, 0, row, start, end - start)
        hidden = decoder.forward(
            tokens[start:end], torch.arange(start, end, device=device), [segment]
        )
        logp = torch.log_softmax(decoder.logits(hidden).float(), dim=-1)
        out += logp.gather(-1, tokens[start + 1 : end + 1, None]).squeeze(-1).tolist()
    return out


class _StateReader:
    """Reads tensors of a state dict by name, checks shapes and tracks unused names."""

    def __init__(
        self, state: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype
    ) -> None:
        self._state = state
        self._device = device
        self._dtype = dtype
        self.unused = set(state)

    def __call__(self, name: str, *sizes: int | None) -> torch.Tensor:
        tensor = self.optional(name, *sizes)
        if tensor is None:
            raise UserError(f"weights: {name} is missing")
        return tensor

    def optional(self, name: str, *sizes: int | None) -> torch.Tensor | None:
        tensor = self._state.get(name)
        if tensor is None:
            return None
        self.unused.discard(name)
        if len(sizes) != tensor.dim() or any(
            want is not None and want != have
            for want, have in zip(sizes, tensor.shape, strict=True)
        ):
            raise UserError(f"weights: {name} has shape {tuple(tensor.shape)}, expected {sizes}")
        # Always a copy: the caller may keep training its tensors.
        return tensor.detach().to(self._device, self._dtype, copy=True)


def _added(
    x: torch.Tensor, projection: Projection, y: torch.Tensor, norm: RmsNorm | None
) -> torch.Tensor:
    """x + the projection of y, which is normalised first where the model does so."""
    return projection.added(x, y) if norm is None else x + norm(projection(y))


def _cat_biases(biases: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    present = [bias for bias in biases if bias is not None]
    if not present:
        return None
    if len(present) != len(biases):
        raise UserError("weights: only some of the fused projections have a bias")
    return torch.cat(present)
