"""A decoder's mixture of experts on a GPU: the twin of `mix` in bridge/runtime/decoder/experts.py.

A token, or a few, go through the experts that they chose without the host, so a CUDA graph can hold the layer:

    logits, experts and weights     one launch                                          product/routing.py
    records of x                    one
    gate, up and activation         one, of all experts chosen; it makes their records  product/experts.py
    down                            one
    the shared expert               two                                                 product/products.py
    the weighted sum                one, with the shared expert and its gate            product/routing.py

Gate and up of different types are two launches, and torch bends what they give. Experts of floats are torch's: those
chosen are gathered, and multiplied as one batch.

Of more tokens the host reads the choice, once a layer; those of an expert go through it together.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from bridge.cuda.forms.matrix import DeviceMatrix, FloatMatrix, has_kernel
from bridge.cuda.product import gates, routing
from bridge.cuda.product.activations import Records
from bridge.cuda.product.experts import ExpertMatrices, grouped
from bridge.cuda.product.halves import Halves, floats_by_torch, halved
from bridge.cuda.product.matmul import LENGTHS, Multiplier
from bridge.cuda.product.matvec import Recorded, work_of
from bridge.cuda.product.products import Gated, Stack, Vector
from bridge.cuda.toolchain.device import Device, Memory, upload, view, zeros

from bridge.blocks.read import WRITTEN
from bridge.errors import BridgeError
from bridge.runtime.config.decoder_config import DecoderConfig
from bridge.runtime.layers.layers import Experts
from bridge.runtime.quant_tensor import QuantTensor


def token_bytes(c: DecoderConfig) -> int:
    """Bytes that a token of a prompt takes in a layer of experts, at most: for each of those that it chose, what the
    expert reads and makes, in its order and the token's, and what is between."""
    return 4 * c.routing.used * (3 * c.expert_outer + 5 * c.expert_inner) + 4 * (c.experts + 3 * c.shared_inner)


