"""Words of codes, which are made where they are used, and places in records: what kernels hand to an `Emitter`."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from bridge.system.records import record


@record
class LookedUp:
    """A word of a table's entries: a function that emits it, as other words are."""

    v: Any
    code: Callable[[], Any]
    table: tuple[int, ...]

    def __call__(self) -> Any:
        return self.v.look_up(self.code(), self.table)

    def nibble(self, right: int) -> Any:
        """Four bits of each entry, by a look-up of their own, which is cheaper than to shift and mask."""
        return self.v.look_up(self.code(), tuple(entry >> right & 15 for entry in self.table))


@record
class Permuted:
    """The same by a look-up that takes no notice of bits that are not the code's."""

    v: Any
    code: Any
    table: tuple[int, ...]

    def __call__(self) -> Any:
        indices, places = self.code.loose(self.v.index_bits)
        numbers = (
            sum((i >> shift & 1) << bit for bit, shift in enumerate(places)) for i in range(1 << self.v.index_bits)
        )
        entries = (*self.table, *[0] * ((1 << len(places)) - len(self.table)))
        return self.v.permute(indices, tuple(entries[number] for number in numbers))


@record
class Nibbles:
    """A word of codes of 8 bits whose low nibbles are at base + offset, the high ones in the vector after it."""

    v: Any
    base: Any
    offset: int

    def __call__(self) -> Any:
        return self.v.or_(self.nibble(0), self.v.shl(self.nibble(4), 4))

    def nibble(self, right: int) -> Any:
        return self.v.load(self.base, self.offset + (4 * self.v.lanes if right else 0))


def nibble(v: Any, word: Callable[[], Any], right: int) -> Any:
    """Four bits of each byte of a word, from bit `right` on."""
    if isinstance(word, LookedUp | Nibbles):
        return word.nibble(right)
    return v.and_(v.shr(word(), right), 0x0F0F0F0F)


class Places(NamedTuple):
    """Where a field of each column's record is, and where the records end, in bytes."""

    offsets: list[int]
    end: int


def computed(value: Any) -> Callable[[], Any]:
    """A word that is at hand already, as a function like the others."""
    return lambda: value


def interleaving(words: int, chosen: Iterable[int], size: int) -> list[int]:
    """The places, in two vectors of so many words side by side, of runs of `size` words of each in turn.

    chosen  the numbers of the runs that are taken from every four words
    """
    return [
        source + start + run * size + i
        for start in range(0, words, 4)
        for run in chosen
        for source in (0, words)
        for i in range(size)
    ]
