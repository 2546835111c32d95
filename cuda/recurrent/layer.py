"""Layers with a state on the device, between their products; runtime/decoder/recurrent.py says what they compute.

    a short convolution     convolve                                1 launch
    a gated delta net       convolve, recur, end                    3
    Mamba-2                 convolve, recur, end if there is a norm 3 or 2
    Mamba                   convolve, a product, split, a product, recur

They are the same for a token and for many, which follow one another. Nothing depends on the host: a CUDA graph
can hold them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from bridge.cuda.norm import norm_threads
from bridge.cuda.recurrent.convolve import convolve_grid, convolve_kernel
from bridge.cuda.recurrent.norms import end_kernel, end_parts, split_kernel
from bridge.cuda.recurrent.recur import recur_grid, recur_kernel
from bridge.cuda.toolchain.device import Device, upload, view, zeros

from bridge.runtime.config.recurrent_config import CONVOLUTION, DELTA, MAMBA1, RecurrentConfig
from bridge.runtime.layers.layers import Recurrent

Multiply = Callable[[Any], Any]  # x f32 [n, columns] -> f32 [n, rows], contiguous


class DeviceRecurrent:
    """A layer's vectors on the device, and its launches."""

    def __init__(
        self, layer: Recurrent, c: RecurrentConfig, eps: float, device: Device, second: Sequence[Multiply] = ()
    ):
        """`second`: what multiplies by the matrices of `Recurrent.second`."""
        self.config, self.device, self._second = c, device, second
        self._eps = np.float32(eps)
        decay, norm = layer.decay, layer.norm
        if c.kind == MAMBA1 and decay is not None:  # [values / 16, key_dim, 16] -> [values, key_dim]
            decay = decay.transpose(0, 2, 1).reshape(-1, c.key_dim)[: c.values].reshape(-1)
            norm = np.concatenate(layer.norms)
        self._normed = norm is not None
        vectors = (layer.convolution.reshape(-1), layer.convolution_bias, decay, layer.dt_bias, layer.skip, norm)
        on_device = [device.placeholder() if v is None else view(upload(v, device)) for v in vectors]
        self._weight, self._bias, self._decay, self._dt_bias, self._skip, self._norm = on_device

    def advance(self, inputs: Sequence[Any], tail: Any, state: Any, dependent: bool = False) -> Any:
        """What the output matrix multiplies, f32 [n, values], for n tokens that follow one another.

        inputs     f32 [n, rows] of each of `RecurrentConfig.inputs`; rows may be apart
        tail       f32 [kernel - 1, channels] and
        state      f32 [heads, value_dim, key_dim], after the tokens before: they become those after these tokens
        dependent  launches may begin while the one before them ends (launch.py)
        """
        c = self.config
        convolved = self._empty(inputs[0], c.channels)
        x = inputs[0] if c.kind in (CONVOLUTION, DELTA) else self._parts(inputs)[-1]
        grid, threads = convolve_grid(c, len(x))
        arrays = view(x, apart=True), _flat(tail), self._weight, self._bias, _flat(convolved)
        convolve_kernel(c, dependent).launch(grid, threads, self.device.stream(), *arrays)
        if c.kind == CONVOLUTION:
            return convolved
        y = self._recur(inputs, convolved, state, dependent)
        if self._normed and c.kind != MAMBA1:
            parts, width = end_parts(c)
            z = inputs[1] if c.kind == DELTA else y
            given = _flat(y), self._norm, view(z, apart=True), self._eps
            end_kernel(c, dependent).launch((parts, len(y)), norm_threads(width), self.device.stream(), *given)
        return y

    def _parts(self, inputs: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Of Mamba's and Mamba-2's only input: z, steps (not Mamba's), and what is convolved."""
        c, first = self.config, inputs[0]
        if c.kind == MAMBA1:
            return first[:, c.values :], None, first[:, : c.values]
        end = c.values + c.channels
        return first[:, : c.values], first[:, end:], first[:, c.values : end]

    def _recur(self, inputs: Sequence[Any], convolved: Any, state: Any, dependent: bool) -> Any:
        c, keys = self.config, convolved
        if c.kind == DELTA:
            z, gates = inputs[1:3]
            steps = gates[:, c.heads // c.groups :] if c.joined else inputs[3]
        else:
            z, steps, _ = self._parts(inputs)
            gates = z
        if c.kind == MAMBA1:
            keys, steps = self._steps(convolved, dependent)
        y = self._empty(convolved, c.values)
        rows = [view(part, apart=True) for part in (keys, convolved, steps, gates, z)]
        vectors = self._decay, self._dt_bias, self._skip
        recur = recur_kernel(c, dependent)
        recur.launch(*recur_grid(c), self.device.stream(), *rows, *vectors, _flat(state), _flat(y))
        return y

    def _steps(self, convolved: Any, dependent: bool) -> tuple[Any, Any]:
        """Mamba's keys and queries, and steps of all values."""
        c, (into, out) = self.config, self._second
        low, steps = into(convolved), self._empty(convolved, c.rank)
        arrays = _flat(low), self._norm, _flat(steps)
        split_kernel(c, dependent).launch(len(low), 96, self.device.stream(), *arrays, self._eps)
        return low, out(steps)

    def _empty(self, like: Any, width: int) -> Any:
        import torch

        return torch.empty((len(like), width), dtype=torch.float32, device=like.device)


def _flat(x: Any) -> Any:
    """A contiguous tensor as kernels take one of one dimension."""
    return view(x.view(-1))


def state_bytes(c: RecurrentConfig) -> int:
    """Bytes of a DeviceState."""
    return 4 * sum(c.layers) * (c.heads * c.value_dim * c.key_dim + (c.kernel - 1) * c.channels)


class DeviceState:
    """The states of all layers of one sequence, in one piece of memory.

    heads   f32 [layers, heads, value_dim, key_dim]
    tails   f32 [layers, kernel - 1, channels]
    memory  f32, of both
    """

    def __init__(self, c: RecurrentConfig, device: Device):
        """Before any token."""
        layers = sum(c.layers)
        heads, tails = (layers, c.heads, c.value_dim, c.key_dim), (layers, c.kernel - 1, c.channels)
        count = math.prod(heads)
        self.memory = zeros(device, state_bytes(c) // 4)
        self.heads, self.tails = self.memory[:count].view(heads), self.memory[count:].view(tails)

    def reset(self) -> None:
        """Forget all tokens."""
        self.memory.zero_()

    def save(self) -> Any:
        """A copy, for `restore`."""
        return self.memory.clone()

    def restore(self, snapshot: Any) -> None:
        """Become what a state of the same shape was when it was saved."""
        self.memory.copy_(snapshot)
