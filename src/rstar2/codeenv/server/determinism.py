"""Decides by its text whether a program always gives the same result.

`why_not(code)` returns None for a program that can observe nothing but its own text, else the first
reason why it might. The check accepts by list and refuses everything else:

- Syntax: the node types in `_SYNTAX`. No classes and no coroutines.
- Imports: the modules and names in `_MODULES`.
- Names: the builtins in `_BUILTINS`, and names that the program binds. A builtin that is not on the
  list (`id`, `open`, `input`, `eval`, `getattr`, ...) is refused even if the program rebinds it.
- Attributes: the names in `ATTRIBUTES`, whatever the object is. None of them leads from a module to
  another module, to a frame or to a namespace. Underscores are refused, and so is `str.format` with
  a field that looks up attributes.

What this leaves a program are two ways to observe its process. Hashes of strings decide the order
of sets: all calls are forks of one interpreter and have the same (`reuse` forgets what an earlier
interpreter gave). Addresses of new objects appear in reprs: `reuse` keeps no result that shows one.

This is not a security boundary. A program that is written to evade it (by computing with the text
of an address, or by collecting functions in a set) can only obtain its own earlier result again.
"""

from __future__ import annotations

import ast
import builtins
import string
import warnings
from collections.abc import Iterator

from rstar2.codeenv.jail.syscalls import words

MAX_CHARS = 16_384
"""Longer programs are not read: parsing them would take the server's time."""

_SYNTAX = frozenset(
    words("""
Module Expr Assign AugAssign AnnAssign For While If With withitem Raise Try TryStar Assert Delete
Import ImportFrom alias Global Nonlocal Pass Break Continue Return FunctionDef Lambda arguments arg
keyword ExceptHandler Match match_case MatchValue MatchSingleton MatchSequence MatchStar
MatchMapping MatchAs MatchOr BoolOp NamedExpr BinOp UnaryOp IfExp Dict Set ListComp SetComp DictComp
GeneratorExp comprehension Yield YieldFrom Compare Call FormattedValue JoinedStr Constant Attribute
Subscript Starred Name List Tuple Slice Load Store Del And Or Add Sub Mult MatMult Div Mod Pow
LShift RShift BitOr BitXor BitAnd FloorDiv Invert Not UAdd USub Eq NotEq Lt LtE Gt GtE Is IsNot In
NotIn
""")
)

_BUILTINS = frozenset(
    words("""
abs all any ascii bin bool bytearray bytes callable chr complex dict divmod enumerate filter float
format frozenset int isinstance issubclass iter len list map max min next oct hex ord pow
print range repr reversed round set slice sorted str sum tuple zip
Ellipsis NotImplemented ArithmeticError AssertionError AttributeError BaseException Exception
FloatingPointError GeneratorExit ImportError IndexError KeyError KeyboardInterrupt LookupError
NameError NotImplementedError OverflowError RecursionError RuntimeError StopIteration SystemExit
TypeError UnboundLocalError UnicodeError ValueError ZeroDivisionError
""")
)
_REFUSED_BUILTINS = frozenset(dir(builtins)) - _BUILTINS

_TYPING = """
Any Callable Dict Final FrozenSet Generator Iterable Iterator List Mapping MutableMapping Optional
Sequence Set Tuple Type Union
"""
_MODULES = {
    module: frozenset(words(names))
    for module, names in {
        "bisect": "bisect bisect_left bisect_right insort insort_left insort_right",
        "cmath": "acos asin atan cos cosh e exp inf isclose log log10 nan phase pi polar rect sin "
        "sinh sqrt tan tanh tau",
        "collections": "ChainMap Counter OrderedDict defaultdict deque",
        "collections.abc": "Callable Generator Iterable Iterator Mapping Sequence",
        "copy": "copy deepcopy",
        "decimal": "Context Decimal DivisionByZero InvalidOperation ROUND_CEILING ROUND_DOWN "
        "ROUND_FLOOR ROUND_HALF_DOWN ROUND_HALF_EVEN ROUND_HALF_UP ROUND_UP getcontext "
        "localcontext setcontext",
        "fractions": "Fraction",
        "functools": "cache cmp_to_key lru_cache partial reduce wraps",
        "heapq": "heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest",
        "itertools": "accumulate chain combinations combinations_with_replacement compress count "
        "cycle dropwhile filterfalse groupby islice pairwise permutations product repeat starmap "
        "takewhile tee zip_longest",
        "math": "acos acosh asin asinh atan atan2 atanh cbrt ceil comb copysign cos cosh degrees "
        "dist e erf erfc exp exp2 expm1 fabs factorial floor fmod frexp fsum gamma gcd hypot inf "
        "isclose isfinite isinf isnan isqrt lcm ldexp lgamma log log10 log1p log2 modf nan "
        "nextafter perm pi pow prod radians remainder sin sinh sqrt sumprod tan tanh tau trunc ulp",
        "operator": "abs add and_ concat contains countOf eq floordiv ge getitem gt indexOf inv "
        "itemgetter le lshift lt mod mul ne neg not_ or_ pos pow rshift sub truediv truth xor",
        "re": "A ASCII DOTALL I IGNORECASE M MULTILINE S VERBOSE X compile escape findall finditer "
        "fullmatch match search split sub subn",
        "statistics": "fmean geometric_mean harmonic_mean mean median median_high median_low mode "
        "multimode pstdev pvariance quantiles stdev variance",
        "string": "ascii_letters ascii_lowercase ascii_uppercase digits hexdigits octdigits "
        "printable punctuation whitespace",
        "sys": "exit getrecursionlimit maxsize set_int_max_str_digits setrecursionlimit",
        "typing": _TYPING,
    }.items()
}

