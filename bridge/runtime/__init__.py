"""Running GGUF files: open one, multiply with its tensors.

    f = bridge.open_gguf("model.gguf")
    w = f["blk.0.ffn_down.weight"].prepare()      a QuantTensor, repacked for this machine
    y = w.matvec(x)                               numpy or torch in, the same out

A GGUF goes in; products, logits and text come out. Read `model` first (text in, text out), then `decoder/` (the
layers), `quant_tensor` (one tensor's products) and `cpu/` (their kernels). `open_gguf` maps the file and reads its
header; nothing else is decoded in advance.

    config/, layers/              what the metadata says; the tensors, found and checked, and the cache
    decoder/                      tokens in, logits out
    sampling, constraint          the next token; replies that fit a schema
    replies/, tokenizer/          text
"""

from bridge.runtime.quant_tensor import QuantTensor
from bridge.runtime.reader import GGUFFile, open_gguf

__all__ = ["GGUFFile", "QuantTensor", "get_num_threads", "get_numa", "open_gguf", "set_num_threads", "set_numa"]


def get_num_threads() -> int:
    """Threads that a product uses: as set, else BRIDGE_THREADS, else the cores this process may use."""
    from bridge.system.threads import pool

    return pool.get_num_threads()


def set_num_threads(threads: int) -> None:
    """Use so many `threads` of the CPU from the next product on, in the whole process.

    Raises BridgeError for less than one.
    """
    from bridge.system.threads import pool

    pool.set_num_threads(threads)


def get_numa() -> str | None:
    """How threads are placed on NUMA nodes: as set, else BRIDGE_NUMA, else None, where the system likes."""
    from bridge.system.threads import pool

    return pool.get_numa()


def set_numa(how: str) -> None:
    """Place threads on NUMA nodes from the next product on.

    how  "distribute" or "isolate", as llama.cpp's --numa

    Copies of weights that were made before stay where they are. Raises BridgeError where the system is not Linux.
    """
    from bridge.system.threads import pool

    pool.set_numa(how)
