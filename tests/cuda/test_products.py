"""Products on CUDA, as far as a machine without a GPU can tell: machine code, bytes, what is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bridge.blocks import BLOCKS
from bridge.blocks.read import WRITTEN
from bridge.errors import BridgeError
from bridge.runtime import QuantTensor
from tests.support import ptx, sass
from tests.support.gpu.device import pretended_gpu
from tests.support.places import ROOT
from tests.support.random_blocks import ALL, FACTOR, assert_product, random_matrix, rounded
from tests.support.sass import weight_loads

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

from bridge.cuda import tensor
from bridge.cuda.forms import dequantize, layout
from bridge.cuda.forms.matrix import DeviceMatrix
from bridge.cuda.product import activations, matvec, matvec_kernel, matvec_shape
from bridge.cuda.product.activations import Records
from bridge.cuda.product.matvec_shape import MatvecShape
from bridge.cuda.toolchain import compiler as compilers
from bridge.cuda.toolchain import device as devices
from bridge.cuda.toolchain import launch

CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)]
pytestmark = pytest.mark.proof
compiler = pytest.mark.skipif(ptx.unavailable() is not None, reason=str(ptx.unavailable()))


def ptx_of(type: str, n: int, shape: MatvecShape, exact: bool, epilogue: str = "") -> str:
    return ptx.ptx_of(matvec_kernel.kernel(type, n, shape, exact, epilogue), (7, 5))


def inner_loop(code: str) -> str:
    """The lines between a label and the last jump back to it."""
    lines = code.splitlines()
    labels = {line.rstrip(":"): i for i, line in enumerate(lines) if line.startswith("$L")}
    jumps = [
        (labels.get(m[1], i), i) for i, line in enumerate(lines) if (m := re.search(r"bra(?:\.uni)?\s+(\$L\w+)", line))
    ]
    first, last = max(jumps, key=lambda jump: jump[1] - jump[0])
    assert last > first
    return "\n".join(lines[first:last])


# (columns, configuration, float32 activations, epilogue): compiled and run
KINDS = [(1, MatvecShape(2, 1, 1, 4), False, ""), (1, MatvecShape(2, 2, 2, 4), False, "")]
KINDS += [(4, MatvecShape(2, 1, 2, 4), False, "bias_accumulate"), (8, MatvecShape(2, 1, 1, 4), False, "")]
KINDS += [(1, MatvecShape(2, 1, 1, 4), True, ""), (4, MatvecShape(2, 1, 2, 4), True, "")]
KINDS += [(8, MatvecShape(2, 1, 1, 4), True, "")]
# Of a type with mins; of one of 8 bits what of it is its own: more columns and units a round are the same code. One
# product of every type is in test_product_results.py
_OWN = [KINDS[0], KINDS[2], KINDS[4]]
_MOST = KINDS[:-2]  # several columns of floats have nothing that these have not, and take the compiler longest
COMPILED = pytest.mark.parametrize(
    ("block", "kinds"),
    [
        *(
            pytest.param(WRITTEN[name], kinds, id=name, marks=pytest.mark.xdist_group(name))
            # and of one with a codebook; of others the codes are read in the same way
            for name, kinds in (("Q4_K", _MOST), ("Q8_0", _OWN), ("IQ2_XS", KINDS[:1]))
        ),
        *(
            pytest.param(*p.values, KINDS, id=f"{p.id}, all", marks=[*p.marks, pytest.mark.exhaustive])
            for p in ALL.args[1]
        ),
    ],
)


@compiler
@COMPILED
def test_the_inner_loop_has_wide_loads_and_byte_products_and_no_long_multiplications(block, kinds):
    for n, shape, exact, epilogue in (kind for kind in kinds if kind[1].units == 1):
        loop = inner_loop(ptx_of(block.name, n, shape, exact, epilogue))
        own = n if n <= 4 else n // 2  # columns of a lane
        assert loop.count("dp4a.s32.s32") == (0 if exact else 8 * shape.rows * own)
        if exact:  # a multiplication for every weight and column, one more and a permutation of bytes for the weight
            assert len(re.findall(r"fma\.rn\.f32", loop)) <= 32 * shape.rows * (own + 1) + 4 * shape.rows
            # three look up four codes, TQ1_0 has four for five words of codes, and a codebook's numbers are bytes too
            assert loop.count("prmt.b32") <= (64 if block.numbered else 56 if block.values else 41) * shape.rows
            assert "cvt.rn.f32.s8" not in loop
        weights = re.findall(r"ld\.global\.nc\.L1::no_allocate\S*\.(v4|v2)\.u32", loop)
        form = layout.DeviceLayout(block)
        pieces = form.pieces + [4] * form.whole + [2] * (form.half_bytes == 8)
        wanted = [f"v{words}" for words in pieces if words > 1] * shape.rows
        assert sorted(weights) == sorted(wanted)
        assert len(re.findall(r"ld\.global\.nc\.v4\.[uf]32", loop)) == (8 if exact else 2) * own  # x
        assert not re.search(r"mul\.lo\.[su]64|mad\.lo\.[su]64|div\.|rem\.", loop)
        assert "local" not in loop


@compiler
@pytest.mark.parametrize(
    "capabilities",
    [
        pytest.param((CAPABILITIES[0], CAPABILITIES[-1]), id="oldest and newest"),
        pytest.param(CAPABILITIES[1:-1], id="between", marks=pytest.mark.exhaustive),
    ],
)
@COMPILED
def test_no_kernel_spills_or_needs_more_registers_than_it_may_have(block, kinds, capabilities):
    for kind in kinds:
        kernel = matvec_kernel.kernel(block.name, *kind)
        for capability in capabilities:
            made = ptx.assembled(ptx_of(block.name, *kind), capability, kernel.registers)
            assert (made.stack, made.spills) == (0, 0), f"{block}, {kind}, {capability}: {made.stack}, {made.spills}"


@compiler
@pytest.mark.parametrize(
    ("name", "capabilities"),
    [
        pytest.param("Q4_K", ((8, 0), (9, 0)), marks=pytest.mark.xdist_group("Q4_K")),
        pytest.param("Q6_K", ((8, 9),), marks=pytest.mark.xdist_group("Q6_K")),
        *(
            pytest.param(name, ((8, 0), (8, 9), (9, 0), (12, 0)), id=f"{name}, all", marks=pytest.mark.exhaustive)
            for name in ("Q4_K", "Q6_K", "Q8_0", "Q2_K", "Q3_K", "Q5_K", "Q4_0")
        ),
    ],
)
def test_all_loads_of_two_units_are_issued_before_arithmetic_needs_the_first(name, capabilities):
    """In machine code: the compiler delays loads where registers are scarce, and half of them were not in flight."""
    kernel = matvec_kernel.kernel(name, *KINDS[1])
    for capability in capabilities:
        before, every = weight_loads(ptx.machine_code(ptx_of(name, *KINDS[1]), capability, kernel.registers))
        assert before == every >= 8, (name, capability, before, every)


@compiler
@COMPILED
def test_compiled_kernels_multiply_as_float64_does_and_stay_inside_their_arrays(block, kinds):
    """On the machine of tests/support/gpu: rows that fill no block, columns that fill no round of a warp."""
    with pretended_gpu() as gpu:
        for rows, columns in ((1, 256), (21, 1280)):
            tensor, weights = random_matrix(block, rows, columns, factors=FACTOR)
            matrix = DeviceMatrix.upload(tensor, "cuda")
            for n, shape, exact, epilogue in kinds:
                x = np.random.default_rng(n).standard_normal((n, columns)).astype(np.float32)
                records = Records(columns, n, "cuda", "f32" if exact else "int8").quantize(x, n)
                more = "accumulate" in epilogue
                bias = np.arange(rows, dtype=np.float32) / 256 if more else None
                y = np.full((n, rows), 0.25 if more else np.nan, np.float32)
                matvec.launch(matrix, records, y, n, 0, more, bias, shape)
                assert_product(y - (0.25 + bias if more else 0), x if exact else rounded(x), weights)
            assert gpu.memory is not None


@compiler
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        pytest.param("Q4_K", _MOST, id="Q4_K", marks=pytest.mark.xdist_group("Q4_K")),
        # scales that take more than their share of sectors; a round of 32 units, and of 16
        pytest.param("Q6_K", [KINDS[0], KINDS[3]], id="Q6_K", marks=pytest.mark.xdist_group("Q6_K")),
        *(
            pytest.param(name, KINDS, id=f"{name}, all", marks=pytest.mark.exhaustive)
            for name in ("Q4_K", "Q6_K", "Q8_0", "Q4_0")
        ),
    ],
)
def test_each_byte_of_the_weights_is_fetched_once_for_all_columns(name, kinds):
    with pretended_gpu() as gpu:
        tensor, _ = random_matrix(BLOCKS[name], 32, 4096)
        matrix = DeviceMatrix.upload(tensor, "cuda")
        fetched = []
        for n, shape, exact, _ in kinds:
            records = Records(4096, n, "cuda", "f32" if exact else "int8")
            matvec.launch(matrix, records, np.zeros((n, 32), np.float32), n, 0, shape=shape)
            fetched.append(gpu.memory.regions[0].fetched)
        # more are sectors of which a warp needs 8 bytes, or half a warp 4: Q6_K has 2 of them a superblock
        assert max(fetched) <= 1.07 * 32 * 4096 * matrix.layout.bpw / 8, fetched


@compiler
def test_what_surrounds_products_compiles_as_well():
    kernels = [activations.quantizer(kind, exact) for kind, exact in (("f32", False), ("bf16", False), ("f16", True))]
    kernels += [dequantize.kernel("Q6_K", "f16", False), dequantize.kernel("Q3_K", "bf16", False)]
    kernels += [
        dequantize.kernel("Q4_K", "f32", True),
        matvec_kernel.kernel("Q4_K", 1, MatvecShape(2, 2, 1, 4), False, "silu"),
        matvec_kernel.kernel("Q4_K", 1, MatvecShape(2, 2, 1, 4), False, "silu_normed_recorded"),
        matvec_kernel.kernel("Q4_K", 1, MatvecShape(2, 2, 2, 4), False, "bias_accumulate_recorded_gain"),
        matvec_kernel.kernel("Q4_K", 1, MatvecShape(2, 1, 2, 4), False, "silu_chosen"),
        matvec_kernel.kernel("Q4_K", 1, MatvecShape(2, 1, 1, 4), True, "bias_chosen"),
    ]
    for kernel in kernels:
        code = ptx.ptx_of(kernel, (7, 5))
        for capability in CAPABILITIES:
            made = ptx.assembled(code, capability, kernel.registers)
            assert (made.stack, made.spills) == (0, 0), kernel.name
        assert "membar" not in code  # one thread of a block counts it, and the last block's acquires
        assert code.count("atom.release.gpu") == code.count("fence.acq_rel.gpu") == ("recorded" in kernel.name)
        if "normed" in kernel.name:  # sums of squares are needed last, and asked for before the weights
            assert code.index("ld.global.v4.f32") < code.index("no_allocate")


@compiler
@pytest.mark.exhaustive
@ALL
def test_no_product_with_chosen_experts_spills(block):
    for exact in (False, True):
        for units, split, epilogue in ((1, 1, "chosen"), (1, 4, "silu_recorded_chosen"), (2, 2, "bias_clamped_chosen")):
            kernel = matvec_kernel.kernel(
                block.name, 1, MatvecShape(2, units - exact * (units - 1), split, 4), exact, epilogue
            )
            code = ptx.ptx_of(kernel, (7, 5))
            for capability in CAPABILITIES:
                made = ptx.assembled(code, capability, kernel.registers)
                assert (made.stack, made.spills) == (0, 0), (kernel.name, capability)


@compiler
@pytest.mark.exhaustive
@ALL
@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_no_product_of_a_decoder_s_step_spills(block, dependent, n):
    for exact in (False, True):
        for split, epilogue in (
            (1, "normed"), (2, "bias_accumulate_recorded_gain"), (1, "bias_gelu_normed_recorded")
        ):  # fmt: skip
            kernel = matvec_kernel.kernel(
                block.name, n, MatvecShape(2, 2 - exact, split, 4), exact, epilogue, dependent
            )
            code = ptx.ptx_of(kernel, kernel.oldest)
            for capability in ((9, 0), (10, 0), (12, 0)) if dependent else CAPABILITIES:
                made = ptx.assembled(code, capability, kernel.registers)
                assert (made.stack, made.spills) == (0, 0), (kernel.name, capability)


@compiler
@ALL
@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_compiler_fuses_nothing_that_is_not_named(block, n):
    """Its choice might differ between kernels, and several columns would not have the sums of one."""
    kernel = matvec_kernel.kernel(block.name, n, MatvecShape(2, 2, 2, 4), False, "")
    code = ptx.ptx_of(kernel, kernel.oldest)
    for capability in CAPABILITIES:
        assert sass.fused_sums(ptx.machine_code(code, capability, kernel.registers)) == code.count("fma.rn.f32")


@ALL
def test_a_product_reads_hardly_more_bytes_than_the_file_has(block):
    form = layout.DeviceLayout(block)
    most = 1.04 if block.name == "TQ1_0" else 1.03  # two of its 56 bytes are not used
    assert block.bpw <= form.bpw <= most * block.bpw
    rows, columns = 4096, 14336
    assert form.nbytes(rows, columns) * 8 <= most * block.bpw * rows * columns


def test_bytes_of_the_layout_are_those_that_kernels_load():
    """What a lane loads for its unit, from the code itself; 16 bytes of scales serve a superblock."""
    for block in WRITTEN.values():
        form = layout.DeviceLayout(block)
        words = sum(form.pieces)
        per_block = 4 * words * form.units_per_block + form.scale_bytes + form.half_bytes
        assert per_block == pytest.approx(form.bpw * block.size / 8)
        assert per_block - block.nbytes in (0, 2), block


def test_four_kernels_serve_one_to_eight_columns(monkeypatch):
    launched = []
    monkeypatch.setattr(launch.Kernel, "launch", lambda self, *given: launched.append(self.name))
    with pretended_gpu():
        matrix = DeviceMatrix.upload(random_matrix(BLOCKS["Q4_K"], 4, 256)[0], "cuda")
        for n in range(1, 9):
            matvec.launch(matrix, Records(256, n, "cuda"), np.zeros((n, 4), np.float32), n, 0)
    assert [name.split("_")[4] for name in launched] == ["1", "2", "4", "4", "8", "8", "8", "8"]
    assert len(set(launched)) == 4


@pytest.mark.parametrize("block", [BLOCKS["Q4_K"]], ids=str)
def test_rows_are_shared_where_they_are_few_or_long_and_units_doubled_where_there_are_many(block):
    gpu = devices.Device(0, "NVIDIA H200", (9, 0), 132)

    def shape(rows: int, columns: int, n: int = 1, bpw: float = 4.5, **options: Any) -> MatvecShape:
        nbytes = int(rows * columns * bpw) // 8
        matrix: Any = SimpleNamespace(rows=rows, units=columns // 32, device=gpu, nbytes=nbytes)
        chosen = matvec_shape.choose_shape(matrix, n, **options)
        if not options:
            assert matvec_shape.shapes_to_try(matrix, n)[0] == chosen
            assert len(set(matvec_shape.shapes_to_try(matrix, n))) == len(matvec_shape.shapes_to_try(matrix, n))
        return chosen

    assert shape(8192, 28672) == shape(4096, 14336) == MatvecShape(2, 2, 4, 4)
    assert shape(4096, 14336, bpw=2.625).split == 2  # too little for each of four
    assert shape(8192, 28672, 2) == MatvecShape(2, 1, 2, 4)
    assert shape(8192, 28672, alone=False) == MatvecShape(2, 2, 1, 4)  # in a decoder's step
    assert shape(4096, 14336, alone=False).split == 2
    assert [shape(rows, 4096).split for rows in (28672, 4096, 1024)] == [1, 2, 4]
    assert shape(14336, 4096, 8) == MatvecShape(2, 1, 1, 4)
    assert shape(4096, 4096, 8) == MatvecShape(2, 1, 2, 4)


# what is refused


class FakeDriver:
    """As much of numba-cuda's driver as is asked of it."""

    initialization_error = None

    def __init__(self, version: tuple[int, int] = (13, 0), devices: int = 1):
        self.version, self.devices = version, devices

    def get_version(self) -> tuple[int, int]:
        return self.version

    def get_device_count(self) -> int:
        return self.devices


