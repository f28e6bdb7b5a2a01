"""Checksums of the weights inside vLLM's workers, and of all workers of a server together.

`held_by_worker` runs in each worker process (see `vllm_plugin`) over the parameters that its layers
compute with. Tensor parallel workers hold shards of some parameters and copies of others. Shards
add up to the whole tensor; copies must be equal. With more workers than KV heads, several workers
hold the same KV heads: only the first of them counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rstar2.engine.checksums import HeldWeights, add, bit_sum, fused_name
from rstar2.errors import WeightUpdateError

if TYPE_CHECKING:
    import torch

SHARD, COPY = "shard", "copy"


def held_by_worker(worker: Any) -> dict[str, Any]:
    """Checksums of one worker's parameters; called by vLLM as a method of its worker."""
    from vllm.distributed import get_tensor_model_parallel_rank

    model = worker.model_runner.get_model()
    rank = get_tensor_model_parallel_rank()
    sums: dict[str, dict[str, int]] = {SHARD: {}, COPY: {}}
    dtypes: dict[str, int] = {}
    for name, tensor, kind in _parts(model, rank):
        add(sums[kind], fused_name(name.replace(".base_layer", "")), int(bit_sum(tensor)))
        dtype = str(tensor.dtype).removeprefix("torch.")
        dtypes[dtype] = dtypes.get(dtype, 0) + tensor.numel()
    return {"dtype": max(dtypes, key=lambda dtype: dtypes[dtype]), **sums}


def _parts(model: Any, rank: int) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Every parameter once, with whether this worker holds a shard or a copy of it."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear
    from vllm.model_executor.layers.linear import RowParallelLinear as RowParallel
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            full, tensor = f"{path}.{name}", parameter.data
            if isinstance(module, QKVParallelLinear):
                queries = module.num_heads * module.head_size
                yield full, tensor[:queries], SHARD
                if rank % module.num_kv_head_replicas == 0:
                    yield full, tensor[queries:], SHARD
            elif isinstance(module, ColumnParallelLinear | VocabParallelEmbedding) or (
                isinstance(module, RowParallel) and name != "bias"
            ):
                yield full, tensor, SHARD
            else:
                yield full, tensor, COPY


def all_workers(workers: Sequence[Mapping[str, Any]]) -> HeldWeights:
    """The weights of all workers of a server; WeightUpdateError if their copies differ."""
    sums: dict[str, int] = {}
    copies: dict[str, int] = {}
    for worker in workers:
        for name, value in worker[SHARD].items():
            add(sums, name, value)
        for name, value in worker[COPY].items():
            if copies.setdefault(name, value) != value:
                raise WeightUpdateError(f"its workers hold different copies of {name}")
    for name, value in copies.items():
        add(sums, name, value)
    return HeldWeights(str(workers[0]["dtype"]), sums)
