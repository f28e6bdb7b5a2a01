"""Token ids and their numbers as immutable arrays: four bytes a value; a tuple takes 32 to 40.

`types` holds the tokens of trajectories in them. They behave as tuples do: they are equal to a
tuple of the same values and have its hash, slices are arrays too, and JSON shows a list.

Invariant: no value changes. Floats take four bytes where float32 holds all of them exactly, as for
the logprobs of engines, and eight where it does not.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    import numpy.typing as npt

N = TypeVar("N", bound=float)


class TokenArray(Sequence[N]):
    """Immutable numbers; made by `id_array`, `mark_array` and `float_array`."""

    __slots__ = ("_values",)

    def __init__(self, values: array[Any]) -> None:
        """Keep an array without copying it; the caller must not change it afterwards."""
        self._values: array[Any] = values

    def tolist(self) -> list[N]:
        """The values as Python numbers."""
        values: list[N] = self._values.tolist()
        return values

    @property
    def held(self) -> array[Any]:
        """The array itself; the caller must not change it."""
        return self._values

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return len(self._values) * self._values.itemsize

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[N]:
        return iter(self._values)

    def __contains__(self, value: object) -> bool:
        return value in self._values

    @overload
    def __getitem__(self, place: int) -> N: ...

    @overload
    def __getitem__(self, place: slice) -> TokenArray[N]: ...

    def __getitem__(self, place: int | slice) -> N | TokenArray[N]:
        if isinstance(place, slice):
            return TokenArray(self._values[place])
        value: N = self._values[place]
        return value

    def __add__(self, other: TokenArray[N]) -> TokenArray[N]:
        """Both arrays, one after the other."""
        if not isinstance(other, TokenArray):
            return NotImplemented
        mine, others = self._values, other._values
        if mine.typecode == others.typecode:
            return TokenArray(mine + others)
        if not mine or not others:
            return self if mine else other
        wider = mine.typecode if mine.itemsize > others.itemsize else others.typecode
        return TokenArray(array(wider, [*mine, *others]))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenArray):
            return bool(self._values == other._values)
        if isinstance(other, tuple):
            return len(self._values) == len(other) and tuple(self._values) == other
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self._values))

    def __repr__(self) -> str:
        return f"TokenArray({self.tolist()})"

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        """A copy for numpy."""
        import numpy as np

        return np.array(self._values, dtype=dtype)

    def count(self, value: object) -> int:
        """How often a value occurs."""
        return self._values.count(value)


_NO_INTEGERS: TokenArray[int] = TokenArray(array("i"))


def id_array(values: Sequence[int]) -> TokenArray[int]:
    """Token ids, four bytes each."""
    return _integers("i", values)


def mark_array(values: Sequence[int]) -> TokenArray[int]:
    """The marks of a mask, one byte each."""
    return _integers("b", values)


def _integers(kind: str, values: Sequence[int]) -> TokenArray[int]:
    if isinstance(values, TokenArray):
        return values
    if not len(values):
        return _NO_INTEGERS
    try:
        return TokenArray(array(kind, values))
    except OverflowError as error:
        raise ValueError(f"token ids and marks are small numbers: {error}") from error


def float_array(values: Sequence[float]) -> TokenArray[float]:
    """Floats, four bytes each if that changes none of them, else eight."""
    if isinstance(values, TokenArray):
        return values
    exact, single = list(values), array("f", values)
    return TokenArray(single if single.tolist() == exact else array("d", exact))


def hold_arrays(
    record: object,
    *,
    ids: tuple[str, ...] = (),
    marks: tuple[str, ...] = (),
    floats: tuple[str, ...] = (),
) -> None:
    """Replace these fields of a new dataclass by arrays; None stays."""
    for names, pack in ((ids, id_array), (marks, mark_array), (floats, float_array)):
        for name in names:
            values = getattr(record, name)
            if values is not None and not isinstance(values, TokenArray):
                object.__setattr__(record, name, pack(values))  # the dataclass is frozen


def plain(value: object) -> object:
    """What msgspec encodes in place of an array."""
    if isinstance(value, TokenArray):
        return value.tolist()
    raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")
