"""The GPU in NumPy that kernels are proved on: instructions of known result, and what it refuses."""

from __future__ import annotations

import struct
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tests.support.gpu.machine import Program
from tests.support.gpu.memory import GpuError

pytestmark = pytest.mark.proof
HEAD = ".version 7.0\n.target sm_75\n.address_size 64\n"
REGISTERS = (
    ".reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<40>; .reg .f32 %f<9>; .reg .b64 %rd<40>; .reg .f64 %fd<9>;\n"
)


def kernel(body: str, arrays: int = 1, shared: int = 0) -> Program:
    """Kernel of so many arrays: their addresses are %rd1, %rd2 ...; %r30 is the thread, %r31 the block."""
    parameters = ", ".join(f".param .u64 p{i}" for i in range(arrays))
    own = f".visible .shared .align 4 .b8 own[{shared}];\n" if shared else ""
    loads = "".join(f"ld.param.u64 %rd{i + 1}, [p{i}];\n" for i in range(arrays))
    start = "mov.u32 %r30, %tid.x;\nmov.u32 %r31, %ctaid.x;\nmul.wide.u32 %rd30, %r30, 4;\n"
    return Program(f"{HEAD}{own}.visible .entry k({parameters})\n{{\n{REGISTERS}{loads}{start}{body}\nret;\n}}\n")


def stored(body: str, threads: int = 32, blocks: int = 1, shared: int = 0) -> np.ndarray:
    """What each thread of a block leaves in %r1; uint32 [threads]."""
    out = np.zeros(threads, np.uint32)
    end = "add.s64 %rd31, %rd1, %rd30; st.global.u32 [%rd31], %r1;"
    kernel(body + end, shared=shared).launch(blocks, threads, [out])
    return out


def bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def f32(value: float) -> str:
    return f"0f{bits(value):08X}"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("mov.u32 %r2, 5; add.s32 %r1, %r2, -7;", -2),
        ("mov.u32 %r2, -8; shr.s32 %r1, %r2, 1;", -4),
        ("mov.u32 %r2, -8; shr.u32 %r1, %r2, 28;", 15),
        ("mov.u32 %r2, 1; shl.b32 %r1, %r2, 32;", 0),  # not the shift modulo 32
        ("mov.u32 %r2, -1; shr.s32 %r1, %r2, 40;", -1),
        ("mov.u32 %r2, -7; div.s32 %r1, %r2, 2;", -3),  # towards zero
        ("mov.u32 %r2, -7; rem.s32 %r1, %r2, 2;", -1),
        ("mov.u32 %r2, -7; div.u32 %r1, %r2, 2;", (2**32 - 7) // 2),
        ("mov.u32 %r2, 65537; mul.lo.s32 %r1, %r2, %r2;", 131073),
        ("mov.u32 %r2, -3; mov.u32 %r3, 5; mov.u32 %r4, 100; mad.lo.s32 %r1, %r2, %r3, %r4;", 85),
        ("mov.u32 %r2, -3; mul.wide.s32 %rd2, %r2, 4; shr.u64 %rd3, %rd2, 32; cvt.u32.u64 %r1, %rd3;", -1),
        ("mov.u64 %rd2, -3; mov.u64 %rd3, 5; mul.hi.s64 %rd4, %rd2, %rd3; cvt.u32.u64 %r1, %rd4;", -1),
        ("mov.u64 %rd2, -3; mov.u64 %rd3, 5; mul.hi.u64 %rd4, %rd2, %rd3; cvt.u32.u64 %r1, %rd4;", 4),
        ("mov.u64 %rd2, 0x123456789ABCDEF; mul.hi.s64 %rd4, %rd2, %rd2; cvt.u32.u64 %r1, %rd4;", 0xdc33f6ac),
        # bytes 127, -128, 1, 2 times 1, 1, -1, 3, and 10
        ("mov.u32 %r2, 0x0201807F; mov.u32 %r3, 0x03FF0101; dp4a.s32.s32 %r1, %r2, %r3, 10;", 127 - 128 - 1 + 6 + 10),
        # halves -2 and 300 times the lowest bytes, -1 and 2
        ("mov.u32 %r2, 0x012CFFFE; mov.u32 %r3, 0x7F7F02FF; dp2a.lo.s32.s32 %r1, %r2, %r3, 1;", 2 + 600 + 1),
        ("mov.u32 %r2, 0x33221100; mov.u32 %r3, 0x77665544; prmt.b32 %r1, %r2, %r3, 0x7041;", 0x77004411),
        ("mov.u32 %r2, 0x33228100; prmt.b32 %r1, %r2, 0, 0x8190;", 0x0081FF00),  # 8 + i: the sign of byte i
        ("mov.u32 %r2, 0x12345678; shf.r.wrap.b32 %r1, %r2, %r2, 40;", 0x78123456),
        ("mov.u32 %r2, 0x12345678; mov.u32 %r3, 0x9ABCDEF0; shf.l.wrap.b32 %r1, %r2, %r3, 8;", 0xBCDEF012),
        ("mov.u64 %rd2, 5; mov.u64 %rd3, 9; bfi.b64 %rd4, %rd2, %rd3, 4, 60; cvt.u32.u64 %r1, %rd4;", 0x59),
        ("mov.u64 %rd2, 5; mov.u64 %rd3, 9; bfi.b64 %rd4, %rd2, %rd3, 0, 64; cvt.u32.u64 %r1, %rd4;", 5),
        ("mov.u32 %r2, 0x00F50000; bfe.u32 %r1, %r2, 16, 4;", 5),
        ("mov.u32 %r2, 0x00F50000; bfe.s32 %r1, %r2, 20, 4;", -1),
        ("mov.u32 %r2, 0x1280; cvt.s32.s8 %r1, %r2;", -128),
        ("mov.u32 %r2, 0x12345; cvt.u16.u32 %h1, %r2; cvt.u32.u16 %r1, %h1;", 0x2345),
        ("mov.u32 %r2, -1; cvt.s64.s32 %rd2, %r2; shr.u64 %rd2, %rd2, 40; cvt.u32.u64 %r1, %rd2;", 0xFFFFFF),
        (f"mov.f32 %f1, {f32(2.5)}; cvt.rni.s32.f32 %r1, %f1;", 2),  # ties to even
        (f"mov.f32 %f1, {f32(-3.5)}; cvt.rni.s32.f32 %r1, %f1;", -4),
        ("mov.f32 %f1, 0f7FC00000; cvt.rni.s32.f32 %r1, %f1;", 0),  # NaN
        (f"mov.f32 %f1, {f32(3e9)}; cvt.rni.s32.f32 %r1, %f1;", 2**31 - 1),
        (f"mov.f32 %f1, {f32(1 + 2**-11)}; cvt.rn.f16.f32 %h1, %f1; cvt.u32.u16 %r1, %h1;", 0x3C00),
        (f"mov.f32 %f1, {f32(65520)}; cvt.rn.f16.f32 %h1, %f1; cvt.u32.u16 %r1, %h1;", 0x7C00),
        ("mov.u32 %r2, 0x8001; cvt.u16.u32 %h1, %r2; cvt.f32.f16 %f1, %h1; mov.b32 %r1, %f1;", bits(-(2.0**-24))),
        # 1 + 2^-11, a tie, goes below; 65520 above is infinite
        (f"mov.f32 %f1, {f32(1 + 2**-11)}; mov.f32 %f2, {f32(65520)}; cvt.rn.f16x2.f32 %r1, %f2, %f1;", 0x7C003C00),
        (f"mov.f32 %f1, {f32(1 + 2**-8)}; mov.f32 %f2, {f32(-3e38)}; cvt.rn.bf16x2.f32 %r1, %f2, %f1;", 0xFF623F80),
        (f"mov.f32 %f1, {f32(-1.5)}; cvt.sat.f32.f32 %f2, %f1; mov.b32 %r1, %f2;", 0),
        (f"mov.f32 %f1, {f32(2)}; mov.f32 %f2, 0f7FC00000; max.f32 %f3, %f1, %f2; mov.b32 %r1, %f3;", bits(2)),
        (f"mov.f32 %f1, {f32(2)}; ex2.approx.ftz.f32 %f2, %f1; mov.b32 %r1, %f2;", bits(4)),
        (f"mov.f32 %f1, {f32(-127.5)}; ex2.approx.ftz.f32 %f2, %f1; mov.b32 %r1, %f2;", 0),
        # 1 - 2^-30 and -1 - 2^-24, towards zero
        (f"add.rz.f32 %f1, {f32(1)}, {f32(-(2**-30))}; mov.b32 %r1, %f1;", bits(1 - 2**-24)),
        (f"add.rz.f32 %f1, {f32(-1)}, {f32(-(2**-24))}; mov.b32 %r1, %f1;", bits(-1)),
        (f"mov.f32 %f1, {f32(3)}; rcp.rn.f32 %f2, %f1; mov.b32 %r1, %f2;", bits(1 / 3)),
        ("mov.b64 %fd1, {1, 0x3FF00000}; mov.b64 {%r1, %r2}, %fd1;", 1),
        ("mov.f64 %fd1, 0d3FF0000000000001; mov.b64 {%r2, %r1}, %fd1;", 0x3FF00000),
        ("setp.lt.u32 %p1, %r30, 64; selp.b32 %r1, 7, 8, %p1;", 7),
        (f"mov.f32 %f1, 0f7FC00000; setp.lt.f32 %p1, %f1, {f32(1)}; selp.b32 %r1, 1, 2, %p1;", 2),
        (f"mov.f32 %f1, 0f7FC00000; setp.geu.f32 %p1, %f1, {f32(1)}; selp.b32 %r1, 1, 2, %p1;", 1),
        ("mov.f32 %f1, 0f7FC00000; setp.ne.f32 %p1, %f1, %f1; selp.b32 %r1, 1, 2, %p1;", 2),
        ("mov.f32 %f1, 0f7FC00000; setp.neu.f32 %p1, %f1, %f1; selp.b32 %r1, 1, 2, %p1;", 1),
        ("mov.pred %p1, 0; mov.u32 %r1, 3; @%p1 mov.u32 %r1, 4; @!%p1 add.s32 %r1, %r1, 1;", 4),
    ],
)  # fmt: skip
def test_instructions_do_what_the_isa_says(code: str, expected: int) -> None:
    assert set(stored(code)) == {expected & 0xFFFFFFFF}


