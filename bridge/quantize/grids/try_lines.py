"""Many lines a * q + c tried at once on a sub-run, one in each lane of a vector; see `refine`.

Alone, a line costs 30 cycles per weight: each code waits for the one before, and its error moves too few numbers for
vectors. Side by side, lines share loads and hide each other's latency; 32 of them take as long as two. Written as LLVM
vector instructions, since Numba does not vectorize loops with so many arrays.
"""

from functools import cache
from typing import Any

from llvmlite import ir

from bridge.system.kernels.jit import cgutils, inlined, intrinsic, types

_F32 = ir.FloatType()
_FUSED = ("contract", "nsz", "nnan")  # products may be fused with sums


@cache
def line_search(lanes: int) -> Any:
    """try_lines(target, push, a, c, low, high, codes, errors, lost), for compiled code.

    target    float32 [n], in rounding order
    push      float32 [n, n]: the factor transposed, the diagonal inverted
    a, c      float32 [lanes], the lines
    low, high float32, of codes
    codes     float32 [n, lanes], written
    errors    float32 [n, lanes], written: the errors that each step feeds forward
    lost      float32 [lanes], written: the error of each line, the sum of squares of `errors`

    Arrays are C-contiguous. Costs n^2 / 2 operations per line.
    """
    vector = ir.VectorType(_F32, lanes)

    @intrinsic
    def try_lines(typingctx, target, push, a, c, low, high, codes, errors, lost):
        def emit(context, builder, signature, arguments):
            data = dict(zip(_ARGUMENTS, arguments, strict=True))
            for name, kind in zip(_ARGUMENTS, signature.args, strict=True):
                if isinstance(kind, types.Array):
                    array = context.make_array(kind)(context, builder, value=data[name])
                    data[name] = array.data
                    if name == "target":
                        data["n"] = cgutils.unpack_tuple(builder, array.shape)[0]
            _emit(builder, vector, data)
            return context.get_dummy_value()

        return types.void(target, push, a, c, low, high, codes, errors, lost), emit

    return try_lines


@inlined
def least(lost, bound):
    """The lane of the least error below `bound`; -1 if there is none."""
    best = -1
    for lane in range(len(lost)):
        if lost[lane] < bound:
            bound = lost[lane]
            best = lane
    return best


_ARGUMENTS = ("target", "push", "a", "c", "low", "high", "codes", "errors", "lost")


def _emit(builder: ir.IRBuilder, vector: ir.VectorType, data: dict[str, ir.Value]) -> None:
    n = data["n"]
    lanes = vector.count

    def spread(x: ir.Value) -> ir.Value:
        empty = ir.Constant(vector, ir.Undefined)
        first = builder.insert_element(empty, x, ir.IntType(32)(0))
        return builder.shuffle_vector(first, empty, ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes))

    def vector_at(base: ir.Value, row: ir.Value | None) -> ir.Value:
        pointer = base if row is None else builder.gep(base, [builder.mul(row, row.type(lanes))])
        return builder.bitcast(pointer, vector.as_pointer())

    def load(name: str, row: ir.Value | None = None) -> ir.Value:
        return builder.load(vector_at(data[name], row), align=4)

    def store(name: str, row: ir.Value | None, value: ir.Value) -> None:
        builder.store(value, vector_at(data[name], row), align=4)

    def call(name: str, *values: ir.Value) -> ir.Value:
        kind = ir.FunctionType(vector, [vector] * len(values))
        function = builder.module.declare_intrinsic(f"llvm.{name}.v{lanes}f32", fnty=kind)
        return builder.call(function, values, fastmath=_FUSED)

    def less(v: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
        return builder.fsub(v, builder.fmul(x, y, flags=_FUSED), flags=_FUSED)

    zero, one = (ir.Constant(vector, [x] * lanes) for x in (0.0, 1.0))
    a, c = load("a"), load("c")
    flat = builder.fcmp_ordered("==", a, zero)
    over = builder.select(flat, zero, builder.fdiv(one, a))
    low, high = spread(data["low"]), spread(data["high"])
    total = cgutils.alloca_once_value(builder, zero)
    builder.store(zero, total)
    sums = [cgutils.alloca_once(builder, vector) for _ in range(2)]  # two, since each sum waits for the one before
    with cgutils.for_range(builder, n) as outer:
        i = outer.index
        row = builder.gep(data["push"], [builder.mul(i, n)])
        builder.store(spread(builder.load(builder.gep(data["target"], [i]))), sums[0])
        builder.store(zero, sums[1])

        def push(k: ir.Value, into: ir.Value) -> None:
            by = spread(builder.load(builder.gep(row, [k])))
            builder.store(less(builder.load(into), load("errors", k), by), into)

        with cgutils.for_range(builder, builder.lshr(i, i.type(1))) as inner:
            even = builder.shl(inner.index, i.type(1))
            push(even, sums[0])
            push(builder.or_(even, i.type(1)), sums[1])
        with builder.if_then(builder.trunc(i, ir.IntType(1))):
            push(builder.sub(i, i.type(1)), sums[0])
        w = builder.fadd(builder.load(sums[0]), builder.load(sums[1]), flags=_FUSED)
        q = call("rint", builder.fmul(builder.fsub(w, c), over))
        q = call("minnum", call("maxnum", q, low), high)
        store("codes", i, q)
        e = builder.fsub(w, builder.fadd(builder.fmul(a, q, flags=_FUSED), c, flags=_FUSED))
        e = builder.fmul(e, spread(builder.load(builder.gep(row, [i]))))
        store("errors", i, e)
        builder.store(builder.fadd(builder.load(total), builder.fmul(e, e, flags=_FUSED), flags=_FUSED), total)
    store("lost", None, builder.load(total))
