"""How kernels are compiled, kept and launched.

Only the driver is a stand-in: code is made for compute capability 9.0 as on an H200, and goes nowhere.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch

from bridge.errors import BridgeError
from tests.support import ptx
from tests.support.cuda_driver import Driver
from tests.support.places import PATIENCE, ROOT

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

from bridge.cuda.toolchain import compiler
from bridge.cuda.toolchain.unroll import registers, unroll

pytestmark = pytest.mark.skipif(ptx.unavailable() is not None, reason=str(ptx.unavailable()))


def test_a_kernel_is_compiled_once_for_all_processes_and_launched_with_the_numbers_it_takes(
    driver: Driver, tmp_path: Path
) -> None:
    from bridge.cuda.norm import norm_kernel
    from bridge.cuda.toolchain.launch import Kernel

    first = norm_kernel.__wrapped__(512, False)
    device, entry = first.warm()
    assert device == 0
    assert (code := driver.codes[0]).startswith(b"\x7fELF")
    (stored,) = tmp_path.rglob("cubins/9.0-*/*")
    assert stored.read_bytes().endswith(code)

    again = Kernel(first.function, first.signature)  # as another process has it
    with mock.patch.object(compiler, "ptx_of", side_effect=AssertionError):
        assert again.warm() == (0, entry) == again.warm()
    assert driver.codes == [code, code]

    x, weight, out = (torch.ones(512) for _ in range(3))
    records = torch.zeros(4096, dtype=torch.uint8)
    numbers = [np.float32(number) for number in (1e-5, 1e-6, 2)]
    again.launch(300, (32, 4), 0, x, x, x, weight, weight, out, records, *numbers)
    ((grid, block, stream, arguments),) = driver.launches
    assert (grid, block, stream) == (300, (32, 4), 0)
    assert arguments[:7] == tuple(array.data_ptr() for array in (x, x, x, weight, weight, out, records))
    assert isinstance(arguments[7], ctypes.c_float)
    assert [number.value for number in arguments[7:]] == numbers


def test_machine_code_is_found_by_what_it_is_made_from_and_not_where_it_is_damaged(
    driver: Driver, tmp_path: Path
) -> None:
    from bridge.cuda import norm
    from bridge.cuda.forms import dequantize
    from bridge.cuda.product import activations, matvec_kernel, mma
    from bridge.cuda.product.matvec_shape import MatvecShape
    from bridge.cuda.toolchain.launch import Kernel

    kernels = [norm.norm_kernel.__wrapped__(hidden, exact) for hidden in (64, 96) for exact in (False, True)]
    kernels += [activations.quantizer.__wrapped__(kind, False) for kind in ("f32", "f16", "bf16")]
    kernels += [dequantize.kernel.__wrapped__(type, "f16", False) for type in ("Q4_K", "Q6_K", "Q8_0")]
    shape = MatvecShape(2, 1, 1, 4)
    kernels += [matvec_kernel.kernel.__wrapped__("Q4_K", 1, shape, exact, "", dependent) for exact in (False, True)
                for dependent in (False, True)]  # fmt: skip
    kernels += [mma.kernel.__wrapped__("Q4_K", kind, 2, 4, False, "") for kind in ("f16", "bf16")]
    kernel = kernels[0]
    kernels += [Kernel(kernel.function, kernel.signature, 32), Kernel(kernels[1].function, kernel.signature)]
    found = [compiler.digest(kernel) for kernel in kernels]
    assert len(set(found)) == len(found) - 1  # the last is the second one again
    assert [compiler.digest(norm.norm_kernel.__wrapped__(64, False)), found[1]] == [found[0], found[-1]]

    def stored(kernel: Kernel, capability: tuple[int, int]) -> bool:
        kernel.codes.clear()  # as another process
        return compiler.known(kernel, capability) is not None

    compiler.code(kernel, (7, 5))
    assert stored(kernel, (7, 5))
    assert not stored(kernel, (8, 0))
    (path,) = tmp_path.rglob("cubins/7.5-*/*")
    path.write_bytes(path.read_bytes()[:-1])
    assert not stored(kernel, (7, 5))
    compiler.code(kernel, (7, 5))
    assert stored(kernel, (7, 5))


def test_what_a_kernel_is_kept_under_is_source_and_the_same_for_every_python() -> None:
    from bridge.cuda.toolchain.unroll import expand

    expanded = expand(_sums, "3", COUNT=3, SCALE=np.float32(0.5), PAIR=(1, 2.5))
    assert list(compiler._content(expanded, set())) == [
        "def _sums_3(x, out):\n"
        "    total_0 = x[0] * SCALE\n"
        "    total_1 = x[1] * SCALE\n"
        "    total_2 = x[2] * SCALE\n"
        "    out[0] = _added(total_0, total_1) + total_2 * 2.5",
        "SCALE float32(0.5)",
        "_added None",
        "def _added(a, b):\n    return a + b",
    ]  # fmt: skip


def _sums(x: Any, out: Any) -> None:
    """Its comments and its annotations are not part of it."""
    total = registers()
    for k in unroll(COUNT):  # noqa: F821
        total[k] = x[k] * SCALE  # noqa: F821
    out[0] = _added(total[0], total[1]) + total[2] * PAIR[1]  # type: ignore[name-defined]  # noqa: F821


def _added(a: Any, b: Any) -> Any:
    # a comment
    return a + b


def test_kernels_compiled_elsewhere_fit_whatever_compiled_them_and_need_no_compiler(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bridge.cuda.norm import activation_kernel
    from cuda.bindings import nvjitlink
    from numba.cuda.cudadrv import nvvm

    kernel, other = activation_kernel(False), activation_kernel(True)
    elsewhere = tmp_path / "elsewhere"
    kernel.codes.clear()
    compiler.keep(kernel, (9, 0), elsewhere)
    made = kernel.codes.pop((9, 0))

    def none(*given: Any) -> Any:
        raise nvvm.NvvmSupportError("libNVVM cannot be found")

    monkeypatch.setattr(nvvm, "NVVM", none)
    monkeypatch.setattr(nvjitlink, "version", none)
    monkeypatch.setattr(compiler, "ptx_of", none)
    compiler._versions.cache_clear()
    assert compiler.known(kernel, (9, 0)) == made  # from its own folder
    assert compiler.any_kept()
    kernel.codes.clear()
    monkeypatch.setattr(compiler, "_versions", lambda: "of others")
    assert compiler.known(kernel, (9, 0)) is None
    assert not compiler.any_kept()
    said = (
        r"^NvvmSupportError: libNVVM cannot be found \(compiling _activation\S* for 9\.0\); there is no CUDA compiler"
    )
    with pytest.raises(BridgeError, match=said):
        kernel.warm()
    monkeypatch.setenv("BRIDGE_KERNELS", str(elsewhere))
    assert compiler.any_kept()
    kernel.warm()
    assert driver.codes == [made.cubin]
    other.codes.clear()
    assert compiler.known(other, (9, 0)) is None  # it is not there: it would be compiled
    assert compiler.known(kernel, (8, 0)) is None
    assert (compiler.count_elsewhere((9, 0)), compiler.count_elsewhere((8, 0))) == (1, 0)
    kernel.codes.clear()


@pytest.mark.parametrize("refusal", ["CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid", "an illegal address"])
def test_kept_code_that_the_driver_refuses_is_compiled_again(
    refusal: str, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bridge.cuda.norm import norm_kernel
    from bridge.cuda.toolchain import launch

    kernel = norm_kernel.__wrapped__(512, False)
    kept = compiler.Code("entry", b"of another toolkit")
    kernel.codes[9, 0] = kept

    def load(code: Any) -> str:
        if code == kept:
            raise RuntimeError(refusal)
        return driver.loaded(code)

    monkeypatch.setattr(launch, "_loaded", load)
    if "INVALID_IMAGE" in refusal:
        kernel.warm()
        assert driver.codes[0].startswith(b"\x7fELF")
    else:  # which compiling would not mend
        with pytest.raises(
            BridgeError, match=r"^RuntimeError: an illegal address \(loading _norm\S*, compiled for 9\.0\)$"
        ):
            kernel.warm()


COMPILES = """
import numpy as np
if hasattr(np, "row_stack"):
    del np.row_stack  # as numpy 2.5 has done
