"""Linear layers of the decoder: plain, packed or with 8 bits, each row for itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rstar2.engine.projections import LEAST_ROWS, Projection

ROWS = (1, LEAST_ROWS - 1, LEAST_ROWS, LEAST_ROWS + 1, 32, 33, 64)


def make(outputs: int, inputs: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(outputs, inputs, generator=generator).to(dtype)


@pytest.fixture(params=[False, True], ids=["plain", "bias"])
def bias(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    kind: torch.dtype = request.param
    return kind


@pytest.mark.parametrize("int8", [False, True], ids=["exact", "int8"])
def test_the_result_of_a_row_does_not_depend_on_the_others(
    dtype: torch.dtype, bias: bool, int8: bool
) -> None:
    added = make(1, 960, dtype, 1)[0] if bias else None
    layer = Projection(make(960, 576, dtype), added, int8=int8)
    x, y = make(64, 960, dtype, 2), make(64, 576, dtype, 3)
    with torch.inference_mode():
        whole, sums = layer(y), layer.added(x, y)
        for rows in ROWS:
            assert torch.equal(layer(y[:rows]), whole[:rows]), rows
            assert torch.equal(layer.added(x[:rows], y[:rows]), sums[:rows]), rows


def test_float32_is_the_plain_product() -> None:
    weight, y = make(96, 64, torch.float32), make(16, 64, torch.float32, 1)
    layer = Projection(weight, None)
    assert torch.equal(layer(y), F.linear(y, weight))
    x = make(16, 96, torch.float32, 2)
    assert torch.equal(layer.added(x, y), torch.addmm(x, y, weight.t()))


def test_bfloat16_rounds_the_product_of_its_own_weights(bias: bool) -> None:
    """New weights give new products: nothing of an earlier packing is left."""
    y = make(32, 576, torch.bfloat16, 9)
    for seed in (0, 1):
        weight = make(960, 576, torch.bfloat16, seed)
        added = make(1, 960, torch.bfloat16, 5)[0] if bias else None
        exact = F.linear(y.double(), weight.double(), None if added is None else added.double())
        gap = (Projection(weight, added)(y).double() - exact).abs()
        assert (gap <= exact.abs() / 128 + 1e-2).all()  # bfloat16 has 8 bits


def test_int8_by_hand() -> None:
    """Rows are scaled so that their largest number is 127; the rest is rounded to the nearest."""
    weight = torch.tensor([[127.0, 63.6], [0.0, -2.54], [0.0, 0.0]])
    y = torch.tensor([[1.27, 0.504], [0.0, 0.0]])
    # y is [127, 50] x 0.01; the weights are [127, 64] x 1, [0, -127] x 0.02 and nothing.
    bias = torch.tensor([0.0, 1.0, 2.0])
    expected = torch.tensor([[(127 * 127 + 50 * 64) * 0.01, 1 - 127 * 50 * 0.0002, 2], [0, 1, 2]])
    torch.testing.assert_close(Projection(weight, bias, int8=True)(y), expected)


def test_int8_is_near_the_exact_product(dtype: torch.dtype) -> None:
    weight, y = make(960, 576, dtype), make(32, 576, dtype, 1)
    exact = F.linear(y.double(), weight.double())
    made = Projection(weight, None, int8=True)(y)
    assert made.dtype is dtype
    assert 0.001 < (made.double() - exact).norm() / exact.norm() < 0.02
