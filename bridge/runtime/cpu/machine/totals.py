"""The type of what kernels add up in, see vectors.py; needed when a kernel is compiled alone."""

from __future__ import annotations

from numba.core import types
from numba.extending import models, register_model

from bridge.system.kernels import ir


class Totals(types.Type):
    """`columns` float vectors of `lanes`."""

    def __init__(self, columns: int, lanes: int):
        self.columns = columns
        self.lanes = lanes
        super().__init__(name=f"Totals({columns}, {lanes})")


@register_model(Totals)
class _TotalsModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        vector = ir.VectorType(ir.F32, fe_type.lanes)
        super().__init__(dmm, fe_type, ir.ArrayType(vector, fe_type.columns))
