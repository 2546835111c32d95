"""WRITTEN: all block types that are written. READ: all that are read and multiplied. CALIBRATED: those whose scales
a calibration text chooses together with the codes; of K-quants it chooses codes on fitted scales.

A module of its own, because the codebooks and tables of the IQ types are the `gguf` package's, which is imported here.
"""

from bridge.blocks import ROUNDED, TYPES
from bridge.blocks.base import BlockType
from bridge.blocks.iq1_m import IQ1_M
from bridge.blocks.iq1_s import IQ1_S
from bridge.blocks.iq2_s import IQ2_S
from bridge.blocks.iq2_xs import IQ2_XS
from bridge.blocks.iq2_xxs import IQ2_XXS
from bridge.blocks.iq3_s import IQ3_S
from bridge.blocks.iq3_xxs import IQ3_XXS
from bridge.blocks.iq4_nl import IQ4_NL
from bridge.blocks.iq4_xs import IQ4_XS
from bridge.blocks.mxfp4 import MXFP4
from bridge.blocks.nvfp4 import NVFP4
from bridge.blocks.q1_0 import Q1_0
from bridge.blocks.q2_0 import Q2_0
from bridge.blocks.q4_0 import Q4_0
from bridge.blocks.q4_1 import Q4_1
from bridge.blocks.q5_0 import Q5_0
from bridge.blocks.q5_1 import Q5_1
from bridge.blocks.q8_0 import Q8_0
from bridge.blocks.tq1_0 import TQ1_0
from bridge.blocks.tq2_0 import TQ2_0

_ROUNDED = (IQ1_S, IQ1_M, TQ1_0, TQ2_0, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ4_XS, IQ4_NL)
WRITTEN: dict[str, BlockType] = TYPES | {block.name: block for block in _ROUNDED}
READ: dict[str, BlockType] = WRITTEN | {block.name: block for block in (Q1_0,)}
_CODEBOOKS = (IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ4_XS, MXFP4, IQ4_NL, NVFP4)
_PLAIN = (Q2_0, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0)
CALIBRATED: dict[str, BlockType] = {block.name: block for block in (*_CODEBOOKS, *_PLAIN)}
assert {block.name: block.size for block in _ROUNDED} == ROUNDED
