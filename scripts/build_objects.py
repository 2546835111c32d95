"""Compile the C functions that models of common types need, for the wheel: what installs it compiles none of them.

    python scripts/build_objects.py bridge/objects

makes linux-avx2.zip and the files of other CPUS there; `make wheel` puts them into the wheel. An object is kept under
its function's name and the digest of its sources (`bridge.system.kernels.object_code`), and used as long as these are
the same. No machine of a target is needed: LLVM compiles for all of them. What is not here is compiled where it is
needed.
"""

import argparse
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from bridge.runtime.cpu.engines import dense, floats, interleaved, products, tiled
from bridge.runtime.cpu.forms import activations, repack, rowmajor
from bridge.runtime.cpu.ops import attention, decoder_ops, expert_ops, passes, sampling_ops  # fmt: skip
from bridge.system.cpu import machine, targets
from bridge.system.cpu.cpus import usable_cpus
from bridge.system.cpu.machine import Machine
from bridge.system.kernels import compiler, object_code
from bridge.system.kernels.jit import CFunction
from bridge.system.threads import pool

TYPES = (
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_XS", "IQ4_NL", "MXFP4"
)  # fmt: skip
_V3 = {"avx2", "bmi", "bmi2", "lzcnt", "movbe", "popcnt"}
_HAS = {"x86-64-v3": _V3, "x86-64-v4": _V3 | {"avx512cd", "avx512dq"}}  # a CPU, besides what kernels ask for
CPUS = {  # of each target, as LLVM names it
    "avx2": "x86-64-v3", "avx512": "x86-64-v4", "avx512vbmi": "x86-64-v4", "neon": "neoverse-n1", "i8mm": "neoverse-n1",
}  # fmt: skip


def machine_of(target: str) -> Machine:
    """What a target's functions are compiled for, and what a machine must have."""
    features = targets.FEATURES[target] | _HAS.get(CPUS[target], set())
    processor = "x86_64" if CPUS[target].startswith("x86") else "aarch64"
    return Machine(f"{processor}-unknown-linux-gnu", CPUS[target], ",".join(f"+{name}" for name in sorted(features)))


def functions(target: str) -> Iterator[CFunction]:
    """The C functions that models of the common types call, with int8 products."""
    isa = targets.isa(target)
    yield from pool.functions()
    yield from (products._product_function(), products.narrow_function(), tiled._tile_function())
    yield from (passes.function(name) for name in passes.FUNCTIONS)
    yield sampling_ops.function()
    yield from (decoder_ops.function(name) for name in decoder_ops.FUNCTIONS)
    yield from (expert_ops.function(name) for name in expert_ops.FUNCTIONS)
    yield from (attention.function(name, kind) for kind in ("f16", "q8_0", "f32") for name in ("store", "attend"))
    yield attention.function("merge", "f16")
    yield from (of(kind) for of in (floats.rows_function, floats.wide_rows_function) for kind in floats.SIZES)
    yield dense.tiles_function()
    for name in TYPES:
        for width in interleaved.widths(name, target):
            yield activations.quantize_function(name, True, interleaved.form(name, target, width, True))
            yield from (interleaved.kernel(name, target, width, True, near) for near in (False, True))
        yield repack.repacker(name, isa.lanes)
        yield tiled._block_function(name, target, isa.lanes, True)
        yield decoder_ops.look_up_function(name)
        yield rowmajor.rows_function(name)


def build(target: str, out: Path) -> None:
    """Compile a target's functions into a file."""
    made_for = machine_of(target)
    features = made_for.features.replace("+", "")
    machine.features = lambda: frozenset(features.split(","))  # type: ignore[assignment]  # what functions ask
    started, objects = time.process_time(), {}
    for name in (made_for.cpu, *(interleaved.AHEAD if target == "avx512vbmi" else ())):
        machine.host = partial(made_for._replace, cpu=name)  # type: ignore[assignment]
        interleaved.kernel.cache_clear()  # type: ignore[attr-defined]  # some depend on the CPU
        for function in functions(target):
            file_name = object_code.bundled_name(function)
            if file_name not in objects:
                objects[file_name] = compiler.object_code(function, made_for)
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.comment = features.encode()
        for file_name, code in sorted(objects.items()):
            archive.writestr(zipfile.ZipInfo(file_name), code, zipfile.ZIP_DEFLATED)
    seconds = time.process_time() - started
    print(f"{target}: {len(objects)} functions, {out.stat().st_size / 1e6:.1f} MB, {seconds:.0f} CPU s", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("out", type=Path, metavar="FOLDER")
    options.add_argument("targets", nargs="*", default=list(CPUS), metavar="TARGET", help="default: all")
    arguments = options.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if len(arguments.targets) == 1:
        build(arguments.targets[0], arguments.out / object_code.bundle(arguments.targets[0]))
        return

    def alone(target: str) -> int:
        """The exit code of building a target in a process of its own: Numba compiles for one CPU in each."""
        triple, cpu, features = machine_of(target)
        described = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
        environment = os.environ | (described if triple.startswith("x86") else {})
        return subprocess.run([sys.executable, __file__, str(arguments.out), target], env=environment).returncode

    with ThreadPoolExecutor(usable_cpus()) as threads:
        sys.exit(max(threads.map(alone, arguments.targets)))


if __name__ == "__main__":
    main()