@pytest.fixture
def small() -> QuantTensor:
    return QuantTensor("blk.0.w", "Q4_0", (1, 32), np.zeros(18, np.uint8))


def test_no_driver_is_said_in_one_line(small, monkeypatch):
    from numba.cuda.cudadrv import driver

    monkeypatch.setattr(driver.driver, "is_initialized", True)
    monkeypatch.setattr(driver.driver, "initialization_error", driver.DRIVER_NOT_FOUND_MSG)
    with pytest.raises(BridgeError, match=r"^device 'cuda': no NVIDIA driver was found; install one, or use the CPU$"):
        small.to("cuda")


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (AttributeError("module 'numpy' has no attribute\n'row_stack'"),
         "AttributeError: module 'numpy' has no attribute 'row_stack' (starting the NVIDIA driver)"),
        (RuntimeError("Call to cuInit results in CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)"),
         "RuntimeError: Call to cuInit results in CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803) "
         "(starting the NVIDIA driver)"),
        (RuntimeError("Call to cuInit results in CUDA_ERROR_NO_DEVICE (100)"), "the NVIDIA driver sees no GPU"),
        (RuntimeError(), "RuntimeError: no reason given (starting the NVIDIA driver)"),
    ],
)  # fmt: skip
def test_a_driver_that_cannot_be_started_is_not_called_missing(problem, said, small, monkeypatch):
    def start():
        raise problem

    monkeypatch.setattr(devices, "_driver", start)
    with pytest.raises(BridgeError) as e:
        small.to("cuda")
    assert str(e.value) == f"device 'cuda': {said}"


