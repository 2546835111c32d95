"""The loops over a block of 256 weights that is rounded to -1, 0 and 1 times a scale, as vector code.

Only vectors of 16 floats of LLVM's own are used, which every target has, whole or in parts. Left to LLVM, these loops
are unrolled whole and spill most of their registers. With AVX-512, `totals` takes 17 ns, `kept` 20 and `residuals` 30.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from bridge.system.kernels.jit import intrinsic, types

SIZE = 256
_LANES = 16
_CHAINS = 2  # partial sums: one waits for the previous addition
_STORED = 64  # codes that are stored at once
_I8, _I32, _I64, _F32 = (*(ir.IntType(n) for n in (8, 32, 64)), ir.FloatType())
_FLOATS, _INTS = (ir.VectorType(kind, _LANES) for kind in (_F32, _I32))
_ZERO = ir.Constant(_FLOATS, [0.0] * _LANES)
_FUSED = ("contract",)


class _Emitter:
    """Writes the vector code of one loop over arrays of `SIZE` numbers."""

    def __init__(self, context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any):
        self.context, self.builder, self.kinds, self.arguments = context, builder, signature.args, arguments
        self.kind = signature.return_type
        self.sums: list[list[ir.Value]] = []

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
        chains = [[_ZERO] * count for _ in range(_CHAINS)]
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
            w = emit.builder.select(emit.builder.fcmp_ordered(">", size, limit), emit.floats(1, column), _ZERO)
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
            r = b.fsub(size, b.select(above, scale, _ZERO))
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
