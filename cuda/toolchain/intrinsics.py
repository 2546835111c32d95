"""CUDA instructions beyond Numba's own functions: dot products of bytes, wide loads, halves, warps, tensor cores.

Each is one instruction or a few. Integers are int32 throughout: Numba widens int32 + int32 to int64, which takes a GPU
twice the instructions, so the kernels of this folder compute with or_, xor, sub, shl, ror (rotate right), mad
(a * b + c), prmt (choose bytes) and `bits` (shift right, then mask) instead of operators; fma is that of float32.
`kept` is its argument, a constant: it goes to a register and stays there, as the compiler, which would otherwise move
it there for each instruction, does not know it.

A kernel is passed the address of an array (`array_at`); where that has two dimensions, also how many rows there are
and how far apart. Loads take an array of any element type, and an index in units of what they load; the arrays of this
folder are aligned to 256 bytes, those in shared memory (`shared_`; `put_` stores) to 16 if declared with ALIGNED.
`stream_` reads memory that nobody writes meanwhile and bypasses the L1 cache (weights: every byte
once); `ahead_` does the same and lets the L2 cache fetch the 128 bytes around (scales: a warp takes few at a time);
`cached_` keeps it in L1 (activations: every row reads them); `load_` may read what the same launch writes, or an
earlier one that is still running. `prefetch_` only asks the L2 cache for what a load would read, and returns zeros.
`add_release` adds to an int32 after all stores before it and returns what was there; `fence` keeps what is before it
before what is after it, for all threads of the GPU: see last_block.py. After `warp_meets` the lanes of a warp see what
each has put into shared memory before.

All 32 lanes of a warp must take part in `warp_sum`, `warp_max`, `warp_any`, `warp_meets` and `mma_*`.

From compute capability 8.0 on there are

    mma_f16, mma_bf16  (c, a0..a3, b0, b1) -> c + A B for A [16, 16], B [16, 8], c float32 [16, 8] spread over a warp.
                       With g = lane / 4 and t = lane % 4, a lane holds of A [g, k], [g + 8, k], [g, k + 8] and
                       [g + 8, k + 8], of B [k, g] and [k + 8, g], for k = 2t and 2t + 1 in a word each, the first
                       below, and of c [g, 2t], [g, 2t + 1], [g + 8, 2t], [g + 8, 2t + 1]
    mma_s8             the same for bytes, signed, and int32: A [16, 32], B [32, 8]; words hold four k, from 4t and from
                       4t + 16 on, where those of halves hold two, from 2t and 2t + 8 on
    mma_s8_short       (c, a0, a1, b) -> c + A B for A [16, 16], B [16, 8]: the words from 4t on alone
    pack_f16, pack_bf16   two float32, rounded to nearest even, as halves in a word, the first below
    sub_f16            differences of the two halves in a word
    copy_16            16 bytes from global to shared memory while the thread goes on. `copies_end` closes the group
                       of copies before it; `copies_wait` waits until all groups of the thread but the last have
                       arrived, `copies_wait_all` for the last too, after which a barrier shows them to the others

and from 9.0 on, where a launch may begin before the one before it has ended (see launch.py):

    launch_dependents  lets the next launch begin, once all blocks of threads have said so or ended
    launches_wait      waits until the launches before have ended and what they wrote can be read

Arrays in shared memory that `copy_16` fills must be aligned to 16 bytes, as those of complex128 are.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import cuda
from numba.cuda import cgutils, types
from numba.cuda.extending import intrinsic

_ALL_LANES = 0xFFFFFFFF
SIGN_BITS = -0x7F7F7F80  # 0x80808080 as int32
ALIGNED = 16  # bytes, for cuda.shared.array

_INT, _FLOAT = ir.IntType(32), ir.FloatType()


def device_function(function: Any) -> Any:
    """A function that kernels call."""
    return cuda.jit(device=True, forceinline=True)(function)


def _inline(builder: Any, result: Any, code: str, constraints: str, values: Any = (), side_effect: bool = True) -> Any:
    """The result of a line of PTX."""
    kinds = ir.FunctionType(result, [value.type for value in values])
    return builder.call(ir.InlineAsm(kinds, code, constraints, side_effect=side_effect), values)


def _place(context: Any, builder: Any, kind: Any, values: Any, nbytes: int = 16, space: int = 1) -> Any:
    """The address of the element of so many bytes at (array, index), in global (1) or shared memory (3)."""
    array, index = values
    data = context.make_array(kind)(context, builder, array).data
    data = builder.addrspacecast(data, ir.IntType(8).as_pointer(space), "place")
    piece = ir.ArrayType(ir.IntType(8), nbytes)
    return builder.gep(builder.bitcast(data, ir.PointerType(piece, addrspace=space)), [index])


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
        return _inline(builder, _FLOAT if result is types.float32 else _INT, code, constraints, values, False)

    return _emit(result, arguments, build)


def _register(name: str) -> Any:
    """An intrinsic that reads a special register; values made from it are recomputed rather than kept."""

    def typed(typingctx):
        def lower(context, builder, signature, values):
            return _inline(builder, _INT, f"mov.u32 $0, %{name};", "=r")

        return types.int32(), lower

    return intrinsic(typed)


def array_at(element: str, dimensions: int) -> Any:
    """An intrinsic (address), or for two dimensions (address, rows, their distance): the array there.

    It lies in global memory. One of one dimension has no size: it must not be indexed from its end.
    """
    array = types.Array(getattr(types, element), dimensions, "C")

    def lower(context, builder, signature, values):
        made = context.make_array(array)(context, builder)
        kind = made.data.type
        place = builder.inttoptr(values[0], kind.pointee.as_pointer(1))
        made.data = builder.addrspacecast(place, kind, "generic")
        sizes = values[1:] or [ir.Constant(ir.IntType(64), 0)]
        made.shape = cgutils.pack_array(builder, sizes)
        return made._getvalue()

    def one(typingctx, address):
        return array(types.uint64), lower

    def two(typingctx, address, rows, columns):
        return array(types.uint64, types.int64, types.int64), lower

    return intrinsic((one, two)[dimensions - 1])


def _load(code: str, count: int, element: Any, changing: bool = False, further: bool = False) -> Any:
    """An intrinsic (array, index) -> `count` elements: a scalar for one, otherwise a tuple.

    `further` takes a number too, which is added to the index: loads that differ in it share an address.
    """
    scalar, letter = (_FLOAT, "f") if element is types.float32 else (_INT, "r")
    nbytes = {"u8": 1, "u16": 2}.get(code.rpartition(".")[2], 4 * count)
    places = ", ".join(f"${k}" for k in range(count))
    code = f"{code} {places if count == 1 else '{' + places + '}'}, [{'a' if further else f'${count}'}];"
    if further:
        code = f"{{.reg .b64 a; mad.wide.s32 a, ${count + 1}, {nbytes}, ${count}; {code}}}"
    constraints = ",".join([f"={letter}"] * count + ["l"] + ["r"] * further + ["~{memory}"] * changing)

    result = element if count == 1 else types.UniTuple(element, count)

    def load(context, builder, signature, values):
        place = _place(context, builder, signature.args[0], values[:2], nbytes)
        kind = scalar if count == 1 else ir.LiteralStructType([scalar] * count)
        loaded = _inline(builder, kind, code, constraints, [place, *values[2:]], changing)
        if count == 1:
            return loaded
        return cgutils.pack_array(builder, [builder.extract_value(loaded, k) for k in range(count)])

    def at(typingctx, array, index):
        return result(array, types.int64), load

    def beyond(typingctx, array, index, more):
        return result(array, types.int64, types.int32), load

    return intrinsic(beyond if further else at)


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
def add_release(typingctx, array, index, value):
    def lower(context, builder, signature, values):
        place = _place(context, builder, signature.args[0], values[:2], 4)
        code = "atom.release.gpu.global.add.s32 $0, [$1], $2;"
        return _inline(builder, _INT, code, "=r,l,r,~{memory}", [place, values[2]])

    return types.int32(array, types.int64, types.int32), lower


@intrinsic
def store_16(typingctx, array, index, words):
    def lower(context, builder, signature, values):
        place = _place(context, builder, signature.args[0], values[:2])
        given = [place, *[builder.extract_value(values[2], k) for k in range(4)]]
        _inline(builder, ir.VoidType(), "st.global.v4.u32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r,~{memory}", given)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.UniTuple(types.int32, 4)), lower


@intrinsic
def copy_16(typingctx, shared, at, array, index):
    def lower(context, builder, signature, values):
        target = _place(context, builder, signature.args[0], values[:2], space=3)
        source = _place(context, builder, signature.args[2], values[2:])
        code = "cp.async.cg.shared.global [$0], [$1], 16;"
        _inline(builder, ir.VoidType(), code, "l,l,~{memory}", [target, source])
        return context.get_dummy_value()

    return types.void(shared, types.int64, array, types.int64), lower


def _statement(code: str) -> Any:
    """An intrinsic without arguments that is one instruction and has no result."""

    def typed(typingctx):
        def lower(context, builder, signature, values):
            _inline(builder, ir.VoidType(), code, "~{memory}")
            return context.get_dummy_value()

        return types.void(), lower

    return intrinsic(typed)


copies_end = _statement("cp.async.commit_group;")
copies_wait = _statement("cp.async.wait_group 1;")
copies_wait_all = _statement("cp.async.wait_group 0;")
warp_meets = _statement("bar.warp.sync 0xffffffff;")
fence = _statement("fence.acq_rel.gpu;")
launch_dependents = _statement("griddepcontrol.launch_dependents;")
launches_wait = _statement("griddepcontrol.wait;")


def _prefetch(count: int, nbytes: int) -> Any:
    """An intrinsic (array, index) in units of `nbytes`, that returns as many zeros as a load has words."""

    def typed(typingctx, array, index):
        result = types.int32 if count == 1 else types.UniTuple(types.int32, count)

        def lower(context, builder, signature, values):
            place = _place(context, builder, signature.args[0], values, nbytes)
            _inline(builder, ir.VoidType(), "prefetch.global.L2 [$0];", "l", [place])
            return context.get_constant_null(result)

        return result(array, types.int64), lower

    return intrinsic(typed)


def _mma(kind: str, k: int = 16) -> Any:
    """An intrinsic: the product of tensor cores, of halves of a kind, or "s8", with k columns of A."""
    total, scalar, letter = ("s32", _INT, "r") if kind == "s8" else ("f32", _FLOAT, "f")
    count = k * (1 if kind == "s8" else 2) // 8  # words of A; B has half of them
    places = [f"${i}" for i in range(8 + count + count // 2)]
    groups = places[:4], places[4 : 4 + count], places[4 + count : -4], places[-4:]
    code = f"mma.sync.aligned.m16n8k{k}.row.col.{total}.{kind}.{kind}.{total} "
    code += ", ".join(f"{{{', '.join(group)}}}" for group in groups) + ";"
    constraints = ",".join([f"={letter}"] * 4 + ["r"] * (count + count // 2) + [letter] * 4)

    def lower(context, builder, signature, values):
        sums = [builder.extract_value(values[0], i) for i in range(4)]
        kinds = ir.FunctionType(ir.LiteralStructType([scalar] * 4), [_INT] * (len(values) - 1) + [scalar] * 4)
        function = ir.InlineAsm(kinds, code, constraints, side_effect=False)
        found = builder.call(function, [*values[1:], *sums], attrs=("convergent",))
        return cgutils.pack_array(builder, [builder.extract_value(found, i) for i in range(4)])

    quad = types.UniTuple(types.int32 if kind == "s8" else types.float32, 4)

    def six(typingctx, c, a0, a1, a2, a3, b0, b1):
        return quad(quad, *[types.int32] * 6), lower

    def three(typingctx, c, a0, a1, b):
        return quad(quad, *[types.int32] * 3), lower

    return intrinsic(six if count == 4 else three)


mma_f16, mma_bf16 = _mma("f16"), _mma("bf16")
mma_s8, mma_s8_short = _mma("s8", 32), _mma("s8", 16)


def _vector(context: Any, builder: Any, count: int, kind: Any, array: Any, index: Any) -> Any:
    """The place of `count` words in shared memory."""
    data = context.make_array(kind)(context, builder, array).data
    data = builder.addrspacecast(data, ir.IntType(8).as_pointer(3), "shared")
    return builder.gep(builder.bitcast(data, ir.VectorType(_INT, count).as_pointer(3)), [index])


def _shared(count: int, further: bool = False) -> Any:
    """An intrinsic (array in shared memory, index) -> `count` words: a scalar for one, otherwise a tuple.

    `further` takes a constant too, which is added to the index: loads that differ in it share an address.
    """
    result = types.int32 if count == 1 else types.UniTuple(types.int32, count)

    def load(context, builder, signature, values):
        place = _vector(context, builder, count, signature.args[0], *values[:2])
        loaded = builder.load(builder.gep(place, values[2:]) if further else place, align=4 * count)
        words = [builder.extract_element(loaded, ir.Constant(_INT, k)) for k in range(count)]
        return words[0] if count == 1 else cgutils.pack_array(builder, words)

    def at(typingctx, array, index):
        return result(array, types.int32), load

    def beyond(typingctx, array, index, more):
        return result(array, types.int32, types.int32), load

    return intrinsic(beyond if further else at)


def _put(count: int, further: bool = False) -> Any:
    """An intrinsic (array in shared memory, index, `count` words, which for one is a scalar).

    `further` takes a constant before the words, as `_shared` does.
    """
    given = types.int32 if count == 1 else types.UniTuple(types.int32, count)

    def store(context, builder, signature, values):
        words = values[-1]
        vector = ir.Constant(ir.VectorType(_INT, count), ir.Undefined)
        for k in range(count):
            word = words if count == 1 else builder.extract_value(words, k)
            vector = builder.insert_element(vector, word, ir.Constant(_INT, k))
        place = _vector(context, builder, count, signature.args[0], *values[:2])
        builder.store(vector, builder.gep(place, values[2:3]) if further else place, align=4 * count)
        return context.get_dummy_value()

    def at(typingctx, array, index, words):
        return types.void(array, types.int32, given), store

    def beyond(typingctx, array, index, more, words):
        return types.void(array, types.int32, types.int32, given), store

    return intrinsic(beyond if further else at)


thread_x = _register("tid.x")
thread_y = _register("tid.y")
block_x = _register("ctaid.x")
block_y = _register("ctaid.y")
block_z = _register("ctaid.z")

_i, _f = types.int32, types.float32


def _as_float(builder: Any, word: Any) -> Any:
    """The half in the low bits of a word."""
    return builder.fpext(builder.bitcast(builder.trunc(word, ir.IntType(16)), ir.HalfType()), _FLOAT)


dp4a = _asm(_i, (_i, _i, _i), "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r")
dp2a = _asm(_i, (_i, _i, _i), "dp2a.lo.s32.s32 $0, $1, $2, $3;", "=r,r,r,r")
bits = _emit(_i, (_i, _i, _i), lambda b, word, shift, mask: b.and_(b.lshr(word, shift), mask))
shl = _emit(_i, (_i, _i), lambda b, word, left: b.shl(word, left))
ror = _asm(_i, (_i, _i), "shf.r.wrap.b32 $0, $1, $1, $2;", "=r,r,r")
kept = _asm(_i, (_i,), "{.reg .b32 z; mov.u32 z, %tid.z; xor.b32 $0, $1, z;}", "=r,r")
prmt = _asm(_i, (_i, _i, _i), "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r")
or_ = _emit(_i, (_i, _i), lambda b, one, other: b.or_(one, other))
xor = _emit(_i, (_i, _i), lambda b, one, other: b.xor(one, other))
sub = _emit(_i, (_i, _i), lambda b, one, other: b.sub(one, other))
mad = _emit(_i, (_i, _i, _i), lambda b, one, other, more: b.add(b.mul(one, other), more))
signed_byte = _emit(_i, (_i, _i), lambda b, word, shift: b.sext(b.trunc(b.lshr(word, shift), ir.IntType(8)), _INT))
low_half = _emit(_f, (_i,), _as_float)
high_half = _emit(_f, (_i,), lambda b, word: _as_float(b, b.lshr(word, ir.Constant(_INT, 16))))
to_half = _asm(_i, (_f,), "{.reg .b16 h; cvt.rn.f16.f32 h, $1; cvt.u32.u16 $0, h;}", "=r,f")
# the first operand of the instruction is the upper half
pack_f16 = _asm(_i, (_f, _f), "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f")
pack_bf16 = _asm(_i, (_f, _f), "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f")
sub_f16 = _asm(_i, (_i, _i), "sub.rn.f16x2 $0, $1, $2;", "=r,r,r")
float_bits = _emit(_i, (_f,), lambda b, value: b.bitcast(value, _INT))
bits_float = _emit(_f, (_i,), lambda b, word: b.bitcast(word, _FLOAT))
fma = _asm(_f, (_f, _f, _f), "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f")
round_even = _asm(_i, (_f,), "cvt.rni.s32.f32 $0, $1;", "=r,f")

stream_16 = _load("ld.global.nc.L1::no_allocate.v4.u32", 4, _i)
stream_8 = _load("ld.global.nc.L1::no_allocate.v2.u32", 2, _i)
stream_4 = _load("ld.global.nc.L1::no_allocate.u32", 1, _i)
ahead_16 = _load("ld.global.nc.L1::no_allocate.L2::128B.v4.u32", 4, _i)
ahead_8 = _load("ld.global.nc.L1::no_allocate.L2::128B.v2.u32", 2, _i)
ahead_4 = _load("ld.global.nc.L1::no_allocate.L2::128B.u32", 1, _i)
ahead_2 = _load("ld.global.nc.L1::no_allocate.L2::128B.u16", 1, _i)
ahead_1 = _load("ld.global.nc.L1::no_allocate.L2::128B.u8", 1, _i)
cached_16 = _load("ld.global.nc.v4.u32", 4, _i)
cached_8 = _load("ld.global.nc.v2.u32", 2, _i)
cached_4 = _load("ld.global.nc.u32", 1, _i)
cached_2 = _load("ld.global.nc.u16", 1, _i)
cached_1 = _load("ld.global.nc.u8", 1, _i)
cached_4_further = _load("ld.global.nc.u32", 1, _i, further=True)
cached_16f = _load("ld.global.nc.v4.f32", 4, _f)
load_16 = _load("ld.global.v4.u32", 4, _i, changing=True)
load_8 = _load("ld.global.v2.u32", 2, _i, changing=True)
load_16f = _load("ld.global.v4.f32", 4, _f, changing=True)
load_4f = _load("ld.global.f32", 1, _f, changing=True)
prefetch_16, prefetch_8, prefetch_4 = _prefetch(4, 16), _prefetch(2, 8), _prefetch(1, 4)
prefetch_2, prefetch_1 = _prefetch(1, 2), _prefetch(1, 1)
shared_16, shared_8, shared_4 = _shared(4), _shared(2), _shared(1)
shared_16_further, shared_8_further = _shared(4, further=True), _shared(2, further=True)
shared_4_further = _shared(1, further=True)
put_16, put_4 = _put(4), _put(1)
put_16_further = _put(4, further=True)
store_4 = _store(_i, 32)
store_2 = _store(_i, 16)
store_1 = _store(_i, 8)


@device_function
def half_warp_sum(value):
    """In each half of a warp, the sum over its 16 lanes."""
    value += cuda.shfl_xor_sync(_ALL_LANES, value, 8)
    value += cuda.shfl_xor_sync(_ALL_LANES, value, 4)
    value += cuda.shfl_xor_sync(_ALL_LANES, value, 2)
    value += cuda.shfl_xor_sync(_ALL_LANES, value, 1)
    return value


@device_function
def warp_sum(value):
    """The sum over a warp, in all its lanes."""
    return half_warp_sum(value + cuda.shfl_xor_sync(_ALL_LANES, value, 16))


@device_function
def warp_max(value):
    """The maximum over a warp, in all its lanes; NaN may be dropped."""
    value = max(value, cuda.shfl_xor_sync(_ALL_LANES, value, 16))
    value = max(value, cuda.shfl_xor_sync(_ALL_LANES, value, 8))
    value = max(value, cuda.shfl_xor_sync(_ALL_LANES, value, 4))
    value = max(value, cuda.shfl_xor_sync(_ALL_LANES, value, 2))
    value = max(value, cuda.shfl_xor_sync(_ALL_LANES, value, 1))
    return value


@device_function
def warp_any(condition):
    """Whether the condition holds in any lane of a warp."""
    return cuda.any_sync(_ALL_LANES, condition)


@device_function
def other_half(value):
    """The value of the lane 16 away."""
    return cuda.shfl_xor_sync(_ALL_LANES, value, 16)