"""


def test_numba_cuda_compiles_with_a_numpy_that_has_no_row_stack(tmp_path: Path) -> None:
    """In the process that asks and in those that it starts."""
    (tmp_path / "sitecustomize.py").write_text(COMPILES)
    program = """
import numpy as np
from bridge.cuda import norm; from bridge.cuda.toolchain import compile_pool, compiler
assert not hasattr(np, "row_stack")
process = compile_pool._Process()
one, other = norm.activation_kernel(False), norm.activation_kernel(True)
for made in (process.code(one, (9, 0)), compiler.compiled(other, (9, 0))):
    assert made.cubin[:4] == b"\\x7fELF", made
process.end()
assert not hasattr(np, "row_stack")
"""
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_toolkit_that_nvcc_belongs_to_is_named_unless_another_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "cuda-13.0"
    (root / "bin").mkdir(parents=True)
    nvcc = root / "bin" / "nvcc"
    nvcc.touch(0o755)
    links = tmp_path / "bin"
    links.mkdir()
    (links / "nvcc").symlink_to(nvcc)
    monkeypatch.setenv("PATH", str(links))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, "")  # so that what is set below is taken back

    def named(**given: str) -> str | None:
        for name in ("CUDA_HOME", "CUDA_PATH"):
            monkeypatch.delenv(name, raising=False)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        compiler._find_toolkit.__wrapped__()
        return os.environ.get("CUDA_HOME")

    assert named() is None  # a compiler without libNVVM
    (root / "nvvm").mkdir()
    assert named() == str(root)
    assert named(CUDA_HOME="/of/the/user") == "/of/the/user"
    assert named(CUDA_PATH="/of/the/user") is None
    monkeypatch.setenv("PATH", "/nowhere")
    assert named() is None


def test_kernels_are_compiled_by_several_processes_and_none_of_them_again(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest first; what a process cannot compile is left to whoever needs it, who says why."""
    from bridge.cuda.norm import activation_kernel
    from bridge.cuda.product.activations import quantizer
    from bridge.cuda.sampling import draw_kernel
    from bridge.cuda.toolchain import compile_pool

    class Process:
        made: ClassVar[list[Any]] = []

        def __init__(self) -> None:
            self.made.append(self)
            self.given: list[Any] = []
            self.ended = False

        def code(self, source: Any, capability: Any) -> Any:
            self.given.append(source)
            both.wait(10)
            return "no memory" if source is quantizer("f16", True) else compiler.Code(source.name, b"code")

        def end(self) -> None:
            self.ended = True

    one = activation_kernel(False)
    kernels = [one, quantizer("f16", True), one, draw_kernel(32), draw_kernel(64)]
    both = threading.Barrier(2)
    told: list[Any] = []
    monkeypatch.setattr(compile_pool, "usable_cpus", lambda: 2)
    monkeypatch.setattr(compile_pool, "_Process", Process)
    for kernel in kernels:
        kernel.codes.clear()
    failed = compile_pool.compile_all(kernels, (7, 5), lambda *given: told.append(given))
    assert failed == {quantizer("f16", True): "no memory"}
    assert sorted(done for done, _, _ in told) == [1, 2, 3, 4]
    assert {name for _, _, name in told} == {kernel.name for kernel in kernels}
    assert [len(process.given) for process in Process.made] == [2, 2]
    assert {process.given[0] for process in Process.made} == {draw_kernel(32), draw_kernel(64)}
    assert all(process.ended for process in Process.made)
    assert compiler.known(activation_kernel(False), (7, 5)) == compiler.Code(activation_kernel(False).name, b"code")
    assert compiler.known(quantizer("f16", True), (7, 5)) is None
    both = threading.Barrier(1)
    compile_pool.compile_all([activation_kernel(False), draw_kernel(32)], (7, 5), lambda *given: told.append(given))
    assert (len(told), len(Process.made)) == (4, 2)
    for kernel in kernels:
        kernel.codes.clear()


