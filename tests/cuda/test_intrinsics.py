"""What instructions of cuda/toolchain/intrinsics.py compute, as compiled PTX on the machine of tests/support/gpu."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support import ptx

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

from bridge.cuda.toolchain.intrinsics import (
    bits,
    bits_float,
    copies_end,
    copies_wait,
    copy_16,
    dp2a,
    dp4a,
    float_bits,
    fma,
    high_half,
    low_half,
    mad,
    mma_bf16,
    mma_f16,
    mma_s8,
    mma_s8_short,
    or_,
    pack_bf16,
    pack_f16,
    prmt,
    ror,
    round_even,
    shared_16,
    shl,
    signed_byte,
    sub,
    thread_x,
    to_half,
    xor,
)
from bridge.cuda.toolchain.launch import Kernel
from numba import cuda

pytestmark = [
    pytest.mark.skipif(ptx.unavailable() is not None, reason=str(ptx.unavailable())),
    pytest.mark.usefixtures("gpu"),
    pytest.mark.proof,
]


def _fragments(a, b, out):
    """a [4, 32], b [2, 32]: words of lanes; out [4 * 32, 4]: products of f16, of bf16, what is copied, and the copy."""
    i = thread_x()
    tile = cuda.shared.array(32, np.complex128)
    copy_16(tile, i ^ 3, out, 2 * 32 + i)
    copies_end()
    copies_end()
    copies_wait()
    cuda.syncthreads()
    quad = shared_16(tile, i)
    zero = np.float32(i)
    start = (zero, zero, zero, zero)
    f16 = mma_f16(start, a[0, i], a[1, i], a[2, i], a[3, i], b[0, i], b[1, i])
    bf16 = mma_bf16(start, a[0, i], a[1, i], a[2, i], a[3, i], b[0, i], b[1, i])
    for k in range(4):
        out[i, k] = f16[k]
        out[32 + i, k] = bf16[k]
        out[96 + i, k] = bits_float(quad[k])


def test_tensor_cores_multiply_what_lanes_hold_and_copies_arrive():
    rng = np.random.default_rng(9)
    g, t = np.arange(32) // 4, np.arange(32) % 4
    start = np.arange(32, dtype=np.float32)
    for kind, place in ((torch.float16, 0), (torch.bfloat16, 1)):
        left, right = (torch.from_numpy(rng.standard_normal(shape)).to(kind) for shape in ((16, 16), (8, 16)))
        # pairs of columns as words
        rows, columns = (m.view(torch.int32).numpy() for m in (left, right))
        a = np.stack([rows[g, t], rows[g + 8, t], rows[g, t + 4], rows[g + 8, t + 4]])
        b = np.stack([columns[g, t], columns[g, t + 4]])
        out = np.zeros((4, 32, 4), np.float32)
        out[2] = rng.standard_normal((32, 4))
        Kernel(_fragments, "void(int32[:,::1], int32[:,::1], float32[:,::1])", oldest=(8, 0)).launch(
            1, 32, 0, a, b, out.reshape(128, 4)
        )
        product = left.double().numpy() @ right.double().numpy().T
        wanted = [product[g, 2 * t], product[g, 2 * t + 1], product[g + 8, 2 * t], product[g + 8, 2 * t + 1]]
        np.testing.assert_allclose(out[place], np.stack(wanted, 1) + start[:, None], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(out[3], out[2][np.arange(32) ^ 3])


def _byte_fragments(a, b, c, out):
    """a [4, 32], b [2, 32], c [32, 4]: words of lanes; out [64, 4]: products of 32 and of 16 columns."""
    i = thread_x()
    start = (c[i, 0], c[i, 1], c[i, 2], c[i, 3])
    long = mma_s8(start, a[0, i], a[1, i], a[2, i], a[3, i], b[0, i], b[1, i])
    short = mma_s8_short(start, a[0, i], a[1, i], b[0, i])
    for k in range(4):
        out[i, k] = long[k]
        out[32 + i, k] = short[k]


def test_tensor_cores_multiply_bytes():
    rng = np.random.default_rng(9)
    g, t = np.arange(32) // 4, np.arange(32) % 4
    left, right = (rng.integers(-128, 128, (n, 32), np.int8) for n in (16, 8))
    rows, columns = left.view(np.int32), right.view(np.int32)
    a = np.stack([rows[g, t], rows[g + 8, t], rows[g, t + 4], rows[g + 8, t + 4]])
    b = np.stack([columns[g, t], columns[g, t + 4]])
    start = rng.integers(-(2**20), 2**20, (32, 4), np.int32)
    out = np.zeros((64, 4), np.int32)
    arrays = "int32[:,::1], int32[:,::1], int32[:,::1], int32[:,::1]"
    Kernel(_byte_fragments, f"void({arrays})", oldest=(8, 0)).launch(1, 32, 0, a, b, start, out)
    for place, k in ((0, 32), (32, 16)):
        product = left[:, :k].astype(np.int32) @ right[:, :k].astype(np.int32).T
        wanted = [product[g, 2 * t], product[g, 2 * t + 1], product[g + 8, 2 * t], product[g + 8, 2 * t + 1]]
        np.testing.assert_array_equal(out[place : place + 32], np.stack(wanted, 1) + start)


def _integers(a, b, c, out):
    i = thread_x()
    out[0, i] = dp4a(a[i], b[i], c[i])
    out[1, i] = dp2a(a[i], b[i], c[i])
    out[2, i] = bits(a[i], b[i] & 31, c[i])
    out[3, i] = shl(a[i], b[i] & 31)
    out[4, i] = ror(a[i], b[i])
    out[5, i] = or_(a[i], b[i])
    out[6, i] = xor(a[i], b[i])
    out[7, i] = sub(a[i], b[i])
    out[8, i] = mad(a[i], b[i], c[i])
    out[9, i] = signed_byte(a[i], b[i] & 24)
    out[10, i] = float_bits(low_half(a[i]))
    out[11, i] = float_bits(high_half(a[i]))
    out[12, i] = to_half(bits_float(c[i]))
    out[13, i] = round_even(bits_float(c[i]))
    out[14, i] = prmt(a[i], b[i], 0x7C43)
    out[15, i] = float_bits(fma(np.float32(a[i] >> 8), np.float32(b[i] >> 8), bits_float(c[i])))
    out[16, i] = pack_f16(np.float32(1), bits_float(c[i]))
    out[17, i] = pack_bf16(np.float32(1), bits_float(c[i]))


def test_integers_and_halves_wrap_and_round_as_the_hardware_does():
    rng = np.random.default_rng(8)
    a, b = rng.integers(-(1 << 31), 1 << 31, (2, 64)).astype(np.int32)
    c = (rng.standard_normal(64) * 10.0 ** rng.integers(-8, 6, 64)).astype(np.float32).view(np.int32)
    a[:2] = -1, 0x7FFF7FFF
    a[2:6] = 0x00013C00, 0x7C00FC00, 0x03FF0001, -0x7FFF8000  # halves: tiny, infinite, subnormal, both zeros
    c[:6] = np.array([2.5, -3.5, np.nan, 65519.9, 65520, 3e9], np.float32).view(np.int32)
    out = np.zeros((18, 64), np.int32)
    Kernel(_integers, "void(int32[::1], int32[::1], int32[::1], int32[:,::1])", oldest=(8, 0)).launch(
        1, 64, 0, a, b, c, out
    )
    bytes_a, bytes_b = (v.view(np.int8).reshape(64, 4).astype(np.int64) for v in (a, b))
    halves = a.view(np.int16).reshape(64, 2).astype(np.int64)
    unsigned, long = a.view(np.uint32).astype(np.uint64), [v.astype(np.int64) for v in (a, b, c)]
    by = b & 31
    floats = c.view(np.float32).astype(np.float64)
    rounded = np.clip(np.nan_to_num(np.rint(floats)), -(1 << 31), (1 << 31) - 1)
    half = np.where(np.abs(floats) >= 65520, np.copysign(np.inf, floats), floats).astype(np.float16).view(np.uint16)
    short = torch.from_numpy(c.view(np.float32)).bfloat16().view(torch.int16).numpy().astype(np.int64)
    expected = [
        (bytes_a * bytes_b).sum(1) + long[2],
        (halves * bytes_b[:, :2]).sum(1) + long[2],
        (unsigned >> by.astype(np.uint64)).astype(np.int64) & long[2],
        (unsigned << by.astype(np.uint64)).astype(np.int64),
        (unsigned * 0x100000001 >> by.astype(np.uint64)).astype(np.int64),
        a | b,
        a ^ b,
        long[0] - long[1],
        long[0] * long[1] + long[2],
        bytes_a[np.arange(64), (b & 24) // 8],
        a.view(np.float16)[::2].astype(np.float32).view(np.int32),
        a.view(np.float16)[1::2].astype(np.float32).view(np.int32),
        half,
        rounded,
        np.stack([bytes_a[:, 3], bytes_b[:, 0], bytes_b[:, 0] >> 7, bytes_b[:, 3]], 1)
        .astype(np.int8)
        .view(np.int32)[:, 0],
        (floats + (long[0] >> 8) * (long[1] >> 8)).astype(np.float32).view(np.int32),  # the product needs 48 bits
        half.astype(np.int64) << 16 | 0x3C00,
        short << 16 | 0x3F80,
    ]
    for row, (found, wanted) in enumerate(zip(out, expected, strict=True)):
        same = found == np.asarray(wanted).astype(np.int64).astype(np.int32)
        assert (same | (np.isnan(floats) & (row in (12, 15, 16, 17)))).all(), row
