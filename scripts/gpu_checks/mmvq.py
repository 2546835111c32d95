"""llama.cpp's own product of a quantized matrix with a vector (mmvq), beside ours in the same run.

Its source is that of a checkout, LLAMA_CPP in the environment; nvcc compiles it here, with what is in mmvq_peer.cu. It
reads a GGUF's blocks as they are, and x in its q8_1: a half for the step, one for the sum, 32 codes.
"""

import ctypes
import hashlib
import os
import shutil
import site
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from bridge.cuda.bench import seconds_from_memory
from bridge.cuda.toolchain.device import require, zeros

from bridge.blocks.read import WRITTEN
from bridge.runtime.bench import random_tensor
from gpu_checks.products import Judge

TYPES = ("Q4_K", "Q6_K", "Q8_0", "Q4_0", "Q2_K", "Q3_K", "Q5_K", "IQ4_XS", "IQ3_S", "IQ2_XS")
SHAPE = (1000, 2304)
_SOURCE = Path(__file__).with_name("mmvq_peer.cu")
_PADDING = 512  # columns of x
_LIMIT = 1e-3  # relative: x is the same, sums of 32 codes are halves


def available() -> str | None:
    """Why llama.cpp's product cannot be compiled; None if it can."""
    folder = os.environ.get("LLAMA_CPP")
    if not folder:
        return "no checkout of llama.cpp was given (--llama-cpp)"
    if not (Path(folder) / "ggml" / "src" / "ggml-cuda" / "mmvq.cu").is_file():
        return f"{folder} has no ggml/src/ggml-cuda/mmvq.cu"
    return None if shutil.which("nvcc") else "nvcc is not installed"


def command(capability: tuple[int, int], out: Path) -> list[str]:
    """The command that compiles llama.cpp's product."""
    source = Path(os.environ["LLAMA_CPP"]) / "ggml"
    folders = [source / "include", source / "src", source / "src" / "ggml-cuda"]
    # it includes cuBLAS's header, which toolkits without that library take from NVIDIA's package
    folders += sorted(p.parent for s in site.getsitepackages() for p in Path(s).glob("nvidia/*/include/cublas_v2.h"))
    flags = ["-shared", "-Xcompiler", "-fPIC", "-O3", "-std=c++17", f"-arch=sm_{capability[0]}{capability[1]}"]
    return ["nvcc", *flags, *(f"-I{folder}" for folder in folders), "-o", str(out), str(_SOURCE)]


def library() -> Any:
    """The compiled library, made once on a machine. Raises RuntimeError with what nvcc says."""
    arguments = command(require("cuda").capability, Path())
    key = hashlib.sha256("\n".join([*arguments, _SOURCE.read_text()]).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"gguf-bridge-mmvq-{os.getuid()}-{key}.so"
    if not path.exists():
        new = path.with_suffix(f".{os.getpid()}")
        done = subprocess.run(command(require("cuda").capability, new), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"nvcc: {done.stderr.strip()[-600:]}")
        new.replace(path)
    library = ctypes.CDLL(str(path), mode=os.RTLD_LAZY)  # what no product calls stays undefined
    long, pointer = ctypes.c_int64, ctypes.c_void_p
    library.multiply.argtypes = [ctypes.c_int, long, long, long, long, pointer, pointer, pointer, pointer]
    library.multiply.restype = None
    return library


class Product:
    """Products of a tensor with one vector; `steps` f16 [blocks] and `codes` int8 [blocks, 32] are x."""

    def __init__(self, type: str, shape: tuple[int, int]):
        self.tensor, self.place = random_tensor(type, *shape), require("cuda").place
        self.library, self.block = library(), WRITTEN[type]
        rows, columns = shape
        self.padded = -(-columns // _PADDING) * _PADDING
        rng = np.random.default_rng(0)
        self.codes = np.zeros((self.padded // 32, 32), np.int8)
        self.codes.reshape(-1)[:columns] = rng.integers(-127, 128, columns)
        self.steps = rng.uniform(0.01, 0.02, self.padded // 32).astype(np.float16)
        sums = (self.steps.astype(np.float32) * self.codes.sum(1)).astype(np.float16)
        halves = np.stack([self.steps, sums], 1).view(np.uint8)
        self.x = torch.from_numpy(np.concatenate([halves, self.codes.view(np.uint8)], 1)).to(self.place)
        self.y = zeros(require("cuda"), rows)
        self.raw = torch.from_numpy(np.array(self.tensor.raw).reshape(-1))

    def launcher(self) -> Callable[[], None]:
        """A function that queues it, on weights of its own."""
        weights = self.raw.to(self.place, copy=True)
        type = int(gguf.GGMLQuantizationType[self.tensor.type])
        rows, columns = self.tensor.shape

        def run() -> None:
            self.library.multiply(
                type, self.block.size, rows, columns, self.padded, weights.data_ptr(), self.x.data_ptr(),
                self.y.data_ptr(), torch.cuda.current_stream().cuda_stream,
            )  # fmt: skip

        run.weights = weights  # type: ignore[attr-defined]
        return run

    def expected(self) -> np.ndarray:
        """The product in float64."""
        x = self.codes.astype(np.float64) * self.steps.astype(np.float64)[:, None]
        y: np.ndarray = self.tensor.dequantize().astype(np.float64) @ x.reshape(-1)[: self.tensor.shape[1]]
        return y


def check() -> dict[str, Any]:
    """Compiles it, and compares its products: times of what is wrong would say nothing."""
    if (reason := available()) is not None:
        return {"wrong": [], "notes": reason}
    judge = Judge()
    for type in TYPES:
        product = Product(type, SHAPE)
        product.launcher()()
        torch.cuda.synchronize()
        judge(f"llama.cpp's {type}", product.y, product.expected(), _LIMIT)
    return {"wrong": judge.wrong, "notes": ""}


def time(shape: tuple[int, int], type: str) -> float | None:
    """Seconds of a product; None where it is not available."""
    if type not in TYPES or available() is not None:
        return None
    product = Product(type, shape)
    return seconds_from_memory(lambda i: product.launcher(), product.tensor.nbytes)