_METHODS = """
add add_note adjusted append appendleft args as_integer_ratio as_tuple bit_count bit_length
cache_clear cache_info canonical capitalize casefold center clear close compare conjugate copy
copy_abs copy_negate copy_sign count decode default_factory denominator difference
difference_update discard elements encode end endswith expandtabs extend extendleft find fromhex
from_bytes from_decimal from_float from_iterable fromkeys get group groupdict groups hex imag index
insert intersection intersection_update is_finite is_infinite is_integer is_nan is_signed
is_zero isalnum isalpha isascii isdecimal isdigit isdisjoint isidentifier islower isnumeric
isprintable isspace issubset issuperset istitle isupper items join keys lastindex
limit_denominator ljust ln log10 lower lstrip maketrans maxlen most_common move_to_end next_minus
next_plus number_class numerator partition pop popitem popleft prec quantize real
remainder_near remove removeprefix removesuffix replace reverse rfind rindex rjust rotate rounding
rpartition rsplit rstrip same_quantum scaleb send setdefault sort span split splitlines sqrt start
startswith step stop string strip subtract swapcase symmetric_difference
symmetric_difference_update throw title to_bytes to_eng_string to_integral_exact
to_integral_value total translate union update upper value values zfill
"""

ATTRIBUTES = frozenset(words(_METHODS)).union(*_MODULES.values())
"""Attribute names that programs may use, on any object."""


def why_not(code: str) -> str | None:
    """Why two executions of a program might differ; None if they cannot (see the module)."""
    if len(code) > MAX_CHARS:
        return f"it has more than {MAX_CHARS} characters"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError, MemoryError, RecursionError, SystemError):
        return "it cannot be parsed"  # CPython reports deep nesting in any of these ways
    bound = {name for node in nodes for name in _bound(node) if not name.startswith("__")}
    names = (bound | _BUILTINS | {"__name__"}) - (_REFUSED_BUILTINS - {"__name__"})
    calls = (node for node in nodes if isinstance(node, ast.Call))
    of_type = {id(call.func) for call in calls if _asks_for_type(call)}
    for node in nodes:
        if id(node) not in of_type and (reason := _refuse(node, names)) is not None:
            return reason
    return None


def _refuse(node: ast.AST, names: set[str]) -> str | None:
    """Why this node is refused; its children are checked on their own."""
    kind = type(node).__name__
    if kind not in _SYNTAX:
        return f"syntax: {kind}"
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        if node.id not in names:
            return f"name: {node.id}"
    elif isinstance(node, ast.Attribute):
        if node.attr == "format":
            return None if _plain_format(node.value) else "attribute: format"
        if node.attr not in ATTRIBUTES and node.attr != "__name__":
            return f"attribute: {node.attr}"
    elif isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name not in _MODULES:
                return f"import: {alias.name}"
    elif isinstance(node, ast.ImportFrom):
        offered = None if node.level else _MODULES.get(node.module or "")
        for alias in node.names:
            if offered is None or alias.name not in offered | {"*"}:
                return f"import: {node.module}.{alias.name}"
    return None


def _bound(node: ast.AST) -> Iterator[str]:
    """The names that a node binds."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.FunctionDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        yield node.name
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest
    elif isinstance(node, ast.Import):
        yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            starred = _MODULES.get(node.module or "", frozenset())
            yield from starred if alias.name == "*" else (alias.asname or alias.name,)


def _asks_for_type(call: ast.Call) -> bool:
    """`type(x)`: with more arguments it makes a class."""
    return (
        isinstance(call.func, ast.Name)
        and call.func.id == "type"
        and len(call.args) == 1
        and not isinstance(call.args[0], ast.Starred)
        and not call.keywords
    )


def _plain_format(receiver: ast.expr) -> bool:
    """True for a literal whose fields are names or numbers, such as `"{:>5} {x!r}"`."""
    if not isinstance(receiver, ast.Constant) or not isinstance(receiver.value, str):
        return False
    todo = [receiver.value]
    while todo:
        try:
            fields = list(string.Formatter().parse(todo.pop()))
        except ValueError:  # the program will fail at this place, always in the same way
            continue
        for _, name, specification, _ in fields:
            if name and not name.isalnum():
                return False
            todo.append(specification or "")
    return True
