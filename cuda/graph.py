"""A step captured once in a CUDA graph and replayed: 160 launches cost the host as much as one.

What a step reads that changes (token, position, uniform numbers) lies in device memory, so the graph is the same
for every step. A step runs once before it is captured: Numba compiles, CUDA loads modules and cuBLAS takes its
workspace on first use, none of which may happen while a stream is capturing.
"""

from collections.abc import Callable
from typing import Any


def captured(step: Callable[[], None], stream: Any) -> Any:
    """A torch.cuda.CUDAGraph of what step() launches; it must have run on the stream before."""
    import torch
    from numba import cuda

    graph = torch.cuda.CUDAGraph()
    # nor may numba free what it has collected meanwhile
    with cuda.defer_cleanup(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    return graph


class Graph:
    """`replay()` launches what `step()` launched, on torch's current stream."""

    def __init__(self, step: Callable[[], None], state: Any):
        """`state`: the tensor that says where a step is; the first run, for its side effects, leaves it as it was."""
        import torch

        kept = state.clone()
        stream = torch.cuda.Stream(state.device)
        stream.wait_stream(torch.cuda.current_stream(state.device))
        with torch.cuda.stream(stream):
            step()
            state.copy_(kept)
        stream.synchronize()
        self._graph = captured(step, stream)
        torch.cuda.current_stream(state.device).wait_stream(stream)

    def replay(self) -> None:
        """Launch the step."""
        self._graph.replay()
