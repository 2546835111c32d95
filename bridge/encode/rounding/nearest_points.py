"""The nearest points of a codebook to the weights of a sub-block at a given scale, as vector code.

Coordinate by coordinate, a weight over the scale falls into a cell of the grid of all levels. A table has the NEAR
points about each cell, and that of least weighted error is taken:

    near     int8    [cells, width, NEAR]   coordinates of each cell's points
    numbers  int16   [cells, NEAR]          and their numbers
    values   float32 [points, width]        coordinates of all points

Only vectors of 8 floats of LLVM's own are used, which every target has, whole or in halves: 4 CPU cycles a weight with
AVX2.
"""

from functools import reduce
from typing import Any

import numpy as np
from llvmlite import ir

from bridge.system.kernels.jit import intrinsic, types

NEAR = 8
_I1, _I8, _I16, _I32, _I64, _F32 = (*(ir.IntType(n) for n in (1, 8, 16, 32, 64)), ir.FloatType())
_BYTES, _INTS, _FLOATS = (ir.VectorType(kind, NEAR) for kind in (_I8, _I32, _F32))
_INTS_OF_TWO, _FLOATS_OF_TWO = (ir.VectorType(kind, 2 * NEAR) for kind in (_I32, _F32))
_FUSED = ("contract",)


def lists(points: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """int16 [cells, NEAR]: the points nearest to each cell's middle, the nearest first.

    points, cells  float32 [.., width]
    """
    nearest = np.empty((len(cells), NEAR), np.int16)
    for i in range(0, len(cells), 512):
        squares = np.square(points).sum(1) - 2 * (cells[i : i + 512] @ points.T)
        some = np.argpartition(squares, NEAR, 1)[:, :NEAR]
        order = np.take_along_axis(squares, some, 1).argsort(1, kind="stable")
        nearest[i : i + 512] = np.take_along_axis(some, order, 1)
    return nearest


def snapper(sub: int, width: int, bounds: tuple[float, ...]) -> Any:
    """The intrinsic `snap` for sub-blocks of `sub` weights, points of `width` coordinates and cells between bounds.

    snap(t, w, a, inverse, near, numbers, values, chosen) -> sums of w r^2, w v^2, w r v

    t, w        float32 [sub]: weights and their importance
    a, inverse  the scale, and one over it
    chosen      int64 [sub / width]: gets the points' numbers
    v, r        the points' values, and residuals t - a * v
    """

    def snap(typingctx, t, w, a, inverse, near, numbers, values, chosen):
        def codegen(context, builder: ir.IRBuilder, signature, arguments):
            emit = _Emitter(context, builder, signature, arguments, t=0, w=1, near=4, numbers=5, values=6, chosen=7)
            return context.make_tuple(builder, signature.return_type, emit.sums(sub, width, bounds))

        f32 = types.float32
        return types.UniTuple(f32, 3)(t, w, f32, f32, near, numbers, values, chosen), codegen

    return intrinsic(snap)


def shifted_snapper(sub: int, shared: int, bounds: tuple[float, ...]) -> Any:
    """The intrinsic `snap` for points of 8 coordinates shifted by the better of 1 and -1, `shared` weights together.

    snap(t, w, a, inverse, near, numbers, values, chosen, negative) -> sums of w r^2, w v^2, w r v

    As `snapper`'s; v has the shift in it, and negative, int64 [sub / shared], gets 1 where that is -1.
    """

    def snap(typingctx, t, w, a, inverse, near, numbers, values, chosen, negative):
        def codegen(context, builder: ir.IRBuilder, signature, arguments):
            indices = {"t": 0, "w": 1, "near": 4, "numbers": 5, "values": 6, "chosen": 7, "negative": 8}
            emit = _Emitter(context, builder, signature, arguments, **indices)
            return context.make_tuple(builder, signature.return_type, emit.shifted_sums(sub, shared, bounds))

        f32 = types.float32
        return types.UniTuple(f32, 3)(t, w, f32, f32, near, numbers, values, chosen, negative), codegen

    return intrinsic(snap)


def looker(bounds: tuple[float, ...]) -> Any:
    """The intrinsic `look` for points of 8 coordinates in a full metric m: the best of those near a target.

    look(t, w, a, inverse, shift, m, near, numbers, values, point) -> r m r^T of residuals r = w - a * (point + shift)

    t      float32 [8]: the target over the scale, less the shift; gets where the found point's gradient leads
    w      float32 [8]: the weights; a, inverse, shift: the scale, one over it, and what is added to all coordinates
    m      float32 [8, 8], symmetric
    point  float32 [8]: gets the point's values
    """

    def look(typingctx, t, w, a, inverse, shift, m, near, numbers, values, point):
        def codegen(context, builder: ir.IRBuilder, signature, arguments):
            indices = {"t": 0, "w": 1, "m": 5, "near": 6, "numbers": 7, "values": 8, "point": 9}
            emit = _Emitter(context, builder, signature, arguments, **indices)
            return emit.look(splat(builder, arguments[4]), bounds)

        f32 = types.float32
        return f32(t, w, f32, f32, f32, m, near, numbers, values, point), codegen

    return intrinsic(look)


def splat(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """A vector of one number."""
    one = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), value, ir.Constant(_I32, 0))
    return _lane(builder, one, 0)


