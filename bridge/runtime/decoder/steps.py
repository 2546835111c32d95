"""Steps of a computation, calls and products in order, in two forms.

`SingleProgram`   one table of calls (cpu/ops/program.py) with the products in it, for a token of each of some contexts,
                  if there are kernels for all matrices; matrices with the same inputs share their int8 records
`SteppedProgram`  programs, and between them each product by itself (`QuantTensor.matmul`): everything else, prompts
                  above all
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from bridge.runtime.config.decoder_config import DecoderConfig
from bridge.runtime.cpu.engines.floats import SIZES, rows_function
from bridge.runtime.cpu.ops import decoder_ops as ops
from bridge.runtime.cpu.ops.program import FIELDS, KernelSlots, Program, add_products, address, bits, product
from bridge.runtime.decoder.experts import ExpertTables, mix
from bridge.runtime.layers.layers import Experts
from bridge.runtime.quant_tensor import QuantTensor
from bridge.system.kernels.jit import CFunction
from bridge.system.threads.pool import MIN_BYTES_TO_SHARE

Products = Sequence[tuple[QuantTensor | None, np.ndarray]]


class Steps(Protocol):
    """Takes calls and products in order."""

    program: Program  # takes the calls that come next

    def products(self, x: np.ndarray, products: Products) -> None:
        """y = W x for each pair that has a matrix, of buffers [n, in] and [n, rows]."""

    def mix(self, experts: Experts, x: np.ndarray, y: np.ndarray, routed: np.ndarray | None = None) -> None:
        """y = the experts' result for x; `routed`: what the router reads, if that is not x."""


class SteppedProgram:
    """Programs of calls, and between them each product by itself."""

    def __init__(self, config: DecoderConfig, precision: str):
        self._config, self._precision = config, precision
        self._calls: list[Callable[[], Any]] = []
        self._programs: list[Program] = []
        self.program = Program()

    def products(self, x: np.ndarray, products: Products) -> None:
        self._then(*(partial(matrix.multiply, x, y, self._precision) for matrix, y in products if matrix is not None))

    def mix(self, experts: Experts, x: np.ndarray, y: np.ndarray, routed: np.ndarray | None = None) -> None:
        def product(matrix: QuantTensor, x: np.ndarray) -> np.ndarray:
            return np.asarray(matrix.matmul(x, precision=self._precision))

        def call() -> None:
            y[:] = mix(experts, x, self._config, product, routed)

        self._then(call)

    def _then(self, *calls: Callable[[], Any]) -> None:
        self._calls += [self.program.run, *calls]
        self._programs.append(self.program)
        self.program = Program()

    def functions(self) -> list[CFunction]:
        """The C functions of all calls but products."""
        return [function for program in (*self._programs, self.program) for function in program.functions()]

    def run(self) -> None:
        for call in self._calls:
            call()
        self.program.run()


class SingleProgram:
    """Calls and products in one program."""

    def __init__(self, config: DecoderConfig, n: int, precision: str):
        self.program = Program()
        self.slots = KernelSlots(precision == "int8")
        self._integer = precision == "int8"
        self._experts: ExpertTables | None = None
        if config.experts:
            self._experts = ExpertTables(config, n, self.slots, lambda _, x, products: self.products(x, products))
            self.program.keep(self._experts)

    def mix(self, experts: Experts, x: np.ndarray, y: np.ndarray, routed: np.ndarray | None = None) -> None:
        assert self._experts is not None
        self._experts.add(self.program, experts, x, y, routed)

    def products(self, x: np.ndarray, products: Products) -> None:
        """Types that read the same records share them."""
        program, integer = self.program, self._integer
        records: dict[Any, np.ndarray] = {}
        parts, widths, blocks = [], [], []
        n = len(x)
        for matrix, y in products:
            if matrix is None:
                continue
            if matrix.type in SIZES:
                self._float_product(matrix, x, y)
                continue
            blocks.append((matrix, y))
            engine: Any = matrix._get_engine()
            columns = engine.columns(n, integer)
            turns = -(-n // columns)
            widths.append(columns)
            x_records = program.records(records, matrix.type, x, columns, integer, engine.form(columns, integer))
            parts.append(product(engine, x_records, y, turns, columns, integer))
            program.keep(engine)
        fields = add_products(program, parts) if parts else np.empty(0)
        for i, (matrix, y) in enumerate(blocks):
            self.slots.register(matrix, fields[i * FIELDS : i * FIELDS + 2], widths[i])
            if matrix.factor != 1:
                program.add(ops.function("scale"), address(y), y.size, bits(matrix.factor), items=1)

    def functions(self) -> list[CFunction]:
        return self.program.functions()

    def run(self) -> None:
        self.program.run()

    def _float_product(self, matrix: QuantTensor, x: np.ndarray, y: np.ndarray) -> None:
        rows, columns = matrix.shape
        arguments = address(matrix.raw), address(x), address(y), columns, SIZES[matrix.type] * columns, len(x), 4 * rows
        self.program.add(rows_function(matrix.type), *arguments, items=rows, shared=matrix.nbytes >= MIN_BYTES_TO_SHARE)
        self.program.keep(matrix)
