"""Any transformers causal LM as a policy over packs: tokens in, logprobs of chosen tokens out.

`PackedPolicy` owns the model and is the root of sharding, so that embedding, body and head are used
under one forward. The body runs on the packed row; the head runs on predicted positions only.
How a model turns hidden states into logits (scaling, soft-capping) is read from its config and
proven against the model's own logits when it is loaded, so a model with an unknown head is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging
from transformers.utils.import_utils import is_flash_attn_2_available

from rstar2.config import LoraConfig
from rstar2.errors import RecipeError
from rstar2.learner import attention
from rstar2.learner.logprobs import HeadScale, token_logprobs
from rstar2.learner.lora import add_adapters
from rstar2.learner.pack import Pack, make_pack, make_row
from rstar2.model_config import unreadable_weights

HEAD_TOLERANCE = 1e-3

ReadModel = Callable[[str | Path], PreTrainedModel | None]

AttentionInterface.register(attention.NAME, attention.ragged_attention)


class PackedPolicy(nn.Module):
    """Logprob and entropy of the predicted tokens of a pack."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.scale = head_scale(model.config)
        inside = {id(p) for layer in decoder_layers(model) for p in layer.parameters()}
        self.matrices = frozenset(
            n for n, p in model.named_parameters() if p.ndim == 2 and id(p) in inside
        )
        """Names of the decoder layers' weight matrices (sharding renames the layers' classes)."""

    def forward(self, pack: Pack, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """(logprob, entropy) of `pack.target_T` at a temperature."""
        hidden_TD = self.hidden(pack)[0].index_select(0, pack.source_T)
        device = hidden_TD.device.type
        if torch.is_autocast_enabled(device):  # the last norm may have widened them
            hidden_TD = hidden_TD.to(torch.get_autocast_dtype(device))
        head = cast(nn.Linear, self.model.get_output_embeddings())
        logprob_T, entropy_T = token_logprobs(
            hidden_TD,
            head.weight,
            head.bias,
            pack.target_T,
            replace(self.scale, temperature=temperature),
        )
        return logprob_T, entropy_T

    def hidden(self, pack: Pack) -> Tensor:
        """Last hidden states of the packed row, [1, tokens, hidden]."""
        extra: dict[str, Any] = {"ragged": pack.ragged}
        if self.model.config._attn_implementation != attention.NAME:
            extra = {
                "cu_seq_lens_q": pack.bounds,
                "cu_seq_lens_k": pack.bounds,
                "max_length_q": pack.lengths[0],
                "max_length_k": pack.lengths[0],
            }
        out = self.model.base_model(
            input_ids=pack.input_ids, position_ids=pack.position_ids, use_cache=False, **extra
        )
        return cast(Tensor, out.last_hidden_state)


def head_scale(config: Any) -> HeadScale:
    """How the model scales its logits, from its config (Granite, Cohere, Gemma)."""
    divisor = float(getattr(config, "logits_scaling", None) or 1.0)
    multiplier = float(getattr(config, "logit_scale", None) or 1.0)
    return HeadScale(divisor / multiplier, getattr(config, "final_logit_softcapping", None))


def load_policy(
    model_dir: str | Path,
    device: str,
    *,
    dtype: torch.dtype = torch.float32,
    mesh: DeviceMesh | None = None,
    checkpointing: bool = False,
    offload: bool = False,
    read: ReadModel | None = None,
    change: Callable[[PackedPolicy], None] | None = None,
) -> PackedPolicy:
    """Load a model in float32 master weights, ready to train on packs.

    With a mesh, every rank holds its shard: the model is built without weights and sharded, then
    rank 0 reads the weights and sends each rank its part of one tensor after the other. `read`
    returns the model with its weights on rank 0, and None on the others. `change` may add
    parameters; it sees the model twice, without weights and with them. With `offload` the shards
    are in host memory.
    """
    whole = (read or read_model)(model_dir)
    model = empty_model(model_dir)
    policy = prepare(model, checkpointing=checkpointing)
    if change is not None:
        change(policy)
        if whole is not None:
            change(PackedPolicy(whole))
    if mesh is None:
        _allocate(policy, device)
    else:
        shard(policy, mesh, dtype, offload=offload)
        policy.to_empty(device="cpu" if offload else device)
        if offload:
            _allocate_buffers(policy, device)
    _copy_weights(model, whole, mesh, device)
    if whole is not None:
        model.generation_config = whole.generation_config
    model.set_attn_implementation(attention_for(device, dtype))
    return policy


def read_model(model_dir: str | Path) -> PreTrainedModel | None:
    """On rank 0, read a model into host memory and prove its head; None on the other ranks."""
    model: PreTrainedModel | None = None
    problem: RecipeError | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            model = _read(model_dir)
            prove_head(prepare(model))
        except RecipeError as error:
            problem = error
    shared = [problem]
    if dist.is_initialized():  # an error of rank 0 ends all ranks
        dist.broadcast_object_list(shared, src=0)
    if shared[0] is not None:
        raise shared[0]
    return model


def _read(model_dir: str | Path) -> PreTrainedModel:
    with _no_progress_bar():
        try:
            model = AutoModelForCausalLM.from_pretrained(
                model_dir, dtype=torch.float32, attn_implementation=attention.NAME
            )
        except SafetensorError as error:
            raise RecipeError(unreadable_weights(model_dir, error)) from error
    if not type(model).is_backend_compatible():
        raise RecipeError(
            f"model.path={model_dir}: {type(model).__name__} does not use transformers' attention "
            "interface, so sequences cannot be packed without padding"
        )
    return cast(PreTrainedModel, model)


def empty_model(model_dir: str | Path) -> PreTrainedModel:
    """The model of a directory without weights, on torch's meta device."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(model_dir),
            dtype=torch.float32,
            attn_implementation=attention.NAME,
        )
    return cast(PreTrainedModel, model)


def _allocate(module: nn.Module, device: str) -> None:
    """Allocate all parameters and buffers on a device; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, old in part._parameters.items():
            if old is not None:
                if id(old) not in made:
                    new = torch.empty_like(old, device=device)
                    made[id(old)] = nn.Parameter(new, requires_grad=old.requires_grad)
                part._parameters[name] = made[id(old)]
    _allocate_buffers(module, device)


def _allocate_buffers(module: nn.Module, device: str) -> None:
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.empty_like(buffer, device=device)


@torch.no_grad()
def _copy_weights(
    model: PreTrainedModel, whole: PreTrainedModel | None, mesh: DeviceMesh | None, device: str
) -> None:
    """Copy all parameters and buffers of `whole`, which with a mesh only rank 0 has.

    They are sent from device to device, wherever the shards are kept.
    """
    if mesh is None and whole is None:
        return  # only the sizes are of interest
    source = {} if whole is None else dict(_named_tensors(whole))
    for name, target in _named_tensors(model):
        if mesh is None:
            target.copy_(source[name])
            continue
        value = source[name].detach() if source else torch.empty(target.shape, dtype=target.dtype)
        value = value.to(device)
        if isinstance(target, DTensor):
            shards = distribute_tensor(value, mesh, target.placements)
            target.to_local().copy_(shards.to_local())
        else:
            dist.broadcast(value, src=0)
            target.copy_(value)


def _named_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters, tied ones once, and buffers, also those that a state dict leaves out."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def prepare(model: PreTrainedModel, *, checkpointing: bool = False) -> PackedPolicy:
    """Make a loaded model trainable: no dropout (ratios need one policy), gradients everywhere."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train()
    model.requires_grad_(True)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return PackedPolicy(model)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Load without transformers' progress bar: the caller shows progress."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def attention_for(device: str, dtype: torch.dtype) -> str:
    """Flash attention's variable-length kernel where it is installed, else bucketed SDPA."""
    if device.startswith("cuda") and dtype is torch.bfloat16 and is_flash_attn_2_available():
        return "flash_attention_2"
    return attention.NAME


@torch.no_grad()
def prove_head(policy: PackedPolicy) -> None:
    """Compare our logprobs with the model's own logits on a few tokens, or refuse the model.

    It runs in float32 on the CPU, whatever device and number format will train: rounding must not
    hide a wrong head, and flash attention does not take float32.
    """
    vocabulary = policy.model.config.get_text_config().vocab_size
    ids = [(7 * i + 1) % vocabulary for i in range(6)]
    pack = make_pack([make_row(0, ids, [0] + [1] * (len(ids) - 1))])
    ours, _ = policy(pack)
    hidden = policy.model(
        input_ids=pack.input_ids,
        position_ids=pack.position_ids,
        use_cache=False,
        ragged=pack.ragged,
    ).logits[0]
    theirs = hidden.float().log_softmax(-1).gather(1, pack.target_T[:, None]).squeeze(1)
    gap = (ours - theirs).abs().max().item()
    if not gap <= HEAD_TOLERANCE:
        raise RecipeError(
            f"model: {type(policy.model).__name__} computes its logits in a way rstar2 does not "
            f"know (logprobs differ by {gap:.3g})"
        )


def adapt(policy: PackedPolicy, config: LoraConfig, dtype: torch.dtype, seed: int) -> None:
    """Freeze the policy, keep its weights in `dtype`, and train float32 adapters beside them."""
    for parameter in policy.model.parameters():  # not the buffers: rotary frequencies stay float32
        parameter.data = parameter.data.to(dtype)
    add_adapters(policy.model, decoder_layers(policy.model), config, seed)


def shard(
    policy: PackedPolicy, mesh: DeviceMesh, dtype: torch.dtype, *, offload: bool = False
) -> None:
    """FSDP2: one group per decoder layer, the rest (embedding, norm, head) in the root group."""
    policy_dtype = MixedPrecisionPolicy(
        param_dtype=dtype if dtype is not torch.float32 else None, reduce_dtype=torch.float32
    )
    pinned = mesh.device_type == "cuda"
    place = CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy()
    for layer in decoder_layers(policy.model):
        fully_shard(layer, mesh=mesh, mp_policy=policy_dtype, offload_policy=place)
    fully_shard(policy, mesh=mesh, mp_policy=policy_dtype, offload_policy=place)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that the model declares must not be split."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]
