"""LaTeX in text becomes MathML; what is not understood stays as it was written."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2.report.latex import (
    LONGEST,
    TAGS,
    Formula,
    MathNode,
    split_formulas,
    to_markup,
    whole_formula,
)


def brief(node: MathNode) -> str:
    """A node as `tag(child child)` or `tag:text`."""
    if node.children:
        return f"{node.tag}({' '.join(brief(child) for child in node.children)})"
    return f"{node.tag}:{node.text}"


def shown(latex: str) -> str:
    """The inside of the one formula `$latex$`."""
    (formula,) = split_formulas(f"${latex}$")
    assert isinstance(formula, Formula), f"{latex} stayed text"
    return " ".join(brief(child) for child in formula.math.children)


@pytest.mark.parametrize(
    ("latex", "expected"),
    [
        ("x + 1", "mi:x mo:+ mn:1"),
        ("-3.5", "mo:− mn:3.5"),
        (r"\frac{1}{2}", "mfrac(mn:1 mn:2)"),
        (r"\frac12", "mfrac(mn:1 mn:2)"),
        (r"\dfrac{a+b}c", "mfrac(mrow(mi:a mo:+ mi:b) mi:c)"),
        (r"{a \over b}", "mfrac(mi:a mi:b)"),
        ("x^2", "msup(mi:x mn:2)"),
        ("x^10", "msup(mi:x mn:1) mn:0"),
        ("x^{10}_i", "msubsup(mi:x mi:i mn:10)"),
        ("f''(x)", "msup(mi:f mrow(mo:′ mo:′)) mo:( mi:x mo:)"),
        (r"90^\circ", "msup(mn:90 mo:∘)"),
        (r"\sqrt{2}", "msqrt(mn:2)"),
        (r"\sqrt[3]{x}", "mroot(mi:x mn:3)"),
        (r"\alpha \cdot \Omega", "mi:α mo:· mi:Ω"),
        (r"\sum_{k=1}^n k", "munderover(mo:∑ mrow(mi:k mo:= mn:1) mi:n) mi:k"),
        (r"\int_0^1 f", "msubsup(mo:∫ mn:0 mn:1) mi:f"),
        (r"\lim_{x \to 0}", "munder(mo:lim mrow(mi:x mo:→ mn:0))"),
        (r"\sin x", "mi:sin mspace: mi:x"),
        (r"\binom{n}{2}", "mrow(mo:( mfrac(mi:n mn:2) mo:))"),
        (r"x \text{ if } y", "mi:x mtext:\u00a0if\u00a0 mi:y"),
        (r"\mathbb{R}^3", "msup(mi:ℝ mn:3)"),
        (r"\mathbf{v}_1", "msub(mi:𝐯 mn:1)"),
        (r"\mathrm{lcm}(a)", "mi:lcm mo:( mi:a mo:)"),
        (r"\left( x \right]", "mrow(mo:( mi:x mo:])"),
        (r"\left. x \right|_0", "msub(mrow(mi:x mo:|) mn:0)"),
        (r"\{1, 2\}", "mo:{ mn:1 mo:, mn:2 mo:}"),
        (r"\overline{AB}", "mover(mrow(mi:A mi:B) mo:‾)"),
        (r"a \not= b", "mi:a mo:≠ mi:b"),
        (r"x \pmod{7}", "mi:x mrow(mspace: mo:( mi:mod mspace: mn:7 mo:))"),
        (r"5\%", "mn:5 mo:%"),
        (
            r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
            "mrow(mo:( mtable(mtr(mtd(mn:1) mtd(mn:2)) mtr(mtd(mn:3) mtd(mn:4))) mo:))",
        ),
        (
            r"\begin{cases} x & x > 0 \\ 0 \end{cases}",
            "mrow(mo:{ mtable(mtr(mtd(mi:x) mtd(mi:x mo:> mn:0)) mtr(mtd(mn:0))))",
        ),
    ],
)
def test_the_subset(latex: str, expected: str) -> None:
    assert shown(latex) == expected


@pytest.mark.parametrize(
    "text",
    [
        r"$\unknown{x}$",
        r"$\frac{1}$",
        "$x^$",
        "$x^1^2$",
        "${x$",
        "$x}$",
        r"$\left( x$",
        r"$a & b$",
        r"$\begin{tikzpicture} x \end{tikzpicture}$",
        "tickets cost $5 and $6",
        "$5 per hour, or 10$",
        "it costs $ 5 $ here",
        r"\$5 and \$6",
        "a $x\n\ny$ b",
        "one $ only",
        r"\boxed{1",
        r"\(x",
        "",
    ],
)
def test_what_is_not_understood_or_not_math_stays_text(text: str) -> None:
    assert split_formulas(text) == ((text,) if text else ())


def test_formulas_are_found_among_text() -> None:
    text = r"Let $n>1$, \(m\), \[ s \] and $$t$$. So \boxed{\frac{1}{2}}."
    parts = split_formulas(text)
    assert [p if isinstance(p, str) else p.source for p in parts] == [
        *("Let ", "$n>1$", ", ", r"\(m\)", ", ", r"\[ s \]", " and ", "$$t$$", ". So "),
        *(r"\boxed{\frac{1}{2}}", "."),
    ]
    displayed = [p.source for p in parts if isinstance(p, Formula) and _is_block(p)]
    assert displayed == [r"\[ s \]", "$$t$$"]


def _is_block(formula: Formula) -> bool:
    return ("display", "block") in formula.math.attributes


def test_an_unknown_formula_does_not_shift_the_next() -> None:
    sources = [p if isinstance(p, str) else p.source for p in split_formulas(r"$\no$ a $x$ b")]
    assert sources == [r"$\no$ a ", "$x$", " b"]


def test_a_boxed_answer_has_a_box() -> None:
    (formula,) = split_formulas(r"\boxed{42}")
    assert isinstance(formula, Formula)
    (box,) = formula.math.children
    assert (box.tag, box.attributes, brief(box)) == ("mrow", (("class", "boxed"),), "mrow(mn:42)")


def test_a_whole_answer() -> None:
    answer = whole_formula(r"\frac{14}{3}")
    assert answer is not None
    assert brief(answer.math) == "math(mfrac(mn:14 mn:3))"
    assert whole_formula("42") is None
    assert whole_formula(r"C:\new") is None


def test_markup_is_escaped() -> None:
    made = to_markup('<b>$a < b$ & $\\text{<script>"}$')
    assert made.startswith("&lt;b&gt;<math")
    assert "<script" not in made
    ElementTree.fromstring(f"<p>{made}</p>")


def test_nesting_and_length_are_bounded() -> None:
    deep = "$" + "{" * 500 + "x" + "}" * 500 + "$"
    assert split_formulas(deep) == (deep,)
    long = "$" + "x" * (LONGEST + 1) + "$"
    assert split_formulas(long) == (long,)


PIECES = [*r"\{}[]()$^_&' x1<", "\\frac", "\\sqrt", "\\left", "\\begin{cases}", "\n"]
LATEX = st.lists(st.sampled_from(PIECES)).map("".join)


@given(LATEX)
def test_no_character_is_lost_and_only_known_elements_are_made(text: str) -> None:
    parts = split_formulas(text)
    assert "".join(p if isinstance(p, str) else p.source for p in parts) == text
    pending = [p.math for p in parts if isinstance(p, Formula)]
    while pending:
        node = pending.pop()
        assert node.tag in TAGS
        assert not (node.text and node.children)
        pending += node.children
