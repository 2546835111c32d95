"""Floats to -1, 0 and 1 times a scale (TQ1_0, TQ2_0), from weights to bytes.

If the weights above a threshold are kept, the best scale is a = sum w |x| / sum w over them, and the nearest codes for
it are those of the threshold a / 2. A first threshold comes from the block's root mean square and mean magnitude,
which for normal, Laplace and uniform weights lead close to the best one. Where the greatest weight lies far out, half
of it is tried as well, as ggml does, and another step follows.

Models trained with such weights come out exactly. TQ2_0's fourth code, which means 2, is not used: its readers may not
expect it.

The loops over a block are vector code: only vectors of 16 floats of LLVM's own are used, which every target has, whole
or in parts. Left to LLVM, these loops are unrolled whole and spill most of their registers. With AVX-512, `totals`
takes 17 ns, `sums_above` 20 and `residuals` 30.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from bridge.blocks.read import WRITTEN
from bridge.system.kernels.half import ZERO, round_half
from bridge.system.kernels.jit import from_plain, inlined, intrinsic, specialize, types
from bridge.system.kernels.memory import to_half

_HALF = np.float32(0.5)
_SPREAD, _MEAN = np.float32(1.43), np.float32(1.02)  # the threshold: so much of the one less so much of the other
_FAR = np.float32(4)  # times the root mean square
_TOGETHER = 8  # blocks, each step of all of them before the next: a block's own steps wait for each other
SIZE = 256
_LANES = 16
_CHAINS = 2  # partial sums: one waits for the previous addition
_STORED = 64  # codes that are stored at once
_I8, _I32, _I64, _F32 = (*(ir.IntType(n) for n in (8, 32, 64)), ir.FloatType())
_FLOATS, _INTS = (ir.VectorType(kind, _LANES) for kind in (_F32, _I32))
_ZEROS = ir.Constant(_FLOATS, [0.0] * _LANES)
_FUSED = ("contract",)

# set per type by `specialize`
pack: Any = None


class _Emitter:
    """Writes the vector code of one loop over arrays of `SIZE` numbers."""

    def __init__(self, context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any):
        self.context, self.builder, self.kinds, self.arguments = context, builder, signature.args, arguments
        self.kind = signature.return_type

    def address(self, argument: int, column: int, kind: ir.Type) -> ir.Value:
        """A pointer to what begins at a column of an array."""
        array = self.context.make_array(self.kinds[argument])(self.context, self.builder, self.arguments[argument])
        data = self.builder.gep(array.data, [_I64(column)])
        return self.builder.bitcast(data, kind.as_pointer())

    def floats(self, argument: int, column: int) -> ir.Value:
        """16 of an array's floats."""
        return self.builder.load(self.address(argument, column, _FLOATS), align=4)

    def splat(self, argument: int) -> ir.Value:
        """A vector of one number."""
        one = self.builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), self.arguments[argument], _I32(0))
        return self.builder.shuffle_vector(one, one, ir.Constant(_INTS, [0] * _LANES))

    def size(self, x: ir.Value) -> ir.Value:
        """The magnitudes."""
        function = ir.FunctionType(_FLOATS, [_FLOATS])
        declared = self.builder.module.declare_intrinsic(f"llvm.fabs.v{_LANES}f32", fnty=function)
        return self.builder.call(declared, [x])

    def fma(self, x: ir.Value, y: ir.Value, total: ir.Value) -> ir.Value:
        """total + x * y, rounded once where the target can."""
        return self.builder.fadd(total, self.builder.fmul(x, y, flags=_FUSED), flags=_FUSED)

    def greater(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """The greater, lane by lane."""
        return self.builder.select(self.builder.fcmp_ordered(">", x, y), x, y)

    def reduce(self, name: str, parts: list[ir.Value]) -> ir.Value:
        """The sum (`fadd`) or the greatest (`fmax`) of all lanes of some vectors."""
        total = parts[0]
        for part in parts[1:]:
            total = self.builder.fadd(total, part) if name == "fadd" else self.greater(total, part)
        start = [ir.Constant(_F32, 0.0)] if name == "fadd" else []
        function = ir.FunctionType(_F32, [*(value.type for value in start), _FLOATS])
        declared = self.builder.module.declare_intrinsic(f"llvm.vector.reduce.{name}.v{_LANES}f32", fnty=function)
        return self.builder.call(declared, [*start, total], fastmath=("reassoc", "nnan", "nsz"))

    def loop(self, count: int, body: Callable[[int, list[ir.Value]], list[ir.Value]], *names: str) -> ir.Value:
        """Run `body` (index of the first weight, `count` totals) -> totals for all weights; a tuple of the totals."""
        chains = [[_ZEROS] * count for _ in range(_CHAINS)]
        for i in range(SIZE // _LANES):
            chains[i % _CHAINS] = body(_LANES * i, chains[i % _CHAINS])
        totals = [self.reduce(name, [chain[k] for chain in chains]) for k, name in enumerate(names or ["fadd"] * count)]
        return self.context.make_tuple(self.builder, self.kind, totals)


@intrinsic
def totals(typingctx, x):
    """x float32 [256] -> the sums of |x| and x^2, and the greatest |x|."""

    def codegen(*parts):
        emit = _Emitter(*parts)

        def body(column, sums):
            size = emit.size(emit.floats(0, column))
            total, squares, peak = sums
            return [emit.builder.fadd(total, size), emit.fma(size, size, squares), emit.greater(size, peak)]

        return emit.loop(3, body, "fadd", "fadd", "fmax")

    return types.UniTuple(types.float32, 3)(x), codegen


@intrinsic
def sums_above(typingctx, x, w, threshold):
    """x, w float32 [256] -> the sums of w |x| and w where |x| > threshold."""

    def codegen(*parts):
        emit = _Emitter(*parts)
        limit = emit.splat(2)

        def body(column, sums):
            size = emit.size(emit.floats(0, column))
            w = emit.builder.select(emit.builder.fcmp_ordered(">", size, limit), emit.floats(1, column), _ZEROS)
            return [emit.fma(w, size, sums[0]), emit.builder.fadd(sums[1], w)]

        return emit.loop(2, body)

    return types.UniTuple(types.float32, 2)(x, w, types.float32), codegen


@intrinsic
def residuals(typingctx, x, w, threshold, a, q):
    """The sums of r^2 and w r^2, r what is left of x float32 [256] at scale a; codes 0, 1, 2 into q uint8 [256]."""

    def codegen(*parts):
        emit = _Emitter(*parts)
        b = emit.builder
        limit, scale = emit.splat(2), emit.splat(3)
        codes: list[ir.Value] = []

        def body(column, sums):
            x = emit.floats(0, column)
            size = emit.size(x)
            above = b.fcmp_ordered(">", size, limit)
            r = b.fsub(size, b.select(above, scale, _ZEROS))
            squares = b.fmul(r, r)
            sign = b.or_(
                b.ashr(b.bitcast(x, _INTS), ir.Constant(_INTS, [31] * _LANES)), ir.Constant(_INTS, [1] * _LANES)
            )
            codes.append(b.select(above, sign, ir.Constant(_INTS, [0] * _LANES)))
            if len(codes) * _LANES == _STORED:
                kind = ir.VectorType(_I8, _STORED)
                stored = b.add(b.trunc(_joined(b, codes), kind), ir.Constant(kind, [1] * _STORED))
                b.store(stored, emit.address(4, column + _LANES - _STORED, kind), align=1)
                codes.clear()
            return [b.fadd(sums[0], squares), emit.fma(squares, emit.floats(1, column), sums[1])]

        return emit.loop(2, body)

    return types.UniTuple(types.float32, 2)(x, w, types.float32, types.float32, q), codegen


def _joined(builder: ir.IRBuilder, parts: list[ir.Value]) -> ir.Value:
    """One vector of all lanes of several, whose number is a power of two."""
    while len(parts) > 1:
        lanes = 2 * parts[0].type.count
        order = ir.Constant(ir.VectorType(_I32, lanes), list(range(lanes)))
        parts = [builder.shuffle_vector(*parts[i : i + 2], order) for i in range(0, len(parts), 2)]
    return parts[0]


def _rows(x, w, out, sums):
    """x [rows, n, 256], w [n, 256] float32 -> out uint8 [rows * n, nbytes]

    sums float64 [rows, 3]: error, signal, error weighted with w.
    """
    n = x.shape[1]
    blocks = x.reshape(-1, SIZE)
    scale, limit = np.zeros(_TOGETHER, np.float32), np.zeros(_TOGETHER, np.float32)
    far = np.zeros(_TOGETHER, np.float32)
    q = np.zeros((_TOGETHER, SIZE), np.uint8)
    nothing = np.zeros(1, np.uint8)
    for first in range(0, len(blocks), _TOGETHER):
        count = min(_TOGETHER, len(blocks) - first)
        for j in range(count):
            total, squares, peak = totals(blocks[first + j])
            sums[(first + j) // n, 1] += squares
            spread = np.sqrt(squares / np.float32(SIZE))
            limit[j] = _SPREAD * spread - _MEAN * (total / np.float32(SIZE))
            far[j] = peak if peak > _FAR * spread else ZERO
        for j in range(count):
            weight, mass = sums_above(blocks[first + j], w[(first + j) % n], limit[j])
            if far[j] > ZERO:
                weight_far, mass_far = sums_above(blocks[first + j], w[(first + j) % n], _HALF * far[j])
                if weight_far * weight_far * mass > weight * weight * mass_far:
                    weight, mass = weight_far, mass_far
                weight, mass = sums_above(blocks[first + j], w[(first + j) % n], _HALF * weight / mass)
            scale[j] = weight / mass if mass > ZERO else ZERO
        for j in range(count):
            a = round_half(scale[j])
            error, weighted = residuals(blocks[first + j], w[(first + j) % n], _HALF * a, a, q[j])
            sums[(first + j) // n, 0] += error
            sums[(first + j) // n, 2] += weighted
            pack(q[j], nothing, nothing, to_half(a), 0, out[first + j])


@cache
def ternary_quantizer(name: str) -> Callable[..., None]:
    """The compiled loop over rows of TQ1_0 or TQ2_0: x, w, blocks, sums."""
    kind = WRITTEN[name]
    return specialize(_rows, name, pack=from_plain(kind.pack, inlined))
