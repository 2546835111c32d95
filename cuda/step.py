"""The verbs of a decoder for a token, as launches that do not depend on the host: a CUDA graph captures them once.

A layer of Llama takes 5 if its matrices are of one type, or v of another one:

    q, k, v                                                                     products.py
    rotation, cache, attention, records of the result                           attention.py
    x += W_o ..., with records of x * weight and sums of squares                matvec.py
    silu(W_gate ...) * (W_up ...) of x * weight / root of the mean square, with records
    x += W_down ..., as W_o

From compute capability 9.0 on each may begin while the one before it ends: see launch.py. A norm has a launch of its
own where torch computes the product before or after it, and where it is more than one of a sum.

Up to WIDEST tokens that follow one another share the products, so the weights are read once for all of them; the rest
is done token by token, and all sums are those of a step of each token alone, to the last bit.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from bridge.cuda import sampling
from bridge.cuda.attention import attention as attn
from bridge.cuda.attention.step_attention import StepAttention
from bridge.cuda.context_memory import ContextMemory
from bridge.cuda.forms.dequantize import rows
from bridge.cuda.machine import Activation, CudaMachine, Normalized, Sum
from bridge.cuda.norm import cap, norm
from bridge.cuda.product import matvec_shape
from bridge.cuda.product.activations import Records
from bridge.cuda.product.matvec import Normed, Recorded
from bridge.cuda.product.products import Gated, Stack, Vector
from bridge.cuda.recurrent.layer import DeviceRecurrent
from bridge.cuda.routed_experts import DeviceExperts
from bridge.cuda.toolchain.device import view, zeros
from bridge.cuda.weights import DeviceWeights

from bridge.runtime.decoder.machine import Value
from bridge.runtime.decoder.walk import embed, walk
from bridge.runtime.layers.layers import Layer
from bridge.runtime.quant_tensor import QuantTensor
from bridge.runtime.sampling import Sampler

WIDEST = matvec_shape.COLUMNS_OF_A_LANE  # tokens of a step

Operand = tuple[Vector, Normed | None]  # what products read, and what they must still normalize by


class Step(CudaMachine):
    """`run` queues all launches of a token but the sampling.

    state   int32 [n, STATE], see attention.py: which tokens, and where
    logits  f32 [n, vocab], of what follows each
    given   f32 [n, hidden], states that the tokens come with
    states  f32 [n, hidden], the normalized states that these are made of, of `run(states=True)`
    drawn   int32 [context + 1], the tokens drawn so far, one by one
    """

    def __init__(self, weights: DeviceWeights, memory: ContextMemory, dependent: bool, n: int = 1):
        """`dependent`: launches may begin while the one before them ends (launch.py)."""
        import torch

        super().__init__(weights, memory, n)
        device, config, context = self.device, self.config, memory.cache.context
        self.dependent = dependent
        self.vocab = weights.model.output.shape[0]
        self.state = zeros(device, (n, attn.STATE), torch.int32)
        self.states, self.given = zeros(device, (n, config.hidden)), zeros(device, (n, config.hidden))
        self.drawn = zeros(device, context + 1, torch.int32)
        self.uniform = zeros(device, context + 1, torch.float64)
        self.how = zeros(device, 3, torch.float64)
        self._named: dict[tuple[str, int], Any] = {}
        self._attention = StepAttention(
            config, memory.cache, memory.positions, self.state, self.exact, dependent, device
        )
        self._counters = view(zeros(device, -(-config.hidden // 32), torch.int32))
        self._squares = view(zeros(device, WIDEST * Normed.length(config.hidden)))
        self.logits = self._rows("logits", self.vocab)

    def run(self, states: bool = False) -> None:
        """Queue them; `states`: those that the logits are made of are wanted as well."""
        c, model = self.config, self.weights.model
        last = walk(self, model, c, self.joined(embed(self, model, c), self.given))
        (logits,) = self.products(last, logits=(model.output, model.output_bias))
        self.rows(logits)
        cap(self.logits, c.logit_cap)
        if states and last.values is not None:
            self.states.copy_(self.rows(last))
        elif states:  # the products read another form of them
            self.states.copy_(self._normalized_by_torch(last.x, last.weight, last.bias))

    # memory

    def _rows(self, name: str, width: int) -> Any:
        """f32 [n, width] of that name."""
        if (name, width) not in self._named:
            self._named[name, width] = zeros(self.device, (self.n, width))
        return self._named[name, width]

    def _vector(self, name: str, width: int) -> Vector:
        """A Vector of that name."""
        if (name, width) not in self._named:
            self._named[name, width] = Vector(width, self.device, self.weights.precision, self.n)
        return self._named[name, width]  # type: ignore[no-any-return]

    def _recorded(self, x: Any) -> Vector:
        """A value with its records."""
        vector = x if isinstance(x, Vector) else self._vector("operand", x.shape[1])
        if vector is not x:
            vector.floats, vector.recorded = x.contiguous(), False
        vector.record(self.dependent)
        return vector

    # verbs

    def look_up(self, table: QuantTensor, name: str) -> Any:
        out = self._rows(name, table.shape[1])
        for i in range(self.n):
            token = self.state[i, attn.TOKEN : attn.TOKEN + 1]
            rows(self.weights.table(table), token, out[i : i + 1], 1, self.device.stream(), self.dependent)
        return out

    def add_positions(self, x: Value, table: np.ndarray) -> None:
        self._changing(x).add_(self.weights.vector(table).index_select(0, self.state[:, attn.POSITION]))

    def _multiply(self, stack: Stack, x: Operand, name: str, onto: Any = None) -> Any:
        y = self._rows(name, stack.rows) if onto is None else onto
        vector, normed = x
        stack.step(vector, y, onto is not None, normed, None, self.dependent)
        return y

    def _operand(self, x: Value, then: Stack | Gated) -> Operand:
        if isinstance(x, Normalized) and x.values is None and self._fuses(x) and then.fuses:
            assert isinstance(x.added, Sum)
            self._take(x)
            normed = self._vector("normed", self.config.hidden)
            recorded = Recorded(normed.records, self._counters, view(x.weight), self._squares)
            vector, before = x.added.x
            x.added.stack.step(vector, x.x, True, before, recorded, self.dependent)
            x.added = None
            return normed, Normed(self._squares, self.config.norm_eps)
        return self._recorded(self.values(x)), None

    def _fuses(self, x: Normalized) -> bool:
        """Whether the product that is added to x can leave records of x times the weight, and sums of its squares."""
        plain = x.weight is not None and not self.config.graph.layer_norm
        return plain and self._only_adds(x.added) and x.added.stack.records

    def _normalize(self, x: Normalized) -> Any:
        c, added, post, post_eps = self.config, x.added, None, 0.0
        x.added = None
        if self._only_adds(added):
            self._multiply(added.stack, added.x, "", onto=x.x)
            added = None
        elif isinstance(added, Sum) and added.values is None:
            post, post_eps = added.post, added.post_eps
            added = self._multiply(added.stack, added.x, added.name)
        elif added is not None:
            added = self.rows(added)
        out = self._vector("normed", c.hidden)
        out.recorded = True
        norm(
            x.x, out.floats, out.records, c.norm_eps, x.weight, x.bias, None if added is None else added.contiguous(),
            post, post_eps, c.residual_scale, c.graph.layer_norm, self.dependent,
        )  # fmt: skip
        return out

    def _activate(self, x: Activation) -> Vector:
        vector, normed = x.x
        out = self._vector("activated", x.gated.inner)
        x.gated.step(vector, out, normed, self.dependent)
        out.recorded = out.recordable
        return out

    def attend(self, layer: Layer, index: int, q: Value, k: Value | None, v: Value | None) -> Any:
        if layer.latent_k is not None:
            latent, tokens = self.memory.latent(layer, index), zip(self.rows(q), self.rows(k), self.state, strict=True)
            return self._joined([latent.step(*one, self.dependent) for one in tokens])
        out = self._vector("attended", self.config.attended(index))
        qkv, norms = self._together(q, k, v), self._head_norms(layer)
        self._attention.attend(index, qkv, out, norms, self.weights.vector(layer.sinks))
        return out

    def _each(self, made: Callable[[Any], Any], x: Any) -> Any:
        return self._joined([made(row) for row in x.split(1)])

    def _joined(self, rows: list[Any]) -> Any:
        """[1, ...] of each token -> [n, ...]."""
        import torch

        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _advance(self, layer: DeviceRecurrent, index: int, inputs: list[Any]) -> Any:
        outputs = []
        for number, of_token in enumerate(zip(*(part.split(1) for part in inputs), strict=True)):
            outputs.append(super()._advance(layer, index, list(of_token)))
            if number < self.n - 1:  # the last one is the state
                self.memory.keep(number, index)
        return self._joined(outputs)

    def _experts(self, experts: DeviceExperts, x: Any, routed: Any, records: Records | None) -> Any:
        if self.n == 1 or (experts.steps and routed is None):
            return experts.mix(x, routed, self.dependent, records, step=True)
        outputs = []
        for i, row in enumerate(x.split(1)):
            routed_row = None if routed is None else routed[i : i + 1]
            outputs.append(experts.mix(row, routed_row, self.dependent, records and records.of(i)))
        return self._joined(outputs)

    def choose(self, count: int | None) -> list[Callable[[], None]]:
        """Turns logits into the next token: greedily, or drawn from the `count` best."""
        import torch

        device, logits = self.device, self.logits[0]
        state, drawn = view(self.state[0]), view(self.drawn)
        if count is None:
            blocks = sampling.greedy_blocks(self.vocab)
            best = [zeros(device, blocks), zeros(device, blocks, torch.int32), zeros(device, 1, torch.int32)]
            arguments = [view(logits), np.int32(self.vocab), *(view(t) for t in best), state, drawn]
            greedy = sampling.greedy_kernel(sampling.GREEDY_THREADS, self.dependent)
            return [lambda: greedy.launch(blocks, sampling.GREEDY_THREADS, device.stream(), *arguments)]
        scores, tokens = chosen = zeros(device, count), zeros(device, count, torch.int64)
        arguments = [view(scores), view(tokens), np.int32(count), view(self.how), view(self.uniform), state, drawn]
        draw = sampling.draw_kernel(sampling.DRAW_THREADS, self.dependent)

        def sort() -> None:
            if count < self.vocab:
                torch.topk(logits, count, out=chosen)
            else:
                torch.sort(logits, descending=True, stable=True, out=chosen)

        return [sort, lambda: draw.launch(1, sampling.DRAW_THREADS, device.stream(), *arguments)]

    def set_sampling(self, sampler: Sampler, steps: int) -> None:
        """Copy settings and uniform numbers to the device."""
        import torch

        how = sampler.how
        self.how.copy_(torch.tensor([how.temperature, how.top_p, how.min_p], dtype=torch.float64))
        self.uniform[:steps].copy_(torch.from_numpy(sampler.uniform(steps)))