def _lane(builder: ir.IRBuilder, vector: ir.Value, lane: int) -> ir.Value:
    """A vector of one lane of another."""
    return builder.shuffle_vector(vector, vector, ir.Constant(_INTS, [lane] * NEAR))


class _Emitter:
    """Writes the vector code of `snap` or `look`, whose arguments 2 and 3 are a and inverse; `indices`: of arrays."""

    def __init__(self, context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any, **indices: int):
        self.builder = builder
        arrays = {n: context.make_array(signature.args[i])(context, builder, arguments[i]) for n, i in indices.items()}
        self.places = {name: builder.ptrtoint(array.data, _I64) for name, array in arrays.items()}
        self.a, self.inverse = (splat(builder, argument) for argument in arguments[2:4])

    def load(self, name: str, offset: ir.Value, kind: ir.Type, align: int) -> ir.Value:
        """What lies `offset` bytes behind the beginning of an array."""
        address = self.builder.add(self.places[name], offset)
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=align)

    def reduce(self, name: str, vector: ir.Value, *start: ir.Value, flags: tuple[str, ...] = ()) -> ir.Value:
        """The sum or the least of a vector's lanes."""
        kind = vector.type.element
        suffix = f"v{vector.type.count}{'f32' if kind == _F32 else 'i32'}"
        function = ir.FunctionType(kind, [*(s.type for s in start), vector.type])
        declared = self.builder.module.declare_intrinsic(f"llvm.vector.reduce.{name}.{suffix}", fnty=function)
        return self.builder.call(declared, [*start, vector], fastmath=flags)

    def store(self, name: str, item: int, number: ir.Value) -> None:
        """Write an int64 as an item of an array."""
        b = self.builder
        b.store(number, b.inttoptr(b.add(self.places[name], ir.Constant(_I64, 8 * item)), _I64.as_pointer()), align=8)

    def inputs(self, sub: int) -> tuple[list[ir.Value], list[ir.Value]]:
        """The weights of a sub-block, and their importance."""
        offsets = [ir.Constant(_I64, 4 * i) for i in range(0, sub, NEAR)]
        return [self.load("t", i, _FLOATS, 4) for i in offsets], [self.load("w", i, _FLOATS, 4) for i in offsets]

    def nearest(self, ratios: list[ir.Value], weights: list[ir.Value], width: int, bounds: Any) -> list[ir.Value]:
        """The nearest points' numbers, step by step for all ratios at once: each step waits for memory in turn."""
        b = self.builder
        cells = [cell for y in ratios for cell in self.cells(y, width, bounds)]
        twice = self.twice(ratios, weights)
        errors = [ir.Constant(_FLOATS, [0.0] * NEAR)] * len(cells)
        starts = [b.mul(cell, ir.Constant(_I64, NEAR * width)) for cell in cells]
        for i in range(width):
            for p, start in enumerate(starts):
                vector, lane = divmod(width * p + i, NEAR)
                p2, w = _lane(b, twice[vector], lane), _lane(b, weights[vector], lane)
                v = b.sitofp(self.near(start, i), _FLOATS)
                errors[p] = self.fma(v, b.fsub(b.fmul(w, v, flags=_FUSED), p2, flags=_FUSED), errors[p])
        return [self.number(cell, error, self.least(error)) for cell, error in zip(cells, errors, strict=True)]

    def shifted_errors(
        self, ratios: list[ir.Value], weights: list[ir.Value], bounds: Any
    ) -> tuple[list[list[ir.Value]], list[list[ir.Value]]]:
        """Cells and near points' errors for the shifts 1 and -1 of each vector of ratios, less sum w (y - shift)^2.

        Both shifts are one vector: they have the weights in common.
        """
        b = self.builder
        shifts = [ir.Constant(_FLOATS, [shift] * NEAR) for shift in (1.0, -1.0)]
        cells = [[self.cells(b.fsub(y, shift), NEAR, bounds)[0] for shift in shifts] for y in ratios]
        starts = [[b.mul(cell, ir.Constant(_I64, NEAR * NEAR)) for cell in pair] for pair in cells]
        twice = self.twice(ratios, weights)
        both = ir.Constant(_INTS_OF_TWO, list(range(2 * NEAR)))
        moves = ir.Constant(_FLOATS_OF_TWO, [2.0] * NEAR + [-2.0] * NEAR)
        errors = [ir.Constant(_FLOATS_OF_TWO, [0.0] * 2 * NEAR)] * len(ratios)
        for i in range(NEAR):
            lane = ir.Constant(_INTS_OF_TWO, [i] * 2 * NEAR)
            for n, pair in enumerate(starts):
                p2, w = (b.shuffle_vector(x[n], x[n], lane) for x in (twice, weights))
                v = b.sitofp(b.shuffle_vector(*(self.near(start, i) for start in pair), both), _FLOATS_OF_TWO)
                slope = b.fsub(b.fmul(w, b.fadd(v, moves), flags=_FUSED), p2, flags=_FUSED)
                errors[n] = self.fma(v, slope, errors[n])
        halves = [ir.Constant(_INTS, list(range(first, first + NEAR))) for first in (0, NEAR)]
        return cells, [[b.shuffle_vector(error, error, half) for half in halves] for error in errors]

    def near(self, start: ir.Value, i: int) -> ir.Value:
        """Coordinate i of a cell's points, int8."""
        return self.load("near", self.builder.add(start, ir.Constant(_I64, NEAR * i)), _BYTES, 1)

    def twice(self, ratios: list[ir.Value], weights: list[ir.Value]) -> list[ir.Value]:
        """2 w y"""
        b = self.builder
        return [b.fmul(w, b.fadd(y, y)) for y, w in zip(ratios, weights, strict=True)]

    def fma(self, x: ir.Value, y: ir.Value, total: ir.Value | None) -> ir.Value:
        """total + x * y, rounded once where the target can; None: there is no total yet."""
        product = self.builder.fmul(x, y, flags=_FUSED)
        return product if total is None else self.builder.fadd(total, product, flags=_FUSED)

    def least(self, errors: ir.Value) -> ir.Value:
        """The least of some numbers."""
        return self.reduce("fmin", errors, flags=("nnan",))

    def squares(self, t: ir.Value, w: ir.Value, v: ir.Value) -> list[ir.Value]:
        """w r^2, w v^2 and w r v of 8 weights."""
        b = self.builder
        r = b.fsub(t, b.fmul(self.a, v))
        wv, wr = b.fmul(w, v), b.fmul(w, r)
        return [b.fmul(f, g) for f, g in zip((wr, wv, wr), (r, v, v), strict=True)]

    def sum(self, vectors: Any) -> ir.Value:
        """The sum of some vectors, lane by lane."""
        return reduce(self.builder.fadd, vectors)

    def total(self, vector: ir.Value) -> ir.Value:
        """The sum of a vector's lanes."""
        return self.reduce("fadd", vector, ir.Constant(_F32, 0.0), flags=("reassoc",))

    def sums(self, sub: int, width: int, bounds: tuple[float, ...]) -> list[ir.Value]:
        """The three sums of `snapper`."""
        b = self.builder
        ts, ws = self.inputs(sub)
        numbers = self.nearest([b.fmul(t, self.inverse) for t in ts], ws, width, bounds)
        for p, number in enumerate(numbers):
            self.store("chosen", p, number)
        each = NEAR // width
        points = [self.point(numbers[n * each : (n + 1) * each], width) for n in range(len(ts))]
        return [self.total(self.sum(part)) for part in zip(*map(self.squares, ts, ws, points), strict=True)]

    def shifted_sums(self, sub: int, shared: int, bounds: tuple[float, ...]) -> list[ir.Value]:
        """The three sums of `shifted_snapper`."""
        b = self.builder
        ts, ws = self.inputs(sub)
        ratios = [b.fmul(t, self.inverse) for t in ts]
        cells, errors = self.shifted_errors(ratios, ws, bounds)
        leasts = [[self.least(error) for error in pair] for pair in errors]
        each = shared // NEAR
        parts = []
        for g in range(sub // shared):
            group = range(g * each, (g + 1) * each)
            # sum w (y - 1)^2 is less than sum w (y + 1)^2 by 4 sum w y
            sides = [b.fadd(ratios[p], ratios[p]) for p in group]
            four = self.total(self.sum(self.twice(sides, [ws[p] for p in group])))
            above, below = (reduce(b.fadd, [leasts[p][k] for p in group]) for k in range(2))
            negative = b.fcmp_ordered("<", below, b.fsub(above, four))
            self.store("negative", g, b.zext(negative, _I64))
            shift = splat(b, b.select(negative, ir.Constant(_F32, -1.0), ir.Constant(_F32, 1.0)))
            for p in group:
                number = self.number(*(b.select(negative, *pair[::-1]) for pair in (cells[p], errors[p], leasts[p])))
                self.store("chosen", p, number)
                parts.append(self.squares(ts[p], ws[p], b.fadd(self.point([number], NEAR), shift)))
        return [self.total(self.sum(part)) for part in zip(*parts, strict=True)]

    def look(self, shift: ir.Value, bounds: tuple[float, ...]) -> ir.Value:
        """The cost of the best point near the target; writes the point, and the next target over it."""
        b = self.builder

        def column(name: str, i: int) -> ir.Value:
            return self.load(name, ir.Constant(_I64, 4 * i), _F32, 4)

        def store(name: str, vector: ir.Value) -> None:
            b.store(vector, b.inttoptr(self.places[name], _FLOATS.as_pointer()), align=4)

        (cell,) = self.cells(self.load("t", ir.Constant(_I64, 0), _FLOATS, 4), NEAR, bounds)
        start = b.mul(cell, ir.Constant(_I64, NEAR * NEAR))
        residuals, cost = [], None
        for i in range(NEAR):
            v = b.fmul(self.a, b.fadd(b.sitofp(self.near(start, i), _FLOATS), shift))
            residuals.append(b.fsub(splat(b, column("w", i)), v))
            along = None
            for k in range(i):
                along = self.fma(residuals[k], splat(b, column("m", NEAR * i + k)), along)
            along = along and b.fadd(along, along)
            along = self.fma(residuals[i], splat(b, column("m", (NEAR + 1) * i)), along)
            cost = self.fma(residuals[i], along, cost)
        point = self.point([self.number(cell, cost, self.least(cost))], NEAR)
        weights = self.load("w", ir.Constant(_I64, 0), _FLOATS, 4)
        residual = b.fsub(weights, b.fmul(self.a, b.fadd(point, shift)))
        slope, diagonal = None, ir.Constant(_FLOATS, ir.Undefined)
        for k in range(NEAR):
            row = self.load("m", ir.Constant(_I64, 4 * NEAR * k), _FLOATS, 4)
            slope = self.fma(_lane(b, residual, k), row, slope)
            lane = ir.Constant(_I32, k)
            diagonal = b.insert_element(diagonal, column("m", (NEAR + 1) * k), lane)
        store("point", point)
        store("t", b.fadd(point, b.fdiv(b.fmul(slope, self.inverse), diagonal)))
        return self.least(cost)

    def cells(self, y: ir.Value, width: int, bounds: tuple[float, ...]) -> list[ir.Value]:
        """int64, for each point that a vector of ratios has room for: its cell, the levels as digits."""
        b = self.builder
        level = ir.Constant(_INTS, [0] * NEAR)
        for bound in bounds:
            above = b.fcmp_ordered(">", y, ir.Constant(_FLOATS, [bound] * NEAR))
            level = b.sub(level, b.sext(above, _INTS))
        base = len(bounds) + 1
        digits = b.mul(level, ir.Constant(_INTS, [base ** (width - 1 - i % width) for i in range(NEAR)]))
        lanes = ir.VectorType(_I32, width)
        parts = [ir.Constant(lanes, list(range(first, first + width))) for first in range(0, NEAR, width)]
        return [b.zext(self.reduce("add", b.shuffle_vector(digits, digits, part)), _I64) for part in parts]

    def number(self, cell: ir.Value, errors: ir.Value, least: ir.Value) -> ir.Value:
        """int64, of a cell's point of least error."""
        b = self.builder
        same = b.bitcast(b.fcmp_ordered("==", errors, splat(b, least)), ir.IntType(NEAR))
        first = b.cttz(b.zext(same, _I32), ir.Constant(_I1, 0))
        first = b.and_(first, ir.Constant(_I32, NEAR - 1))  # not a number is equal to none
        entry = b.add(b.mul(cell, ir.Constant(_I64, NEAR)), b.zext(first, _I64))
        return b.zext(self.load("numbers", b.shl(entry, ir.Constant(_I64, 1)), _I16, 2), _I64)

    def point(self, numbers: list[ir.Value], width: int) -> ir.Value:
        """A vector of the values of one point of 8 coordinates, or of two points of 4."""
        b = self.builder
        offsets = [b.mul(number, ir.Constant(_I64, 4 * width)) for number in numbers]
        parts = [self.load("values", offset, ir.VectorType(_F32, width), 4) for offset in offsets]
        return parts[0] if width == NEAR else b.shuffle_vector(*parts, ir.Constant(_INTS, list(range(NEAR))))
