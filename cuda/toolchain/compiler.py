"""Machine code of kernels, for any GPU and on any machine: neither a GPU nor a driver is needed.

    function -> PTX -> machine code         numba-cuda, then nvJitLink: 1 to 10 s

It is kept in files under a digest of its source: the expanded function with its constants, the functions that it calls,
and the intrinsics. So a kernel is compiled once on a machine, and edits elsewhere do not matter. A kept kernel needs no
compiler. compile_pool.py compiles many at once.

    ~/.cache/gguf-bridge/cubins/CAPABILITY-VERSIONS/DIGEST      name of the kernel, digest and bytes of its code
    $BRIDGE_KERNELS/CAPABILITY/DIGEST                           the same, compiled elsewhere; looked up first

VERSIONS are those of the packages that compile. A folder that BRIDGE_KERNELS names is used wherever the sources are the
same, whichever Python and toolkit compiled it (`keep` writes it).

Numba passes an array as seven or more numbers, in an order that it documents nowhere. So what is compiled is a function
that takes the address of an array, of one with two dimensions also its sizes, and calls the kernel with arrays made of
them. The parameters of the result are compared with those that launch.py passes.
"""

import ctypes
import dis
import hashlib
import importlib
import importlib.metadata
import os
import re
import shutil
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from bridge.cuda.toolchain import intrinsics
from bridge.cuda.toolchain.unroll import source_of

from bridge.errors import BridgeError
from bridge.system.storage.cache import cache_folder
from bridge.system.storage.files import write_bytes

Capability = tuple[int, int]

_C_NAMES = {"float32": "float", "float64": "double"}
# what compiles: of these, a CUDA 12 or CUDA 13 install has some
_PACKAGES = ("numba", "numba-cuda", "cuda-bindings", "nvidia-nvvm", "nvidia-nvjitlink", "nvidia-cuda-nvcc-cu12",
             "nvidia-nvjitlink-cu12")  # fmt: skip
# what linker and driver say of PTX or machine code that another version has made
_OF_VERSIONS = re.compile(r"\bversion|IR_VERSION|UNSUPPORTED_PTX|INVALID_(PTX|IMAGE|SOURCE)|NO_BINARY", re.IGNORECASE)
_lock = threading.RLock()  # held while numba takes one capability for that of the current GPU


class Code(NamedTuple):
    """Machine code, and the name of the kernel in it."""

    entry: str
    cubin: bytes


class Source:
    """A kernel as it is written: a function of Python, its signature, and the registers that a thread may have."""

    def __init__(self, function: Callable[..., None], signature: str, registers: int):
        self.function, self.name = function, function.__name__
        self.signature, self.registers = signature, registers
        self.recipe: tuple[str, str, tuple[Any, ...], dict[str, Any]] | None = None  # set by `recipe`
        self.codes: dict[Capability, Code] = {}  # compiled so far

    def __reduce__(self) -> Any:
        """Another process makes it as it was made here."""
        return _made, self.recipe


def recipe(make: Callable[..., Any]) -> Any:
    """For functions that make kernels: one kernel for the same arguments, and another process can make it too."""

    @cache
    @wraps(make)
    def made(*arguments: Any, **named: Any) -> Any:
        kernel = make(*arguments, **named)
        kernel.recipe = make.__module__, make.__name__, arguments, named
        return kernel

    return made


