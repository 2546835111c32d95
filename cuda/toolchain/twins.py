"""What intrinsics.py offers, in Python, for the CUDA simulator: the same names, results and rounding.

In the simulator each thread of a block is a Python thread; a warp's lanes exchange values at a barrier of the block.
"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

_adding = threading.Lock()


def _thread() -> Any:
    """The simulator's, which knows its place in block and grid."""
    return threading.current_thread()


def _int(value: int) -> np.int32:
    """The low 32 bits, as two's complement."""
    return np.uint32(int(value) & 0xFFFFFFFF).view(np.int32)


def _unsigned(value: Any) -> int:
    return int(value) & 0xFFFFFFFF


def _bytes(word: Any) -> list[int]:
    return [int(b) for b in np.array([_unsigned(word)], np.uint32).view(np.int8)]


def _as(array: Any, kind: Any) -> np.ndarray:
    """The array's memory seen as another type; the simulator wraps arrays twice."""
    while not isinstance(array, np.ndarray):
        array = array.__dict__.get("_item", None) if "_item" in array.__dict__ else array._ary
    return array.reshape(-1).view(kind)


def _loader(kind: Any, count: int) -> Callable[..., Any]:
    def load(array: Any, index: Any) -> Any:
        values = _as(array, kind)[int(index) * count : (int(index) + 1) * count]
        if index < 0 or len(values) != count:
            raise IndexError(f"load of {count} at {index} times {count}")
        return tuple(values) if count > 1 else values[0]

    return load


def _storer(kind: Any, mask: int) -> Callable[..., None]:
    def store(array: Any, index: Any, value: Any) -> None:
        if index < 0:
            raise IndexError(f"store at {index}")
        _as(array, kind)[int(index)] = int(value) & mask

    return store


def store_16(array: Any, index: Any, words: Any) -> None:
    if index < 0:
        raise IndexError(f"store at {index}")
    _as(array, np.int32)[4 * int(index) : 4 * int(index) + 4] = [int(word) for word in words]


def _coordinate(index: str, axis: str) -> Callable[[], np.int32]:
    return lambda: np.int32(getattr(getattr(_thread(), index), axis))


thread_x, thread_y = (_coordinate("threadIdx", axis) for axis in "xy")
block_x, block_y, block_z = (_coordinate("blockIdx", axis) for axis in "xyz")


def dp4a(a, b, c):
    return _int(sum(x * y for x, y in zip(_bytes(a), _bytes(b), strict=True)) + int(c))


def _halves(word: Any) -> list[int]:
    return [int(h) for h in np.array([_unsigned(word)], np.uint32).view(np.int16)]


def dp2a(a, b, c):
    return _int(sum(x * y for x, y in zip(_halves(a), _bytes(b)[:2], strict=True)) + int(c))


def bits(word, shift, mask):
    return _int((_unsigned(word) >> int(shift)) & _unsigned(mask))


def shl(word, left):
    return _int(_unsigned(word) << int(left))


def ror(word, right):
    return _int((_unsigned(word) * 0x100000001) >> (int(right) & 31))


def kept(value):
    return np.int32(value)


def prmt(word, other, selector):
    """The bytes that the selector's nibbles choose: 0..3 of the first word, 4..7 of the second; 8 more, its sign."""
    indices = [_unsigned(selector) >> 4 * i & 15 for i in range(4)]
    chosen = np.array([word, other], np.int32).view(np.int8)[[i & 7 for i in indices]]
    return np.where(np.array(indices) > 7, chosen >> 7, chosen).astype(np.int8).view(np.int32)[0]


def or_(one, other):
    return _int(_unsigned(one) | _unsigned(other))


def xor(one, other):
    return _int(_unsigned(one) ^ _unsigned(other))


def sub(one, other):
    return _int(int(one) - int(other))


def mad(one, other, more):
    return _int(int(one) * int(other) + int(more))


def signed_byte(word, shift):
    return np.int32(_bytes(_unsigned(word) >> int(shift))[0])


def low_half(word):
    return np.float32(np.uint16(_unsigned(word) & 0xFFFF).view(np.float16))


def high_half(word):
    return np.float32(np.uint16(_unsigned(word) >> 16).view(np.float16))


def to_half(value):
    return np.int32(np.float16(value).view(np.uint16))


def pack_f16(one, other):
    return or_(to_half(one), shl(to_half(other), 16))


def sub_f16(one, other):
    pair = [np.array([_unsigned(word)], np.uint32).view(np.float16) for word in (one, other)]
    return (pair[0] - pair[1]).view(np.int32)[0]


def pack_bf16(one, other):
    """Rounded to nearest even by what is cut off: its half, less one where the last bit kept is even."""
    low, high = (_unsigned(float_bits(value)) for value in (one, other))
    low, high = (word + 0x7FFF + (word >> 16 & 1) >> 16 for word in (low, high))
    return _int(low | high << 16)


def float_bits(value):
    return np.float32(value).view(np.int32)


def bits_float(word):
    return _int(word).view(np.float32)


def fma(one, other, more):
    """one * other + more, rounded once."""
    return np.float32(np.float64(one) * np.float64(other) + np.float64(more))


def round_even(value):
    return np.int32(0 if np.isnan(value) else np.clip(np.rint(np.float64(value)), -(2.0**31), 2.0**31 - 1))


