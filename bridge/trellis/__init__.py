"""Trellis-coded weights (QTIP, EXL3): codebooks, bit streams, and products with layers that stay coded.

    bridge.trellis.BitshiftCodebook(L, K, V, tlut_bits, decode_mode, tlut)    the values of states
    bridge.trellis.TrellisLayer                                               a layer: matmul, dequantize
    bridge.trellis.bitshift_gemm(input, trellis, codebook, ...)               one product from bare tensors

Packed codes and a codebook go in; floats, or products with vectors, come out. Read `layer.py` first. The layers of a
checkpoint come from open_checkpoint(...).read_trellis(name).
"""

from bridge.trellis.codebooks import BitshiftCodebook
from bridge.trellis.gemm import bitshift_gemm
from bridge.trellis.layer import TrellisLayer

bitshift_codebook = BitshiftCodebook

__all__ = ["BitshiftCodebook", "TrellisLayer", "bitshift_codebook", "bitshift_gemm"]
