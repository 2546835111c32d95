"""Running GGUF files: open one, multiply with its tensors.

    f = bridge.open_gguf("model.gguf")
    w = f["blk.0.ffn_down.weight"].prepare()      a QuantTensor, repacked for this machine
    y = w.matvec(x)                               numpy or torch in, the same out

`open_gguf` maps the file and reads its header; nothing is decoded before it is asked for.
"""

from bridge.runtime.quant_tensor import QuantTensor
from bridge.runtime.reader import GGUFFile, open_gguf

__all__ = ["GGUFFile", "QuantTensor", "open_gguf"]
