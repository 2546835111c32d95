"""Steps of a computation, calls and products in order: tables of calls (cpu/ops/program.py) with the products in them.

A step, a token of each of some contexts, is one table where there are kernels for all matrices, and so is a prompt:
from Python, what surrounds the products of a short one would take as long as they do. A table ends, and the next one
begins, where Python has something to do: for a prompt, a product of float matrices, or of values that are not rounded,
because a dense product of dequantized tiles is faster; one of a type without kernels; what an adapter adds.

Products of the same x share its records where their kernels read the same ones. Layers use the same memory for them:
for 512 tokens, it is a few megabytes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from bridge.runtime.config.decoder_config import DecoderConfig
from bridge.runtime.cpu.engines.floats import SIZES, rows_function
from bridge.runtime.cpu.engines.turns import split
from bridge.runtime.cpu.forms.activations import record_bytes, record_kind
from bridge.runtime.cpu.ops import decoder_ops as ops
from bridge.runtime.cpu.ops import passes
from bridge.runtime.cpu.ops.passes import Kernels
from bridge.runtime.cpu.ops.program import Program, Scratch, address, bits, every_token
from bridge.runtime.decoder.experts import ExpertTables, mix
from bridge.runtime.layers.layers import Experts
from bridge.runtime.quant_tensor import QuantTensor
from bridge.system.kernels.jit import CFunction
from bridge.system.threads.pool import MIN_BYTES_TO_SHARE, MIN_VALUES_TO_SHARE

_AT_ONCE = 32  # calls of a prompt before other models may take threads, and signals are handled: each may take long

Products = Sequence[tuple[QuantTensor | None, np.ndarray]]


class Steps:
    """Takes calls and products in order, for up to n tokens.

    program     takes the calls that come next
    place       passes.py's, of the tokens
    one_by_one  whether tokens are computed as by a step of each alone, to the last bit
    """

    def __init__(self, config: DecoderConfig, n: int, kernels: Kernels, one_by_one: bool):
        self.kernels, self.scratch = kernels, Scratch()
        self.place = np.zeros(passes.PLACE, np.int64)
        self.one_by_one = one_by_one
        self._config, self._n = config, n
        self._precision = "int8" if kernels.integer else "f32"
        self._calls: list[Callable[[], Any]] = []  # between the programs
        self.program = Program()
        self._programs = [self.program]
        self._unchecked: list[Any] = []  # engines
        self._experts = ExpertTables(config, n, self) if config.experts else None

    @property
    def single(self) -> bool:
        """Whether this is one table."""
        return not self._calls

    def products(self, x: np.ndarray, products: Products) -> None:
        """y = W x for each pair that has a matrix, of buffers [n, in] and [n, rows]."""
        pairs = [(matrix, y) for matrix, y in products if matrix is not None]
        self._multiply(x, [pair for pair in pairs if self.multiplies(pair[0])])
        for matrix, y in pairs:
            if not self.multiplies(matrix):
                if not self.one_by_one or matrix.type not in SIZES:
                    self._then(partial(self._in_python, matrix.multiply, x, y, self._precision))
                    continue
                self._multiply_floats(matrix, x, y)
            elif matrix.factor != 1:
                arguments = address(y), y.shape[1], bits(matrix.factor)
                self.program.add(ops.function("scale"), *arguments, items=every_token, shared=self._n > 1)
            if matrix.change is not None:
                self._then(partial(self._in_python, matrix.add_change, x, y))

    def multiplies(self, matrix: QuantTensor) -> bool:
        """Whether there are kernels for a matrix, and these are the fastest way."""
        from bridge.runtime.cpu.engines.products import Interleaved

        return isinstance(matrix._get_engine(), Interleaved) and (self.kernels.integer or self.one_by_one)

    def _multiply(self, x: np.ndarray, pairs: list[tuple[QuantTensor, np.ndarray]]) -> None:
        """Products by kernels of row groups, all in one row of the table."""
        from bridge.runtime.cpu.engines.products import narrow_function

        records: dict[Any, np.ndarray] = {}
        products: list[passes.Product] = []
        narrowed: list[tuple[np.ndarray, np.ndarray]] = []
        for matrix, y in pairs:
            out, width = y, self.width(matrix)
            if self._n > 1 and width != y.shape[1]:  # a row's last group would reach into the next row
                out = self.scratch.rows(f"wide {len(narrowed)}", self._n, width)
                narrowed.append((out, y))
            self._check_room(matrix, out, width)
            kind = self.record_kind(matrix)
            if kind not in records:
                records[kind] = self.record_memory(matrix, len(records), self._n)
                passes.add_records(self.program, x, records[kind], self.kernels.words(matrix), self.place)
            products.append(self.product(matrix, self.place, records[kind], out))
        if products:
            turns = -(-self._n // int(self.kernels.words(pairs[0][0])[-1, passes.COLUMNS]))
            passes.add_products(self.program, products, turns * sum(p.groups for p in products))
        for wide, y in narrowed:
            sizes = address(wide), wide.shape[1], address(y), y.shape[1]
            self.program.add(narrow_function(), *sizes, items=every_token, shared=y.size > MIN_VALUES_TO_SHARE)

    def _check_room(self, matrix: QuantTensor, y: np.ndarray, width: int) -> None:
        """AssertionError where the last turn of a kernel would write beyond a buffer."""
        engine: Any = matrix._get_engine()
        kinds = engine.kinds(self.kernels.integer)
        rows = max(
            sum(-(-count // columns) * columns for count, columns in split(kinds, self._n, one_pass))
            for one_pass in (False, True)
        )
        if y.base is None or address(y) + 4 * ((rows - 1) * y.shape[1] + width) > address(y.base) + y.base.nbytes:
            raise AssertionError(f"{matrix.name}: rows beyond the buffer")

    @staticmethod
    def width(matrix: QuantTensor) -> int:
        """Values of a row of y that the kernels of a matrix write, in whole row groups."""
        engine: Any = matrix._get_engine()
        return int(engine.groups * engine.lanes)

    def record_kind(self, matrix: QuantTensor) -> Any:
        """What is the same for matrices that read the same records, of tokens in the same turns."""
        engine: Any = matrix._get_engine()
        return record_kind(matrix.type, self.kernels.integer), engine.kinds(self.kernels.integer)

    def record_memory(self, matrix: QuantTensor, number: int, rows: int) -> np.ndarray:
        """Memory for the records of so many rows, and of what a turn of theirs has beyond; `number`: of those now."""
        padded = rows + max(self.kernels.words(matrix)[:, passes.COLUMNS])
        nbytes = padded * record_bytes(matrix.type, matrix.shape[1], self.kernels.integer)
        return self.scratch.memory(f"records {number}", nbytes)

    def product(self, matrix: QuantTensor, place: np.ndarray, records: np.ndarray, y: np.ndarray) -> passes.Product:
        """A matrix times the tokens of a place."""
        engine: Any = matrix._get_engine()
        words = self.kernels.words(matrix)
        if engine.repacks:  # what is prepared was checked then
            self._unchecked.append(engine)
        y_at = address(y), 4 * y.shape[1]
        sizes = engine.blocks, engine.stride, engine.groups
        return passes.Product(address(words), len(words), address(place), address(records), *y_at, *sizes)

    def _multiply_floats(self, matrix: QuantTensor, x: np.ndarray, y: np.ndarray) -> None:
        rows, columns = matrix.shape
        arguments = address(matrix.raw), address(x), address(y), columns, SIZES[matrix.type] * columns
        shared = matrix.nbytes >= MIN_BYTES_TO_SHARE
        self.program.add(rows_function(matrix.type), *arguments, every_token, 4 * rows, items=rows, shared=shared)
        self.program.keep(matrix)

    def mix(self, experts: Experts, x: np.ndarray, y: np.ndarray, routed: np.ndarray | None = None) -> None:
        """y = the experts' result for x; `routed`: what the router reads, if that is not x."""
        assert self._experts is not None
        matrices = [matrix for network in experts.networks for matrix in network if matrix is not None]
        if all(matrix.change is None and self.multiplies(matrix) for matrix in matrices):
            self._experts.add(experts, x, y, routed)
        else:
            self._then(partial(self._in_python, partial(self._mix, experts), x, y, routed))

    def _mix(self, experts: Experts, x: np.ndarray, y: np.ndarray, routed: np.ndarray | None) -> None:
        def product(matrix: QuantTensor, x: np.ndarray) -> np.ndarray:
            return np.asarray(matrix.matmul(x, precision=self._precision))

        y[:] = mix(experts, x, self._config, product, routed)

    def _in_python(self, function: Callable[..., None], *arguments: Any) -> None:
        """function(*arguments) on the rows of the present tokens."""
        n = int(self.place[passes.TOKENS])
        function(*(part[:n] if isinstance(part, np.ndarray) else part for part in arguments))

    def _then(self, call: Callable[[], Any]) -> None:
        self._calls.append(call)
        self.program = Program()
        self._programs.append(self.program)

    def functions(self) -> list[CFunction]:
        """The C functions of all calls but of what Python has to do."""
        return [function for program in self._programs for function in program.functions()]

    def ready(self, tokens: int) -> bool:
        """Whether so many tokens need the kernels that those before needed."""
        return bool((self.place[passes.TOKENS :] == (tokens, self.kernels.one_pass)).all())

    def begin(self, tokens: int) -> None:
        """Get ready for so many tokens."""
        self.place[:] = 0, tokens, self.kernels.one_pass
        for program in self._programs:
            program.tokens = tokens

    def run(self) -> None:
        """Make the calls. Raises BridgeError where weights of a prompt, or of a first step, have scales that are not
        finite."""
        at_once = 0 if self.one_by_one else _AT_ONCE
        for program, call in zip(self._programs, self._calls, strict=False):
            program.run(at_once)
            call()
        self.program.run(at_once)
        for engine in self._unchecked:
            engine.check()
        if self.one_by_one:
            self._unchecked = []