@pytest.mark.parametrize("down", [False, True])
def test_a_fused_product_is_rounded_once(down: bool) -> None:
    rng = np.random.default_rng(0)
    a, b, c = (np.ldexp(rng.uniform(-2, 2, 4096), rng.integers(-9, 9, 4096)).astype(np.float32) for _ in range(3))
    c[:2048] = -(a * b)[:2048]  # where all that is left is rounding
    out = np.zeros(4096, np.float32)
    code = "mov.u32 %r1, %ctaid.x; mad.lo.s32 %r30, %r1, 1024, %r30;"
    for i in (2, 3, 4):
        code += f"mad.wide.u32 %rd5, %r30, 4, %rd{i}; ld.global.f32 %f{i}, [%rd5];"
    code += f"fma.{'rm' if down else 'rn'}.f32 %f1, %f2, %f3, %f4;"
    code += "mad.wide.u32 %rd5, %r30, 4, %rd1; st.global.f32 [%rd5], %f1;"
    kernel(code, 4).launch(4, 1024, [out, a, b, c])
    for x, y, z, found in zip(*(v.tolist() for v in (a, b, c, out)), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        near = np.float32(found)
        if down:
            assert Fraction(float(near)) <= exact < Fraction(float(np.nextafter(near, np.float32(np.inf))))
        else:
            error = abs(Fraction(found) - exact)
            for other in (np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))):
                assert error <= abs(Fraction(float(other)) - exact)


def test_lanes_that_took_different_ways_meet_again() -> None:
    code = """
    setp.lt.u32 %p1, %r30, 5;
    mov.u32 %r1, 0;
    mov.u32 %r2, 0;
    @%p1 bra $FEW;
$MORE:
    add.s32 %r1, %r1, %r30;
    add.s32 %r2, %r2, 1;
    setp.lt.u32 %p2, %r2, %r30;
    @%p2 bra $MORE;
    bra.uni $END;
$FEW:
    mov.u32 %r1, 1000;
$END:
    shfl.sync.bfly.b32 %r1|%p3, %r1, 1, 31, -1;
    """
    own = np.array([1000 if i < 5 else i * i for i in range(64)])
    assert (stored(code, 64) == own[np.arange(64) ^ 1]).all()


