"""What calibrating a model takes, counted before it begins: peak memory, disk, and time.

The peak is what the process has already, and the largest of

    gradients   embeddings, head and the logits of some positions; or a block, its layers' A, and a batch's passes
    embeddings  what the solver makes of their Hessian, and of as many rows as it takes at a time
    layers      a block, twice with the float model's, a layer's Hessians, and what the solver makes of them
    head        its Hessians, and what the solver makes of as many rows as it takes at a time

with the activations that stay in memory meanwhile: as many as fit into a limit. The others are on disk.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from bridge.errors import refused
from bridge.quantize.model.block_inputs import head_of, is_layer, matrix_shape
from bridge.quantize.model.experts import expert_of
from bridge.quantize.model.float_model import FloatModel, fast_arithmetic
from bridge.quantize.model.forward_passes import LOGITS, sequences_at_once
from bridge.quantize.model.stages import HESSIANS
from bridge.quantize.run.walk import rows_at_once, sequences_together
from bridge.quantize.settings import Calibration
from bridge.quantize.solve.target import takes_products
from bridge.quantize.solve.two_sided import ROWS
from bridge.system.cpu.cpus import usable_cpus
from bridge.system.cpu.memory import free_memory, resident
from bridge.system.text import duration_text, size_text

_LATER = 200 << 20  # bytes: what is imported and compiled while it runs
_FREE = 0.9  # share of the free memory that is taken where no limit is given
_ROUNDED = 1.5e-7  # seconds of one core for a weight, without matrix products
_REFINED = 1e-7  # for a sweep of refinement
_TWO_SIDED = 3.5  # times as long, as few rows go together
_PREDICTED = 1.5e-8  # for a token's gradient at a word of the vocabulary, without matrix products
_ATTENTION = 1.5  # times as long as other products: PyTorch's kernel on CPUs, forward and backward
_WORKING = 4  # copies of a layer's weights in the solver, float32


@dataclass(frozen=True)
class Job:
    """What is calibrated.

    tokens      (sequences, length)
    bits        of a weight, by layer, embeddings and head among them; other tensors count with their mean
    settings    how
    held        whole sequences are held back
    batch       sequences that pass through a block together; None: as many as `sequences_together`
    """

    model: FloatModel
    tokens: tuple[int, int]
    bits: Mapping[str, float]
    settings: Calibration
    held: bool = False
    batch: int | None = None


@dataclass(frozen=True)
class Needs:
    """Bytes and seconds; see `needs_of`.

    memory     peak resident memory of the process
    gradients  bytes of activations in memory while gradients are gathered
    layers     the same while layers are quantized
    hessians   bytes of experts' Hessians gathered in one pass
    free       what the process has and can still take; None: not known
    """

    memory: int
    disk: int
    seconds: float
    gradients: int
    layers: int
    hessians: int
    free: int | None = None

    def __str__(self) -> str:
        memory, disk = size_text(self.memory), size_text(self.disk)
        text = f"needs {memory} of memory and {disk} of disk, about {duration_text(self.seconds)} on this machine"
        if self.free is not None and self.memory > self.free:
            text += f"; only {size_text(self.free)} of memory can be had"
        return text


def needs_of(job: Job, memory: int | None = None) -> Needs:
    """What a job takes if its process is to stay within so many bytes; None: within nine tenths of the free memory.

    Raises BridgeError if not even a block fits into what was given.
    """
    sizes = _Sizes(job)
    rest = {"gradients": sizes.gradients(), "layers": sizes.layers(), "head": sizes.head()}
    rest["embeddings"] = sizes.embeddings()
    present, limit, total = _limits(memory, max(rest.values()), "calibrating")
    spare = {name: max(0, limit - present - size) for name, size in rest.items()}
    more = min(spare["layers"] // 2, sizes.experts - min(sizes.experts, HESSIANS))
    gradients = min(spare["gradients"], sizes.activations_of_gradients())
    layers = min(spare["layers"] - more, sizes.activations())
    peak = max(rest["gradients"] + gradients, rest["layers"] + more + layers, rest["head"] + layers, rest["embeddings"])
    spilled = max(sizes.activations_of_gradients() - gradients, sizes.activations() - layers)
    return Needs(present + peak, sizes.stored() + spilled, _seconds(job), gradients, layers, HESSIANS + more, total)


def needs_of_pass(model: FloatModel, tokens: tuple[int, int], settings: Calibration) -> Needs:
    """What a forward pass of (sequences, length) takes, and rounding all weights after it.

    Raises BridgeError as `needs_of` does.
    """
    sizes, memory = _Sizes(Job(model, tokens, {}, settings)), settings.memory
    inside = max(max(sizes.blocks), sizes.outside) * sizes.item + sizes.batch * 4 * sizes.item * sizes.widest
    present, limit, total = _limits(memory, inside, "a pass of")
    between = sizes.count * sizes.hidden * sizes.item
    in_memory = min(max(0, limit - present - inside), between)
    seconds = sizes.count * sum(_operations(sizes)) / _rate(model.dtype)
    seconds += _ROUNDED * (sum(sizes.blocks) + sizes.outside) / usable_cpus()
    return Needs(present + inside + in_memory, between - in_memory, seconds, 0, in_memory, 0, total)


def _limits(memory: int | None, needed: int, what: str) -> tuple[int, int, int | None]:
    """Bytes that the process has, may have, and could have, None where that is not known; `needed`: more at least."""
    present, free = resident() + _LATER, free_memory()
    if memory is not None and present + needed > memory:
        least = size_text(present + needed)
        raise refused("memory", memory, f"too little; {what} this model block by block takes {least}")
    limit = memory if memory is not None else present + int(_FREE * free) if free is not None else 1 << 60
    return present, limit, None if free is None else present + free


class _Sizes:
    """Bytes of a job's parts."""

    def __init__(self, job: Job) -> None:
        self.job = job
        model = job.model
        self.count = job.tokens[0] * job.tokens[1]
        self.settings = job.settings
        together = sequences_together(job.tokens[1]) if job.batch is None else job.batch
        self.batch = min(self.count, together * job.tokens[1])
        self.gradient_tokens = self.count if self.settings.needs_gradients else 0
        self.item = model.dtype.itemsize
        self.activation_item = 2 if model.stored_in_bfloat16 else self.item
        self.copies = 1 + self.settings.cross
        self.blocks = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
        self.shapes = [
            {name: matrix_shape(m) for name, m in block.named_modules() if is_layer(m)} for block in model.blocks
        ]
        self.outside = sum(p.numel() for p in model.model.parameters()) - sum(self.blocks)
        self.hidden = matrix_shape(head_of(model.model)[1])[1]
        self.widest = max((n for shapes in self.shapes for _, n in shapes.values()), default=self.hidden)
        hessians = [4 * self.matrices * n * n for name, (_, n) in self.shapes[-1].items() if expert_of(f"{name}.")]
        self.experts = sum(hessians) // 2 if hessians else 0  # gate and up share theirs; down comes after them

    @property
    def matrices(self) -> int:
        """How many are gathered at most: H, with float inputs C, each of all tokens and of those held back."""
        return 4 if self.settings.cross else 1 + self.job.held

    def activations(self) -> int:
        """Bytes of the activations between blocks, of attention's outputs, and of the inputs of the widest layer."""
        return self.count * self.copies * self.activation_item * (2 * self.hidden + self.widest)

    def activations_of_gradients(self) -> int:
        """Bytes of the inputs of all blocks."""
        return self.gradient_tokens * self.hidden * self.activation_item * (len(self.blocks) + 1)

    def gradients(self) -> int:
        """Bytes while gradients are gathered, without activations between blocks."""
        if not self.gradient_tokens:
            return 0
        vocabulary = self.job.model.vocabulary
        length = self.job.tokens[1]
        together = min(self.gradient_tokens, sequences_at_once(self.job.model, length) * length)
        logits = min(together, max(1, LOGITS // vocabulary)) * vocabulary * 4
        head = self.outside * self.item + 4 * logits + self._of_embeddings()
        passes = together * (16 * self.hidden + (4 * self.item + 4 * (self.item < 4)) * self.widest)
        products = max(map(_output_bytes, self.shapes)) if self.settings.two_sided else 0
        block = max(self.blocks) * self.item + products + passes
        return max(head, block + self._of_embeddings()) + self.gradient_tokens * self.hidden * self.item

    def _of_embeddings(self) -> int:
        """Half of their H, and where they are the head too, H of its inputs."""
        tied = self.job.model.untied_head() is None
        return 4 * self.hidden**2 * (1 + tied) if self.settings.two_sided else 0

    def embeddings(self) -> int:
        """Bytes while the embeddings are quantized; there are no activations then."""
        if self.job.model.embedding_and_head()[0] not in self.job.bits:
            return 0
        rows = min(self.job.model.vocabulary, rows_at_once(self.hidden))
        return 4 * self.hidden * (3 * self.hidden + _WORKING * rows)

    def layers(self) -> int:
        """Bytes while a block's layers are quantized, without activations between blocks."""
        each = ((shapes, shape) for shapes in self.shapes for shape in shapes.values())
        largest = max((self._solved(*shape) + self._beside(shapes, shape[1]) for shapes, shape in each), default=0)
        largest += min(self.experts, HESSIANS)
        return max(self.blocks) * self.item * self.copies + largest

    def head(self) -> int:
        """Bytes while the output head is quantized, without activations between blocks."""
        rows, n = matrix_shape(head_of(self.job.model.model)[1])
        untied = self.job.model.untied_head()
        if untied is None or untied[0] not in self.job.bits:
            return 0
        gathered = self.outside * self.item + 4 * self.matrices * n * n + self._gathered(n)
        return max(gathered, self._solved(min(rows, rows_at_once(self.hidden)), n))

    def hessians_beside(self, shapes: Mapping[str, tuple[int, int]], n: int) -> int:
        """How many Hessians more than one may be gathered together for a block's layers of n columns: q, k and v have
        one each where tokens count otherwise for them."""
        layers = sum(columns == n and not expert_of(f"{name}.") for name, (_, columns) in shapes.items())
        return min(2, max(0, layers - 1)) if self.settings.needs_gradients else 0

    def _beside(self, shapes: Mapping[str, tuple[int, int]], n: int) -> int:
        return 4 * self.matrices * n * n * self.hessians_beside(shapes, n)

    def _gathered(self, n: int) -> int:
        """A batch's passes through a block, or its inputs of a layer while they are added to the Hessians."""
        # bytes: both inputs in float32, and those of the tokens held back apart
        added = 17 if self.settings.cross else 8
        return self.batch * n * max(3 * self.item + 4 * self.settings.cross, added)

    def _solved(self, rows: int, n: int) -> int:
        """Bytes for one layer: H and C; then those to find alpha, with a factor of the other tokens' H; then H alone.

        In place of C it may be the products of the layer's outputs, of as many rows as it has. Where it shares its
        inputs with others, or its outputs are not at hand, these may be C after all if it has over half as many rows
        as columns.
        """
        square, weights = 4 * n * n, 4 * rows * n
        # H and its factor; where tokens are held back, H shrunk, and theirs
        gathered, several = self.matrices * square, 2 + 2 * (self.matrices > 1)
        if self.settings.cross and takes_products([rows], n, at_hand=False):
            gathered = 2 * square + weights
        alpha = gathered + square + 2 * weights if self.settings.cross else 0
        return max(gathered + self._gathered(n), alpha, several * square + _WORKING * weights)

    def outside_blocks(self) -> dict[str, tuple[int, int]]:
        """(rows, columns) of the embeddings and the head by their names in the checkpoint, one where they are tied."""
        return dict.fromkeys(self.job.model.embedding_and_head(), self.job.model.head()[1])

    def stored(self) -> int:
        """Bytes on disk: finished layers, the output, the inputs of this block and the next, and A of all layers."""
        bits, weights = 0.0, 0
        for name, (rows, n) in (self.outside_blocks() | self.job.model.linears()).items():
            if name in self.job.bits:
                bits += self.job.bits[name] * rows * n
                weights += rows * n
        output_bits = (self.outside + sum(self.blocks)) * bits / max(weights, 1)
        gradients = self.gradient_tokens * self.item
        inputs = 2 * self.hidden * max(self.count * self.copies * self.activation_item, gradients)
        outputs = sum(map(_output_bytes, self.shapes)) + 4 * self.hidden**2 if self.settings.two_sided else 0
        outputs += 4 * self.gradient_tokens * sum(map(len, self.shapes))  # norms of the gradients
        return int((bits + output_bits) / 8) + inputs + outputs


def _output_bytes(shapes: Mapping[str, tuple[int, int]]) -> int:
    """Bytes of A of a block's layers."""
    return sum(4 * -(-rows // ROWS) * min(rows, ROWS) ** 2 for rows, _ in shapes.values())


def _seconds(job: Job) -> float:
    """The seconds of a job, by operations in matrix products and the solver's other work for each weight."""
    sizes, settings = _Sizes(job), job.settings
    fast, exact = _rate(job.model.dtype), _rate(torch.float32)
    back = _rate(fast_arithmetic(job.model.device)) if settings.needs_gradients else fast  # of the gradients
    words = job.model.vocabulary
    # the head, there and back
    total = sizes.gradient_tokens * words * (4 * sizes.hidden / back + _PREDICTED / usable_cpus())
    for operations, shapes, share in zip(_operations(sizes), sizes.shapes, _reached(sizes), strict=True):
        total += operations * (sizes.count * sizes.copies / fast + 4 * sizes.gradient_tokens / back)
        for n in {n for _, n in shapes.values()}:
            outputs = [rows for rows, columns in shapes.values() if columns == n]
            inputs = -(-len(outputs) // 2) + sizes.hessians_beside(shapes, n)
            cross = sum(outputs) if takes_products(outputs, n, at_hand=False) else n
            gathered = sizes.count * n * (n + 2 * cross * settings.cross) * share
            total += inputs * (gathered + 4 * n**3) / exact
        if settings.two_sided:
            squares = sum(2 * rows * min(rows, ROWS) for rows, _ in shapes.values())
            total += sizes.gradient_tokens * squares * share / back
    each = (_ROUNDED + _REFINED * settings.sweeps) / usable_cpus()
    # of rows and half of H: feedback; G of a sweep; W C and its H^-1
    products = 1 + 2 * settings.sweeps + 4 * settings.cross
    in_blocks = 1 + (_TWO_SIDED - 1) * settings.two_sided
    for shapes, factor in ((job.model.linears(), in_blocks), (sizes.outside_blocks(), 1)):
        for rows, n in (shape for name, shape in shapes.items() if name in job.bits):
            total += rows * n * (each + products * n / exact) * factor
    return total


def _operations(sizes: _Sizes) -> list[float]:
    """Operations of a token's forward pass through each block: its layers, and attention's as if at their rate.

    A token sees half of its sequence on average, as if no layer had a window.
    """
    config = sizes.job.model.model.config.get_text_config()
    if getattr(config, "is_heterogeneous", False):  # transformers' word for layers of several sizes
        config = config.per_layer_config[0]
    heads = getattr(config, "num_attention_heads", None) or 0
    width = getattr(config, "head_dim", None) or sizes.hidden // max(heads, 1)
    attention = _ATTENTION * 2 * sizes.job.tokens[1] * heads * width
    return [2 * n * share + attention for n, share in zip(sizes.blocks, _reached(sizes), strict=True)]


def _reached(sizes: _Sizes) -> list[float]:
    """The share of each block's weights that a token reaches: of a mixture, that of the experts chosen."""
    config = sizes.job.model.model.config.get_text_config()
    chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None) or 1
    experts = [{expert[1] for name in shapes if (expert := expert_of(f"{name}."))} for shapes in sizes.shapes]
    return [min(1.0, chosen / len(numbers)) if numbers else 1.0 for numbers in experts]


def _rate(dtype: torch.dtype) -> float:
    """Operations a second in products of a dtype, measured for a few milliseconds."""
    a, b = torch.ones(512, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
    seconds = []
    for _ in range(4):
        begun = time.perf_counter()
        torch.nn.functional.linear(a, b)
        seconds.append(time.perf_counter() - begun)
    return 2 * 512 * 1024 * 1024 / max(min(seconds), 1e-9)