def test_a_driver_older_than_the_toolkit_is_said(small, monkeypatch):
    monkeypatch.setattr(devices, "_driver", lambda: FakeDriver((12, 8)))
    monkeypatch.setattr(compilers, "toolkit", lambda: (13, 4))
    with pytest.raises(BridgeError, match=r"knows CUDA 12.8, older than the toolkit, 13.4; .*numba-cuda\[cu12\]"):
        small.to("cuda")


def test_missing_gpus_devices_and_packages_are_said(small, monkeypatch):
    monkeypatch.setattr(compilers, "toolkit", lambda: (13, 4))
    monkeypatch.setattr(devices, "_driver", lambda: FakeDriver(devices=0))
    with pytest.raises(BridgeError, match="the NVIDIA driver sees no GPU"):
        small.to("cuda")
    monkeypatch.setattr(devices, "_driver", FakeDriver)
    with pytest.raises(BridgeError, match="'cuda:7': there is 1, from cuda:0 on"):
        small.to("cuda:7")
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BridgeError, match=r"numba-cuda is not installed; pip install numba-cuda\[cu13\]"):
        small.to("cuda")
    for wrong in ("cuda:x", "gpu"):
        with pytest.raises(BridgeError, match=r"cuda, cuda:0, cuda:1 \.\.\."):
            small.to(wrong)


