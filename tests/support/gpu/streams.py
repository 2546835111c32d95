"""torch.cuda on the machine: streams that do nothing, events that look at the clock, and graphs that record.

While a graph is captured nothing runs, as on a GPU: kernels and torch's operations are noted with the tensors they
were given, and what they would have changed is as before. A replay does them in order, on the same memory. What a
GPU refuses then is refused: a kernel that has never run, and reading a tensor's value on the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.gpu.memory import GpuError

_ON_THE_HOST = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero")


class Graph:
    """torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], object]] = []

    def replay(self) -> None:
        if Recorder.current is not None:
            raise GpuError("a replay while another graph is captured")
        for step in self.steps:
            step()


class Recorder(TorchDispatchMode):
    """Notes torch's operations instead of doing them."""

    current: Recorder | None = None

    def __init__(self, graph: Graph):
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if schema.name in _ON_THE_HOST:
            raise GpuError(f"{schema.name} waits for the GPU while a graph is captured")
        given = list(zip(schema.arguments, args, strict=False))
        given += [(a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs]
        written = [value for argument, value in given if argument.alias_info and argument.alias_info.is_write]
        before = [value.clone() for value in written]
        result = func(*args, **kwargs)
        for value, kept in zip(written, before, strict=True):
            value.copy_(kept)
        if written:
            self.graph.steps.append(lambda: func(*args, **kwargs))
        elif not any(r.alias_info for r in schema.returns):  # a view is not work
            outputs = [r for r in (result if isinstance(result, tuple | list) else [result]) if torch.is_tensor(r)]
            places = {a.untyped_storage().data_ptr() for _, a in given if torch.is_tensor(a)}
            if any(output.untyped_storage().data_ptr() in places for output in outputs):
                return result  # a view as well
            for output in outputs:
                if output.is_floating_point():
                    output.fill_(float("nan"))

            def again() -> None:
                found = func(*args, **kwargs)
                found = found if isinstance(found, tuple | list) else [found]
                for output, value in zip(outputs, [f for f in found if torch.is_tensor(f)], strict=True):
                    output.copy_(value)

            self.graph.steps.append(again)
        return result


@contextmanager
def _capture(graph: Graph, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
    """torch.cuda.graph."""
    if Recorder.current is not None:
        raise GpuError("a capture within a capture")
    Recorder.current = Recorder(graph)
    try:
        with Recorder.current:
            yield
    finally:
        Recorder.current = None


class Stream:
    """torch.cuda.Stream."""

    cuda_stream = 0

    def __init__(self, device: Any = None):
        pass

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)

    def synchronize(self) -> None:
        _refuse_while_capturing("synchronize")


class Event:
    """torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False):
        self.timed = enable_timing
        self.at: float | None = None

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        _refuse_while_capturing("synchronize")
        assert self.at is not None, "an event that was never recorded"

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        assert self.timed
        assert end.timed
        assert self.at is not None
        assert end.at is not None
        return 1000 * (end.at - self.at) + 1e-3


def _refuse_while_capturing(what: str) -> None:
    if Recorder.current is not None:
        raise GpuError(f"{what} while a graph is captured")


def launched(kernel: Any, known: set[Any], run: Callable[[], None]) -> None:
    """Run a kernel, or note it where a graph is captured."""
    if Recorder.current is None:
        known.add(kernel)
        run()
    elif kernel not in known:
        raise GpuError(f"{kernel.name} is compiled while a graph is captured")
    else:
        Recorder.current.graph.steps.append(run)


@contextmanager
def pretended_torch() -> Iterator[None]:
    """torch.cuda is replaced by this module; its tensors stay on the CPU."""

    fakes: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": _capture,
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda device=None: Stream(),
        "current_device": lambda: 0,
        "device": lambda index: nullcontext(),
        "is_available": lambda: True,
        "synchronize": lambda device=None: _refuse_while_capturing("synchronize"),
        "empty_cache": lambda: None,
        "get_rng_state": lambda device="cuda": torch.empty(0, dtype=torch.uint8),  # which a compiler keeps
        "set_rng_state": lambda state, device="cuda": None,
        "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=1 << 12),
    }
    with ExitStack() as stack:
        for name, fake in fakes.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, fake))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda self: self))
        yield
