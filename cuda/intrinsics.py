"""What CUDA offers beyond Numba's own functions: dot products of bytes, wide loads, halves, sums over a warp.

Each is an instruction or a few of them, and has a Python twin of the same name for the CUDA simulator
(NUMBA_ENABLE_CUDASIM=1), which knows no inline assembly and no shuffles. Integers are int32 throughout: Numba
widens int32 + int32 to int64, which takes a GPU twice the instructions, so the kernels of this folder compute
with `bits`, `multiply_add` and the like instead of operators.

Loads take an array of any element type, and an index in units of what they load; the arrays of this folder begin
on 256 bytes. `stream_` reads memory that nobody writes meanwhile and passes the L1 cache by (weights: every byte
once); `ahead_` does so and lets the L2 cache fetch 128 bytes around (scales, of which a warp takes little at a time);
`cached_` keeps it in L1 (activations: every row reads them); `load_` may read what the same launch writes.

All 32 lanes of a warp must take part in `warp_sum`, `warp_max` and `warp_any`; in the simulator all threads
of a block must, the same number of times.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import config, cuda

SIMULATED = bool(config.ENABLE_CUDASIM)  # type: ignore[attr-defined]
_ALL_LANES = 0xFFFFFFFF

if not SIMULATED:
    from llvmlite import ir
    from numba.cuda import cgutils, types
    from numba.cuda.extending import intrinsic

    _INT, _FLOAT = ir.IntType(32), ir.FloatType()

    def _emit(result: Any, arguments: tuple[Any, ...], build: Callable[..., Any]) -> Any:
        """An intrinsic of scalars: `build(builder, *values)` emits it."""

        def lower(context, builder, signature, values):
            return build(builder, *values)

        def one(typingctx, a):
            return result(*arguments), lower

        def two(typingctx, a, b):
            return result(*arguments), lower

        def three(typingctx, a, b, c):
            return result(*arguments), lower

        return intrinsic((one, two, three)[len(arguments) - 1])

    def _asm(result: Any, arguments: tuple[Any, ...], code: str, constraints: str) -> Any:
        """An intrinsic of scalars that is one line of PTX."""

        def build(builder, *values):
            kinds = ir.FunctionType(_FLOAT if result is types.float32 else _INT, [value.type for value in values])
            return builder.call(ir.InlineAsm(kinds, code, constraints, side_effect=False), values)

        return _emit(result, arguments, build)

    def _register(name: str) -> Any:
        """An intrinsic that reads a special register; what is made of it is not kept, but made again."""

        def typed(typingctx):
            def lower(context, builder, signature, values):
                kinds = ir.FunctionType(_INT, [])
                return builder.call(ir.InlineAsm(kinds, f"mov.u32 $0, %{name};", "=r", side_effect=True), [])

            return types.int32(), lower

        return intrinsic(typed)

    def _load(code: str, count: int, element: Any, changing: bool = False) -> Any:
        """An intrinsic (array, index) -> `count` elements: a scalar for one, otherwise a tuple."""
        scalar, letter = (_FLOAT, "f") if element is types.float32 else (_INT, "r")
        nbytes = 2 if ".u16" in code else 4 * count
        places = ", ".join(f"${k}" for k in range(count))
        code = f"{code} {places if count == 1 else '{' + places + '}'}, [${count}];"
        constraints = ",".join([f"={letter}"] * count + ["l"] + ["~{memory}"] * changing)

        def typed(typingctx, array, index):
            result = element if count == 1 else types.UniTuple(element, count)

            def lower(context, builder, signature, values):
                array, index = values
                data = context.make_array(signature.args[0])(context, builder, array).data
                data = builder.addrspacecast(data, ir.IntType(8).as_pointer(1), "global")
                piece = ir.ArrayType(ir.IntType(8), nbytes)
                place = builder.gep(builder.bitcast(data, ir.PointerType(piece, addrspace=1)), [index])
                kind = scalar if count == 1 else ir.LiteralStructType([scalar] * count)
                function = ir.FunctionType(kind, [place.type])
                loaded = builder.call(ir.InlineAsm(function, code, constraints, side_effect=changing), [place])
                if count == 1:
                    return loaded
                return cgutils.pack_array(builder, [builder.extract_value(loaded, k) for k in range(count)])

            return result(array, types.int64), lower

        return intrinsic(typed)

    def _store(element: Any, width: int) -> Any:
        """An intrinsic (array, index, value): stores the low `width` bits of an int32."""

        def typed(typingctx, array, index, value):
            def lower(context, builder, signature, values):
                array, index, value = values
                data = context.make_array(signature.args[0])(context, builder, array).data
                data = builder.bitcast(data, ir.IntType(width).as_pointer())
                if width < 32:
                    value = builder.trunc(value, ir.IntType(width))
                builder.store(value, builder.gep(data, [index]))
                return context.get_dummy_value()

            return types.void(array, types.int64, element), lower

        return intrinsic(typed)

    @intrinsic
    def store_16(typingctx, array, index, words):
        def lower(context, builder, signature, values):
            array, index, words = values
            data = context.make_array(signature.args[0])(context, builder, array).data
            data = builder.addrspacecast(data, ir.IntType(8).as_pointer(1), "global")
            piece = ir.ArrayType(ir.IntType(8), 16)
            place = builder.gep(builder.bitcast(data, ir.PointerType(piece, addrspace=1)), [index])
            function = ir.FunctionType(ir.VoidType(), [place.type, *[_INT] * 4])
            code = ir.InlineAsm(
                function, "st.global.v4.u32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r,~{memory}", side_effect=True
            )
            builder.call(code, [place, *[builder.extract_value(words, k) for k in range(4)]])
            return context.get_dummy_value()

        return types.void(array, types.int64, types.UniTuple(types.int32, 4)), lower

    thread_x = _register("tid.x")
    thread_y = _register("tid.y")
    block_x = _register("ctaid.x")

    _i, _f = types.int32, types.float32

    dp4a = _asm(_i, (_i, _i, _i), "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r")
    dp2a = _asm(_i, (_i, _i, _i), "dp2a.lo.s32.s32 $0, $1, $2, $3;", "=r,r,r,r")
    bits = _emit(_i, (_i, _i, _i), lambda b, word, shift, mask: b.and_(b.lshr(word, shift), mask))
    shifted = _emit(_i, (_i, _i), lambda b, word, left: b.shl(word, left))
    rotated = _asm(_i, (_i, _i), "shf.r.wrap.b32 $0, $1, $1, $2;", "=r,r,r")
    permuted = _asm(_i, (_i, _i, _i), "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r")
    either = _emit(_i, (_i, _i), lambda b, one, other: b.or_(one, other))
    differing = _emit(_i, (_i, _i), lambda b, one, other: b.xor(one, other))
    minus = _emit(_i, (_i, _i), lambda b, one, other: b.sub(one, other))
    multiply_add = _emit(_i, (_i, _i, _i), lambda b, one, other, more: b.add(b.mul(one, other), more))
    signed_byte = _emit(
        _i, (_i, _i), lambda b, word, shift: b.sext(b.trunc(b.lshr(word, shift), ir.IntType(8)), ir.IntType(32))
    )
    low_half = _emit(
        _f, (_i,), lambda b, word: b.fpext(b.bitcast(b.trunc(word, ir.IntType(16)), ir.HalfType()), _FLOAT)
    )
    high_half = _emit(
        _f,
        (_i,),
        lambda b, word: b.fpext(
            b.bitcast(b.trunc(b.lshr(word, ir.Constant(_INT, 16)), ir.IntType(16)), ir.HalfType()), _FLOAT
        ),
    )
    to_half = _asm(_i, (_f,), "{.reg .b16 h; cvt.rn.f16.f32 h, $1; cvt.u32.u16 $0, h;}", "=r,f")
    float_bits = _emit(_i, (_f,), lambda b, value: b.bitcast(value, _INT))
    bits_float = _emit(_f, (_i,), lambda b, word: b.bitcast(word, _FLOAT))
    fused = _asm(_f, (_f, _f, _f), "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f")
    round_even = _asm(_i, (_f,), "cvt.rni.s32.f32 $0, $1;", "=r,f")

    stream_16 = _load("ld.global.nc.L1::no_allocate.v4.u32", 4, _i)
    stream_8 = _load("ld.global.nc.L1::no_allocate.v2.u32", 2, _i)
    stream_4 = _load("ld.global.nc.L1::no_allocate.u32", 1, _i)
    ahead_16 = _load("ld.global.nc.L1::no_allocate.L2::128B.v4.u32", 4, _i)
    ahead_4 = _load("ld.global.nc.L1::no_allocate.L2::128B.u32", 1, _i)
    ahead_2 = _load("ld.global.nc.L1::no_allocate.L2::128B.u16", 1, _i)
    cached_16 = _load("ld.global.nc.v4.u32", 4, _i)
    cached_8 = _load("ld.global.nc.v2.u32", 2, _i)
    cached_16f = _load("ld.global.nc.v4.f32", 4, _f)
    cached_8f = _load("ld.global.nc.v2.f32", 2, _f)
    load_16 = _load("ld.global.v4.u32", 4, _i, changing=True)
    store_4 = _store(_i, 32)
    store_2 = _store(_i, 16)
    store_1 = _store(_i, 8)

    @cuda.jit(device=True, forceinline=True)
    def warp_sum(value):
        """The sum over a warp, in all its lanes."""
        value += cuda.shfl_xor_sync(_ALL_LANES, value, 16)
        value += cuda.shfl_xor_sync(_ALL_LANES, value, 8)
        value += cuda.shfl_xor_sync(_ALL_LANES, value, 4)
        value += cuda.shfl_xor_sync(_ALL_LANES, value, 2)
        value += cuda.shfl_xor_sync(_ALL_LANES, value, 1)
        return value

    @cuda.jit(device=True, forceinline=True)
    def half_warp_sum(value):
        """The sum over lanes 0..15 in those, over lanes 16..31 in these."""
        value += cuda.shfl_xor_sync(_ALL_LANES, value, 8)
        value += cuda.shfl_xor_sync(_ALL_LANES, value, 4)
        value += cuda.shfl_xor_sync(_ALL_LANES, value, 2)
        value += cuda.shfl_xor_sync(_ALL_LANES, value, 1)
        return value

    @cuda.jit(device=True, forceinline=True)
    def warp_max(value):
        """The largest over a warp, in all its lanes; of NaN and a number, either."""
        value = max(value, cuda.shfl_xor_sync(_ALL_LANES, value, 16))
        value = max(value, cuda.shfl_xor_sync(_ALL_LANES, value, 8))
        value = max(value, cuda.shfl_xor_sync(_ALL_LANES, value, 4))
        value = max(value, cuda.shfl_xor_sync(_ALL_LANES, value, 2))
        value = max(value, cuda.shfl_xor_sync(_ALL_LANES, value, 1))
        return value

    @cuda.jit(device=True, forceinline=True)
    def warp_any(condition):
        """Whether the condition holds in any lane of a warp."""
        return cuda.any_sync(_ALL_LANES, condition)

    @cuda.jit(device=True, forceinline=True)
    def other_half(value):
        """The value of the lane 16 away."""
        return cuda.shfl_xor_sync(_ALL_LANES, value, 16)

else:

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

    def thread_x():
        return np.int32(_thread().threadIdx.x)

    def thread_y():
        return np.int32(_thread().threadIdx.y)

    def block_x():
        return np.int32(_thread().blockIdx.x)

    def dp4a(a, b, c):
        return _int(sum(x * y for x, y in zip(_bytes(a), _bytes(b), strict=True)) + int(c))

    def _halves(word: Any) -> list[int]:
        return [int(h) for h in np.array([_unsigned(word)], np.uint32).view(np.int16)]

    def dp2a(a, b, c):
        return _int(sum(x * y for x, y in zip(_halves(a), _bytes(b)[:2], strict=True)) + int(c))

    def bits(word, shift, mask):
        return _int((_unsigned(word) >> int(shift)) & _unsigned(mask))

    def shifted(word, left):
        return _int(_unsigned(word) << int(left))

    def rotated(word, right):
        return _int((_unsigned(word) * 0x100000001) >> (int(right) & 31))

    def permuted(word, other, selector):
        """Bytes of the two, the nibbles of the selector say which: 0..3 of the one, 4..7 of the other."""
        chosen = np.array([word, other], np.int32).view(np.uint8)
        return chosen[[int(selector) >> 4 * i & 7 for i in range(4)]].view(np.int32)[0]

    def either(one, other):
        return _int(_unsigned(one) | _unsigned(other))

    def differing(one, other):
        return _int(_unsigned(one) ^ _unsigned(other))

    def minus(one, other):
        return _int(int(one) - int(other))

    def multiply_add(one, other, more):
        return _int(int(one) * int(other) + int(more))

    def signed_byte(word, shift):
        return np.int32(_bytes(_unsigned(word) >> int(shift))[0])

    def low_half(word):
        return np.float32(np.uint16(_unsigned(word) & 0xFFFF).view(np.float16))

    def high_half(word):
        return np.float32(np.uint16(_unsigned(word) >> 16).view(np.float16))

    def to_half(value):
        return np.int32(np.float16(value).view(np.uint16))

    def float_bits(value):
        return np.float32(value).view(np.int32)

    def bits_float(word):
        return _int(word).view(np.float32)

    def fused(one, other, more):
        """one * other + more, rounded once."""
        return np.float32(np.float64(one) * np.float64(other) + np.float64(more))

    def round_even(value):
        return np.int32(0 if np.isnan(value) else np.clip(np.rint(np.float64(value)), -(2.0**31), 2.0**31 - 1))

    stream_16 = ahead_16 = cached_16 = load_16 = _loader(np.int32, 4)
    stream_8 = cached_8 = _loader(np.int32, 2)
    stream_4 = ahead_4 = _loader(np.int32, 1)
    ahead_2 = _loader(np.uint16, 1)
    cached_16f = _loader(np.float32, 4)
    cached_8f = _loader(np.float32, 2)
    store_4 = _storer(np.uint32, 0xFFFFFFFF)
    store_2 = _storer(np.uint16, 0xFFFF)
    store_1 = _storer(np.uint8, 0xFF)

    def _exchange(value: Any) -> tuple[int, list[Any]]:
        """This thread's lane, and what all lanes of its warp gave."""
        thread = _thread()
        given = thread._manager.__dict__.setdefault("given", {})
        given[thread.thread_id] = value
        thread.syncthreads()
        first = thread.thread_id // 32 * 32
        warp = [given[i] for i in range(first, first + 32)]
        thread.syncthreads()
        return thread.thread_id % 32, warp

    def _butterfly(value: Any, masks: tuple[int, ...], combine: Callable[..., Any]) -> Any:
        """Combined in the order of the shuffles, so that rounding is theirs."""
        lane, warp = _exchange(value)
        values = np.array(warp)
        for mask in masks:
            values = combine(values, values[np.arange(32) ^ mask])
        return values[lane]

    def warp_sum(value):
        return _butterfly(value, (16, 8, 4, 2, 1), np.add)

    def half_warp_sum(value):
        return _butterfly(value, (8, 4, 2, 1), np.add)

    def warp_max(value):
        return _butterfly(value, (16, 8, 4, 2, 1), np.fmax)

    def warp_any(condition):
        return any(_exchange(condition)[1])

    def other_half(value):
        lane, warp = _exchange(value)
        return warp[lane ^ 16]