@pytest.mark.parametrize(
    ("mode", "by", "limit", "source"),
    [
        ("bfly", 16, 31, lambda i: i ^ 16),
        ("down", 3, 31, lambda i: i + 3 if i + 3 < 32 else i),
        ("up", 3, 0, lambda i: i - 3 if i >= 3 else i),
        ("idx", 7, 31, lambda i: 7),
        ("bfly", 4, 0x181F, lambda i: i ^ 4),  # within 8 lanes
        ("down", 3, 0x181F, lambda i: i + 3 if i % 8 < 5 else i),
    ],
)
def test_shuffles_take_from_the_lane_they_name(mode: str, by: int, limit: int, source: Any) -> None:
    found = stored(f"mul.lo.s32 %r2, %r30, 10; shfl.sync.{mode}.b32 %r1|%p1, %r2, {by}, {limit}, -1;", 64)
    assert found.tolist() == [10 * (i // 32 * 32 + source(i % 32)) for i in range(64)]


def test_votes_are_those_of_a_warp() -> None:
    code = "setp.eq.s32 %p1, %r30, 40; vote.sync.any.pred %p2, %p1, -1; selp.b32 %r1, 1, 0, %p2;"
    assert stored(code, 96).tolist() == [0] * 32 + [1] * 32 + [0] * 32
    code = "setp.ge.s32 %p1, %r30, 40; vote.sync.ballot.b32 %r1, %p1, -1;"
    assert stored(code, 64).tolist() == [0] * 32 + [0xFFFFFF00] * 32


EXCHANGE = """
    mov.u64 %rd2, own;
    mad.wide.u32 %rd3, %r30, 4, %rd2;
    st.shared.u32 [%rd3], %r30;
    {barrier}
    xor.b32 %r2, %r30, {mask};
    mad.wide.u32 %rd3, %r2, 4, %rd2;
    ld.shared.u32 %r1, [%rd3];
"""


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_tensor_cores_multiply_fragments(kind: str) -> None:
    """Each lane loads its words from A [16, 16] and B transposed, [8, 16], as the ISA's figures have them."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(-8, 9, (16, 16)).astype(np.float32), rng.integers(-8, 9, (8, 16)).astype(np.float32)
    c = rng.standard_normal((16, 8)).astype(np.float32)
    code = "shr.u32 %r2, %r30, 2; and.b32 %r3, %r30, 3;"  # the row or column, and which pair of k
    for array, words in ((2, 4), (3, 2)):
        code += f"mad.lo.s32 %r4, %r2, 8, %r3; mad.wide.u32 %rd10, %r4, 4, %rd{array};"  # 8 words of 4 bytes a row
        for i in range(words):
            below, beside = (i % 2, i // 2) if array == 2 else (0, i)
            code += f"ld.global.u32 %r{10 * (array - 1) + i}, [%rd10+{256 * below + 16 * beside}];"
    code += "mad.lo.s32 %r4, %r2, 4, %r3; mad.wide.u32 %rd11, %r4, 8, %rd4; mad.wide.u32 %rd12, %r4, 8, %rd1;"
    code += "ld.global.v2.f32 {%f1, %f2}, [%rd11]; ld.global.v2.f32 {%f3, %f4}, [%rd11+256];"
    code += f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    code += " {%f1, %f2, %f3, %f4}, {%r10, %r11, %r12, %r13}, {%r20, %r21}, {%f1, %f2, %f3, %f4};"
    code += "st.global.v2.f32 [%rd12], {%f1, %f2}; st.global.v2.f32 [%rd12+256], {%f3, %f4};"
    halves = [m.astype(np.float16) if kind == "f16" else (m.view(np.uint32) >> 16).astype(np.uint16) for m in (a, b)]
    out = np.zeros(128, np.float32)
    kernel(code, 4).launch(1, 32, [out, *(m.reshape(-1) for m in (*halves, c))])
    np.testing.assert_array_equal(out.reshape(16, 8), (a.astype(np.float64) @ b.T + c).astype(np.float32))


def test_tensor_cores_take_whole_warps() -> None:
    code = "setp.eq.s32 %p1, %r30, 0; @%p1 ret;"
    code += "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1, %f1, %f1, %f1}, {%r1, %r1, %r1, %r1}, {%r1, %r1},"
    code += " {%f1, %f1, %f1, %f1};"
    with pytest.raises(GpuError, match="lanes of the warp have ended"):
        stored(code)


COPY = """
    mov.u64 %rd2, own;
    mad.wide.u32 %rd3, %r30, 16, %rd2;
    mad.wide.u32 %rd4, %r30, 16, %rd5;
    cp.async.cg.shared.global [%rd3], [%rd4], 16;
    cp.async.commit_group;
    cp.async.cg.shared.global [%rd3+512], [%rd4+512], 16;
    cp.async.commit_group;
    {wait}
    xor.b32 %r2, %r30, 5;
    mad.wide.u32 %rd3, %r2, 16, %rd2;
    ld.shared.u32 %r1, [%rd3+{at}];
    mad.wide.u32 %rd4, %r30, 4, %rd1;
    st.global.u32 [%rd4], %r1;
"""


def copied(wait: str, at: int) -> np.ndarray:
    """What lanes find 5 away (xor) after their copies of 16 bytes, the second group's from byte 512 on."""
    out, source = np.zeros(32, np.uint32), np.arange(256, dtype=np.uint32)
    kernel("mov.u64 %rd5, %rd2;" + COPY.format(wait=wait, at=at), 2, shared=1024).launch(1, 32, [out, source])
    return out


@pytest.mark.parametrize(("left", "at", "first"), [(1, 0, 0), (0, 0, 0), (0, 512, 128)])
def test_a_copy_has_arrived_where_its_thread_waits_and_a_barrier_shows_it(left: int, at: int, first: int) -> None:
    found = copied(f"cp.async.wait_group {left}; bar.sync 0;", at)
    assert found.tolist() == [first + 4 * (i ^ 5) for i in range(32)]


@pytest.mark.parametrize(
    ("wait", "at", "message"),
    [
        ("bar.sync 0;", 0, "before anything was stored"),
        ("cp.async.wait_group 1; bar.sync 0;", 512, "before anything was stored"),
        ("cp.async.wait_group 0;", 0, "no barrier between thread 0 and what thread 5 stored"),
    ],
)
def test_a_copy_that_is_not_awaited_or_not_shown_is_an_error(wait: str, at: int, message: str) -> None:
    with pytest.raises(GpuError, match=message):
        copied(wait, at)


def test_a_copy_onto_what_others_still_read_is_a_race() -> None:
    code = "st.shared.u32 [own], 1; bar.sync 0; ld.shared.u32 %r1, [own]; setp.eq.s32 %p1, %r30, 40;"
    code += "@%p1 cp.async.cg.shared.global [own], [%rd1], 16;"
    with pytest.raises(GpuError, match="thread 40 and what thread 63 read"):
        stored(code, 64, shared=16)


def test_a_barrier_lets_a_block_see_what_its_threads_have_stored() -> None:
    found = stored(EXCHANGE.format(barrier="bar.sync 0;", mask=40), 64, shared=256)
    assert found.tolist() == [i ^ 40 for i in range(64)]
    found = stored(EXCHANGE.format(barrier="bar.warp.sync 0xffffffff;", mask=8), 64, shared=256)
    assert found.tolist() == [i ^ 8 for i in range(64)]


@pytest.mark.parametrize(("barrier", "mask"), [("", 8), ("bar.warp.sync 0xffffffff;", 40)])
def test_a_missing_barrier_is_a_race(barrier: str, mask: int) -> None:
    with pytest.raises(GpuError, match="no barrier between thread 0 and what thread"):
        stored(EXCHANGE.format(barrier=barrier, mask=mask), 64, shared=256)


def test_storing_what_others_have_read_needs_a_barrier_too() -> None:
    again = "bar.sync 0; ld.shared.u32 %r2, [own]; {barrier} setp.eq.s32 %p1, %r30, 40;"
    again += "@%p1 st.shared.u32 [own], 9;"
    start = "setp.eq.s32 %p1, %r30, 0; @%p1 st.shared.u32 [own], %r30; mov.u32 %r1, 0;"
    stored(start + again.format(barrier="bar.sync 0;"), 64, shared=4)
    with pytest.raises(GpuError, match=r"thread 40 and what thread 63 read at byte"):
        stored(start + again.format(barrier="bar.warp.sync 0xffffffff;"), 64, shared=4)


def test_atomics_take_turns_and_tell_what_was_there() -> None:
    counter = np.zeros(1, np.uint32)
    out = np.zeros(64, np.uint32)
    code = "atom.global.add.u32 %r1, [%rd1], 2; mad.wide.u32 %rd3, %r30, 4, %rd2; st.global.u32 [%rd3], %r1;"
    kernel(code, 2).launch(1, 64, [counter, out])
    assert counter == 128
    assert sorted(out) == list(range(0, 128, 2))
    low = "mov.u32 %r2, 50; setp.eq.s32 %p1, %r30, 0; @%p1 st.shared.u32 [own], %r2; bar.sync 0;"
    low += "atom.shared.min.s32 %r3, [own], %r30; bar.sync 0; ld.shared.u32 %r1, [own];"
    assert set(stored(low, 64, shared=4)) == {0}


@pytest.mark.parametrize("blocks", [3, 200])
def test_every_block_has_shared_memory_of_its_own(blocks: int) -> None:
    out = np.zeros(blocks * 512, np.uint32)
    code = """
    mov.u32 %r2, %nctaid.x;
    mad.lo.s32 %r3, %r31, 512, %r30;
    mov.u64 %rd2, own;
    add.s64 %rd3, %rd2, %rd30;
    st.shared.u32 [%rd3], %r3;
    bar.sync 0;
    xor.b32 %r4, %r30, 511;
    mad.wide.u32 %rd3, %r4, 4, %rd2;
    ld.shared.u32 %r1, [%rd3];
    mad.wide.u32 %rd3, %r3, 4, %rd1;
    st.global.u32 [%rd3], %r1;
    """
    kernel(code, shared=2048).launch(blocks, 512, [out])
    assert (out.reshape(-1, 512) == np.arange(blocks * 512).reshape(-1, 512)[:, ::-1]).all()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("ld.global.u32 %r1, [%rd1+128];", "byte 128 of argument 0, which has 128"),
        ("ld.global.u32 %r1, [%rd1+-4];", "byte -4 of argument 0"),
        ("ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1+116];", "byte 116 of argument 0"),
        ("ld.global.u32 %r1, [%rd1+2];", "not a multiple of 4"),
        ("ld.global.nc.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1+8];", "not a multiple of 16"),
        ("mov.u64 %rd2, 64; ld.global.u32 %r1, [%rd2];", "address 0x40"),
        ("ld.shared.u32 %r1, [own+4];", "beyond an array"),
        ("ld.shared.u32 %r1, [own];", "before anything was stored"),
        ("mov.u32 %r1, 0; st.global.u32 [%rd1], %r30;", "threads store different values at one place"),
        ("st.global.u32 [%rd1], 5; ld.global.nc.u32 %r1, [%rd1];", "past the coherent cache"),
        ("setp.eq.s32 %p1, %r30, 0; @%p1 ret; bar.warp.sync -1;", "lanes of the warp have ended"),
        ("setp.eq.s32 %p1, %r30, 0; @%p1 bra $A; bar.sync 0; bra $B; $A: bar.warp.sync -1; $B:", "for ever"),
    ],
)
def test_what_a_gpu_would_not_forgive_is_an_error(code: str, message: str) -> None:
    with pytest.raises(GpuError, match=message):
        stored(code, shared=4)


