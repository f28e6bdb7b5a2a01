"""Integers and choices in their common notations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2.reward.grade import as_choice, as_integer, choice_equal


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("42", "42"), (" 42 ", "42"), ("+42", "42"), ("-42", "-42"), ("\u221242", "-42"),
        ("- 42", "-42"), ("007", "7"), ("-0", "0"), ("0", "0"), ("42.", "42"), ("42.00", "42"),
        ("1,234", "1234"), ("1{,}234", "1234"), ("1\\,234\\,567", "1234567"), ("1 234", "1234"),
        ("11,\\! 111,\\! 111,\\! 100", "11111111100"), ("$42$", "42"), ("9" * 5000, "9" * 5000),
        ("4 2", None), ("1,23", None), ("1,2345", None), ("4,2", None), ("42.5", None),
        ("4.2e1", None), ("x", None), ("", None), ("\\frac{84}{2}", None), ("42\\%", None),
        ("٤٢", None), ("(42)", None), ("42 apples", None), ("--42", None), ("1,234,", None),
    ],
)  # fmt: skip
def test_integer_literals(text: str, canonical: str | None) -> None:
    assert as_integer(text) == canonical


@given(st.integers(), st.integers())
def test_integers_are_equal_as_numbers(left: int, right: int) -> None:
    assert (as_integer(f"{left:,}") == as_integer(str(right))) == (left == right)
    assert as_integer(f" {left} ") == as_integer(f"${left}$") == str(left)


@pytest.mark.parametrize("text", ["C", "c", "(C)", "C.", "C)", "\\text{C}", "\\text{(C)}", "$C$"])
def test_choices(text: str) -> None:
    assert as_choice(text) == "C"
    assert choice_equal(text, "C")
    assert not choice_equal(text, "D")


@pytest.mark.parametrize("text", ["", "CD", "Carbon", "C or D", "3", "\\text{C and D}", "Z"])
def test_what_is_no_choice(text: str) -> None:
    assert as_choice(text) is None
    assert not choice_equal(text, text)
