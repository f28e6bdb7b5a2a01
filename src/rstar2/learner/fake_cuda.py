"""GPUs that exist only in name: the learner's own code on CUDA device strings, without CUDA.

torch's FakeTensorMode gives every tensor a device, a number format and a shape but no data, and its
fake process group answers every collective at once. So a whole step of a large model over many
ranks runs on a CPU in seconds, and shows which devices and formats meet, how often the host reads
from the device, and how much memory one rank needs. What it cannot show: values, speed, the
allocator's fragmentation, and workspaces inside kernels.
"""

from __future__ import annotations

import contextlib
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import (
    _DISPATCH_META_HANDLERS,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rstar2.learner import learner, model

DEVICE = "cuda:0"

META = torch.device("meta")
DEVICE_OF = torch.ops.prim.device.default
aten = torch.ops.aten
MATMULS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)


class FakeStream:
    """A stream or event of CUDA: everything has happened already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def nothing(self, *args: Any, **kwargs: Any) -> FakeStream:
        """Return at once."""
        return self

    wait_stream = wait_event = record_event = record = wait = synchronize = nothing


@contextlib.contextmanager
def fake_cuda(ranks: int = 1, rank: int = 0) -> Iterator[DeviceTrace]:
    """Run as one rank of a group on GPUs that do not exist; yields a record of what is done."""
    streams: dict[str, Any] = {
        "Stream": FakeStream,
        "Event": FakeStream,
        "current_stream": FakeStream,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "is_bf16_supported": lambda *args: True,
    }
    with contextlib.ExitStack() as stack:
        for name, value in streams.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        check = "torch.cuda.amp.common.amp_definitely_not_available"
        stack.enter_context(mock.patch(check, return_value=False))
        # C++ code asks for a tensor's device to reach CUDA's driver, which is not there; Python
        # code asks for it to compute, and gets the CUDA device.
        stack.enter_context(mock.patch.dict(_DISPATCH_META_HANDLERS, {DEVICE_OF: _meta_device}))
        local = property(lambda tensor: tensor.to_local().device)
        stack.enter_context(mock.patch.object(DTensor, "device", local, create=True))
        # FSDP keeps the shards of a model without data as they were when it was sharded.
        stack.enter_context(mock.patch.object(FakeTensor, "is_meta", False, create=True))
        real = ((learner, "init_device_mesh"), (learner, "adapt"), (model, "empty_model"))
        for module, name in real:
            function = _without_fakes(getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, function))
        if ranks > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
            stack.callback(dist.destroy_process_group)
            stack.enter_context(mock.patch.object(dist, "all_gather_object", _same_everywhere))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        # DTensor derives the shapes of results in a mode of its own, which is not traced.
        detect = "torch.distributed.tensor._sharding_prop.detect_fake_mode"
        stack.enter_context(mock.patch(detect, return_value=None))
        linear = AutocastLinear()
        stack.enter_context(mock.patch.object(F, "linear", linear))
        stack.enter_context(mock.patch.object(torch, "clear_autocast_cache", linear.clear))
        stack.enter_context(mock.patch.object(F, "silu", fused_silu))
        stack.enter_context(mock.patch.object(Tensor, "pin_memory", lambda tensor, *args: tensor))
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", fused_attention))
        yield stack.enter_context(DeviceTrace())


def _meta_device(args: Any) -> torch.device:
    return META


def _same_everywhere(shared: list[Any], value: Any) -> None:
    """Every rank answers as this one does."""
    shared[:] = [value] * len(shared)


def _without_fakes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Meshes hold real numbers, and a model on the meta device has no data anyway."""

    def real(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return real


class FlashAttention(torch.autograd.Function):
    """The memory of a fused attention kernel: inputs, output and one number per query are kept."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        norms = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, norms)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def fused_attention(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
    """Attention as its fused CUDA kernel does it; torch would choose another one here."""
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(f"query is {query.dtype}, key {key.dtype} and value {value.dtype}")
    apply: Callable[..., Tensor] = FlashAttention.apply
    return apply(query, key, value)


class FusedSilu(torch.autograd.Function):
    """SiLU with the one kernel of its backward pass; builds for CPUs take it apart for CUDA."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor) -> Tensor:
        ctx.save_for_backward(gate)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.empty_like(grad)


def fused_silu(gate: Tensor, inplace: bool = False) -> Tensor:
    apply: Callable[..., Tensor] = FusedSilu.apply
    return apply(gate)


class AutocastLinear:
    """`F.linear` under autocast, which C++ code would apply to real CUDA tensors only.

    As there, the narrow copy of a parameter is kept until the context ends.
    """

    def __init__(self) -> None:
        self._linear, self._narrow = F.linear, dict[int, Tensor]()
        self._clear = torch.clear_autocast_cache

    def __call__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            hidden, bias = hidden.to(dtype), None if bias is None else bias.to(dtype)
            if weight.dtype is not dtype:
                key = id(weight)
                if key not in self._narrow:
                    self._narrow[key] = weight.to(dtype)
                weight = self._narrow[key]
        return self._linear(hidden, weight, bias)

    def clear(self) -> None:
        """End of an autocast context."""
        self._narrow.clear()
        self._clear()


@dataclass(frozen=True, slots=True)
class HostRead:
    """A value that the host waited for, and the line of rstar2 that asked for it."""

    operation: str
    where: str


@dataclass
class _Allocated:
    """Bytes of live storages on the device."""

    now: int = 0
    peak: int = 0
    sizes: dict[int, int] = field(default_factory=dict)


class DeviceTrace(TorchDispatchMode):
    """Record the device's memory, the host's reads, and the number formats of matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.host_reads: list[HostRead] = []
        self.copies_to_device = 0
        self.matmuls: Counter[torch.dtype] = Counter()
        self.memory = _Allocated()
        self._resize = torch.UntypedStorage.resize_
        self._mode = active_fake_mode()

    def __enter__(self) -> DeviceTrace:
        trace, resize = self, self._resize

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            trace._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: object) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*exc)  # type: ignore[no-untyped-call]

    @property
    def peak_gb(self) -> float:
        """Largest memory on the device since the start or `reset_peak`."""
        return self.memory.peak / 1e9

    @property
    def gb(self) -> float:
        """Memory on the device now."""
        return self.memory.now / 1e9

    def reset_peak(self) -> None:
        """Measure the peak from here on."""
        self.memory.peak = self.memory.now

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls this mode again with the local tensors
        packet = getattr(func, "overloadpacket", None)
        if packet is aten._local_scalar_dense and isinstance(args[0], FakeTensor):
            if args[0].device.type == "cuda":
                self._read("item")
            return True if args[0].dtype is torch.bool else 1
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # as on a GPU: the fake kernel would return a copy
        if (
            kwargs.get("device") == META and active_fake_mode()
        ):  # C++ code that asked a tensor for its device
            kwargs = {**kwargs, "device": torch.device(DEVICE)}
        out = func(*args, **kwargs)
        if packet in MATMULS:
            self.matmuls[out.dtype] += 1
        if packet in (aten._to_copy, aten.copy_):
            self._copied(packet, args, out)
        if active_fake_mode() is not self._mode:
            return out
        for value in tree_leaves(out):
            if isinstance(value, Tensor) and value.device.type == "cuda":
                self._allocated(value)
        return out

    def _copied(self, packet: Any, args: tuple[Any, ...], out: Any) -> None:
        source, target = (args[1], args[0]) if packet is aten.copy_ else (args[0], out)
        if source.device.type == "cuda" and target.device.type == "cpu":
            self._read("copy to the host")
        elif source.device.type == "cpu" and target.device.type == "cuda" and source.ndim:
            self.copies_to_device += 1

    def _read(self, operation: str) -> None:
        ours = [f for f in traceback.extract_stack() if "/rstar2/" in f.filename]
        ours = [f for f in ours if not f.filename.endswith("fake_cuda.py")]
        where = f"{ours[-1].filename.rpartition('/')[2]}:{ours[-1].name}" if ours else "torch"
        self.host_reads.append(HostRead(operation, where))

    # ------------------------------------------------------------------ memory

    def _allocated(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.memory.sizes:
            self.memory.sizes[key] = 0
            weakref.finalize(storage, self._freed, key)
        self._resized(storage)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        memory, key = self.memory, storage._cdata
        if key not in memory.sizes:
            return
        memory.now += storage.nbytes() - memory.sizes[key]
        memory.sizes[key] = storage.nbytes()
        memory.peak = max(memory.peak, memory.now)

    def _freed(self, key: int) -> None:
        self.memory.now -= self.memory.sizes.pop(key)
