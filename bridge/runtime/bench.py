"""Times products and compares them with the machine's limit: how fast the same threads can read memory.

Contenders take turns within one run and are compared by the median of their ratios, because the clock and
the neighbours of a machine change between runs. Bytes are those of the GGUF tensor, whatever a kernel reads.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bridge.blocks import BlockType
from bridge.blocks.read import READ
from bridge.errors import BridgeError
from bridge.runtime.quant_tensor import QuantTensor
from bridge.runtime.reader import open_gguf
from bridge.system.devices import choose, cuda
from bridge.system.progress import Progress
from bridge.system.storage.files import expect_name, near_names
from bridge.system.text import meant, unknown

LARGE = (40960, 4096)  # from memory
SMALL = (2048, 4096)  # from the cache
_ROUNDS = 15
_WARM = 0.02  # seconds of untimed runs before the timed one: they clear what the contender before left in caches
_DISTINCT = 512  # rows that are drawn; the others repeat them


@dataclass
class ProductTiming:
    """Seconds that one tensor's products take on one number of threads."""

    type: str
    shape: tuple[int, ...]
    kernel: str
    threads: int
    nbytes: int
    seconds: dict[str, list[float]] = field(default_factory=dict)  # per contender and round

    def speed(self, name: str) -> float:
        """GB/s of GGUF bytes, median."""
        return self.nbytes / statistics.median(self.seconds[name]) / 1e9

    def ratio(self, name: str) -> float:
        """How many times as fast as a contender the product is: the median over rounds."""
        pairs = zip(self.seconds["matvec"], self.seconds[name], strict=True)
        return statistics.median(other / ours for ours, other in pairs)


@dataclass(frozen=True)
class ProductSpeed:
    """A product's speed, as `bench` tells it.

    place      the number of threads, or the GPU
    kernel     its name
    nbytes     that a product reads, in `seconds`
    bandwidth  bytes a second that the same threads, or the GPU, read
    share      of that which the product reads
    """

    type: str
    shape: tuple[int, ...]
    place: str
    kernel: str
    nbytes: int
    seconds: float
    bandwidth: float
    share: float

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        return (
            f"{self.type:<5} {size:<12} {self.place}  {1e6 * self.seconds:8.1f} us  "
            f"{self.nbytes / self.seconds / 1e9:6.1f} GB/s, {100 * self.share:3.0f}% of reading "
            f"({self.bandwidth / 1e9:.1f} GB/s)  {self.kernel}"
        ).rstrip()


def put_d(block: BlockType, raw: np.ndarray, halves: np.ndarray) -> None:
    """Set d of blocks, uint8 [..., nbytes], to float16 [...], if the type has one."""
    if block.d_at >= 0:
        raw[..., block.d_at : block.d_at + 2] = halves[..., None].view(np.uint8)
    for i, offset in enumerate(block.d_nibbles):
        nibbles = halves.view(np.uint16) >> np.uint16(4 * i) & np.uint16(15)
        raw[..., offset] = raw[..., offset] & 15 | nibbles.astype(np.uint8) << 4


def put_dmin(block: BlockType, raw: np.ndarray, halves: np.ndarray) -> None:
    """The same for dmin."""
    if block.has_min:
        raw[..., block.dmin_at : block.dmin_at + 2] = halves[..., None].view(np.uint8)