class FloatExperts:
    """A matrix of each expert as torch's floats, [experts, rows, columns]: ExpertMatrices of types without a kernel."""

    def __init__(self, tensors: Sequence[QuantTensor], device: Device, precision: str):
        import torch

        self._matrices = [FloatMatrix(tensor, device, precision) for tensor in tensors]
        self.weight = torch.stack([matrix.weight for matrix in self._matrices])
        for matrix, weight in zip(self._matrices, self.weight, strict=True):
            matrix.weight, matrix.memory = weight, Memory(device, self.weight)
        self.rows, self.columns = self.weight.shape[1:]

    def __getitem__(self, expert: int) -> FloatMatrix:
        return self._matrices[expert]

    def takes(self, pairs: int) -> bool:
        """No more than a token's: what is chosen is copied."""
        return False

    def records(self, x: Any, precision: str, dependent: bool = False) -> Any:
        return x

    def multiply(
        self, x: Any, chosen: Any, bias: Any = None, activation: None = None, dependent: bool = False,
        recorded: None = None, shape: None = None,
    ) -> Any:  # fmt: skip
        """As that of ExpertMatrices, of x f32 [n, columns], without what is fused."""
        import torch

        x = x.repeat_interleave(len(chosen) // len(x), 0)[:, :, None]
        y = torch.bmm(self.weight[chosen].float(), x)[:, :, 0]
        return y if bias is None else y + bias[chosen]


class DeviceExperts:
    """A layer's experts on the device.

    steps   whether `mix` takes several tokens of a step at once, with the sums of each alone
    """

    def __init__(self, experts: Experts, config: DecoderConfig, multiplier: Multiplier):
        """Upload them. Raises BridgeError where the experts are not alike, and as DeviceMatrix does."""
        import torch

        self.config, self.multiplier, self.device = config, multiplier, multiplier.device

        def vector(array: np.ndarray | None) -> Any:
            return None if array is None else upload(array, self.device)

        def alone(tensor: QuantTensor | None) -> Any:
            return None if tensor is None else Stack([tensor], multiplier)

        self._activation = gates.limited(config.activation, experts.limits[0])
        self._count, self._gated = len(experts.networks), experts.shared_gate is not None
        rows = [experts.router] + [gate[None] for gate in (experts.shared_gate,) if gate is not None]
        self._router = upload(np.concatenate(rows), self.device)
        self._biases = vector(experts.router_bias), vector(experts.choice_bias)
        self._counters = view(zeros(self.device, routing.MULTIPLIED, torch.int32))
        gate, up, down = zip(*experts.networks, strict=True)
        biases = [vector(bias) for bias in experts.biases or (None, None, None)]
        parts = [(part, bias) for part, bias in zip((gate, up), biases, strict=False) if part[0] is not None]
        self._fused = {part[0].type for part, _ in parts} <= {gate[0].type} & WRITTEN.keys()
        self._way = "gate_in_turn" if len(parts) > 1 else "gate_alone"
        if self._fused:  # one matrix, whose rows are those of gate and up in turn
            bias = None if biases[0] is None else torch.stack([bias for _, bias in parts], -1).flatten(1)
            self._inner = [(self._stack([part for part, _ in parts]), bias)]
        else:
            self._inner = [(self._stack([part]), bias) for part, bias in parts]
        # factors of types that have none become part of the weights
        factors = [1.0 if has_kernel(matrix) else matrix.factor for matrix in down if matrix.type in WRITTEN]
        self._factors = vector(np.array(factors, np.float32)) if {*factors} - {1.0} else None
        if self._factors is not None:
            if config.routing.before:
                raise BridgeError(f"{down[0].name}: {down[0].type} with a factor has no CUDA kernel, use the CPU")
            down = tuple(QuantTensor(matrix.name, matrix.type, matrix.shape, matrix.raw) for matrix in down)
            biases[2] = None if biases[2] is None else biases[2] / self._factors[:, None]
        self._down = self._stack([down]), biases[2]
        self._records = self._fused and isinstance(self._down[0], ExpertMatrices)
        self._recorded: dict[int, Recorded] = {}  # by numbers of pairs, of a step
        self._shorten, self._lengthen = alone(experts.shorten), alone(experts.lengthen)
        self._shared: Any = None
        if experts.shared is not None:
            *inner, last = experts.shared
            shared = gates.limited(config.activation, experts.limits[1])
            self._shared, self._shared_down = Gated(*inner, multiplier, None, shared), alone(last)
            self._between: dict[int, tuple[Vector, Vector, Any]] = {}  # by numbers of tokens, of a step
        one_each = self._shorten is None and self._lengthen is None
        self.steps = one_each and all(isinstance(stack, ExpertMatrices) for stack, _ in (*self._inner, self._down))

    def _stack(self, parts: Sequence[Sequence[QuantTensor]]) -> ExpertMatrices | FloatExperts:
        """The tensors of all experts on the device, of several parts with their rows in turn."""
        for tensors in parts:
            for tensor in tensors:
                if (tensor.type, tensor.shape) != (tensors[0].type, tensors[0].shape):
                    raise BridgeError(
                        f"{tensor.name}: {tensor.type} {list(tensor.shape)}, but {tensors[0].name} is "
                        f"{tensors[0].type} {list(tensors[0].shape)}; experts of a layer must be alike on CUDA, use "
                        "the CPU"
                    )
        if parts[0][0].type in WRITTEN:
            return ExpertMatrices(list(zip(*parts, strict=True)), self.device)
        return FloatExperts(parts[0], self.device, self.multiplier.precision)

    def mix(
        self, x: Any, routed: Any = None, dependent: bool = False, records: Records | None = None, step: bool = False
    ) -> Any:  # fmt: skip
        """x f32 [n, hidden] on the device -> the same: what the experts add.

        routed     what the router reads, f32 [n, hidden], if that is not x
        dependent  launches may begin while the one before them ends (launch.py), those of a step
        records    of x, where they are a step's and there are some
        step       they have the sums of each token alone, as one has
        """
        n, before = len(x), self.config.routing.before
        x, step = x.contiguous(), step or n == 1
        few = step or all(stack.takes(n * self.config.routing.used) for stack, _ in (*self._inner, self._down))
        chosen, weights, logits = self._choose(x if routed is None else routed.contiguous(), few, dependent)
        if routed is not None and self._gated:
            logits[:, -1] = x @ self._router[-1]
        if step and records is None:
            records = Records(x.shape[1], n, self.device, self.multiplier.precision, clear=False)
            records.quantize(x, n, self.device.stream(), dependent)
        if self._factors is not None:
            weights *= self._factors[chosen]
        shared = None if self._shared is None else self._share(x, records if step else None, dependent)
        read = x if self._shorten is None else self._shorten.multiply(x)
        if few:
            if before:
                read = (read[:, None] * weights[:, :, None]).flatten(0, 1)
            made = self._at_once(read, records if read is x else None, chosen.flatten(), dependent, step)
        else:
            made = self._by_expert(read, chosen.flatten(), weights.flatten() if before else None)
        if self._lengthen is None:
            return self._weigh(made, weights, shared, logits, dependent)
        y = self._lengthen.multiply(self._weigh(made, weights, None, logits, dependent))
        return y if shared is None else y.add_(shared * logits[:, -1:].sigmoid() if self._gated else shared)

    def _choose(self, x: Any, few: bool, dependent: bool) -> tuple[Any, Any, Any]:
        """Of x f32 [n, hidden] experts int64 and weights f32, both [n, used], and logits f32 [n, experts (+ 1)]."""
        import torch

        n, (rows, hidden), how = len(x), self._router.shape, self.config.routing
        product = n <= routing.MULTIPLIED
        logits = torch.empty((n, rows), device=x.device) if product else x @ self._router.T
        # what torch reads must be experts, even where launches are only noted
        memory = torch.empty if few and self._records and self._factors is None else torch.zeros
        chosen = memory((n, how.used), dtype=torch.int64, device=x.device)
        weights = torch.empty((n, how.used), device=x.device)
        router_bias, choice_bias = self._biases
        biased = router_bias is not None, choice_bias is not None
        kernel = routing.choose_kernel(how, self._count, rows, hidden, product, biased, dependent)
        floats = [x, self._router, logits, router_bias, choice_bias]
        arrays = [self.device.placeholder() if array is None else view(array.view(-1)) for array in floats]
        kernel.launch(
            (n, rows) if product else n, routing.THREADS, self.device.stream(), *arrays, self._counters,
            view(chosen.view(-1)), view(weights.view(-1)),
        )  # fmt: skip
        return chosen, weights, logits

    def _at_once(self, x: Any, records: Records | None, chosen: Any, dependent: bool, step: bool) -> Any:
        """What the chosen experts make of x f32 [n, outer] or [pairs, outer]: f32 [pairs, outer]."""
        precision, activation, used = self.multiplier.precision, self._activation, self.config.routing.used

        def made(part: Any, x: Any, records: Any = None, activation: Any = None, recorded: Any = None) -> Any:
            stack, bias = part
            shape = None
            if step and isinstance(stack, ExpertMatrices):
                shape, _ = work_of(stack[0], 1, precision == "f32", None, used, alone=recorded is None)
            given = records or stack.records(x, precision, dependent)
            return stack.multiply(given, chosen, bias, activation, dependent, recorded, shape)

        if not self._fused:
            return made(self._down, gates.by_torch(activation, *(made(part, x) for part in self._inner)))
        recorded = self._recorded_of(len(chosen)) if step and self._records else None
        y = made(self._inner[0], x, records, activation, recorded)
        return made(self._down, y, recorded and recorded.records)

    def _recorded_of(self, pairs: int) -> Recorded:
        """Where gate and up of a step leave records."""
        import torch

        if pairs not in self._recorded:
            inner = self._down[0].columns
            records = Records(inner, pairs, self.device, self.multiplier.precision)
            self._recorded[pairs] = Recorded(records, view(zeros(self.device, pairs * inner // 32, torch.int32)))
        return self._recorded[pairs]

    def _by_expert(self, x: Any, chosen: Any, weights: Any) -> Any:
        """The same of more tokens, expert by expert; weights f32 [pairs] of what they read, or None. The host waits."""
        import torch

        order, parts = grouped(chosen, self._count)
        x = x[order // self.config.routing.used]
        if weights is not None:
            x *= weights[order, None]

        def made(part: Any, x: Any) -> Any:
            stack, bias = part
            y = torch.empty((len(x), stack.rows), device=x.device)
            halves: Any = None  # made once, rather than for each expert
            for expert, first, stop in parts:
                matrix, given = stack[expert], x[first:stop]
                if isinstance(matrix, DeviceMatrix) and self.multiplier.form([matrix], stop - first) == "halves":
                    halves = halves or halved(x, self.device)
                    given = Halves(*(each[first:stop] for each in halves))
                self.multiplier.multiply(matrix, given, y[first:stop], None if bias is None else bias[expert])
            return y

        values = [made(part, x) for part in self._inner]
        if self._fused:
            y = floats_by_torch(self._way, values[0], activation=self._activation)
        else:
            y = gates.by_torch(self._activation, *values)
        y = made(self._down, y)
        return torch.empty_like(y).index_copy_(0, order, y)

    def _share(self, x: Any, records: Records | None, dependent: bool) -> Any:
        """What the shared expert makes of x, f32 [n, hidden]."""
        if records is None:
            return self._shared_down.multiply(self._shared.multiply(x, self._shared_down))
        n, width = x.shape
        if n not in self._between:
            given, inner = (Vector(w, self.device, self.multiplier.precision, n) for w in (width, self._shared.inner))
            self._between[n] = given, inner, zeros(self.device, (n, width))
        given, inner, added = self._between[n]
        given.floats, given.records = x, records
        self._shared.step(given, inner, None, dependent)
        self._shared_down.step(inner, added, dependent=dependent)
        return added

    def _weigh(self, made: Any, weights: Any, shared: Any, logits: Any, dependent: bool) -> Any:
        """The weighted sum of made f32 [n * used, outer] and, where it is given, the shared expert: f32 [n, outer]."""
        import torch

        (n, used), width, how = weights.shape, made.shape[1], self.config.routing
        y = torch.empty((n, width), device=made.device)
        gate = (logits.shape[1], self._count) if self._gated and shared is not None else None
        kernel = routing.weigh_kernel(used, width, how.before, shared is not None, gate, dependent)
        floats = made, weights, shared, logits, y
        arrays = [self.device.placeholder() if array is None else view(array.view(-1)) for array in floats]
        kernel.launch((n, -(-width // routing.THREADS)), routing.THREADS, self.device.stream(), *arrays)
        return y

    def multiply_lengths(self) -> None:
        """Products of an expert with all numbers of tokens that take other kernels, so that these can be noted."""

        for stack, bias in (*self._inner, self._down):
            for n in LENGTHS:
                x, y = (zeros(self.device, (n, width)) for width in (stack.columns, stack.rows))
                self.multiplier.multiply(stack[0], x, y, None if bias is None else bias[0])
