"""Planning, packing and ragged attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from rstar2.errors import InvariantError, RecipeError
from rstar2.learner.attention import MAX_WASTE, Ragged, cut, ragged_attention
from rstar2.learner.pack import empty_pack, flat, input_length, make_pack, make_row, plan

LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=60)


class TestPlan:
    @given(LENGTHS, st.integers(64, 1000), st.integers(1, 4))
    def test_every_sequence_once_within_the_budget(
        self, lengths: list[int], budget: int, ranks: int
    ) -> None:
        steps = plan(lengths, budget, ranks)
        assert sorted(i for bins in steps for part in bins for i in part) == list(
            range(len(lengths))
        )
        for bins in steps:
            assert len(bins) == ranks
            for part in bins:
                assert sum(lengths[i] for i in part) <= budget or len(part) == 1

    def test_is_balanced_over_ranks(self) -> None:
        (bins,) = plan([100, 90, 80, 70, 60, 50, 40, 30], 1000, 2)
        assert {sum([100, 90, 80, 70, 60, 50, 40, 30][i] for i in part) for part in bins} == {260}

    def test_fewest_micro_batches(self) -> None:
        assert len(plan([50] * 8, 100, 1)) == 4
        assert len(plan([50] * 8, 100, 2)) == 2
        assert len(plan([50], 100, 2)) == 1


class TestRow:
    @pytest.mark.parametrize(
        ("mask", "length"), [((0, 1), 1), ((0, 1, 0, 0), 1), ((1, 0), 0), ((0, 0, 1, 0, 1, 0), 4)]
    )
    def test_input_ends_before_the_last_predicted(self, mask: tuple[int, ...], length: int) -> None:
        assert input_length(mask) == length

    def test_predictions(self) -> None:
        row = make_row(0, (9, 8, 7, 6, 5), (1, 0, 1, 1, 0))
        assert row.ids.tolist() == [9, 8, 7, 6]
        assert row.predict.tolist() == [2, 3]

    def test_refuses_what_cannot_be_trained(self) -> None:
        with pytest.raises(InvariantError, match="no token to predict"):
            make_row(3, (1, 2), (1, 0))
        with pytest.raises(InvariantError, match="2 ids but a mask of 3"):
            make_row(3, (1, 2), (0, 1, 1))


class TestPack:
    def test_layout(self) -> None:
        rows = [make_row(0, (1, 2, 3), (0, 1, 1)), make_row(1, (4, 5, 6, 7), (0, 0, 1, 1))]
        pack = make_pack(rows)
        assert pack.input_ids.tolist() == [[4, 5, 6, 1, 2]]
        assert pack.position_ids.tolist() == [[0, 1, 2, 0, 1]]
        assert pack.source_T.tolist() == [1, 2, 3, 4]
        assert pack.target_T.tolist() == [6, 7, 2, 3]
        assert pack.sequence_T.tolist() == [0, 0, 1, 1]
        values = [[0.0, 0.1, 0.2], [0.0, 1.1, 1.2, 1.3]]
        assert flat(values, pack, "cpu").tolist() == pytest.approx([1.2, 1.3, 0.1, 0.2])

    def test_empty_pack_predicts_nothing(self) -> None:
        pack = empty_pack()
        assert pack.target_T.numel() == 0
        assert flat([], pack, "cpu").numel() == 0


class TestAttention:
    @given(LENGTHS)
    def test_buckets_bound_the_padding(self, lengths: list[int]) -> None:
        ordered = sorted(lengths, reverse=True)
        parts = cut(ordered)
        assert [n for part in parts for n in part] == ordered
        for part in parts:
            padded = len(part) * part[0] ** 2
            assert padded - sum(n * n for n in part) <= MAX_WASTE * padded + 64**2

    @settings(deadline=None, max_examples=20)
    @given(st.lists(st.integers(1, 90), min_size=1, max_size=8), st.sampled_from([None, 16]))
    def test_equals_attention_of_each_sequence(
        self, lengths: list[int], window: int | None
    ) -> None:
        ordered = sorted(lengths, reverse=True)
        torch.manual_seed(0)
        query = torch.randn(1, 4, sum(ordered), 8, dtype=torch.float64)
        key, value = torch.randn(2, 1, 2, sum(ordered), 8, dtype=torch.float64)
        packed, _ = ragged_attention(
            torch.nn.Identity(),
            query,
            key,
            value,
            None,
            scaling=0.3,
            sliding_window=window,
            ragged=Ragged.of(ordered),
        )
        start = 0
        for length in ordered:
            part = slice(start, start + length)
            age = torch.arange(length)[:, None] - torch.arange(length)
            mask = (age >= 0) & (age < (window or length))
            expected = F.scaled_dot_product_attention(
                query[:, :, part],
                key[:, :, part].repeat_interleave(2, 1),
                value[:, :, part].repeat_interleave(2, 1),
                attn_mask=mask,
                scale=0.3,
            )
            assert torch.allclose(packed[:, part], expected.transpose(1, 2), atol=1e-12)
            start += length

    def test_refuses_unsorted_lengths_and_unknown_models(self) -> None:
        with pytest.raises(InvariantError, match="longest first"):
            Ragged.of([3, 4])
        x = torch.zeros(1, 1, 2, 4)
        with pytest.raises(InvariantError, match="did not receive"):
            ragged_attention(torch.nn.Identity(), x, x, x, None)
        with pytest.raises(RecipeError, match="softcap"):
            ragged_attention(
                torch.nn.Identity(), x, x, x, None, ragged=Ragged.of([2]), softcap=30.0
            )
