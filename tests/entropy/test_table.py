"""The table, against numbers counted by hand."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from rstar2.entropy.classes import Token
from rstar2.entropy.show import entropy_tables
from rstar2.entropy.table import Analysis, analyse


def token(piece: str, kind: str, entropy: float, top: bool = False, turn: int = 0) -> Token:
    return Token(turn, 0, piece, kind, entropy, -entropy, top)


FIRST = [
    token("But", "reasoning", 2.0, top=True),
    token(" before", "reasoning", 1.0),
    token(" x", "code", 0.1),
    token(" =", "code", 0.1),
    token("</reason>", "format", 0.0),
]
SECOND = [
    token("Try", "after_error", 3.0, top=True, turn=1),
    token(" again", "after_error", 1.0, turn=1),
    token(" y", "code", 0.4),
    token("z", "code", 0.2),
    token("<answer>", "format", 0.2),
]


def test_shares_and_means() -> None:
    analysis = analyse("both", [FIRST, SECOND])
    assert (analysis.trajectories, analysis.tokens) == (2, 10)
    assert analysis.entropy == pytest.approx(0.8)
    assert analysis.cut == pytest.approx(2.5)
    code, reasoning = analysis.row("code"), analysis.row("reasoning")
    assert code.tokens == 4
    assert code.share == pytest.approx(0.4)
    assert code.entropy == pytest.approx(0.2)
    assert code.entropy_share == pytest.approx(0.1)
    assert (code.top_share, code.top_rate) == (0.0, 0.0)
    assert reasoning.top_share == pytest.approx(0.5)
    assert reasoning.top_rate == pytest.approx(0.5)
    assert analysis.row("answer").entropy is None
    assert sum(row.share for row in analysis.rows) == pytest.approx(1.0)
    assert sum(row.top_share for row in analysis.rows) == pytest.approx(1.0)


def test_intervals_are_over_trajectories() -> None:
    analysis = analyse("both", [FIRST, SECOND] * 8).row("code")
    assert analysis.low is not None
    assert analysis.high is not None
    assert 0.1 <= analysis.low < 0.2 < analysis.high <= 0.3
    assert analyse("one", [FIRST]).row("code").low is None
    again = analyse("both", [FIRST, SECOND] * 8).row("code")
    assert (again.low, again.high) == (analysis.low, analysis.high), "seeded"


def test_grams_begin_at_uncertain_tokens_and_stay_in_their_class() -> None:
    analysis = analyse("all", [FIRST, FIRST, SECOND])
    assert [(g.text, g.count) for g in analysis.grams["reasoning"][2]] == [("But before", 2)]
    assert 3 not in analysis.grams["reasoning"], "the third token is code"
    assert analysis.grams["after_error"][1][0].entropy == pytest.approx(3.0)
    assert "code" not in analysis.grams


def test_second_looks_are_counted_against_their_base() -> None:
    analysis = analyse("all", [FIRST, SECOND])
    assert analysis.markers == pytest.approx(1.0), "But, Try"
    assert analysis.markers_base == pytest.approx(1.0), "But, before, Try, again"
    plain = [token("So", "reasoning", 1.0, top=True), token(" it", "reasoning", 0.5)]
    assert analyse("plain", [plain]).markers == 0.0


def test_nothing_is_no_error() -> None:
    analysis = analyse("none", [])
    assert (analysis.trajectories, analysis.tokens, analysis.entropy) == (0, 0, 0.0)
    assert re.search(r"^ *none +0 +0 ", shown([analysis]), re.MULTILINE)


def test_tables_show_text_as_it_is_within_80_columns() -> None:
    nasty = [token("[b]a|b\n", "reasoning", 2.0, top=True), token("d", "reasoning", 0.1)]
    text = shown([analyse("a-run-with-a-long-name stage1", [nasty] * 3)])
    assert "“[b]a|b⏎d” 3" in text
    assert " reasoning " in text
    assert all(len(line) <= 80 for line in text.splitlines())


def shown(analyses: list[Analysis]) -> str:
    out = io.StringIO()
    Console(file=out, width=80, markup=False).print(entropy_tables(analyses))
    return out.getvalue()
