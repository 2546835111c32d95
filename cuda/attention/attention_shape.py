"""How attention.py shares its work: spans of the context among blocks, and within a block tiles, heads and columns.

A block serves one key-value head and one span. It goes through the span in tiles of keys and of values, in turn,
which lie in shared memory (kv_tile.py). A thread works for `share` query heads, so each value that it reads serves all
of them:

    scores          a warp: a set of 32 positions, `share` heads, a slice of the columns; the slices are summed later
    weighted sum    a thread: 4 columns, `share` heads, every subsets-th position; the subsets are summed at the end

On tensor cores (attention_mma.py) a warp works for all heads, 8 at a time, on 8 positions and then on 16 columns.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from bridge.cuda.attention.kv_cache import KVForm

THREADS = 256  # of a block, unless the weighted sum needs more
ROWS = 64  # positions of a tile, at most
LOADS = 4  # of 16 bytes that a thread has in flight, at most: 16 registers
SPAN = 64  # positions of a span, at least
BLOCKS = 2  # per multiprocessor: they have 32 KB in flight; more blocks would only take longer to merge
_SHARE = 4  # query heads of a thread, at most: 16 sums in registers
_CORES = (8, 0)  # compute capability of mma.sync's m16n8k16
_SUMS = 4  # registers for each sum of a thread on tensor cores, at least: with fewer, some are spilled
_SHARED = 48 << 10  # bytes of shared memory that a kernel may declare
_WARP = 32


def spans(multiprocessors: int, kv_heads: int, context: int) -> int:
    """Spans of the grid: enough for all multiprocessors, and no more than a full context needs."""
    return max(1, min(BLOCKS * multiprocessors // kv_heads, -(-context // SPAN)))


@dataclass(frozen=True)
class AttentionShape:
    """A block that serves `group` query heads, with tiles of `rows` positions, a power of two; on tensor cores 16 at
    least."""

    form: KVForm
    group: int
    rows: int
    cores: bool = False  # tensor cores

    @property
    def chunks(self) -> int:
        """Parts of the query heads."""
        return -(-self.group // _SHARE)

    @property
    def share(self) -> int:
        """Query heads of a part."""
        return -(-self.group // self.chunks)

    @property
    def eights(self) -> int:
        """Parts of the query heads on tensor cores."""
        return -(-self.group // 8)

    @property
    def units(self) -> int:
        """Groups of four columns."""
        return self.form.head_dim // 4

    @property
    def threads(self) -> int:
        """Threads of a block: a power of two, at least one for each unit and chunk."""
        return max(THREADS, 1 << (self.units * self.chunks - 1).bit_length())

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.threads // _WARP

    @property
    def registers(self) -> int:
        """Registers that a thread may have: more where BLOCKS blocks still find room, so that none are spilled."""
        return 128 if 128 * BLOCKS * self.threads <= 64 << 10 else 64

    @property
    def quads(self) -> int:
        """Loads of 16 bytes of a row."""
        return self.form.row_words // 4

    @property
    def pitch(self) -> int:
        """Quads from one row of a tile to the next: odd, so that 8 lanes that read 8 rows use different banks."""
        return self.quads | 1

    @property
    def sets(self) -> int:
        """Sets of 32 positions of a tile."""
        return -(-self.rows // _WARP)

    @property
    def slices(self) -> int:
        """Parts of a row that different warps multiply with the queries."""
        return 1 if self.cores else max(1, min(self.warps // (self.sets * self.chunks), self.quads))

    @property
    def column_groups(self) -> int:
        """Groups of 16 columns."""
        return self.form.head_dim // 16

    @property
    def subsets(self) -> int:
        """Parts of a tile's positions that different threads sum; a power of two."""
        if self.cores:
            return max(1, min(_power(self.warps // self.column_groups), self.rows // 16))
        return min(_power(self.threads // (self.units * self.chunks)), self.rows)

    @property
    def sums(self) -> int:
        """Sums that a thread holds."""
        if not self.cores:
            return 4 * self.share
        return 8 * self.eights * -(-self.column_groups * self.subsets // self.warps)

    @property
    def mergers(self) -> int:
        """Parts of the spans that different threads merge."""
        return max(1, self.threads // (self.group * self.units))

    @property
    def tile_words(self) -> int:
        """Words of a tile, or of the sums that take its place at the end."""
        sums = max(self.subsets, self.mergers) * self.group * self.form.head_dim
        return max(self.rows * (4 * self.pitch + self.form.step_words), sums)

    @property
    def steps_at(self) -> int:
        """Where the steps of a tile's rows begin, in words."""
        return 4 * self.rows * self.pitch

    @property
    def part_words(self) -> int:
        """Words of the slices' scores: [slices, chunks * share, rows]."""
        return self.slices * self.chunks * self.share * self.rows

    @property
    def weight_words(self) -> int:
        """Words of a tile's weights: 4 for each chunk, [rows, chunks, 4]; on tensor cores see there."""
        if not self.cores:
            return self.rows * self.chunks * 4
        return 8 * self.eights * (self.rows + 16)

    @property
    def query_pitch(self) -> int:
        """Words from one query to the next. On tensor cores an odd number of quads: 8 lanes that read every second quad
        of two queries use different banks."""
        return self.form.head_dim + (4 if self.cores else 0)

    @property
    def constants(self) -> dict[str, Any]:
        """The constants that the kernel's functions use."""
        form, heads = self.form, self.chunks * self.share
        names = (
            "chunks", "mergers", "pitch", "quads", "query_pitch", "share", "sets", "slices", "subsets", "sums", "units",
            "warps",
        )  # fmt: skip
        return {name.upper(): getattr(self, name) for name in names} | {
            "KIND": form.kind, "HEADS": self.group, "HEAD_DIM": form.head_dim, "PADDED": heads, "TILE": self.rows,
            "BLOCK": self.threads, "STEP_WORDS": form.step_words, "HEAD_ROUNDS": -(-heads // self.warps),
        }  # fmt: skip

    @property
    def shared(self) -> int:
        """Bytes of shared memory: for the above, the queries and the key, the state of each head, the number of spans,
        and last_block's flag."""
        heads = self.chunks * self.share
        words = self.tile_words + self.part_words + self.weight_words + (heads + 1) * self.query_pitch
        return 4 * (words + 3 * heads + 2)


@cache
def _fitting(form: KVForm, group: int, cores: bool = False) -> AttentionShape | None:
    """The shape with the largest tile; None if a block has too few threads or too little shared memory, or on tensor
    cores too few registers."""
    rows = min(ROWS, _power(LOADS * THREADS // (form.row_words // 4)))
    while rows >= (16 if cores else 4):  # a tile's steps fill whole 16 bytes
        candidate = AttentionShape(form, group, rows, cores)
        spilled = cores and _SUMS * candidate.sums > candidate.registers
        if candidate.threads <= 1024 and candidate.shared <= _SHARED and not spilled:
            return candidate
        rows //= 2
    return None


def supported(head_dim: int, group: int, kind: str) -> bool:
    """Whether there is a kernel for heads of that size, `group` of them per key-value head."""
    return head_dim % 8 == 0 and group <= 64 and _fitting(KVForm(kind, head_dim), group) is not None


def shape(form: KVForm, group: int, capability: tuple[int, int] = (0, 0)) -> AttentionShape:
    """The shape of a supported block, on tensor cores where GPUs of a compute capability and the form have them."""
    cores = capability >= _CORES and form.kind != "f32" and form.head_dim % 32 == 0
    chosen = (_fitting(form, group, True) if cores else None) or _fitting(form, group)
    assert chosen is not None
    return chosen


def _power(n: int) -> int:
    """The largest power of two up to n, which is 1 or more; otherwise 0."""
    return 1 << n.bit_length() - 1 if n > 0 else 0
