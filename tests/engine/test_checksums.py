"""Checksums of weights: what leaves them as they are, and what changes them."""

from __future__ import annotations

import pytest
import torch

from rstar2.engine.checksums import bit_sum, bit_sums, differing, fused_name
from rstar2.engine.vllm_weights import COPY, SHARD, all_workers
from rstar2.errors import WeightUpdateError


def test_order_shards_and_zero_padding_change_nothing() -> None:
    whole = torch.randn(300, 257, dtype=torch.float32)
    expected = int(bit_sum(whole))
    assert int(bit_sum(whole[torch.randperm(300)])) == expected
    assert int(bit_sum(whole.t())) == expected
    halves = int(bit_sum(whole[:, :100])) + int(bit_sum(whole[:, 100:]))
    assert halves % 2**64 == expected % 2**64
    padded = torch.cat((whole, torch.zeros(20, 257)))
    assert int(bit_sum(padded)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_last_bit_of_one_element_changes_it(dtype: torch.dtype) -> None:
    weights = torch.randn(1 << 17).to(dtype)
    words = torch.int32 if dtype is torch.float32 else torch.int16
    expected = int(bit_sum(weights))
    for at in (0, 65_535, 65_536, (1 << 17) - 1):
        changed = weights.clone()
        changed.view(words)[at] ^= 1
        assert int(bit_sum(changed)) != expected
    up, down = weights.clone(), weights.view(words)
    up.view(words)[3] = down[3] + 1
    up.view(words)[4] = down[4] - 1
    assert int(bit_sum(up)) != expected, "changes in opposite directions do not cancel"


def test_casts_are_those_of_the_engine() -> None:
    master = torch.randn(1000)
    narrow = master.to(torch.bfloat16)
    assert int(bit_sum(master, (torch.bfloat16,))) == int(bit_sum(narrow))
    wide = (torch.bfloat16, torch.float32)
    assert int(bit_sum(master, wide)) == int(bit_sum(narrow.float()))


def test_fused_tensors_are_the_sum_of_their_parts() -> None:
    q, k, v = torch.randn(8, 4), torch.randn(2, 4), torch.randn(2, 4)
    at = "model.layers.0.self_attn."
    parts = bit_sums([(f"{at}{n}_proj.weight", x) for n, x in {"q": q, "k": k, "v": v}.items()])
    assert parts == bit_sums([(f"{at}qkv_proj.weight", torch.cat((q, k, v)))])
    assert fused_name("model.layers.3.mlp.up_proj.bias") == "model.layers.3.mlp.gate_up_proj.bias"


def test_differing_names_the_tensors_and_compares_unknown_names_as_one() -> None:
    assert differing({"a": 1, "b": 2}, {"a": 1, "b": 2}) == []
    assert differing({"a": 1, "b": 2}, {"a": 1, "b": 3}) == ["b"]
    assert differing({"a": 1, "x": 2, "y": 3}, {"a": 1, "xy": 5}) == []
    assert differing({"a": 1, "x": 2, "y": 3}, {"a": 1, "xy": 6}) == ["x", "y"]
    assert differing({"a": 1}, {"a": 1, "extra": 7}) == ["extra"]


def test_workers_shards_add_up_and_their_copies_must_agree() -> None:
    first = {"dtype": "bfloat16", SHARD: {"w": 2**64 - 1}, COPY: {"norm": 5}}
    second = {"dtype": "bfloat16", SHARD: {"w": 4}, COPY: {"norm": 5}}
    held = all_workers([first, second])
    assert (held.dtype, held.sums) == ("bfloat16", {"w": 3, "norm": 5})
    with pytest.raises(WeightUpdateError, match="different copies of norm"):
        all_workers([first, {**second, COPY: {"norm": 6}}])