def test_another_process_makes_a_kernel_by_its_function_and_arguments() -> None:
    from bridge.cuda import norm, sampling
    from bridge.cuda.attention import attention, prompt_attention
    from bridge.cuda.attention.attention_kind import AttentionKind
    from bridge.cuda.forms import dequantize
    from bridge.cuda.product import activations, fused, matvec_kernel, mma
    from bridge.cuda.product.matvec_shape import MatvecShape

    from bridge.trellis import BitshiftCodebook
    from bridge.trellis.vector import Code

    columns = (0, 1, 8, 9, 2, 3, 10, 11)
    for kernel in (
        activations.quantizer("f32", False), attention.kernel(AttentionKind(64, 1, 64), False),
        prompt_attention.kernel(AttentionKind(64, 1, 64, windowed=True), False, "f16"),
        dequantize.kernel("Q4_0", "f16", False), matvec_kernel.kernel("Q4_0", 1, MatvecShape(2, 1, 1, 4), False, ""),
        fused.kernel(Code.of(BitshiftCodebook(), 2, "cuda"), (0, 0, 1, 1, 0, 0, 1, 1), columns, 32, 1, 4),
        mma.kernel("Q4_0", "f16", 2, 4, False, ""), mma.combiner(""), norm.norm_kernel(64, False),
        norm.activation_kernel(False), sampling.greedy_kernel(32), sampling.draw_kernel(32),
    ):  # fmt: skip
        assert pickle.loads(pickle.dumps(kernel)) is kernel


