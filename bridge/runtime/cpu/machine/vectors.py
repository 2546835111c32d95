"""Vector code for numba: the intrinsics that kernels call, made of an `Emitter`.

Numba has no vector types. Here a kernel holds its running sums in a `Totals`, an LLVM array of vectors, and
three intrinsics work on it: `zeros()`, `accumulate(totals, weights, halves, x)`, which is a function of
superblock.py written out, and `store(totals, y, stride)`. Addresses are plain int64.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from bridge.runtime.cpu.machine.emitter import Emitter
from bridge.runtime.cpu.machine.instruction_set import InstructionSet
from bridge.system.kernels import ir
from bridge.system.kernels.jit import intrinsic, types


@cache
def totals_type(columns: int, lanes: int) -> Any:
    """Numba's type of a `Totals`: `columns` float vectors of `lanes`."""
    from numba.extending import models, register_model

    class Totals(types.Type): ...

    vectors = ir.ArrayType(ir.VectorType(ir.F32, lanes), columns)
    register_model(Totals)(lambda manager, kind: models.PrimitiveModel(manager, kind, vectors))
    return Totals(f"Totals({columns}, {lanes})")


Body = Callable[[Any, list[Any], Any, Any, Any], list[Any]]
Routine = Callable[[Any, Any, Any, Any], None]


def intrinsics(
    target: InstructionSet, columns: int, body: Body, paired: bool = False, ahead: tuple[int, ...] = (), level: int = 1
) -> dict[str, Any]:
    """zeros(), load(y, stride), accumulate(totals, weights, halves, x), store(totals, y, stride)."""
    kind = partial(totals_type, columns, target.lanes)

    @intrinsic
    def zeros(typingctx):
        def emit(context, builder, signature, arguments):
            return context.get_constant_null(kind())

        return kind()(), emit

    @intrinsic
    def load(typingctx, y, stride):
        def emit(context, builder, signature, arguments):
            packed = context.get_constant_null(kind())
            for c, vector in enumerate(Emitter(builder, target).load_all(columns, *arguments)):
                packed = builder.insert_value(packed, vector, c)
            return packed

        return kind()(types.int64, types.int64), emit

    @intrinsic
    def accumulate(typingctx, totals, weights, halves, x):
        def emit(context, builder, signature, arguments):
            packed, *addresses = arguments
            vectors = [builder.extract_value(packed, c) for c in range(columns)]
            for c, vector in enumerate(body(Emitter(builder, target, paired, ahead, level), vectors, *addresses)):
                packed = builder.insert_value(packed, vector, c)
            return packed

        return kind()(kind(), types.int64, types.int64, types.int64), emit

    @intrinsic
    def store(typingctx, totals, y, stride):
        def emit(context, builder, signature, arguments):
            packed, address, step = arguments
            vectors = [builder.extract_value(packed, c) for c in range(columns)]
            Emitter(builder, target, paired).store_all(vectors, address, step)
            return context.get_dummy_value()

        return types.void(kind(), types.int64, types.int64), emit

    return {"zeros": zeros, "load": load, "accumulate": accumulate, "store": store}


def routine(target: InstructionSet, body: Routine, ahead: tuple[int, ...] = (), level: int = 1) -> Any:
    """The function of three addresses that `body` emits."""

    @intrinsic
    def run(typingctx, weights, halves, out):
        def emit(context, builder, signature, arguments):
            body(Emitter(builder, target, False, ahead, level), *arguments)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), emit

    return run
