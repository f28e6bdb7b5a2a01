"""GPU data sheets, and the parser of cluster descriptions such as 64xMI300X.

Figures are from the vendors' data sheets: memory, memory bandwidth and dense bfloat16 FLOPS (no
sparsity). Prices are rounded on-demand prices per hour; `--price` overrides them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rstar2.errors import UserError

GPUS_PER_NODE = 8
CORES_PER_GPU = 12
"""CPU cores per GPU on common machines, available to the code environment."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """The figures of one GPU that the roofline model uses."""

    name: str
    memory_gb: float
    bandwidth_tb: float
    """Memory bandwidth, TB/s."""
    tflops: float
    """Dense bfloat16 TFLOPS."""
    link_gb: float
    """Bandwidth to the other GPUs of its node, GB/s in one direction."""
    train_mfu: float
    """Share of peak FLOPS that training reaches; it depends on the software, not the chip."""
    price: float
    """US dollars per hour."""


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("MI300X", 192, 5.3, 1307, 448, 0.25, 2.0),
        Gpu("MI325X", 256, 6.0, 1307, 448, 0.25, 2.5),
        Gpu("L4", 24, 0.3, 121, 25, 0.45, 0.7),
        Gpu("A10", 24, 0.6, 125, 25, 0.45, 0.75),
        Gpu("L40S", 48, 0.864, 362, 25, 0.4, 1.0),
        Gpu("A100-40", 40, 1.56, 312, 300, 0.45, 1.2),
        Gpu("A100", 80, 2.04, 312, 300, 0.45, 1.5),
        Gpu("H100", 80, 3.35, 989, 450, 0.38, 2.5),
        Gpu("H200", 141, 4.8, 989, 450, 0.38, 3.5),
        Gpu("B200", 180, 8.0, 2250, 900, 0.33, 5.0),
        Gpu("3090", 24, 0.936, 71, 25, 0.5, 0.25),
        Gpu("4090", 24, 1.01, 165, 25, 0.45, 0.45),
        Gpu("5090", 32, 1.79, 210, 50, 0.45, 0.7),
    )
}


@dataclass(frozen=True, slots=True)
class Cluster:
    """A number of equal nodes with equal GPUs."""

    gpu: Gpu
    gpus: int
    gpus_per_node: int = GPUS_PER_NODE
    cores_per_node: int = 0
    network_gb: float = 50.0
    """Bandwidth between nodes, GB/s per GPU in one direction (400 Gb/s)."""
    price: float | None = None

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def cores(self) -> int:
        """CPU cores of the whole cluster."""
        per_node = self.cores_per_node or CORES_PER_GPU * min(self.gpus, self.gpus_per_node)
        return self.nodes * per_node

    @property
    def dollars_per_hour(self) -> float:
        return self.gpus * (self.gpu.price if self.price is None else self.price)

    @property
    def slowest_link_gb(self) -> float:
        """Bandwidth that limits a collective over all GPUs, GB/s."""
        return self.gpu.link_gb if self.nodes == 1 else min(self.gpu.link_gb, self.network_gb)


def parse_cluster(text: str, *, cores_per_node: int = 0, price: float | None = None) -> Cluster:
    """Parse `64xMI300X` (GPUs x name) or `8x8xMI300X` (nodes x GPUs per node x name)."""
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)x([A-Za-z0-9 -]+)", text.strip())
    if match is None:
        raise UserError(
            f"--cluster {text}: write the number and name of the GPUs, such as 64xMI300X, or "
            "nodes x GPUs per node x name, such as 8x8xMI300X"
        )
    nodes, count, name = match.groups()
    gpu = _find(name)
    total = int(count) * int(nodes or 1)
    if total < 1:
        raise UserError(f"--cluster {text}: there must be at least one GPU")
    per_node = int(count) if nodes else min(GPUS_PER_NODE, total)
    return Cluster(gpu, total, per_node, cores_per_node, price=price)


def _find(name: str) -> Gpu:
    wanted = _plain(name).removeprefix("nvidia").removeprefix("rtx").removesuffix("gb")
    wanted = "a100" if wanted == "a10080" else wanted
    for gpu in GPUS.values():
        if _plain(gpu.name) == wanted:
            return gpu
    raise UserError(f"unknown GPU {name!r}: choose one of {', '.join(GPUS)}")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
