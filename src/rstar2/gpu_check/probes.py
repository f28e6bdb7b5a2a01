"""Measurements in a process of their own, because a broken kernel or library can end it.

python -m rstar2.gpu_check.probes torch|collective|flash   prints its facts as JSON
"""

from __future__ import annotations

import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from rstar2.gpu_check.facts import CollectiveFacts, FlashFacts, TorchFacts

MEGABYTES = 64


def torch_facts() -> TorchFacts:
    import torch

    count = torch.cuda.device_count()
    capabilities = [torch.cuda.get_device_capability(i) for i in range(count)]
    return TorchFacts(
        version=str(torch.__version__),
        cuda=torch.version.cuda or getattr(torch.version, "hip", None),
        devices=count,
        architectures=tuple(torch.cuda.get_arch_list()),
        capabilities=tuple(f"sm_{major}{minor}" for major, minor in capabilities),
        bfloat16=not count or torch.cuda.is_bf16_supported(),
    )


def collective_facts() -> CollectiveFacts:
    """An all-reduce between one process per GPU; between two with gloo where there is none."""
    import torch
    from torch.multiprocessing import spawn  # type: ignore[attr-defined]

    ranks = torch.cuda.device_count() or 2
    with tempfile.TemporaryDirectory(prefix="rstar2-gpu-check-") as directory:
        spawn(_reduce, (ranks, directory), nprocs=ranks)
        return msgspec.json.decode((Path(directory) / "facts").read_bytes(), type=CollectiveFacts)


def _reduce(rank: int, ranks: int, directory: str) -> None:
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    device = f"cuda:{rank}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(rank)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{directory}/store", rank=rank, world_size=ranks
    )
    numbers = torch.full((MEGABYTES * 2**18,), float(rank + 1), device=device)
    dist.all_reduce(numbers)
    total = numbers[-1].item()
    started = time.monotonic()
    dist.all_reduce(numbers)
    if cuda:
        torch.cuda.synchronize()
    seconds = time.monotonic() - started
    if rank == 0:
        name = ".".join(map(str, torch.cuda.nccl.version())) if cuda else str(torch.__version__)
        speed = numbers.nbytes / 1e9 / seconds
        facts = CollectiveFacts(backend, name, ranks, total, round(speed, 2))
        (Path(directory) / "facts").write_bytes(msgspec.json.encode(facts))
    dist.destroy_process_group()


def flash_facts() -> FlashFacts:
    """Two sequences of unequal length, causal, through flash-attn and through torch."""
    try:
        installed = version("flash-attn")
    except PackageNotFoundError:
        return FlashFacts(None)
    import torch
    import torch.nn.functional as F
    from flash_attn import flash_attn_varlen_func

    torch.manual_seed(0)
    lengths = (48, 80)
    query, key, value = (
        torch.randn(sum(lengths), 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    bounds = torch.tensor((0, lengths[0], sum(lengths)), dtype=torch.int32, device="cuda")
    ours = flash_attn_varlen_func(
        query, key, value, bounds, bounds, max(lengths), max(lengths), causal=True
    ).float()
    gap, start = 0.0, 0
    for length in lengths:
        part = slice(start, start + length)
        q, k, v = (t[part].float().transpose(0, 1)[None] for t in (query, key, value))
        theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)
        gap = max(gap, (ours[part] - theirs).abs().max().item())
        start += length
    return FlashFacts(installed, gap)


PROBES = {"torch": torch_facts, "collective": collective_facts, "flash": flash_facts}


def main() -> None:
    facts = PROBES[sys.argv[1]]()
    sys.stdout.write(msgspec.json.encode(facts).decode() + "\n")


if __name__ == "__main__":
    main()
