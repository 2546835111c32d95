"""Plans how each module's qzeros must change, in a first pass over all of them; they are about 1% of a model."""

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from bridge.checkpoint.formats.gptq import GptqReader
from bridge.checkpoint.formats.zeros import Dialect, decode, dialects, recode
from bridge.errors import BridgeError, parameter
from bridge.system.text import few_of

BITS = (2, 3, 4, 8)


@dataclass
class Clamped:
    """The cost of changing zero points of 0 to 1: every weight of such a group loses one step, its scale.

    groups, modules   those with a zero point of 0 (each row has its own groups)
    weights           in those groups
    largest           change of a weight
    squares           sum of the squared changes
    total             weights of all modules
    """

    groups: int = 0
    modules: int = 0
    weights: int = 0
    largest: float = 0.0
    squares: float = 0.0
    total: int = 0

    def __str__(self) -> str:
        here, all_ = (math.sqrt(self.squares / n) if n else 0.0 for n in (self.weights, self.total))
        return (
            f"{self.groups} groups in {self.modules} modules had a zero point of 0 and now have 1: their weights "
            f"change by {self.largest:.3g} at most, RMS {here:.3g} ({all_:.3g} over all quantized weights)"
        )


@dataclass
class ZeroPointChange:
    """How one module's qzeros are rewritten."""

    bits: int
    out: int
    source: Dialect
    target: Dialect
    clamp: bool

    def apply(self, words: np.ndarray) -> np.ndarray:
        """qzeros in the target dialect."""
        raised = decode(words, self.bits, self.out, self.source) == 0 if self.clamp else None
        return recode(words, self.bits, self.source, self.target, raised)


@dataclass
class _Module:
    dialect: Dialect
    zeros: int  # zero points of 0
    symmetric: bool


@dataclass
class ZeroPointPlan:
    """Reads all qzeros; `changes` says how to rewrite them.

    reader   the checkpoint's reader
    wanted   gptq, gptq_v2, or None for the format of the data
    clamp    whether zero points of 0 may become 1

    format      the result's: gptq or gptq_v2
    changes     by the tensor's full name; modules in the wanted format have none
    rewritten   number of modules to rewrite, by how they were stored
    symmetric   whether all zero points are 2**(bits-1), by module
    clamped     the cost of `clamp`; None if it changes nothing
    restated    whether some v1 modules were written by GPTQModel in another form than they now have

    Raises BridgeError if the result cannot hold a zero point.
    """

    reader: GptqReader
    wanted: str | None
    clamp: bool
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._modules = {name: self._stored(name) for name in self.reader.modules}
        v1 = all(module.dialect.undo for module in self._modules.values())
        self.format = self.wanted or ("gptq" if v1 else "gptq_v2")
        self.symmetric = {name: module.symmetric for name, module in self._modules.items()}
        self.changes: dict[str, ZeroPointChange] = {}
        self.rewritten: Counter[str] = Counter()
        self.clamped: Clamped | None = None
        lost: dict[str, int] = {}  # module -> zero points of 0 that v1 cannot hold
        for name, module in self._modules.items():
            info, target = self.reader.modules[name], self._target(name)
            count = module.zeros if target.undo else 0
            if count and (module.dialect != target or self.clamp):
                lost[name] = count
            if module.dialect != target or (count and self.clamp):
                change = ZeroPointChange(info.bits, info.shape[0], module.dialect, target, bool(count) and self.clamp)
                self.changes[info.tensors["qzeros"].name] = change
                self.rewritten[self._dialect_name(name, module.dialect)] += 1
        if lost and not self.clamp:
            raise BridgeError(_refusal(str(self.reader.store.files[0].parent), lost))
        if lost:
            self.clamped = self._clamped(lost)
        self._add_notes()

    def _target(self, name: str) -> Dialect:
        return Dialect(self.reader.modules[name].bits) if self.format == "gptq" else Dialect()

    def _dialect_name(self, name: str, dialect: Dialect) -> str:
        has_own_bits = dialect.undo in (0, self.reader.modules[name].bits)
        return str(dialect) if has_own_bits else f"{dialect} of {dialect.undo} bits"

    def _stored(self, name: str) -> _Module:
        info = self.reader.modules[name]
        file = info.tensors["qzeros"].file
        words = self.reader.part(name, "qzeros")
        dialect = self.reader.dialect(name, words, self.notes)
        if dialect.planar:
            raise BridgeError(
                f"{file}: {name} is planar (gptq_p), which stores true zero points already; there is nothing to repack"
            )
        zeros = decode(words, info.bits, info.shape[0], dialect)
        return _Module(dialect, int(np.count_nonzero(zeros == 0)), bool((zeros == 1 << (info.bits - 1)).all()))

    @property
    def restated(self) -> bool:
        quant = self.reader.quant
        if self.format != "gptq" or quant.gptqmodel is None:
            return False
        return any(
            dialects(info.bits, quant.bits, "gptq", quant.gptqmodel)[0] != Dialect(info.bits)
            for info in self.reader.modules.values()
        )

    def _clamped(self, lost: dict[str, int]) -> Clamped:
        damage = Clamped(sum(lost.values()), len(lost))
        damage.total = sum(math.prod(info.shape) for info in self.reader.modules.values())
        for name in lost:
            info = self.reader.modules[name]
            order = self.reader.group_order(name)
            group = order if order is not None else np.arange(info.shape[1]) // info.group_size
            scales = np.abs(self.reader.scales(name))
            columns = np.bincount(group, minlength=len(scales))[:, None]
            zeros = decode(self.reader.part(name, "qzeros"), info.bits, info.shape[0], self._modules[name].dialect) == 0
            damage.weights += int((zeros * columns).sum())
            damage.largest = max(damage.largest, float((scales * zeros * (columns > 0)).max()))
            damage.squares += float((np.square(scales, dtype=np.float64) * zeros * columns).sum())
        return damage

    def _add_notes(self) -> None:
        """Add notes on programs that misread the result."""
        if self.format != "gptq":
            return
        modules, quant = self.reader.modules, self.reader.quant
        left = [
            n for n, m in self._modules.items() if m.zeros and modules[n].tensors["qzeros"].name not in self.changes
        ]
        if left and quant.gptqmodel is not None:
            groups = sum(self._modules[name].zeros for name in left)
            self.notes.append(
                f"{groups} groups in {len(left)} modules have a zero point of 0, which only GPTQModel reads "
                f"correctly from v1; gptq_v2 stores it for all programs, and {parameter('clamp', True)} makes it 1"
            )
        odd = sum(info.bits != quant.bits for info in modules.values())
        if odd:
            self.notes.append(
                f"{odd} modules do not have the default {quant.bits} bits: GPTQModel before 7.3.2 misreads their v1"
            )


def _refusal(where: str, lost: dict[str, int]) -> str:
    named = few_of([f"{name} ({count})" for name, count in lost.items()], 4)
    return (
        f"{where}: {sum(lost.values())} groups in {len(lost)} modules have a zero point of 0, which GPTQ v1 cannot "
        f"hold: {named}; {parameter('clamp', True)} makes them 1 and reports the cost, gptq_v2 keeps them"
    )