stream_16 = ahead_16 = cached_16 = load_16 = shared_16 = _loader(np.int32, 4)
stream_8 = ahead_8 = cached_8 = load_8 = shared_8 = _loader(np.int32, 2)
stream_4 = ahead_4 = cached_4 = shared_4 = _loader(np.int32, 1)
ahead_2 = cached_2 = _loader(np.uint16, 1)
ahead_1 = cached_1 = _loader(np.uint8, 1)
cached_16f = load_16f = _loader(np.float32, 4)
load_4f = _loader(np.float32, 1)
store_4 = put_4 = _storer(np.uint32, 0xFFFFFFFF)
store_2 = _storer(np.uint16, 0xFFFF)
store_1 = _storer(np.uint8, 0xFF)
put_16 = store_16


def _further(load: Callable[..., Any]) -> Callable[..., Any]:
    return lambda array, index, more: load(array, int(index) + int(more))


cached_4_further = shared_4_further = _further(shared_4)
shared_16_further, shared_8_further = _further(shared_16), _further(shared_8)


def put_16_further(array, index, more, words):
    put_16(array, int(index) + int(more), words)


def _exchange(value: Any, make: Callable[[list[Any]], Any] = list) -> tuple[int, Any]:
    """This thread's lane, and the result of all values of its warp's lanes, computed once by the first to arrive."""
    thread = _thread()
    thread.exchanges = getattr(thread, "exchanges", 0) + 1
    # two buffers in turn: a thread that reuses one has seen all threads arrive at the other
    values = thread._manager.__dict__.setdefault(f"exchanged_{thread.exchanges % 2}", {})
    values[thread.thread_id] = value
    thread.syncthreads()
    first = thread.thread_id // 32 * 32
    results = thread._manager.__dict__.setdefault("exchange_results", {})
    key = first, thread.exchanges
    if key not in results:
        results[key] = make([values[i] for i in range(first, first + 32)])
    return thread.thread_id % 32, results[key]


def _butterfly(value: Any, masks: tuple[int, ...], combine: Callable[..., Any]) -> Any:
    """Combined in the order of the shuffles, so that it rounds as they do."""

    def combined(warp: list[Any]) -> np.ndarray:
        values = np.array(warp)
        for mask in masks:
            values = combine(values, values[np.arange(32) ^ mask])
        return values

    lane, values = _exchange(value, combined)
    return values[lane]


def warp_sum(value):
    return _butterfly(value, (16, 8, 4, 2, 1), np.add)


def half_warp_sum(value):
    return _butterfly(value, (8, 4, 2, 1), np.add)


def warp_max(value):
    return _butterfly(value, (16, 8, 4, 2, 1), np.fmax)


def warp_any(condition):
    return _exchange(condition, any)[1]


def other_half(value):
    lane, warp = _exchange(value)
    return warp[lane ^ 16]


def copy_16(shared, target, array, index):
    store_16(shared, target, cached_16(array, index))


def warp_meets():
    _thread().syncthreads()


def add_release(array, index, value):
    with _adding:
        before = array[index]
        array[index] = before + value
    return np.int32(before)


def _nothing() -> None:
    """What only a GPU has to do."""


copies_end = copies_wait = copies_wait_all = fence = launch_dependents = launches_wait = _nothing


def prefetch_1(array, index):
    return np.int32(0)


prefetch_2 = prefetch_4 = prefetch_1


def prefetch_8(array, index):
    return (np.int32(0),) * 2


def prefetch_16(array, index):
    return (np.int32(0),) * 4


def _mma(kind: Any) -> Callable[..., Any]:
    def mma(c: Any, *words: Any) -> tuple[np.float32, ...]:
        lane, warp = _exchange(tuple(int(word) for word in words))
        g, t = lane // 4, lane % 4
        a0, a1, a2, a3, b0, b1 = (np.array(part, np.int32) for part in zip(*warp, strict=True))

        def halves(word: np.ndarray, row: int) -> np.ndarray:
            """What the lanes of a row or column hold, in order of k."""
            pairs = word[4 * row : 4 * row + 4]
            if kind == "f16":
                return pairs.view(np.float16).astype(np.float64)
            return np.stack([pairs << 16, pairs & -65536], 1).reshape(-1).view(np.float32).astype(np.float64)

        rows = [np.concatenate([halves(low, g), halves(high, g)]) for low, high in ((a0, a2), (a1, a3))]
        columns = [np.concatenate([halves(b0, 2 * t + i), halves(b1, 2 * t + i)]) for i in range(2)]
        return tuple(np.float32(c[2 * r + i] + rows[r] @ columns[i]) for r in range(2) for i in range(2))

    return mma


mma_f16, mma_bf16 = _mma("f16"), _mma("bf16")


def mma_s8(c, *words):
    """The first two thirds of `words` are A's, for rows g and g + 8 in turn; the rest are B's."""
    lane, warp = _exchange(tuple(int(word) for word in words))
    g, t = lane // 4, lane % 4
    count = len(words) // 3 * 2
    parts = [np.array(part, np.int32) for part in zip(*warp, strict=True)]

    def line(of: list[np.ndarray], row: int) -> np.ndarray:
        """What the lanes of a row or column hold, in order of k."""
        return np.concatenate([part[4 * row : 4 * row + 4].view(np.int8) for part in of]).astype(np.int64)

    rows = [line(parts[r:count:2], g) for r in range(2)]
    columns = [line(parts[count:], 2 * t + i) for i in range(2)]
    return tuple(_int(int(c[2 * r + i]) + int(rows[r] @ columns[i])) for r in range(2) for i in range(2))


mma_s8_short = mma_s8
