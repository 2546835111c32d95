"""Try which CUDA kernels numba-cuda-mlir, the successor of numba-cuda, compiles. Neither a GPU nor a driver is needed.

    pip install numba-cuda-mlir nvidia-cuda-nvcc; python scripts/try_numba_cuda_mlir.py

Kernels that use none of cuda/intrinsics.py compile with version 0.6. The others need those instructions defined in the
successor's way, which are built of MLIR instead of LLVM's IR. The exit code is 1 if a kernel that compiled with version
0.6 no longer does.
"""

import sys

CAPABILITY = (9, 0)
COMPILED = {"draw"}  # with version 0.6


def main() -> int:
    import numba
    from numba_cuda_mlir import cuda, tools

    # bridge.cuda imports numba.cuda; and without a GPU it is not known for which one to compile
    sys.modules["numba.cuda"] = numba.cuda = cuda
    for part in ("extending", "types", "cgutils"):
        sys.modules[f"numba.cuda.{part}"] = getattr(cuda, part)
    tools.get_gpu_compute_capability = lambda *given: CAPABILITY

    from bridge.cuda import activations, attention, halves, matvec_kernel, norm, sampling
    from bridge.cuda.matvec_shape import MatvecShape

    kernels = {
        "draw": sampling.draw_kernel(sampling.DRAW_THREADS),
        "greedy": sampling.greedy_kernel(sampling.GREEDY_THREADS),
        "norm": norm.norm_kernel(4096, False),
        "silu": norm.silu_kernel(False),
        "records": activations.quantizer("f32", False),
        "halves": halves.kernel("plain"),
        "product": matvec_kernel.kernel("Q4_K", 1, MatvecShape(2, 1, 1, 4), False, ""),
        "attention": attention.kernel(128, 4, 128, True, False, False),
    }
    compiled = set()
    for name, kernel in kernels.items():
        try:
            cuda.compile_ptx(kernel.function, kernel.signature, cc=CAPABILITY)
        except Exception as problem:
            print(f"{name:10} {type(problem).__name__}: {' '.join(str(problem).split())[:100]}")
        else:
            compiled.add(name)
            print(f"{name:10} compiles")
    return int(not COMPILED.issubset(compiled))


if __name__ == "__main__":
    sys.exit(main())
