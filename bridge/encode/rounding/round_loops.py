"""The inner loops of quantizing floats: the nearest codes of one sub-block at a given scale, and their error.

    with a minimum   w' = a * q - b    q 0..high, a >= 0
    without          w' = a * q        q low..high

`line_errors`, `line_fit` and `line_write` are compiled for one of them, by `has_min`. `rows_quantizer` is the loop over
blocks that all types have in common.

All are float32 with a constant trip count, so that LLVM vectorizes them: 4 ns for one error over 32 weights with
AVX-512. Two errors are computed at a time, because LLVM unrolls a loop over 16 weights that does less instead of
vectorizing it. Kernels that use these pass them through `specialize`, with `sub`, `low` and `high` set.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from bridge.blocks import BlockType
from bridge.system.kernels.half import ONE, ZERO
from bridge.system.kernels.jit import UNSET, inlined, intrinsic, kernel, specialize, types

# set per type by `specialize`
sub = subs = odd = 0
low = high = unit = ZERO
plain = has_min = False
workspace = search = write = UNSET


def _add(typingctx, total, term):
    """total + term, float32, in any order with the other terms of the same sum, so that sums become vector adds.

    (Numba's `fastmath` would allow it for a whole function, with roundings that must stay as written.)
    """

    def codegen(context, builder: ir.IRBuilder, signature, arguments):
        return builder.fadd(*arguments, flags=("reassoc", "nsz"))

    return types.float32(types.float32, types.float32), codegen


def _extreme(name):
    """The lesser or greater of two float32, in any order with others. NaN yields anything."""

    def extreme(typingctx, a, b):
        def codegen(context, builder: ir.IRBuilder, signature, arguments):
            f32 = ir.FloatType()
            function = builder.module.declare_intrinsic(f"llvm.{name}", [f32], ir.FunctionType(f32, [f32, f32]))
            return builder.call(function, arguments, fastmath=("nnan", "nsz"))

        return types.float32(types.float32, types.float32), codegen

    return intrinsic(extreme)


add: Any = intrinsic(_add)
lesser: Any = _extreme("minnum")
greater: Any = _extreme("maxnum")


def extremes(x):
    """The least of the weights and 0, and the greatest."""
    bottom = peak = ZERO
    for i in range(sub):
        bottom = lesser(bottom, x[i])
        peak = greater(peak, x[i])
    return bottom, peak


def line_errors(x, w, a1, b1, a2, b2):
    """The weighted squared errors of two lines a * q - b, with the nearest codes of each; b is 0 without `has_min`."""
    i1 = ONE / a1 if a1 != ZERO else ZERO
    i2 = ONE / a2 if a2 != ZERO else ZERO
    e1 = e2 = ZERO
    for i in range(sub):
        y = x[i] + b1 if has_min else x[i]
        q = np.rint(y * i1)
        q = q if q > low else low
        q = q if q < high else high
        r = y - a1 * q
        e1 = add(e1, w[i] * r * r)
        y = x[i] + b2 if has_min else x[i]
        q = np.rint(y * i2)
        q = q if q > low else low
        q = q if q < high else high
        r = y - a2 * q
        e2 = add(e2, w[i] * r * r)
    return e1, e2


def line_fit(x, w, a, b):
    """The error of a line, and of its codes q and residuals r: sums of w q, w q^2, w r, w r q.

    Without `has_min`, the first and the third of the sums are not made.
    """
    inverse = ONE / a if a != ZERO else ZERO
    e = sq = sqq = sr = srq = ZERO
    for i in range(sub):
        y = x[i] + b if has_min else x[i]
        q = np.rint(y * inverse)
        q = q if q > low else low
        q = q if q < high else high
        r = y - a * q
        wq = w[i] * q
        wr = w[i] * r
        e = add(e, wr * r)
        sqq = add(sqq, wq * q)
        if has_min:
            sq = add(sq, wq)
            sr = add(sr, wr)
            srq = add(srq, wr * q)
        else:
            srq = add(srq, wq * r)
    return e, sq, sqq, sr, srq


def line_write(x, w, a, b, codes, scratch):
    """Write the codes as stored, 0..high - low; the plain error, sum of x^2 and weighted error, with w' rounded as
    dequantizing rounds it."""
    inverse = ONE / a if a != ZERO else ZERO
    error = signal = weighted = ZERO
    for i in range(sub):
        q = np.rint((x[i] + b if has_min else x[i]) * inverse)
        q = q if q > low else low
        q = q if q < high else high
        codes[i] = np.uint8(q - low)
        r = x[i] - (a * q - b if has_min else a * q)
        error = add(error, r * r)
        signal = add(signal, x[i] * x[i])
        weighted = add(weighted, w[i] * r * r)
    return error, signal, weighted


def _rows(x, w, q, sc, mn, d, dmin, sums):
    """x [rows, n * subs, sub], w [n * subs, sub] -> fields as `block_bytes` packs them.

    sums float64 [rows, 3]: error, signal, error weighted with w.
    """
    scratch = workspace()
    for row in range(x.shape[0]):
        for n in range(d.shape[1]):
            start = n * subs
            best_d, best_m = search(x, w, row, start, scratch, sc, mn)
            d[row, n] = best_d
            dmin[row, n] = best_m
            for j in range(start, start + subs):
                a = best_d if plain else best_d * (unit * np.float32(odd * sc[row, j] + odd - 1))
                b = -best_m if plain else best_m * np.float32(mn[row, j])
                error, signal, weighted = write(x[row, j], w[j], a, b, q[row, j], scratch)
                sums[row, 0] += error
                sums[row, 1] += signal
                sums[row, 2] += weighted


def rows_quantizer(
    kind: BlockType,
    suffix: str,
    loops: Sequence[Any],
    stages: Sequence[Any],
    workspace: Any,
    search: Any,
    settings: dict[str, Any] | None = None,
    compile: Callable[..., Any] = kernel,
) -> Callable[..., None]:
    """The compiled `_rows` of a type.

    loops      functions that the stages, and those after them, use; the last, `.._write`, writes the codes
    stages     each, `_stage`, may call those before it as `stage`; the last, as `block`, is the search of one block
    workspace  () -> arrays that `search` may write to
    search     (x, w, row, a block's first sub-block, workspace, sc, mn) -> d, and dmin or m
    settings   constants besides the type's own and those of its ScaleSearch
    compile    how to compile the loops
    """
    numbers = kind.values or range(-kind.zero, kind.levels - kind.zero)
    scope: dict[str, Any] = {
        "sub": kind.sub, "subs": kind.subs, "plain": not kind.is_k, "has_min": kind.has_min, "scale_lo": kind.scale_lo,
        "scale_hi": kind.scale_hi, "min_hi": kind.min_hi, "unit": np.float32(kind.unit),
        "odd": 2 if kind.odd_scales else 1, "low": np.float32(min(numbers)), "high": np.float32(max(numbers)),
    }  # fmt: skip
    constants = (kind.search._asdict() if kind.search else {}) | (settings or {})
    scope |= {key: np.float32(value) if type(value) is float else value for key, value in constants.items()}
    for f in loops:
        scope[f.__name__] = specialize(f, kind.name, compile, **scope)
    for stage in stages:
        scope[stage.__name__[1:]] = scope["block"] = specialize(stage, suffix, **scope)
    for name, function in (("workspace", workspace), ("search", search)):
        scope[name] = specialize(function, suffix, inlined, **scope)
    return specialize(_rows, suffix, **scope, write=scope[loops[-1].__name__])