def test_too_little_memory_says_how_much_is_needed_and_free(monkeypatch):
    import torch

    def full(*size: Any, **options: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    gpu = devices.Device(0, "NVIDIA H200", (9, 0), 132)
    monkeypatch.setattr(devices.Device, "free", lambda self: 3 << 29)
    monkeypatch.setattr(devices, "check_torch", lambda device: None)
    monkeypatch.setattr(devices.Device, "stream", lambda self: 0)
    monkeypatch.setattr(devices, "capturing", lambda stream: False)
    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(BridgeError, match=r"cuda:0: blk.0.w needs 2.0 GiB, 1.5 GiB are free"):
        gpu.empty(1 << 31, "blk.0.w")
    monkeypatch.setattr(devices, "capturing", lambda stream: True)
    with pytest.raises(BridgeError, match=r"cuda:0: blk.0.w is uploaded and the stream is being captured; run the"):
        gpu.upload(np.zeros(1, np.uint8), "blk.0.w")


def test_a_first_compilation_while_a_graph_is_captured_is_refused(monkeypatch):
    monkeypatch.setattr(devices, "context", lambda: 0)
    monkeypatch.setattr(devices, "current", lambda: devices.Device(0, "NVIDIA H200", (9, 0), 132))
    monkeypatch.setattr(devices, "capturing", lambda stream: True)
    kernel = matvec_kernel.kernel("Q4_0", 1, MatvecShape(1, 1, 1, 1), False, "")
    with pytest.raises(BridgeError, match="is not compiled yet and the stream is being captured; run the product once"):
        kernel.warm()


VERSIONS = (
    "; the CUDA packages must be of one version, no newer than the driver's: pip install numba-cuda[cu13], or [cu12]"
)


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (RuntimeError("NVJITLINK_ERROR:\nPTX version 9.4 is not known"),
         f"RuntimeError: NVJITLINK_ERROR: PTX version 9.4 is not known (compiling _reads for 9.0){VERSIONS}"),
        (AttributeError("module 'numpy' has no attribute 'row_stack'"),
         "AttributeError: module 'numpy' has no attribute 'row_stack' (compiling _reads for 9.0)"),
        (OSError("an unexpected conversion"), "OSError: an unexpected conversion (compiling _reads for 9.0)"),
    ],
)  # fmt: skip
def test_a_compiler_that_fails_is_one_line_with_the_exception_first(problem, said, monkeypatch):
    """Versions are mentioned only where the exception does."""

    def refuse(*source: Any) -> Any:
        raise problem

    monkeypatch.setattr(devices, "context", lambda: 0)
    monkeypatch.setattr(devices, "current", lambda: devices.Device(0, "NVIDIA H200", (9, 0), 132))
    monkeypatch.setattr(compilers, "known", lambda *source: None)
    monkeypatch.setattr(compilers, "compiled", refuse)
    monkeypatch.setattr(devices, "capturing", lambda stream: False)
    with pytest.raises(BridgeError) as e:
        launch.Kernel(SimpleNamespace(__name__="_reads"), "void()").warm()  # type: ignore[arg-type]
    assert str(e.value) == said