def random_tensor(type: str, rows: int, columns: int) -> QuantTensor:
    """A tensor of random codes, with scales around 0.01."""
    if type not in READ:
        raise unknown("type", type, [*READ])
    block = READ[type]
    if columns % block.size:
        raise BridgeError(f"{type}: {columns} columns are not a multiple of {block.size}")
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (min(rows, _DISTINCT), columns // block.size, block.nbytes), np.uint8)
    for put in (put_d, put_dmin):
        put(block, raw, rng.uniform(0.005, 0.01, raw.shape[:2]).astype(np.float16))
    if block.scales:
        near = int(np.argmin(np.abs(np.array(block.scales) - 0.01)))
        raw[:, :, : block.subs] = rng.integers(near - 1, near + 1, (*raw.shape[:2], block.subs))
    raw = raw.reshape(raw.shape[0], -1)
    return QuantTensor(type, type, (rows, columns), np.resize(raw, (rows, raw.shape[1])).reshape(-1))


def measure(
    tensor: QuantTensor, threads: int, others: dict[str, Callable[[], object]] | None = None, rounds: int = _ROUNDS,
    rest: Callable[[], object] | None = None, tick: Callable[[], object] | None = None,
) -> ProductTiming:  # fmt: skip
    """Time tensor.matvec, reading as many bytes ("read"), and `others`, taking turns. Prepares the tensor.

    Before its timed run each contender runs alone until its data are what the caches hold, as far as they can, and
    until the threads of the one before have stopped spinning for work: libgomp's spin for some 5 ms, on a core that
    the next one needs. `rest` is called after each of the others, to stop threads that would spin for longer, and
    `tick` after each round.
    """
    from bridge.runtime.cpu.engines.readbw import Reader
    from bridge.system.threads import pool

    before = pool.get_num_threads()
    pool.set_num_threads(threads)
    try:
        tensor.prepare()
        rows, columns = tensor.shape
        x = np.random.default_rng(1).standard_normal(columns).astype(np.float32)
        y = np.empty(rows, np.float32)
        contenders: dict[str, Callable[[], object]] = {
            "matvec": lambda: tensor.matvec(x, out=y),
            "read": Reader(tensor.nbytes).run,
            **(others or {}),
        }
        timing = ProductTiming(tensor.type, tensor.shape, tensor.kernel, threads, tensor.nbytes)
        timing.seconds = taking_turns(contenders, rounds, dict.fromkeys(others or {}, rest) if rest else None, tick)
        return timing
    finally:
        pool.set_num_threads(before)


def taking_turns(
    contenders: dict[str, Callable[[], object]], rounds: int, after: dict[str, Callable[[], object]] | None = None,
    tick: Callable[[], object] | None = None,
) -> dict[str, list[float]]:  # fmt: skip
    """Seconds of each contender in each round, after one that does not count; see `measure`.

    after  what is called after a contender's timed run
    tick   called after each round, that one too
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, run in contenders.items():
            warmed = time.perf_counter() + _WARM
            while time.perf_counter() < warmed:
                run()
            start = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - start)
            if after and name in after:
                after[name]()
        if tick:
            tick()
    return seconds


def tensors_to_time(
    what: str | Path, shapes: Sequence[tuple[int, int]], types: Collection[str] = READ
) -> list[QuantTensor]:
    """The tensors to time: random ones of a type, or a GGUF's largest matrix of each type that has a kernel."""
    name = str(what).upper()
    if name in types:
        return [random_tensor(name, *shape) for shape in shapes]
    expect_name(Path(what))
    if not Path(what).exists() and Path(what).suffix != ".gguf":
        near = meant(name, types) or near_names(Path(what))
        raise BridgeError(f"{what}: is neither a GGUF file nor a type ({', '.join(types)}){near}")
    largest: dict[str, QuantTensor] = {}
    for tensor in open_gguf(what).tensors.values():
        known = largest.get(tensor.type)
        if len(tensor.shape) == 2 and (known is None or tensor.nbytes > known.nbytes):
            largest[tensor.type] = tensor
    tensors = [t for t in largest.values() if t.type in types]
    if not tensors:
        raise BridgeError(f"{what}: no matrix of a type that has a kernel ({', '.join(types)})")
    return tensors


def bench(
    what: str | Path, shape: tuple[int, int] | None = None, device: str = "cpu", threads: int | None = None,
    progress: Progress | None = None,
) -> list[str | ProductSpeed]:  # fmt: skip
    """Lines to print, for a type of block or the matrices of a GGUF: the speeds, and before them what there is to say.

    `what` is a type (then `shape` may be given) or the path of a GGUF, whose largest tensor of each type is timed.
    `progress` is called with the rounds of timing done, of how many, and the tensor's type and shape.
    """
    from bridge.system.threads.pool import get_num_threads

    if device != "cpu":
        device, note = choose(device)
        if device != "cpu":
            return cuda("bench").bench(what, shape, device, progress)
        return [*([note] if note else []), *bench(what, shape, threads=threads, progress=progress)]
    count = threads or get_num_threads()
    lines: list[str | ProductSpeed] = []
    place = f"{count} thread{'s' * (count != 1)}"
    tensors = tensors_to_time(what, [shape] if shape else [LARGE, SMALL])
    told = progress or (lambda *_: None)
    done, total = itertools.count(1), len(tensors) * (_ROUNDS + 1)
    told(0, total, "")
    for tensor in tensors:
        name = f"{tensor.type} {'x'.join(map(str, tensor.shape))}"
        timing = measure(tensor, count, rounds=_ROUNDS, tick=lambda name=name: told(next(done), total, name))  # type: ignore[misc]
        bandwidth, seconds = 1e9 * timing.speed("read"), timing.nbytes / timing.speed("matvec") / 1e9
        share, of = timing.ratio("read"), (tensor.type, tensor.shape, place, timing.kernel, timing.nbytes)
        lines.append(ProductSpeed(*of, seconds, bandwidth, share))
    return lines
