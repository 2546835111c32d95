"""scripts/gpu_check.py without a GPU: its jobs run here, on kernels that do their arithmetic in NumPy or none at all.

What is real: the script, and all of bridge.cuda but the kernels; their arguments are held against their signatures.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

import bridge
from bridge.blocks import ROUNDED
from tests.support.gpu import device
from tests.support.places import ROOT
from tests.support.random_blocks import rounded

sys.path.append(str(ROOT / "scripts"))

import gpu_check
from gpu_checks import (
    contexts,
    costs,
    experts,
    jobs,
    linears,
    model,
    products,
    report,
    runner,
    synthetic,
    timing,
    tokens,
    torchs,
    trellis,
)

_SPARED = {*ROUNDED} - {"IQ2_XS"}  # types whose jobs would be one like the other here, where nothing is computed
jobs.TYPES = report.TYPES = tuple(name for name in jobs.TYPES if name not in _SPARED)
# in tests/scripts/test_gpu_check.py by themselves: what comes early, or needs kernels that compute or a real stream
_PARTS = "correct/attention/", "correct/layers/", "correct/experts/"
_COMPUTED = {"correct/graphs", *(job for job in jobs.CORRECT if job.startswith(_PARTS))}
jobs.EARLY = []
for _jobs in (jobs.CORRECT, jobs.TIMES):
    _jobs[:] = [job for job in _jobs if not _SPARED & {*job.split("/")} and job not in _COMPUTED]


class Products:
    """Products and weights in float64, stored where kernels would store them. `wrong`: types with wrong results."""

    def __init__(self) -> None:
        self.wrong: set[str] = set()
        self.weights: dict[int, np.ndarray] = {}  # by the id of a matrix on the device
        self.matrices: list[Any] = []  # kept, so that an id stays theirs
        self.tokens: dict[int, tuple[Any, np.ndarray]] = {}  # records by the id of their buffer, and rounded values

    @contextmanager
    def installed(self) -> Iterator[None]:
        """In place of the kernels' results."""
        from bridge.cuda import bench, prompt
        from bridge.cuda.attention.prompt_attention import PromptAttention
        from bridge.cuda.forms import dequantize
        from bridge.cuda.forms.matrix import DeviceMatrix
        from bridge.cuda.norm import rms
        from bridge.cuda.product import halves, matmul, matvec, mma, mma_int8, token_records
        from bridge.cuda.product import products as stacks
        from bridge.cuda.product.activations import Records
        from bridge.cuda.product.fused import FusedOnDevice
        from bridge.cuda.trellis_layer import CudaTrellisLayer

        upload, quantize = DeviceMatrix.upload.__func__, Records.quantize  # type: ignore[attr-defined]
        multiply, activated, tile, rows = matvec.launch, matvec.launch_activated, dequantize.tile, dequantize.rows
        scale, attend = halves._launch, PromptAttention.attend
        record, of_bytes = token_records.recorded, mma_int8.launch
        tensor_cores, move, run = mma.launch, CudaTrellisLayer.__init__, FusedOnDevice.run

        def uploaded(cls: Any, tensors: Any, device: Any = None, interleave: bool = False) -> Any:
            found = upload(cls, tensors, device, interleave)
            parts = [t.dequantize().astype(np.float64) for t in (tensors if isinstance(tensors, list) else [tensors])]
            weights = np.stack(parts, 1).reshape(found.rows, -1) if interleave else np.concatenate(parts)
            self.matrices.append(found)
            self.weights[id(found)] = weights * (1.01 if found.type in self.wrong else 1)
            return found

        def quantized(records: Any, x: Any, n: int, stream: Any = 0, dependent: bool = False) -> Any:
            quantize(records, x, n, stream, dependent)
            values = torch.as_tensor(x[:n]).float().numpy()
            records.values = values.astype(np.float64) if records.exact else rounded(values)
            return records

        def memory(x: Any) -> np.ndarray:
            return device.memory_of(x) if isinstance(x, torch.Tensor) else x

        def multiplied(
            matrix: Any, records: Any, y: Any, n: int, stream: Any = None, accumulate: bool = False, bias: Any = None,
            *more: Any, **options: Any,
        ) -> None:  # fmt: skip
            multiply(matrix, records, y, n, stream, accumulate, bias, *more, **options)
            if id(matrix) not in self.weights or not hasattr(records, "values"):  # what is only timed
                return
            product = records.values[:n] @ self.weights[id(matrix)].T
            y = memory(y)
            y[:n] = product + (y[:n] if accumulate else 0) + (0 if bias is None else memory(bias))

        def gated(matrix: Any, records: Any, y: Any, n: int, *more: Any, **options: Any) -> None:
            activated(matrix, records, y, n, *more, **options)
            if not hasattr(records, "values"):
                return
            product = records.values[:n] @ self.weights[id(matrix)].T
            gate, up = product[:, ::2], product[:, 1::2]
            memory(y)[:n] = gate / (1 + np.exp(-gate)) * up

        def of_tokens(
            matrix: Any, x: Any, y: Any, stream: Any, scale: Any = None, accumulate: bool = False, bias: Any = None,
            shape: Any = None,
        ) -> None:  # fmt: skip
            tensor_cores(matrix, x, y, stream, scale, accumulate, bias, shape)
            if id(matrix) not in self.weights:
                return
            product = x.double() @ torch.from_numpy(self.weights[id(matrix)]).to(x.dtype).double().T
            product = product if scale is None else product * scale[:, None]
            y.copy_(product + (0 if bias is None else bias) + (y if accumulate else 0))

        def recorded(x: Any, tiles: int, device: Any, way: str = "plain", *more: Any, **options: Any) -> Any:
            made = record(x, tiles, device, way, *more, **options)
            values = halves.floats_by_torch(way, x, *more, **options).float().cpu().numpy()
            self.tokens[id(made.buffer)] = made, rounded(values)
            return made

        def of_records(
            matrix: Any, records: Any, y: Any, stream: Any, accumulate: bool = False, bias: Any = None,
            shape: Any = None,
        ) -> None:  # fmt: skip
            of_bytes(matrix, records, y, stream, accumulate, bias, shape)
            if id(matrix) not in self.weights:
                return
            product = torch.from_numpy(self.tokens[id(records.buffer)][1] @ self.weights[id(matrix)].T)
            y.copy_(product + (0 if bias is None else bias) + (y if accumulate else 0))

        def scaled(
            way: str, x: Any, columns: int, device: Any, *more: Any, factors: Any = None, **options: Any
        ) -> Any:  # fmt: skip
            scale(way, x, columns, device, *more, factors=factors, **options)
            x = x if factors is None else x * factors[:, None]
            return halves.by_torch(halves.floats_by_torch(way, x, *more, **options))

        def tiled(matrix: Any, first: int, count: int, out: Any, stream: Any) -> None:
            tile(matrix, first, count, out, stream)
            if id(matrix) in self.weights:  # no floats, which need no kernel
                out.copy_(torch.from_numpy(self.weights[id(matrix)][first : first + count]))

        def chosen(matrix: Any, ids: Any, out: Any, n: int, stream: Any, dependent: bool = False) -> None:
            rows(matrix, ids, out, n, stream, dependent)
            if id(matrix) in self.weights:
                out[:n] = torch.from_numpy(self.weights[id(matrix)])[ids[:n]]

        def attended(own: Any, layer: int, qkv: Any, norms: Any = (None, None), sinks: Any = None) -> Any:
            """The cache and torch's attention as if the launch before it had rotated and stored."""
            attend(own, layer, qkv, norms, sinks)
            c, slot, n, start = own._config, own._cache.slots[layer], len(qkv), own.start
            q, k, v = qkv.reshape(n, -1, c.head_dim).split([c.heads, c.kv_heads, c.kv_heads], 1)
            if norms[0] is not None:
                q, k = (rms(x, weight, c.norm_eps) for x, weight in zip((q, k), norms, strict=True))
            cos, sin = (angle[start : start + n, None] for angle in own._positions.angles)
            step = (slice(0, c.rotated, 2), slice(1, c.rotated, 2))
            if not c.graph.neighbours:
                step = (slice(0, c.rotated // 2), slice(c.rotated // 2, c.rotated))
            for x in (q, k):
                one, other = x[..., step[0]].clone(), x[..., step[1]].clone()
                x[..., step[0]], x[..., step[1]] = one * cos - other * sin, one * sin + other * cos
            parts = slot.keys, slot.values
            for part, given in zip(parts, (k, v), strict=True):
                slot.form.store(part, start, given)
            dtype, group = torch.float32 if own._exact else torch.float16, c.heads // c.kv_heads
            stored = [slot.form.load(part, start + n, c.kv_heads, dtype) for part in parts]
            later = torch.arange(start + n) > torch.arange(start, start + n)[:, None]
            result = torch.nn.functional.scaled_dot_product_attention(
                q.transpose(0, 1)[None].to(dtype), *(part.repeat_interleave(group, 0)[None] for part in stored), ~later,
                scale=c.attention_scale,
            )  # fmt: skip
            return result[0].transpose(0, 1).reshape(n, -1)

        def moved(layer: Any, source: Any, device: Any = None) -> None:
            move(layer, source, device)
            unit = layer._fused.code.unit
            layer._fused.weights = source.decoded() / unit * (1.01 if source.name in self.wrong else 1)

        def decoded(fused: Any, x: Any, y: Any, split: int = 4, halves: bool = False) -> None:
            run(fused, x, y, split, halves)
            y.copy_(x.double() @ torch.from_numpy(fused.weights).double().T)

        with ExitStack() as stack:
            for owner, name, own in (
                (CudaTrellisLayer, "__init__", moved), (FusedOnDevice, "run", decoded),
                (DeviceMatrix, "upload", classmethod(uploaded)), (Records, "quantize", quantized),
                (matvec, "launch", multiplied), (matvec, "launch_activated", gated),
                (halves, "_launch", scaled), (mma, "launch", of_tokens), (dequantize, "tile", tiled),
                (dequantize, "rows", chosen), (prompt, "rows", chosen), (mma_int8, "launch", of_records),
                *((owner, "recorded", recorded) for owner in (matmul, stacks, prompt, bench, tokens)),
                (PromptAttention, "attend", attended),
            ):  # fmt: skip
                stack.enter_context(mock.patch.object(owner, name, own))
            yield


class Stepped:
    """The CPU's decoder with what the one on a GPU has besides."""

    def __init__(self, decoder: Any):
        self._decoder = decoder
        self.graphs = self.dependent = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def build(self) -> None:
        """Nothing depends on how launches are made where there are none."""

    def next_scores(self, token: int) -> np.ndarray:
        """As bridge.cuda's."""
        return self._decoder.logits(self._decoder.run([token]))[0]


def _only_checked(launches: Any, kernel: Any, grid: Any, block: Any, arguments: Any) -> None:
    """A launch that only checks its arguments."""
    for pair in zip(device._types(kernel.signature), arguments, strict=True):
        device._checked(kernel, *pair)
    launches.names.append(kernel.name)


def _here(left: Any, until: float, note: Any, case: Any) -> None:
    """runner.process without a process."""
    while left:
        job = left.popleft()
        if time.monotonic() >= until:
            return note(job, {"late": runner.CUT})  # type: ignore[no-any-return]
        note(job, json.loads(json.dumps(runner.outcome(jobs.run, job))))


@contextmanager
def small_check(right: bool = True) -> Iterator[Products]:
    """`gpu_check.main` can be called: all its jobs, with small shapes, in seconds.

    Models are the CPU's in disguise, or where not `right`, those of bridge.cuda, whose steps then do nothing.
    """
    from bridge.cuda import bench
    from bridge.cuda.product import matvec_shape

    every, load = matvec_shape.shapes_to_try, bridge.Model.load
    computed = Products()

    def loaded(path: Any, device: str = "cpu", **options: Any) -> Any:
        cuda = device != "cpu"
        made = load(path, device="cpu" if right else device, **options)
        if cuda and right:
            made._shared.decoder = Stepped(made._decoder)
        return made

    large, small, others, lengths = "8x512", "4x256", ("4x512", "2x256", "6x256"), ("64", "128")
    rename = {jobs.LARGE: large, jobs.SMALL: small}
    rename |= dict(zip((*jobs.OTHERS, *jobs.LENGTHS), (*others, *lengths), strict=True))
    names = ["/".join(rename.get(part, part) for part in job.split("/")) for job in jobs.TIMES]
    with ExitStack() as stack:
        for owner, name, value in (
            (runner, "process", _here), (runner, "PROCESSES", 1), (runner, "_SHORTEST", 0),
            (jobs, "TIMES", names), (report, "LARGE", large), (report, "SMALL", small),
            (report, "OTHERS", others), (report, "LENGTHS", lengths), (report, "MANY", (others[-1], small)),
            (contexts, "HEADS", 4), (contexts, "KV_HEADS", 2), (contexts, "HEAD_DIM", 32),
            (costs, "CALLS", 4), (costs, "QUEUED", 2), (costs, "SMALL", (4, 256)), (costs, "LARGE", (8, 512)),
            (torchs, "SHAPE", (10, 256)),
            (products, "SHAPES", [(1, 256), (3, 512)]), (products, "SMALL_BLOCKS", [(5, 32)]),
            (products, "EPILOGUES", (10, 256)), (products, "COLUMNS", (1, 5)),
            (products, "THREADS", 2), (products, "PRODUCTS", 2),
            (tokens, "SHAPES", [(3, 512)]), (tokens, "SMALL_BLOCKS", [(5, 32)]), (tokens, "EPILOGUES", (10, 256)),
            (tokens, "TOKENS", (9,)), (tokens, "INT8", (9,)),
            (linears, "SHAPE", (10, 256)), (linears, "MANY", (13, 5)),
            (experts, "TIMED", (4, 256, 256)), (experts, "USED", 2),
            (trellis, "SHAPE", (128, 128)), (trellis, "TOKENS", (1, 9)), (trellis, "BITS", (1, 3)),
            (model, "CONTEXT", 64), (model, "PROMPTS", (20, 5, 1)), (model, "STEPPED", 3), (model, "MADE", 4),
            (timing, "DECODED", 2), (timing, "CONTEXT", 64), (timing, "PROMPTS", (4, 12)),
            (timing, "BATCHES", (13,)), (timing, "INT8", (9, 65)),
            (synthetic.SyntheticFile, "HIDDEN", 256), (synthetic.SyntheticFile, "INNER", 512),
            (synthetic.SyntheticFile, "HEADS", 4), (synthetic.SyntheticFile, "KV_HEADS", 2),
            (synthetic.SyntheticFile, "LAYERS", 2), (synthetic.SyntheticFile, "VOCAB", 96),
            (bench, "LARGE", (8, 512)), (bench, "_READ", 1 << 23), (bench, "_WARM", 0), (bench, "ROUNDS", 1),
            (bench, "LAUNCHES", 2), (matvec_shape, "shapes_to_try", lambda *given: every(*given)[:2]),
            (bridge.Model, "load", loaded), (device.Launches, "run", _only_checked),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(device.pretended_gpu(multiprocessors=2, graphs=True, overlapping=True))
        stack.enter_context(computed.installed())
        yield computed


main = gpu_check.main