def test_a_gpu_that_is_too_old_is_refused_and_auto_takes_the_cpu(monkeypatch):
    from numba import cuda

    from bridge.system.devices import choose

    old = SimpleNamespace(compute_capability=(6, 1), name="GeForce GTX 1080")
    monkeypatch.setattr(compilers, "toolkit", lambda: (12, 9))
    monkeypatch.setattr(devices, "_driver", FakeDriver)
    monkeypatch.setattr(cuda, "gpus", [old])
    with pytest.raises(
        BridgeError, match=r"'cuda:0': GeForce GTX 1080 has compute capability 6.1; must be 7.5 or newer"
    ):
        devices.require("cuda")
    assert choose("auto") == (
        "cpu",
        "running on the CPU: device 'cuda:0': GeForce GTX 1080 has compute capability 6.1; must be 7.5 or newer",
    )


def test_a_compiler_without_its_library_is_said(small, monkeypatch):
    """torch brings a compiler of CUDA C, and not the one that kernels of Numba need."""
    from numba.cuda.cudadrv import nvvm

    def missing() -> None:
        raise nvvm.NvvmSupportError("libNVVM cannot be found.\nconda install cuda-nvcc")

    monkeypatch.setattr(devices, "_driver", FakeDriver)
    monkeypatch.setattr(nvvm, "NVVM", missing)
    monkeypatch.setattr(compilers, "any_kept", lambda: False)
    with pytest.raises(BridgeError) as e:
        small.to("cuda")
    assert str(e.value) == (
        "device 'cuda': NvvmSupportError: libNVVM cannot be found. conda install cuda-nvcc (looking for the CUDA "
        "compiler); there is no CUDA compiler: pip install numba-cuda[cu13], or [cu12] for a driver of CUDA 12"
    )
    monkeypatch.setattr(compilers, "any_kept", lambda: True)  # kept kernels need none
    assert devices.available() is None