def _made(module: str, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return getattr(importlib.import_module(module), name)(*arguments, **named)


def parameters(signature: str) -> list[tuple[str, int]]:
    """(element type, dimensions) of each parameter of "void(float32[:,::1], int64, ...)"; a number has none."""
    inside = signature[signature.index("(") + 1 : signature.rindex(")")]
    parts = [part.strip().partition("[") for part in re.split(r",(?![^\[]*\])", inside)]
    return [(element, max(0, sizes.count(":") - 1)) for element, _, sizes in parts if element]


def scalar(element: str) -> Any:
    """The type of ctypes that a number of this type is passed as."""
    return getattr(ctypes, f"c_{_C_NAMES.get(element, element)}")


def code(source: Source, capability: Capability) -> Code:
    """A kernel's machine code, from its file or compiled. Raises BridgeError where Numba passes arguments otherwise."""
    return known(source, capability) or compiled(source, capability)


def known(source: Source, capability: Capability) -> Code | None:
    """A kernel's machine code if it has been compiled, by this process or another one."""
    if capability not in source.codes:
        name = digest(source)
        stored = (_stored(folder / name) for folder in _folders(capability))
        if (machine_code := next(filter(None, stored), None)) is None:
            return None
        source.codes[capability] = machine_code
    return source.codes[capability]


def compiled(source: Source, capability: Capability) -> Code:
    """A kernel's machine code, compiled now and kept for the next time; raises as `code` does."""
    machine_code = source.codes[capability] = _compiled(source, capability)
    if (local := folder(capability)) is not None:
        with suppress(OSError, BridgeError):  # a home that is full or cannot be written to: compiled again next time
            _store(local / digest(source), machine_code)
    return machine_code


def ptx_of(source: Source, capability: Capability) -> str:
    """A kernel as PTX."""
    _find_toolkit()
    import numba.cuda.dispatcher as dispatcher
    from numba import cuda

    with _lock, _names_of_numpy():
        before: Any = dispatcher.get_current_device
        # device functions are compiled for the current GPU, and asking for it would start CUDA
        dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
        try:
            entry, signature = _entry(source)
            ptx, _ = cuda.compile(entry, signature, device=False, abi="numba", cc=capability, output="ptx")
        finally:
            dispatcher.get_current_device = before
    return ptx if isinstance(ptx, str) else ptx.decode()


@contextmanager
def _names_of_numpy() -> Iterator[None]:
    """Names that numpy 2.5 no longer has and numba-cuda 0.30 evaluates when it compiles its first kernel."""
    if hasattr(np, "row_stack"):
        yield
        return
    np.row_stack = np.vstack  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del np.row_stack  # type: ignore[attr-defined]


def toolkit() -> tuple[int, int]:
    """The version of the CUDA toolkit that compiles; raises what numba-cuda does where there is none.

    torch brings all of a toolkit but libNVVM.
    """
    _find_toolkit()
    from numba.cuda.cudadrv.nvvm import NVVM
    from numba.cuda.cudadrv.runtime import get_version

    NVVM()
    return tuple(get_version())[:2]  # type: ignore[return-value]


@cache
def _find_toolkit() -> None:
    """Name the toolkit that nvcc belongs to, unless one is named. NVIDIA's packages look there last, and do so once."""
    nvcc = shutil.which("nvcc")
    if nvcc and not (os.environ.get("CUDA_PATH") or os.environ.get("CUDA_HOME")):
        root = Path(nvcc).resolve().parents[1]
        if (root / "nvvm").is_dir():
            os.environ["CUDA_HOME"] = str(root)


def failure(problem: Exception, step: str) -> str:
    """What went wrong in a step of compiling or loading, in a line; with the way out where that is known."""
    from cuda.pathfinder import DynamicLibNotFoundError
    from numba.cuda.cudadrv.error import NvvmSupportError

    words = " ".join(str(problem).split())[:400]
    line = f"{type(problem).__name__}: {words or 'no reason given'} ({step})"
    if isinstance(problem, NvvmSupportError | DynamicLibNotFoundError):
        return f"{line}; there is no CUDA compiler: pip install numba-cuda[cu13], or [cu12] for a driver of CUDA 12"
    if of_versions(problem):
        return (
            f"{line}; the CUDA packages must be of one version, no newer than the driver's: "
            "pip install numba-cuda[cu13], or [cu12]"
        )
    return line


def of_versions(problem: Exception) -> bool:
    """Whether an error says that versions of compiler, linker and driver do not fit."""
    return _OF_VERSIONS.search(str(problem)) is not None


def _compiled(source: Source, capability: Capability) -> Code:
    from cuda.core import Linker, LinkerOptions, ObjectCode

    ptx = ptx_of(source, capability)
    head = re.search(r"\.entry (\w+)\((.*?)\)", ptx, re.DOTALL)
    assert head is not None
    passed = [int(bits) // 8 for bits in re.findall(r"\.param \.[a-z](\d+)", head[2])]
    if passed != [ctypes.sizeof(scalar(element)) for element, _ in parameters(_entry_text(source)[1])]:
        raise BridgeError(
            f"{source.name}: this numba-cuda passes arguments in another form than the kernels are launched with; "
            "pip install 'numba-cuda>=0.30.4,<0.31'"
        )
    options = LinkerOptions(arch=f"sm_{capability[0]}{capability[1]}", max_register_count=source.registers)
    return Code(head[1], bytes(Linker(ObjectCode.from_ptx(ptx.encode()), options=options).link("cubin").code))


def _entry(source: Source) -> tuple[Callable[..., None], str]:
    """What is compiled for a kernel, and its signature."""
    text, signature = _entry_text(source)
    names: dict[str, Any] = {"kernel": intrinsics.device_function(source.function)}
    for element, dimensions in parameters(source.signature):
        if dimensions:
            names[f"{element}_{dimensions}"] = intrinsics.array_at(element, dimensions)
    exec(text, names)
    return names[source.name], signature


def _entry_text(source: Source) -> tuple[str, str]:
    """Its text, and its signature: of an array the address, then the sizes if there are two."""
    all_names, types, arguments = [], [], []
    for i, (element, dimensions) in enumerate(parameters(source.signature)):
        names = [f"p{i}", f"rows{i}", f"columns{i}"] if dimensions > 1 else [f"p{i}"]
        all_names += names
        types += ["uint64", "int64", "int64"][: len(names)] if dimensions else [element]
        arguments.append(f"{element}_{dimensions}({', '.join(names)})" if dimensions else names[0])
    text = f"def {source.name}({', '.join(all_names)}):\n    kernel({', '.join(arguments)})\n"
    return text, f"void({', '.join(types)})"


# files


def folder(capability: Capability) -> Path | None:
    """Where machine code is kept that the installed versions have compiled; None where it cannot be."""
    named = os.environ.get("NUMBA_CACHE_DIR")
    try:
        every = (Path(named) if named else cache_folder()) / "cubins"
    except BridgeError:
        return None
    return every / f"{_name(capability)}-{_versions()}"


def elsewhere(capability: Capability) -> Path | None:
    """Where machine code is that was compiled elsewhere; None where BRIDGE_KERNELS names no folder."""
    named = os.environ.get("BRIDGE_KERNELS")
    return Path(named) / _name(capability) if named else None


def count_elsewhere(capability: Capability) -> int:
    """How many kernels the folder of BRIDGE_KERNELS has."""
    path = elsewhere(capability)
    return 0 if path is None else len(list(path.glob("*")))


def keep(source: Source, capability: Capability, path: Path) -> None:
    """Store a kernel's machine code in a folder for BRIDGE_KERNELS. Raises as `code` does, and OSError."""
    _store(path / _name(capability) / digest(source), code(source, capability))


def any_kept() -> bool:
    """Whether there are kernels that need no compiler, for any compute capability."""
    named, local = os.environ.get("BRIDGE_KERNELS"), folder((0, 0))
    if named and any(Path(named).glob("*/*")):
        return True
    return local is not None and any(local.parent.glob(f"*-{_versions()}/*"))


def _folders(capability: Capability) -> list[Path]:
    return [path for path in (elsewhere(capability), folder(capability)) if path is not None]


def _name(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"


def _stored(path: Path) -> Code | None:
    with suppress(OSError, ValueError):
        head, cubin = path.read_bytes().split(b"\n", 1)
        entry, wanted = head.decode("ascii").split()
        if hashlib.sha256(cubin).hexdigest() == wanted:
            return Code(entry, cubin)
    return None


def _store(path: Path, machine_code: Code) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    head = f"{machine_code.entry} {hashlib.sha256(machine_code.cubin).hexdigest()}\n"
    write_bytes(path, head.encode() + machine_code.cubin)


@cache
def _versions() -> str:
    """A digest of the versions of what compiles, as installed: no library is loaded for it."""
    parts = []
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            parts.append((name, importlib.metadata.version(name)))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def digest(source: Source) -> str:
    """A digest of what a kernel's machine code is made from, but for the compiler: the same for every Python."""
    parts = [source.signature, str(source.registers), *_entry_text(source), *_content(source.function, set())]
    text = "\n".join([*parts, _intrinsics_source()])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def _intrinsics_source() -> str:
    return Path(intrinsics.__file__).read_text("utf-8")


def _content(function: Callable[..., Any], seen: set[Any]) -> Iterator[str]:
    """A function's source, then the constants that it names, and the functions that it calls."""
    yield source_of(function)
    if function in seen:
        return
    seen.add(function)
    body = function.__code__
    for name in sorted({i.argval for i in dis.get_instructions(body) if i.opname == "LOAD_GLOBAL"}):
        value = function.__globals__.get(name)
        called = getattr(value, "py_func", value)
        if isinstance(called, types.FunctionType):
            yield f"{name} {getattr(value, 'targetoptions', {}).get('forceinline')}"
            yield from _content(called, seen)
        else:
            yield f"{name} {_named(value)}"


def _named(value: Any) -> str:
    """A constant's value, or the name of a type, module, builtin or intrinsic."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_named, value))})"
    if isinstance(value, np.generic):  # whose repr is another one in numpy 2
        return f"{value.dtype}({value.item()!r})"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, type | types.ModuleType):
        return value.__name__
    return _INTRINSICS[id(value)]


_INTRINSICS = {id(value): name for name, value in vars(intrinsics).items()}
