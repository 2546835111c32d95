"""Machine code of kernels, for any GPU and on any machine: neither a GPU nor a driver is needed.

    function -> PTX -> machine code         numba-cuda, then nvJitLink: 1 to 10 s

It is kept in files under a digest of what it is made from: the function's own code, its constants and the functions
that it calls, the source of the intrinsics, and the compiler's version. So a kernel is compiled once on a machine, or
on another one beforehand, and edits elsewhere do not matter. compile_pool.py compiles many at once.

    ~/.cache/gguf-bridge/cubins/CAPABILITY-VERSIONS/DIGEST      name of the kernel, digest and bytes of its code

Numba passes an array as seven or more numbers, in an order that it documents nowhere. So what is compiled is a function
that takes the address of an array, of one with two dimensions also its sizes, and calls the kernel with arrays made of
them. The parameters of the result are compared with those that launch.py passes.
"""

import ctypes
import dis
import hashlib
import importlib
import os
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from bridge.cuda import intrinsics

from bridge.errors import BridgeError
from bridge.system.cache import cache_folder
from bridge.system.files import write_bytes

Capability = tuple[int, int]

_C_NAMES = {"float32": "float", "float64": "double"}
_lock = threading.RLock()  # held while numba takes one capability for that of the current GPU


class Code(NamedTuple):
    """Machine code, and the name of the kernel in it."""

    entry: str
    cubin: bytes


class Source:
    """A kernel as it is written: a function of Python, its signature, and the registers that a thread may have."""

    def __init__(self, function: Callable[..., None], signature: str, registers: int):
        self.function = function
        self.signature = signature
        self.registers = registers
        self.name = function.__name__
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
    found = known(source, capability)
    if found is None:
        found = source.codes[capability] = _compiled(source, capability)
        if (path := _path(source, capability)) is not None:
            _store(path, found)
    return found


def known(source: Source, capability: Capability) -> Code | None:
    """A kernel's machine code if it has been compiled, by this process or another one."""
    if capability not in source.codes:
        path = _path(source, capability)
        stored = None if path is None else _stored(path)
        if stored is None:
            return None
        source.codes[capability] = stored
    return source.codes[capability]


def ptx_of(source: Source, capability: Capability) -> str:
    """A kernel as PTX."""
    import numba.cuda.dispatcher as dispatcher
    from numba import cuda

    with _lock:
        before: Any = dispatcher.get_current_device
        # device functions are compiled for the current GPU, and asking for it would start CUDA
        dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
        try:
            entry, signature = _entry(source)
            ptx, _ = cuda.compile(entry, signature, device=False, abi="numba", cc=capability, output="ptx")
        finally:
            dispatcher.get_current_device = before
    return ptx if isinstance(ptx, str) else ptx.decode()


def _compiled(source: Source, capability: Capability) -> Code:
    from cuda.core import Linker, LinkerOptions, ObjectCode

    ptx = ptx_of(source, capability)
    head = re.search(r"\.entry (\w+)\((.*?)\)", ptx, re.DOTALL)
    assert head is not None
    taken = [int(bits) // 8 for bits in re.findall(r"\.param \.[a-z](\d+)", head[2])]
    if taken != [ctypes.sizeof(scalar(element)) for element, _ in parameters(_entry_text(source)[1])]:
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
    taken, types, given = [], [], []
    for i, (element, dimensions) in enumerate(parameters(source.signature)):
        names = [f"p{i}", f"rows{i}", f"columns{i}"] if dimensions > 1 else [f"p{i}"]
        taken += names
        types += ["uint64", "int64", "int64"][: len(names)] if dimensions else [element]
        given.append(f"{element}_{dimensions}({', '.join(names)})" if dimensions else names[0])
    text = f"def {source.name}({', '.join(taken)}):\n    kernel({', '.join(given)})\n"
    return text, f"void({', '.join(types)})"


# files


def folder(capability: Capability) -> Path | None:
    """Where machine code is kept that the installed versions have compiled; None where it cannot be."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    try:
        every = (Path(given) if given else cache_folder()) / "cubins"
    except BridgeError:
        return None
    return every / f"{capability[0]}.{capability[1]}-{_versions()}"


def _path(source: Source, capability: Capability) -> Path | None:
    """Where a kernel's machine code is kept; None where there is no folder for it."""
    found = folder(capability)
    return None if found is None else found / digest(source)


def _stored(path: Path) -> Code | None:
    with suppress(OSError, ValueError):
        head, cubin = path.read_bytes().split(b"\n", 1)
        entry, wanted = head.decode("ascii").split()
        if hashlib.sha256(cubin).hexdigest() == wanted:
            return Code(entry, cubin)
    return None


def _store(path: Path, made: Code) -> None:
    with suppress(OSError, BridgeError):  # a home that is full or cannot be written to: compiled again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        head = f"{made.entry} {hashlib.sha256(made.cubin).hexdigest()}\n"
        write_bytes(path, head.encode() + made.cubin)


@cache
def _versions() -> str:
    """A digest of what compiles, and of the intrinsics."""
    import numba
    import numba_cuda
    from cuda.bindings import nvjitlink
    from numba.cuda.cudadrv.nvvm import NVVM

    parts = [sys.version_info[:2], numba.__version__, numba_cuda.__version__, nvjitlink.version(), NVVM().get_version()]
    source = Path(intrinsics.__file__).read_bytes()
    return hashlib.sha256(repr(parts).encode() + source).hexdigest()[:12]


def digest(source: Source) -> str:
    """A digest of what a kernel's machine code is made from, but for compiler and intrinsics."""
    text = "\n".join([source.signature, str(source.registers), *_entry_text(source), *_content(source.function, set())])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _content(function: Callable[..., Any], seen: set[str]) -> Iterator[str]:
    """A function's instructions and constants, then those of the functions that it calls."""
    body = function.__code__
    text = f"{function.__name__}{body.co_varnames}{body.co_names}{body.co_consts!r}{body.co_code.hex()}"
    yield text
    if text in seen:
        return
    seen.add(text)
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
    if value is None or isinstance(value, bool | int | float | str | tuple | np.generic):
        return repr(value)
    if isinstance(value, type | types.ModuleType):
        return value.__name__
    return _INTRINSICS[id(value)]


_INTRINSICS = {id(value): name for name, value in vars(intrinsics).items()}
