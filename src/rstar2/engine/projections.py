"""Norms and linear layers of the decoder.

Products are plain, or use weights that oneDNN packs once.

In float32, and on GPUs, a projection is `F.linear`. In bfloat16 on a CPU its weights are also kept
as oneDNN's kernels read them; `F.linear` would bring them into this order for every product, which
for a few dozen rows takes longer than the product. The plain weights stay: checksums are of them,
and new weights replace both.

With `int8`, the weights and the rows of a product are rounded to 8 bits (`engine.quantization`).

Invariant: the result of a row does not depend on the other rows (see LEAST_ROWS).
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F

LEAST_ROWS = 8
"""Products of fewer rows are padded: BLAS sums in a different order for a few rows."""
LARGEST_INT8 = 127
PACKED_FOR_ROWS = 32
"""Rows for which oneDNN chooses the order of packed weights; other numbers of rows work too."""


class Projection:
    """x -> x W^T + b, for a weight W of shape [outputs, inputs]."""

    __slots__ = ("_int8", "_packed", "bias", "weight")

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, int8: bool = False
    ) -> None:
        self.weight, self.bias = weight, bias
        self._int8 = Int8Weight(weight) if int8 else None
        self._packed = None if int8 else _pack(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The projection of each row."""
        count = x.shape[0]
        if count >= LEAST_ROWS:
            return self._product(x)
        return self._product(F.pad(x, (0, 0, 0, LEAST_ROWS - count)))[:count]

    def added(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x + the projection of y, fused into one operation where that is exact."""
        if self.bias is not None or self._packed is not None or self._int8 is not None:
            return x + self(y)
        if x.shape[0] >= LEAST_ROWS:
            return torch.addmm(x, y, self.weight.t())
        extra = (0, 0, 0, LEAST_ROWS - x.shape[0])
        return torch.addmm(F.pad(x, extra), F.pad(y, extra), self.weight.t())[: x.shape[0]]

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self._int8 is not None:
            wide = self._int8.product(x)
            return (wide if self.bias is None else wide + self.bias).to(x.dtype)
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        out = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return cast(torch.Tensor, out)


class Int8Weight:
    """A weight as whole numbers from -127 to 127, with a scale per output.

    The rows that it multiplies are rounded in the same way, with a scale per row. Products and sums
    of whole numbers are exact in 32 bits, in any order and beside any other row.
    """

    __slots__ = ("_scales", "_values")

    def __init__(self, weight: torch.Tensor) -> None:
        values, scales = _rounded(weight)
        self._values, self._scales = values.t(), scales.t()

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T in float32."""
        values, scales = _rounded(x)
        sums = torch._int_mm(values, self._values)
        return sums.float().mul_(scales).mul_(self._scales)


class RmsNorm:
    """x / rms(x) * w; in Gemma's form * (1 + w), multiplied in float32."""

    __slots__ = ("_eps", "_factor", "weight")

    def __init__(self, weight: torch.Tensor, eps: float, *, plus_one: bool) -> None:
        self.weight, self._eps = weight, eps
        self._factor = weight.float() + 1.0 if plus_one else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The norm over the last dimension."""
        if x.dtype is self._factor.dtype:
            return F.rms_norm(x, self._factor.shape, self._factor, self._eps)
        return F.rms_norm(x.float(), self._factor.shape, self._factor, self._eps).to(x.dtype)


def _pack(weight: torch.Tensor) -> torch.Tensor | None:
    """The weight as oneDNN reads it; None where plain products are used."""
    if weight.device.type != "cpu" or weight.dtype is not torch.bfloat16:
        return None
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
    return cast(torch.Tensor, packed)


def _rounded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as 8-bit whole numbers, and the scale of each row as a column."""
    largest = rows.abs().amax(1, keepdim=True).float()
    scales = largest.clamp_(min=torch.finfo(torch.float32).tiny).div_(LARGEST_INT8)
    return torch.round(rows / scales).to(torch.int8), scales
