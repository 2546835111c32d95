"""llama.cpp's own `llama_model_quantize`, by ctypes over the libraries of `tuned.py`.

    python -m scripts.peers.llama.llama_quantize LIBRARIES IN.gguf OUT.gguf Q4_K_M --imatrix FILE --threads 1

`llama_quantizer.py` needs no such package, but rebuilds what a preset means; this is the function that llama-quantize
calls. Its parameters are set only after their documented defaults were found in their places, so a release that moves
them is noticed.
"""

import argparse
import ctypes
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from bridge.gguf_file.imatrix import read_imatrix
from scripts.peers.llama import tuned


class _Imatrix(ctypes.Structure):
    """struct llama_model_imatrix_data"""

    _fields_ = (("name", c_char_p), ("data", POINTER(c_float)), ("size", c_size_t))


class _Params(ctypes.Structure):
    """struct llama_model_quantize_params, and room for what later releases add"""

    _fields_ = (
        ("nthread", c_int32), ("ftype", c_int), ("output_tensor_type", c_int), ("token_embedding_type", c_int),
        ("allow_requantize", c_bool), ("quantize_output_tensor", c_bool), ("only_copy", c_bool), ("pure", c_bool),
        ("keep_split", c_bool), ("dry_run", c_bool), ("imatrix", c_void_p), ("kv_overrides", c_void_p),
        ("tt_overrides", c_void_p), ("prune_layers", c_void_p), ("more", c_int64 * 32),
    )  # fmt: skip


_DEFAULTS = {
    "nthread": 0, "ftype": int(gguf.LlamaFileType.MOSTLY_Q8_0), "allow_requantize": False,
    "quantize_output_tensor": True, "only_copy": False, "pure": False, "keep_split": False, "dry_run": False,
    "imatrix": None, "kv_overrides": None, "tt_overrides": None, "prune_layers": None,
}  # fmt: skip


def quantize(folder: Path, source: Path, out: Path, preset: str, imatrix: Path | None = None, threads: int = 1) -> None:
    """Write `source`, a GGUF with matrices in F16, BF16 or F32, as one of llama.cpp's presets.

    folder   has the shared libraries, see `tuned.download`
    imatrix  llama.cpp's importance matrix

    Raises RuntimeError if the libraries have other parameters, or llama.cpp fails.
    """
    lib = _library(folder)
    params = lib.llama_model_quantize_default_params()
    for field, default in _DEFAULTS.items():
        if (value := getattr(params, field)) != default:
            raise RuntimeError(
                f"llama_model_quantize_params.{field} is {value}, not {default}: it is not where this llama.cpp keeps "
                "it; adapt scripts/peers/llama/llama_quantize.py"
            )
    params.nthread, params.ftype = threads, int(gguf.LlamaFileType[f"MOSTLY_{preset}"])
    importance = {} if imatrix is None else read_imatrix(imatrix)
    columns = [np.ascontiguousarray(values, np.float32) for values in importance.values()]
    entries = (_Imatrix * (len(columns) + 1))()  # the last one, without a name, ends the list
    for entry, name, values in zip(entries, importance, columns, strict=False):
        entry.name, entry.size = name.encode(), values.size
        entry.data = values.ctypes.data_as(POINTER(c_float))
    if columns:
        params.imatrix = ctypes.cast(entries, c_void_p)
    if status := lib.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params)):
        raise RuntimeError(f"{source}: llama_model_quantize returned {status} for {preset}")


def _library(folder: Path) -> Any:
    """The loaded library with the signatures used here."""
    lib = tuned.load(folder).llama
    lib.llama_model_quantize_default_params.restype = _Params
    lib.llama_model_quantize.argtypes = [c_char_p, c_char_p, POINTER(_Params)]
    lib.llama_model_quantize.restype = c_uint32
    lib.llama_backend_init()
    return lib


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    for name in ("folder", "source", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("preset")
    parser.add_argument("--imatrix", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    quantize(**vars(options))


if __name__ == "__main__":
    main()