def test_a_barrier_does_not_wait_for_threads_that_have_ended() -> None:
    out = np.zeros(64, np.uint32)
    code = "setp.lt.s32 %p1, %r30, 7; @%p1 ret; bar.sync 0; add.s64 %rd31, %rd1, %rd30; st.global.u32 [%rd31], 1;"
    kernel(code).launch(1, 64, [out])
    assert out.tolist() == [0] * 7 + [1] * 57


@pytest.mark.parametrize(
    "code", ["sin.approx.f32 %f1, %f2;", "add.sat.s32 %r1, %r2, %r3;", "ld.local.u32 %r1, [%rd1];",
             "prefetch.global.L1 [%rd1];", "cvt.f32.s32 %f1, %r1;", "shfl.bfly.b32 %r1, %r2, 1, 31;",
             "mul.s32 %r1, %r2, %r3;"],
)  # fmt: skip
def test_instructions_it_does_not_know_are_named(code: str) -> None:
    with pytest.raises(NotImplementedError, match=code.split()[0].replace(".", r"\.")):
        kernel(code)


# a block stores, counts itself, and, as the last, reads what the first one has stored
LAST = """
    mad.lo.s32 %r2, %r31, 64, %r30;
    mad.wide.u32 %rd3, %r2, 4, %rd1;
    st.global.u32 [%rd3], %r2;
    {before}
    setp.eq.s32 %p1, %r30, 0;
    @%p1 {count} %r3, [%rd2], 1;
    @%p1 {fence}
    {after}
    setp.eq.s32 %p2, %r31, 0;
    @%p2 ret;
    xor.b32 %r4, %r30, 33;
    mad.wide.u32 %rd3, %r4, 4, %rd1;
    ld.global.u32 %r1, [%rd3];
"""
BETWEEN = {
    "before": "bar.sync 0;",
    "count": "atom.release.gpu.global.add.s32",
    "fence": "fence.acq_rel.gpu;",
    "after": "bar.sync 0;",
}