def test_why_a_process_could_not_compile_a_kernel_is_told_and_the_next_one_is_compiled(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bridge.cuda.norm import activation_kernel
    from bridge.cuda.toolchain import compile_pool

    kernel = activation_kernel(False)
    process = compile_pool._Process()
    try:
        reason = process.code(kernel, (1, 0))
        assert isinstance(reason, str)
        assert re.match(r"\w+: .*\(compiling _activation\S*\)", reason)
        process._process.kill()
        process._process.wait()
        assert isinstance(process.code(kernel, (7, 5)), compiler.Code)
        process._process.kill()
        process._process.wait()
        monkeypatch.setattr(process._process, "poll", lambda: None)  # as if it ended while it compiles
        assert re.fullmatch(r"the process that compiled _activation\S* ended with exit code -?\d+",
                            str(process.code(kernel, (7, 5))))  # fmt: skip
    finally:
        process.end()


def test_why_kernels_failed_is_told_where_this_process_compiles_them_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from bridge.cuda.norm import activation_kernel
    from bridge.cuda.toolchain import compile_pool

    def refuse(*given: Any) -> Any:
        raise OSError("no memory")

    monkeypatch.setattr(compile_pool, "usable_cpus", lambda: 1)
    monkeypatch.setattr(compiler, "known", lambda *given: None)
    monkeypatch.setattr(compiler, "code", refuse)
    failed = compile_pool.compile_all([activation_kernel(False)], (7, 5), lambda *given: None)
    assert list(failed) == [activation_kernel(False)]
    assert re.fullmatch(r"OSError: no memory \(compiling _activation\S*\)", failed[activation_kernel(False)])


@pytest.mark.exhaustive
def test_a_process_compiles_a_kernel_that_another_one_describes(driver: Driver) -> None:
    from bridge.cuda.norm import activation_kernel
    from bridge.cuda.toolchain import compile_pool

    kernel = activation_kernel(False)
    process = compile_pool._Process()
    try:
        made = process.code(kernel, (7, 5))
    finally:
        process.end()
    assert made.cubin.startswith(b"\x7fELF")
    assert "_activation_silu_0" in made.entry
    kernel.codes.clear()
    assert compiler.known(kernel, (7, 5)) == made
    kernel.codes.clear()


def test_layouts_of_trellis_codes_that_are_nearly_alike_have_their_own_machine_code() -> None:
    """They were one entry of Numba's cache, which goes by the name."""
    from bridge.cuda.product.fused import kernel

    from bridge.trellis import BitshiftCodebook
    from bridge.trellis.vector import Code

    code = Code.of(BitshiftCodebook(), 2, "cuda")
    layouts = (
        [(0, 0, 1, 1, 0, 0, 1, 1), (0, 1, 0, 1, 0, 1, 0, 1)],
        [(0, 1, 8, 9, 2, 3, 10, 11), (0, 1, 2, 3, 8, 9, 10, 11)],
    )
    found = [kernel(code, sums, columns, 32, 1, 4) for sums in layouts[0] for columns in layouts[1]]
    assert len({compiler.digest(made) for made in found}) == 4


def test_what_belongs_to_one_backend_is_in_few_modules() -> None:
    """So that another backend needs other ones of these, and no other kernels."""

    def users(pattern: str) -> list[str]:
        return sorted(
            path.name for path in (ROOT / "cuda").rglob("*.py") if re.search(pattern, path.read_text("utf-8"))
        )

    assert users(r"numba\.cuda\.extending|llvmlite") == ["intrinsics.py"]
    assert users(r"import numba\.cuda|from numba\.cuda\.(?!extending)") == ["compiler.py", "device.py"]


def test_a_numba_that_passes_arguments_otherwise_is_refused(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    from bridge.cuda.norm import norm_kernel

    kernel = norm_kernel.__wrapped__(64, False)
    ptx = compiler.ptx_of(kernel, (9, 0))
    last = re.findall(r"\.param \.[a-z0-9]+ \w+\n\)", ptx)[0]
    for other in (ptx.replace(last, last.replace("32", "64")), ptx.replace(last, last[:-2] + ",\n.param .u64 more)")):
        assert other != ptx
        monkeypatch.setattr(compiler, "ptx_of", lambda source, capability, other=other: other)
        with pytest.raises(
            BridgeError, match=r"_norm_64_0010_: this numba-cuda passes arguments in another form .*<0.31"
        ):
            kernel.warm()


def test_a_dependent_kernel_is_launched_while_the_one_before_it_may_run(driver: Driver) -> None:
    """By the attribute of cuLaunchKernelEx; on a stream that is captured, it makes the edge of a graph."""
    from bridge.cuda.sampling import greedy_kernel
    from bridge.cuda.toolchain import launch
    from cuda.core import LaunchConfig

    configs: list[Any] = []
    launch._core().LaunchConfig = LaunchConfig
    driver.queue = lambda stream, config, kernel, *arguments: configs.append(config)
    for dependent in (False, True):
        kernel = greedy_kernel.__wrapped__(32, dependent)
        arguments = operands(kernel)
        kernel.launch(2, 32, 0, *arguments)
        kernel.bind(2, 32, 0, *arguments)(0)
    assert [config.programmatic_stream_serialization for config in configs] == [False, False, True, True]
    assert [config.grid for config in configs] == [(2, 1, 1)] * 4
    assert kernel.oldest == (9, 0)


def operands(kernel: Any) -> list[Any]:
    """Arrays of some size, and numbers, of the types that a kernel takes."""
    return [
        torch.from_numpy(np.zeros((3, 5, 7)[:dimensions], element)) if dimensions else 3
        for element, dimensions in compiler.parameters(kernel.signature)
    ]


@pytest.mark.parametrize(
    ("capability", "driver_version", "switch", "wanted"),
    [
        ((9, 0), (12, 3), None, True),
        ((12, 0), (13, 0), "1", True),
        ((8, 9), (13, 0), None, False),
        ((9, 0), (12, 2), None, False),  # which captures no such launch
        ((9, 0), (13, 0), "0", False),
    ],
)
def test_launches_overlap_where_gpu_and_driver_can_and_nobody_says_no(
    capability: tuple[int, int], driver_version: tuple[int, int], switch: str | None, wanted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from bridge.cuda.toolchain import device as devices

    monkeypatch.setattr(devices, "_driver", lambda: SimpleNamespace(get_version=lambda: driver_version))
    monkeypatch.delenv("BRIDGE_PDL", raising=False)
    if switch is not None:
        monkeypatch.setenv("BRIDGE_PDL", switch)
    gpu = devices.Device(0, "NVIDIA H200", capability, 132)
    assert devices.overlaps(gpu) is wanted
    monkeypatch.setattr("cuda.core.LaunchConfig", object)  # an old one
    assert not devices.overlaps(gpu)


def test_arguments_are_addresses_rows_and_their_distance_and_numbers_of_their_type(driver: Driver) -> None:
    from bridge.cuda.product.matvec_kernel import kernel
    from bridge.cuda.product.matvec_shape import MatvecShape
    from bridge.cuda.sampling import draw_kernel

    product = kernel.__wrapped__("Q4_0", 3, MatvecShape(2, 1, 1, 4), False, "")
    weights, x, both = torch.zeros(9, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8), torch.zeros(3, 10)
    bias = torch.zeros(4)
    product.launch(1, 32, 0, weights, 5, x, both[:, 2:6], bias, 4, 2)
    draw = draw_kernel.__wrapped__(32)
    arrays = operands(draw)
    draw.launch(1, 32, 0, *arrays)
    numbers = [[(type(v), getattr(v, "value", v)) for v in launch[3]] for launch in driver.launches]
    long = ctypes.c_int64
    assert numbers[0] == [
        (int, weights.data_ptr()), (long, 5), (int, x.data_ptr()), (int, both.data_ptr() + 8), (int, 3), (int, 10),
        (int, bias.data_ptr()), (long, 4), (long, 2),
    ]  # fmt: skip
    assert numbers[1][2] == (ctypes.c_int32, 3)
    assert [number for i, (_, number) in enumerate(numbers[1]) if i != 2] == [
        array.data_ptr() for i, array in enumerate(arrays) if i != 2
    ]


def test_a_second_launch_asks_the_driver_for_the_context_alone(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launch costs the host: neither the device nor the kernel is looked for again."""
    from bridge.cuda.norm import activation_kernel
    from bridge.cuda.toolchain import launch
    from cuda.bindings import driver as bindings

    kernel = activation_kernel.__wrapped__(False)
    kernel.launch(1, 32, 0, *operands(kernel))
    asked: list[str] = []
    for name in driver.functions():
        function = getattr(bindings, name)
        monkeypatch.setattr(bindings, name, lambda *given, f=function, n=name: (asked.append(n), f(*given))[1])
    monkeypatch.setattr(launch._core(), "LaunchConfig", None)
    kernel.launch(1, 32, 0, *operands(kernel))
    assert asked == ["cuCtxGetCurrent"]
    assert len(driver.launches) == 2


@pytest.mark.parametrize("n", [None, 3])
def test_a_second_product_only_points_its_launches_elsewhere(
    n: int | None, moved: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = moved
    shape = (64,) if n is None else (n, 64)
    multiply = tensor.matvec if n is None else tensor.matmul
    first, again = torch.randn(shape), torch.randn(shape)
    made = [multiply(first)]
    monkeypatch.setattr(tensor, "_input", None)  # looked at no more
    made += [multiply(first), multiply(again)]
    out = torch.empty_like(made[0])
    assert multiply(again, out=out) is out
    assert len(driver.launches) == 8
    quantized, products = driver.launches[::2], driver.launches[1::2]

    def same_but(launches: list[Any], *places: int) -> None:
        for grid, block, stream, arguments in launches[1:]:
            assert (grid, block, stream) == launches[0][:3]
            old, new = ([getattr(v, "value", v) for v in given] for given in (launches[0][3], arguments))
            assert {i for i, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1]} <= set(places)

    same_but(quantized, 0, len(quantized[0][3]) - 1)  # where x is, the first array, and the records, the last
    assert [launch[3][0] for launch in quantized] == [x.data_ptr() for x in (first, first, again, again)]
    y_at = 3  # behind the weights, a number and the records
    same_but(products, 2, y_at)
    assert [launch[3][y_at] for launch in products] == [y.data_ptr() for y in (*made, out)]


def test_what_is_not_as_it_was_is_looked_at_again(moved: Any, driver: Driver) -> None:
    tensor = moved
    x = torch.randn(64)
    tensor.matvec(x)
    for wrong, message in (
        (x.double(), "x has dtype torch.float64"), (x[:32], r"x has shape \[32\]"), (x.to("meta"), "x is on meta"),
    ):  # fmt: skip
        with pytest.raises(BridgeError, match=message):
            tensor.matvec(wrong)
    for out in (torch.empty(7), torch.empty(6, dtype=torch.float16), torch.empty(12)[::2], np.empty(6, np.float32)):
        with pytest.raises(BridgeError, match="out is"):
            tensor.matvec(x, out=out)
    count = len(driver.launches)
    tensor.matvec(torch.randn(128)[::2])  # copied, and multiplied
    tensor.matvec(x.half())
    assert len(driver.launches) == count + 4


def test_registers_are_limited_in_what_runs_and_not_only_in_what_was_tried(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cuda.core
    from bridge.cuda.norm import norm_kernel
    from bridge.cuda.toolchain.launch import MAX_REGISTERS

    options: list[Any] = []
    linker = cuda.core.Linker

    def noted(*codes: Any, **given: Any) -> Any:
        options.append(given["options"])
        return linker(*codes, **given)

    monkeypatch.setattr(cuda.core, "Linker", noted)
    norm_kernel.__wrapped__(64, False).warm()
    assert options[0].max_register_count == MAX_REGISTERS
    assert options[0].arch == "sm_90"


def test_memory_that_nobody_uses_any_more_is_freed_before_there_is_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    from bridge.cuda.toolchain.device import Device

    gpu = Device(0, "NVIDIA H200", (9, 0), 132)
    free = [1000]
    kept = [800]  # what torch has yet to free

    def freed() -> None:
        free[0] += kept[0]
        kept[0] = 0

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free[0], 1 << 40))
    monkeypatch.setattr(torch.cuda, "empty_cache", freed)
    gpu.check_memory(1000, "w")
    assert kept == [800]
    gpu.check_memory(1800, "w")
    assert kept == [0]
    with pytest.raises(BridgeError, match=r"w needs 1.8 KiB, 1.8 KiB are free"):
        gpu.check_memory(1801, "w")
