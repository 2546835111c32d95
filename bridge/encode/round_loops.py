"""The inner loops of quantizing floats: the nearest codes of one sub-block at a given scale, and their error.

    affine   w' = a * q - b    q 0..high           `affine_errors`, `affine_fit`, `affine_write`
    scaled   w' = a * q        q low..high         `scaled_errors`, `scaled_fit`, `scaled_write`

and the loop over blocks that all types have in common, `rows_quantizer`.

All are float32 with a constant trip count, so that LLVM vectorizes them: 4 ns for one error over 32 weights with
AVX-512. Two errors are computed at a time, because LLVM unrolls a loop over 16 weights that does less instead of
vectorizing it. Kernels that use these pass them through `specialize`, with `sub`, `low` and `high` set.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from bridge.blocks import BlockType
from bridge.system.jit import inlined, intrinsic, kernel, specialize, types

_ZERO = np.float32(0)
_ONE = np.float32(1)

# set per type by `specialize`
sub = subs = odd = 0
low = high = unit = _ZERO
plain = False
workspace: Any = None
search: Any = None
write: Any = None


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
    bottom = _ZERO
    peak = _ZERO
    for i in range(sub):
        bottom = lesser(bottom, x[i])
        peak = greater(peak, x[i])
    return bottom, peak


def affine_errors(x, w, a1, b1, a2, b2):
    """The weighted squared errors of two lines a * q - b, a >= 0, with the nearest codes of each."""
    i1 = _ONE / a1 if a1 > _ZERO else _ZERO
    i2 = _ONE / a2 if a2 > _ZERO else _ZERO
    e1 = _ZERO
    e2 = _ZERO
    for i in range(sub):
        y = x[i] + b1
        q = np.rint(y * i1)
        q = q if q > _ZERO else _ZERO
        q = q if q < high else high
        r = y - a1 * q
        e1 = add(e1, w[i] * r * r)
        y = x[i] + b2
        q = np.rint(y * i2)
        q = q if q > _ZERO else _ZERO
        q = q if q < high else high
        r = y - a2 * q
        e2 = add(e2, w[i] * r * r)
    return e1, e2


def affine_fit(x, w, a, b):
    """The error of a line, and of its codes q and residuals r: sums of w q, w q^2, w r, w r q."""
    inverse = _ONE / a if a > _ZERO else _ZERO
    e = _ZERO
    sq = _ZERO
    sqq = _ZERO
    sr = _ZERO
    srq = _ZERO
    for i in range(sub):
        y = x[i] + b
        q = np.rint(y * inverse)
        q = q if q > _ZERO else _ZERO
        q = q if q < high else high
        r = y - a * q
        wq = w[i] * q
        wr = w[i] * r
        e = add(e, wr * r)
        sq = add(sq, wq)
        sqq = add(sqq, wq * q)
        sr = add(sr, wr)
        srq = add(srq, wr * q)
    return e, sq, sqq, sr, srq


def affine_write(x, w, a, b, codes, scratch):
    """Write the codes; the plain error, sum of x^2 and weighted error, with w' rounded as dequantizing rounds it."""
    inverse = _ONE / a if a > _ZERO else _ZERO
    error = _ZERO
    signal = _ZERO
    weighted = _ZERO
    for i in range(sub):
        q = np.rint((x[i] + b) * inverse)
        q = q if q > _ZERO else _ZERO
        q = q if q < high else high
        codes[i] = np.uint8(q)
        r = x[i] - (a * q - b)
        error = add(error, r * r)
        signal = add(signal, x[i] * x[i])
        weighted = add(weighted, w[i] * r * r)
    return error, signal, weighted


def scaled_errors(x, w, a1, a2):
    """The weighted squared errors of two scales of either sign, with the nearest codes of each."""
    i1 = _ONE / a1 if a1 != _ZERO else _ZERO
    i2 = _ONE / a2 if a2 != _ZERO else _ZERO
    e1 = _ZERO
    e2 = _ZERO
    for i in range(sub):
        q = np.rint(x[i] * i1)
        q = q if q > low else low
        q = q if q < high else high
        r = x[i] - a1 * q
        e1 = add(e1, w[i] * r * r)
        q = np.rint(x[i] * i2)
        q = q if q > low else low
        q = q if q < high else high
        r = x[i] - a2 * q
        e2 = add(e2, w[i] * r * r)
    return e1, e2


def scaled_fit(x, w, a):
    """The error of a scale, and of its codes q and residuals r: sums of w q^2, w r q."""
    inverse = _ONE / a if a != _ZERO else _ZERO
    e = _ZERO
    sqq = _ZERO
    srq = _ZERO
    for i in range(sub):
        q = np.rint(x[i] * inverse)
        q = q if q > low else low
        q = q if q < high else high
        r = x[i] - a * q
        wq = w[i] * q
        e = add(e, w[i] * r * r)
        sqq = add(sqq, wq * q)
        srq = add(srq, wq * r)
    return e, sqq, srq


def scaled_write(x, w, a, b, codes, scratch):
    """As `affine_write`, without b; the codes are written as stored, 0..high - low."""
    inverse = _ONE / a if a != _ZERO else _ZERO
    error = _ZERO
    signal = _ZERO
    weighted = _ZERO
    for i in range(sub):
        q = np.rint(x[i] * inverse)
        q = q if q > low else low
        q = q if q < high else high
        codes[i] = np.uint8(q - low)
        r = x[i] - a * q
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
            at = n * subs
            best_d, best_m = search(x, w, row, at, scratch, sc, mn)
            d[row, n] = best_d
            dmin[row, n] = best_m
            for j in range(at, at + subs):
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
    settings: dict[str, Any],
    compile: Callable[..., Any] = kernel,
) -> Callable[..., None]:
    """The compiled `_rows` of a type.

    loops      functions that the stages, and those after them, use; the last, `.._write`, writes the codes
    stages     each, `_stage`, may call those before it as `stage`; the last, as `block`, is the search of one block
    workspace  () -> arrays that `search` may write to
    search     (x, w, row, a block's first sub-block, workspace, sc, mn) -> d, and dmin or m
    settings   further constants
    compile    how to compile the loops
    """
    numbers = kind.values or range(-kind.zero, kind.levels - kind.zero)
    scope: dict[str, Any] = {
        "sub": kind.sub,
        "subs": kind.subs,
        "plain": not kind.is_k,
        "scale_lo": kind.scale_lo,
        "scale_hi": kind.scale_hi,
        "min_hi": kind.min_hi,
        "unit": np.float32(kind.unit),
        "odd": 2 if kind.odd_scales else 1,
        "low": np.float32(min(numbers)),
        "high": np.float32(max(numbers)),
    }
    scope |= {key: np.float32(value) if type(value) is float else value for key, value in settings.items()}
    for f in loops:
        scope[f.__name__] = specialize(f, kind.name, compile, **scope)
    for stage in stages:
        scope[stage.__name__[1:]] = scope["block"] = specialize(stage, suffix, **scope)
    for name, function in (("workspace", workspace), ("search", search)):
        scope[name] = specialize(function, suffix, inlined, **scope)
    return specialize(_rows, suffix, **scope, write=scope[loops[-1].__name__])