def test_a_tensor_whose_strides_a_kernel_would_not_see_is_refused():
    import torch

    with pytest.raises(BridgeError, match=r"a tensor \[3, 4\] with strides \[1, 3\]; must be contiguous"):
        devices.view(torch.zeros(4, 3).T)


def test_a_tensor_on_another_device_is_refused():
    gpu = devices.Device(1, "NVIDIA H200", (9, 0), 132)
    moved = object.__new__(tensor.CudaTensor)
    moved.name, moved.matrix = "blk.0.w", SimpleNamespace(device=gpu)  # type: ignore[assignment]

    class Tensor:
        device = "cuda:0"

        def detach(self) -> None: ...

    Tensor.__module__ = "torch"
    with pytest.raises(BridgeError, match=r"blk\.0\.w: x is on cuda:0, the tensor on cuda:1"):
        moved.matvec(Tensor())


def test_the_package_and_its_gpu_part_import_from_anywhere(tmp_path):
    """bridge itself without numba; bridge.cuda.toolchain.device without numba-cuda or a GPU."""
    code = (
        "import sys, bridge; assert 'numba' not in sys.modules\n"
        "import bridge.runtime, bridge.cuda.toolchain.device as d; assert 'numba.cuda' not in sys.modules\n"
        "print(d.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(ROOT / "cuda" / "toolchain" / "device.py")


@pytest.mark.parametrize(
    ("rows", "columns", "tiles"),
    [
        (6144, 4096, [6144]),
        (4096, 14336, [4096]),
        (28672, 4096, [14336] * 2),
        (128256, 4096, [16128] * 7 + [15360]),
        (5, 1 << 27, [1] * 5),
    ],
)
def test_rows_are_dequantized_in_tiles_alike_in_size(rows: int, columns: int, tiles: list[int]) -> None:
    from bridge.cuda.product.matmul import tile_rows

    step = tile_rows(rows, columns)
    assert [min(step, rows - first) for first in range(0, rows, step)] == tiles
