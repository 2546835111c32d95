"""Running GGUF files: open one, multiply with its tensors.

    f = bridge.open_gguf("model.gguf")
    w = f["blk.0.ffn_down.weight"].prepare()      a QuantTensor, repacked for this machine
    y = w.matvec(x)                               numpy or torch in, the same out

A GGUF goes in; products, logits and text come out. Read `model.py` first (text in, text out), then `decoder.py` (the
layers), `quant_tensor.py` (one tensor's products) and `cpu/` (their kernels). `open_gguf` maps the file and reads its
header; nothing else is decoded in advance.
"""

from bridge.runtime.quant_tensor import QuantTensor
from bridge.runtime.reader import GGUFFile, open_gguf

__all__ = ["GGUFFile", "QuantTensor", "get_num_threads", "open_gguf", "set_num_threads"]


def get_num_threads() -> int:
    """Threads that a product uses: as set, else BRIDGE_THREADS, else the cores this process may use."""
    from bridge.system.threads import pool

    return pool.get_num_threads()


def set_num_threads(threads: int) -> None:
    """Use that many threads from the next product on."""
    from bridge.system.threads import pool

    pool.set_num_threads(threads)