def test_a_block_may_read_what_others_have_released_and_it_has_acquired() -> None:
    kernel(LAST.format(**BETWEEN), 2).launch(2, 64, [np.zeros(128, np.uint32), np.zeros(1, np.uint32)])


@pytest.mark.parametrize(
    ("part", "instead"),
    [("before", ""), ("count", "atom.global.add.s32"), ("fence", "mov.u32 %r5, 0;"), ("after", "")],
)
def test_what_another_block_has_stored_is_not_read_without_any_of_these(part: str, instead: str) -> None:
    code = LAST.format(**BETWEEN | {part: instead})
    with pytest.raises(GpuError, match="no release and acquire between thread 64 and what thread 33 of another block"):
        kernel(code, 2).launch(2, 64, [np.zeros(128, np.uint32), np.zeros(1, np.uint32)])


WAIT = "griddepcontrol.wait;"
STORE = "add.s64 %rd31, %rd1, %rd30; st.global.u32 [%rd31], %r30;"


def test_a_launch_that_may_begin_early_waits_before_it_touches_memory() -> None:
    code = f"griddepcontrol.launch_dependents; prefetch.global.L2 [%rd2+64]; {WAIT} ld.global.u32 %r1, [%rd2]; {STORE}"
    out, source = np.zeros(64, np.uint32), np.ones(64, np.uint32)
    kernel(code, 2).launch(1, 64, [out, source], dependent=True)
    assert out.tolist() == list(range(64))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (f"ld.global.u32 %r1, [%rd2]; {WAIT} {STORE}", "ld.global.u32 .*: global memory before griddepcontrol.wait"),
        (f"ld.global.nc.u32 %r1, [%rd2]; {WAIT} {STORE}", "ld.global.nc.*: global memory before griddepcontrol.wait"),
        (f"{STORE} {WAIT}", "st.global.u32 .*: global memory before griddepcontrol.wait"),
        (f"atom.global.add.u32 %r1, [%rd1], 2; {WAIT}", "atom.*: global memory before griddepcontrol.wait"),
        (f"cp.async.cg.shared.global [own], [%rd2], 16; {WAIT}", "cp.async.*: global memory before"),
        (STORE, "global memory before griddepcontrol.wait"),
        ("griddepcontrol.launch_dependents;", "a thread ends without griddepcontrol.wait"),
        # one thread of many
        (f"setp.eq.s32 %p1, %r30, 7; @%p1 bra $A; {WAIT} $A: {STORE}", "global memory before griddepcontrol.wait"),
        (f"setp.eq.s32 %p1, %r30, 7; @%p1 ret; {WAIT} {STORE}", "a thread ends without griddepcontrol.wait"),
        ("prefetch.global.L2 [%rd2+256];", "byte 256 of argument 1"),
    ],
)
def test_a_launch_that_may_begin_early_and_does_not_wait_is_an_error(code: str, message: str) -> None:
    arrays = [np.zeros(64, np.uint32), np.ones(64, np.uint32)]
    with pytest.raises(GpuError, match=message):
        kernel(code, 2, 16).launch(1, 64, arrays, dependent=True)
    if "prefetch" not in code:  # launched behind the others it is none
        kernel(code, 2, 16).launch(1, 64, arrays)


def test_what_stays_in_l1_is_loaded_once_by_a_block() -> None:
    out, source = np.zeros(32, np.uint32), np.arange(128, dtype=np.uint32)
    for hint, sectors in (("", 2), (".L1::no_allocate", 4 * 3)):
        code = f"ld.global.nc{hint}.u32 %r1, [%rd2+64];" * 3
        memory = kernel(code, 2).launch(2, 64, [out, source])
        assert (memory.regions[1].fetched, memory.regions[1].fetched_from_l2) == (4 * 3 * 32, sectors * 32)


def test_what_each_array_was_loaded_is_counted() -> None:
    out, source = np.zeros(32, np.uint32), np.arange(128, dtype=np.uint32)
    code = "mad.wide.u32 %rd3, %r30, 16, %rd2; ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd3];" * 2
    memory = kernel(code, 2).launch(1, 32, [out, source])
    assert [region.fetched for region in memory.regions] == [0, 2 * 512]
