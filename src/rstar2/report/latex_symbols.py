"""The symbols of LaTeX that formulas of problems use, by command, as Unicode characters."""

from __future__ import annotations

import string

_GREEK = (
    "alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι "
    "kappa κ lambda λ mu μ nu ν xi ξ pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ "
    "upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π "
    "Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω"
)
_OTHER = "infty ∞ ell ℓ hbar ℏ partial ∂ nabla ∇ emptyset ∅ varnothing ∅ Re ℜ Im ℑ aleph ℵ imath ı"
_OPERATORS = (
    "cdot · times × div ÷ pm ± mp ∓ ast ∗ star ⋆ circ ∘ bullet ∙ oplus ⊕ otimes ⊗ "
    "leq ≤ le ≤ leqslant ⩽ geq ≥ ge ≥ geqslant ⩾ neq ≠ ne ≠ equiv ≡ approx ≈ sim ∼ simeq ≃ "
    "cong ≅ propto ∝ ll ≪ gg ≫ lt < gt > in ∈ notin ∉ ni ∋ subset ⊂ subseteq ⊆ supset ⊃ "
    "supseteq ⊇ subsetneq ⊊ cup ∪ cap ∩ setminus ∖ land ∧ wedge ∧ lor ∨ vee ∨ neg ¬ lnot ¬ "
    "forall ∀ exists ∃ nexists ∄ to → rightarrow → leftarrow ← leftrightarrow ↔ Rightarrow ⇒ "
    "Leftarrow ⇐ Leftrightarrow ⇔ implies ⟹ impliedby ⟸ iff ⟺ mapsto ↦ "
    "longrightarrow ⟶ Longrightarrow ⟹ "
    "uparrow ↑ downarrow ↓ nearrow ↗ searrow ↘ hookrightarrow ↪ "
    "perp ⊥ parallel ∥ mid ∣ nmid ∤ nparallel ∦ angle ∠ measuredangle ∡ triangle △ square □ "
    "therefore ∴ because ∵ prime ′ dots … ldots … cdots ⋯ dotsb ⋯ dotsm ⋯ "
    "dotsc … vdots ⋮ ddots ⋱ colon : "
    "bmod mod mod mod diamond ⋄ clubsuit ♣ bigtriangleup △ top ⊤ degree ° "
    "checkmark ✓ dagger † blacksquare ■ Box □ lvert | rvert | "
    "asymp ≍ prec ≺ succ ≻ preceq ⪯ succeq ⪰ models ⊨ vdash ⊢ colonneqq ≔ triangleq ≜ doteq ≐"
)
_BIG = (
    "sum ∑ prod ∏ coprod ∐ int ∫ iint ∬ iiint ∭ oint ∮ bigcup ⋃ bigcap ⋂ bigoplus ⨁ "
    "bigotimes ⨂ bigvee ⋁ bigwedge ⋀ bigsqcup ⨆"
)
_ACCENTS = (
    "bar ¯ overline ‾ hat ^ widehat ^ tilde ~ widetilde ~ vec → dot ˙ ddot ¨ overrightarrow → "
    "overleftarrow ← overbrace ⏞ check ˇ breve ˘ acute ´ grave ` mathring ˚"
)
_FUNCTIONS = (
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth log ln lg exp deg dim ker "
    "hom arg"
)
_LIMITS = "lim max min sup inf gcd lcm det Pr argmax argmin"
_IGNORED = "displaystyle textstyle scriptstyle limits nolimits hline bf rm it nonumber"


def _pairs(text: str) -> dict[str, str]:
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


IDENTIFIERS = _pairs(_GREEK) | _pairs(_OTHER)
OPERATORS = _pairs(_OPERATORS) | {"%": "%", "$": "$", "#": "#", "&": "&", "_": "_"}
BIG_OPERATORS = _pairs(_BIG)
FUNCTIONS = frozenset(_FUNCTIONS.split())
LIMIT_FUNCTIONS = {name: name for name in _LIMITS.split()} | {
    "limsup": "lim sup",
    "liminf": "lim inf",
}
DELIMITERS = {
    **{"{": "{", "}": "}", "|": "‖", "lbrace": "{", "rbrace": "}", "vert": "|", "Vert": "‖"},
    **{"lvert": "|", "rvert": "|", "lVert": "‖", "rVert": "‖", "langle": "⟨", "rangle": "⟩"},
    **{"lfloor": "⌊", "rfloor": "⌋", "lceil": "⌈", "rceil": "⌉", "backslash": "\\"},
    **{"lbrack": "[", "rbrack": "]"},
}
ACCENTS = _pairs(_ACCENTS)
UNDER_ACCENTS = {"underline": "_", "underbrace": "⏟"}
SPACES = {
    **{",": "0.167em", ":": "0.222em", ">": "0.222em", ";": "0.278em", "!": "-0.167em"},
    **{" ": "0.333em", "quad": "1em", "qquad": "2em", "enspace": "0.5em", "thinspace": "0.167em"},
}
NEGATED = {"=": "≠", "∈": "∉", "≡": "≢", "∣": "∤", "⊂": "⊄", "⊆": "⊈", "∼": "≁", "<": "≮", ">": "≯"}
IGNORED = frozenset(_IGNORED.split())


def _letters(capital: int, small: int, digit: int = 0, **irregular: str) -> dict[str, str]:
    """An alphabet that begins at these code points."""
    table = {c: chr(capital + n) for n, c in enumerate(string.ascii_uppercase)}
    table |= {c: chr(small + n) for n, c in enumerate(string.ascii_lowercase)}
    if digit:
        table |= {c: chr(digit + n) for n, c in enumerate(string.digits)}
    return table | irregular


_BOLD = _letters(0x1D400, 0x1D41A, 0x1D7CE)
ALPHABETS = {
    "mathbb": _letters(
        0x1D538, 0x1D552, 0x1D7D8, C="ℂ", H="ℍ", N="ℕ", P="ℙ", Q="ℚ", R="ℝ", Z="ℤ"
    ),
    "mathcal": _letters(
        0x1D49C, 0x1D4B6,
        B="ℬ", E="ℰ", F="ℱ", H="ℋ", I="ℐ", L="ℒ", M="ℳ", R="ℛ", e="ℯ", g="ℊ", o="ℴ",
    ),
    "mathfrak": _letters(0x1D504, 0x1D51E, C="ℭ", H="ℌ", I="ℑ", R="ℜ", Z="ℨ"),
    "mathbf": _BOLD,
    "boldsymbol": _BOLD,
    "bm": _BOLD,
    "bold": _BOLD,
}  # fmt: skip
ALPHABETS["mathscr"] = ALPHABETS["mathcal"]
