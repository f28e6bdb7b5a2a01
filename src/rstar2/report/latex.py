"""LaTeX formulas in text as MathML, which browsers draw without a script or a font of ours.

`split_formulas` finds `$...$`, `$$...$$`, `\\(...\\)`, `\\[...\\]`, `\\boxed{...}` and
environments.
The subset is what problems and answers use: fractions, scripts, roots, boxes, Greek letters,
operators, text, accents, delimiters, matrices, cases and alignments.

Invariants
- Joining the parts (the source of each formula) gives the text back, character by character.
- A formula with an unknown command, unbalanced braces or too much nesting stays source text.
- The result is a tree of elements from MathML Core (TAGS); text of a run is never markup.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup, escape

from rstar2.report.latex_symbols import (
    ACCENTS,
    ALPHABETS,
    BIG_OPERATORS,
    DELIMITERS,
    FUNCTIONS,
    IDENTIFIERS,
    IGNORED,
    LIMIT_FUNCTIONS,
    NEGATED,
    OPERATORS,
    SPACES,
    UNDER_ACCENTS,
)

LONGEST = 4000
"""The most characters of one formula."""
DEEPEST = 40
MOST = 400
"""The most formulas of one text."""
TAGS = frozenset(
    {"math", "mrow", "mi", "mn", "mo", "mtext", "mspace", "mfrac", "msqrt", "mroot", "msub", "msup"}
    | {"msubsup", "munder", "mover", "munderover", "mtable", "mtr", "mtd", "mphantom"}
)
MATRICES = {
    **{"matrix": ("", ""), "smallmatrix": ("", ""), "array": ("", ""), "pmatrix": ("(", ")")},
    **{"bmatrix": ("[", "]"), "Bmatrix": ("{", "}"), "vmatrix": ("|", "|"), "Vmatrix": ("‖", "‖")},
    **{"cases": ("{", ""), "aligned": ("", ""), "align": ("", ""), "align*": ("", "")},
    **{"split": ("", ""), "gathered": ("", ""), "gather": ("", ""), "gather*": ("", "")},
    **{"equation": ("", ""), "equation*": ("", "")},
}
"""Environments, and the delimiters around each."""
TEXTS = ("text", "mbox", "textbf", "textit", "textrm", "texttt", "textsf", "textnormal", "emph")

_TOKEN = re.compile(r"\\([A-Za-z]+)\*?|(\\.)|(\d+(?:\.\d+)?|\.\d+)|(\s+)|(.)", re.DOTALL)
_OPENER = re.compile(r"\\\$|\$\$|\$|\\\[|\\\(|\\boxed\{|\\begin\{([A-Za-z]+\*?)\}")
_PROSE = re.compile(r"[A-Za-z]{3,}\s+[A-Za-z]{2,}")
_IN_BRACES = re.compile(r"\\[A-Za-z]+\s*\{[^{}]*\}")


class NotLatexError(ValueError):
    """This formula is not in the subset."""


@dataclass(frozen=True, slots=True)
class MathNode:
    """One element of MathML: it has text or children."""

    tag: str
    text: str = ""
    children: tuple[MathNode, ...] = ()
    attributes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Formula:
    """A formula as the text has it, and as MathML."""

    source: str
    math: MathNode


# --------------------------------------------------------------------------- finding


def split_formulas(text: str) -> tuple[str | Formula, ...]:
    """The text as strings and formulas, in order."""
    parts: list[str | Formula] = []
    taken = at = 0
    while len(parts) < 2 * MOST and (opener := _OPENER.search(text, at)):
        span = _span(text, opener)
        if span is None:
            at = opener.end()
            continue
        start, inner_start, inner_end, at = span
        source = text[start:at]
        display = opener[0] in ("$$", "\\[") or opener[0].startswith("\\begin")
        if formula := _formula(source, text[inner_start:inner_end], display):
            parts += [text[taken:start], formula] if taken < start else [formula]
            taken = at
    return (*parts, text[taken:]) if taken < len(text) else tuple(parts)


def formulas(text: str) -> tuple[str | Formula, ...] | None:
    """The parts of a text that has a formula; None for all others."""
    if "$" not in text and "\\" not in text:
        return None
    parts = split_formulas(text)
    return parts if any(isinstance(part, Formula) for part in parts) else None


def whole_formula(text: str) -> Formula | None:
    """A text that is one formula without delimiters, such as an expected answer."""
    if len(text) > LONGEST or not ("\\" in text or "^" in text) or "$" in text:
        return None
    return _formula(text, text, display=False)


def to_markup(text: str) -> Markup:
    """The text as HTML: formulas as MathML, everything else escaped."""
    parts = split_formulas(text)
    return Markup("").join(escape(p) if isinstance(p, str) else _markup(p.math) for p in parts)


def _markup(node: MathNode) -> Markup:
    attributes = Markup("").join(Markup(' {}="{}"').format(*pair) for pair in node.attributes)
    inside = escape(node.text) + Markup("").join(_markup(child) for child in node.children)
    return Markup("<{0}{1}>{2}</{0}>").format(node.tag, attributes, inside)


def _span(text: str, opener: re.Match[str]) -> tuple[int, int, int, int] | None:
    """Start, start and end of the formula without delimiters, end; None if nothing is delimited."""
    start, inner, what = opener.start(), opener.end(), opener[0]
    most = inner + LONGEST
    if what == "\\$":
        return None
    if what == "\\boxed{":
        end = _closing_brace(text, inner, most)
        return None if end is None else (start, start, end, end)
    if what.startswith("\\begin"):
        closer = f"\\end{{{opener[1]}}}"
        at = text.find(closer, inner, most)
        end = at + len(closer)
        return None if at < 0 or opener[1] not in MATRICES else (start, start, end, end)
    if what == "$":
        dollar = _closing_dollar(text, inner, most)
        return None if dollar is None else (start, inner, dollar, dollar + 1)
    closer = {"$$": "$$", "\\[": "\\]", "\\(": "\\)"}[what]
    at = text.find(closer, inner, most)
    return None if at < 0 else (start, inner, at, at + len(closer))


def _closing_brace(text: str, at: int, most: int) -> int | None:
    depth = 1
    for match in re.finditer(r"\\.|[{}]", text[at:most], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return at + match.end()
    return None


def _closing_dollar(text: str, inner: int, most: int) -> int | None:
    """Where `$` closes a formula. Prices are none: `$5 and $6`, `$5 per hour, or 10$`."""
    at = text.find("$", inner, most)
    while at > 0 and text[at - 1] == "\\":
        at = text.find("$", at + 1, most)
    if at <= inner or text[inner].isspace() or text[at - 1].isspace():
        return None
    if text[at + 1 : at + 2].isdigit() or "\n\n" in text[inner:at]:
        return None
    return None if _PROSE.search(_IN_BRACES.sub(" ", text[inner:at])) else at


def _formula(source: str, latex: str, display: bool) -> Formula | None:
    try:
        row = _LatexParser(latex).whole()
    except NotLatexError:
        return None
    block = (("display", "block"),) if display else ()
    return Formula(source, MathNode("math", "", row, (*block, ("alttext", source))))


# --------------------------------------------------------------------------- parsing


def _mo(text: str, **attributes: str) -> MathNode:
    return MathNode("mo", text, (), tuple(attributes.items()))


def _mrow(children: Sequence[MathNode], **attributes: str) -> MathNode:
    if len(children) == 1 and not attributes:
        return children[0]
    named = tuple((name.rstrip("_"), value) for name, value in attributes.items())
    return MathNode("mrow", "", tuple(children), named)


def _fraction(above: MathNode, below: MathNode, binomial: bool) -> MathNode:
    if not binomial:
        return MathNode("mfrac", "", (above, below))
    inner = MathNode("mfrac", "", (above, below), (("linethickness", "0"),))
    return _mrow([_mo("("), inner, _mo(")")])


class _LatexParser:
    """A recursive descent parser; every method reads from `_at` on and raises NotLatexError."""

    def __init__(self, latex: str) -> None:
        self._tokens = [match[0] for match in _TOKEN.finditer(latex)]
        self._at = 0
        self._depth = 0

    def whole(self) -> tuple[MathNode, ...]:
        row = self._row()
        if self._at < len(self._tokens):
            raise NotLatexError(f"unexpected {self._tokens[self._at]!r}")
        return tuple(row)

    # ----------------------------------------------------------------- tokens

    def _peek(self) -> str:
        while self._at < len(self._tokens) and self._tokens[self._at].isspace():
            self._at += 1
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _next(self) -> str:
        token = self._peek()
        if not token:
            raise NotLatexError("the formula ends too early")
        self._at += 1
        return token

    def _expect(self, wanted: str) -> None:
        if (token := self._next()) != wanted:
            raise NotLatexError(f"{token!r} instead of {wanted!r}")

    def _raw_group(self) -> str:
        """The source between balanced braces."""
        self._expect("{")
        start, depth = self._at, 1
        while self._at < len(self._tokens):
            depth += {"{": 1, "}": -1}.get(self._tokens[self._at], 0)
            self._at += 1
            if depth == 0:
                return "".join(self._tokens[start : self._at - 1])
        raise NotLatexError("unbalanced braces")

    # ----------------------------------------------------------------- rows and scripts

    def _row(self, *ends: str) -> list[MathNode]:
        """Items up to one of `ends`, which is not read, or to the end of the formula."""
        self._depth += 1
        if self._depth > DEEPEST:
            raise NotLatexError("nested too deeply")
        row: list[MathNode] = []
        while (token := self._peek()) and token not in ends:
            if token in ("}", "&", "\\\\", "\\right", "\\end"):
                raise NotLatexError(f"unexpected {token!r}")
            if token in ("\\over", "\\choose"):
                self._next()
                row = [_fraction(_mrow(row), _mrow(self._row(*ends)), token == "\\choose")]
            else:
                row += self._item()
        self._depth -= 1
        return row

    def _item(self) -> Iterator[MathNode]:
        token = self._peek()
        if token.lstrip("\\") in IGNORED and token.startswith("\\"):
            self._next()
            return
        base = MathNode("mrow") if token in ("^", "_", "'") else self._atom()
        yield self._scripts(base)
        name = token.lstrip("\\")
        if name in FUNCTIONS and self._peek() not in ("", "(", "[", "}", "\\left", "^", "_"):
            yield MathNode("mspace", attributes=(("width", "0.167em"),))

    def _scripts(self, base: MathNode) -> MathNode:
        below: MathNode | None = None
        above: list[MathNode] = []
        while (token := self._peek()) in ("^", "_", "'", "\\limits", "\\nolimits"):
            self._next()
            if token == "'":
                above.append(_mo("′"))
            elif token == "^":
                if any(node.text != "′" for node in above):
                    raise NotLatexError("two superscripts")
                above.append(self._argument())
            elif token == "_":
                if below is not None:
                    raise NotLatexError("two subscripts")
                below = self._argument()
        over = _mrow(above) if above else None
        limits = ("movablelimits", "true") in base.attributes
        names = ("munder", "mover", "munderover") if limits else ("msub", "msup", "msubsup")
        if below is not None and over is not None:
            return MathNode(names[2], "", (base, below, over))
        if below is not None:
            return MathNode(names[0], "", (base, below))
        return MathNode(names[1], "", (base, over)) if over is not None else base

    def _argument(self) -> MathNode:
        """One group, or one character: `\\frac12` has two arguments."""
        token = self._peek()
        if token[:1].isdigit() and len(token) > 1:
            self._tokens[self._at] = token[1:]
            return MathNode("mn", token[0])
        if token in ("^", "_", "&", "}", ""):
            raise NotLatexError("an argument is missing")
        return self._atom()

    # ----------------------------------------------------------------- atoms

    def _atom(self) -> MathNode:
        token = self._next()
        if token == "{":
            row = self._row("}")
            self._expect("}")
            return _mrow(row)
        if token.startswith("\\"):
            return self._command(token[1:].rstrip("*"))
        if token[0].isdigit() or (token[0] == "." and len(token) > 1):
            return MathNode("mn", token)
        if token.isalpha():
            return MathNode("mi", token)
        if token == "~":
            return MathNode("mspace", attributes=(("width", "0.333em"),))
        if token in ("$", "#", "%"):
            raise NotLatexError(f"unexpected {token!r}")
        if token in "()[]|/":
            return _mo(token, stretchy="false")
        return _mo({"-": "−", "*": "∗", ":": "∶"}.get(token, token))

    def _command(self, name: str) -> MathNode:
        if (symbol := self._symbol(name)) is not None:
            return symbol
        if name in ("frac", "dfrac", "tfrac", "cfrac", "binom", "dbinom", "tbinom"):
            return _fraction(self._argument(), self._argument(), name.endswith("binom"))
        if name == "sqrt":
            return self._root()
        if name in ("boxed", "fbox"):
            return _mrow([self._argument()], class_="boxed")
        if name == "left":
            return self._fenced()
        if re.fullmatch(r"[bB]igg?[lrm]?", name):
            return _mo(self._delimiter(), stretchy="false")
        if name == "begin":
            return self._environment()
        return self._annotated(name)

    def _annotated(self, name: str) -> MathNode:
        """Text, alphabets, accents, and things above or below others."""
        if name in TEXTS:
            return self._text()
        if name in ("mathrm", "operatorname", "mathit", "mathsf", "mathtt"):
            return self._upright()
        if name in ALPHABETS:
            return _in_alphabet(self._argument(), ALPHABETS[name])
        if name in ACCENTS:
            stretchy = "true" if name.startswith(("over", "wide")) else "false"
            mark = _mo(ACCENTS[name], stretchy=stretchy)
            return MathNode("mover", "", (self._argument(), mark), (("accent", "true"),))
        if name in UNDER_ACCENTS:
            mark = _mo(UNDER_ACCENTS[name], stretchy="true")
            return MathNode("munder", "", (self._argument(), mark))
        if name in ("overset", "stackrel"):
            above, base = self._argument(), self._argument()
            return MathNode("mover", "", (base, above))
        if name == "underset":
            below, base = self._argument(), self._argument()
            return MathNode("munder", "", (base, below))
        if name == "hspace":
            width = self._raw_group()
            if not re.fullmatch(r"-?[\d.]+(em|ex|pt|px|mm|cm|in)", width):
                raise NotLatexError(f"{width!r} is no width")
            return MathNode("mspace", attributes=(("width", width),))
        if name == "phantom":
            return MathNode("mphantom", "", (self._argument(),))
        if name == "pmod":
            inner = self._argument()
            gap = MathNode("mspace", attributes=(("width", "0.444em"),))
            return _mrow([gap, _mo("("), MathNode("mi", "mod"), gap, inner, _mo(")")])
        if name == "not":
            negated = self._atom()
            return replace(negated, text=NEGATED.get(negated.text, negated.text + "\u0338"))
        raise NotLatexError(f"\\{name} is unknown")

    def _symbol(self, name: str) -> MathNode | None:
        if name in IDENTIFIERS:
            upright = (("mathvariant", "normal"),) if IDENTIFIERS[name].isupper() else ()
            return MathNode("mi", IDENTIFIERS[name], (), upright)
        if name in BIG_OPERATORS:
            limits = {} if "∫" in BIG_OPERATORS[name] else {"movablelimits": "true"}
            return _mo(BIG_OPERATORS[name], **limits)
        if name in LIMIT_FUNCTIONS:
            return _mo(LIMIT_FUNCTIONS[name], movablelimits="true", form="prefix")
        if name in FUNCTIONS:
            return MathNode("mi", name)
        if name in OPERATORS:
            return _mo(OPERATORS[name])
        if name in DELIMITERS:
            return _mo(DELIMITERS[name], stretchy="false")
        if name in SPACES:
            return MathNode("mspace", attributes=(("width", SPACES[name]),))
        return None

    def _root(self) -> MathNode:
        if self._peek() != "[":
            return MathNode("msqrt", "", (self._argument(),))
        self._next()
        index = self._row("]")
        self._expect("]")
        return MathNode("mroot", "", (self._argument(), _mrow(index)))

    def _text(self) -> MathNode:
        words: list[MathNode] = []
        for part in split_formulas(self._raw_group()):
            if isinstance(part, str):
                plain = re.sub(r"\\([%$#&_{} ])", r"\1", part)
                if "\\" in plain:
                    raise NotLatexError("a command in text")
                # leading and trailing spaces would be dropped
                words.append(MathNode("mtext", plain.replace(" ", "\u00a0")))
            else:
                words.append(_mrow(part.math.children))
        return _mrow(words)

    def _upright(self) -> MathNode:
        raw = self._raw_group()
        if re.fullmatch(r"[A-Za-z0-9 ]+", raw):
            return MathNode("mi", raw.strip(), (), (("mathvariant", "normal"),))
        return _mrow(_LatexParser(raw).whole())

    def _delimiter(self) -> str:
        token = self._next()
        if token == ".":
            return ""
        if token in ("(", ")", "[", "]", "|", "/", "<", ">"):
            return {"<": "⟨", ">": "⟩"}.get(token, token)
        if token.startswith("\\") and token[1:] in DELIMITERS:
            return DELIMITERS[token[1:]]
        raise NotLatexError(f"{token!r} is no delimiter")

    def _fenced(self) -> MathNode:
        row = [_mo(self._delimiter(), stretchy="true", form="prefix")]
        while True:
            row += self._row("\\right", "\\middle")
            end = self._next()
            form = "postfix" if end == "\\right" else "infix"
            row.append(_mo(self._delimiter(), stretchy="true", form=form))
            if end == "\\right":
                return _mrow([node for node in row if node.text or node.tag != "mo"])

    def _environment(self) -> MathNode:
        name = self._raw_group()
        if name not in MATRICES:
            raise NotLatexError(f"the environment {name!r} is unknown")
        if name == "array":
            self._raw_group()  # the alignment of its columns
        rows: list[MathNode] = []
        cells: list[MathNode] = []
        while True:
            cells.append(MathNode("mtd", "", tuple(self._row("&", "\\\\", "\\end"))))
            token = self._next()
            if token == "&":
                continue
            rows.append(MathNode("mtr", "", tuple(cells)))
            cells = []
            if token == "\\end":
                break
        if self._raw_group() != name:
            raise NotLatexError(f"{name} is not closed")
        if rows and not any(cell.children for cell in rows[-1].children):
            rows.pop()  # a line break before \end
        table = MathNode("mtable", "", tuple(rows), (("class", name.rstrip("*")),))
        before, after = MATRICES[name]
        fence = [_mo(before, form="prefix"), table, _mo(after, form="postfix")]
        return _mrow([node for node in fence if node.text or node.tag != "mo"])


def _in_alphabet(node: MathNode, alphabet: dict[str, str]) -> MathNode:
    """The letters and digits of a formula in another alphabet, such as blackboard bold."""
    text = "".join(alphabet.get(c, c) for c in node.text) if node.tag in ("mi", "mn") else node.text
    children = tuple(_in_alphabet(child, alphabet) for child in node.children)
    return replace(node, text=text, children=children)
