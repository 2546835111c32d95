"""llama.cpp's multimodal library, by ctypes over the same shared library as `llama_cpp.py`: an image's embeddings."""

import ctypes
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int32, c_size_t, c_ubyte, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from scripts.peers.llama import ggml
from scripts.peers.llama.llama_cpp import LlamaCpp


class _Params(ctypes.Structure):
    """mtmd_context_params, larger than it is: see `llama_cpp`. `use_gpu` is its first byte."""

    _fields_ = (("use_gpu", c_bool), ("rest", c_ubyte * 511))


class _Text(ctypes.Structure):
    _fields_ = (("text", c_char_p), ("length", c_size_t), ("add_special", c_bool), ("parse_special", c_bool))


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "mtmd_context_params_default": (_Params, []),
    "mtmd_default_marker": (c_char_p, []),
    "mtmd_log_set": (None, [c_void_p, c_void_p]),
    "mtmd_init_from_file": (c_void_p, [c_char_p, c_void_p, _Params]),
    "mtmd_free": (None, [c_void_p]),
    "mtmd_bitmap_init": (c_void_p, [c_uint32, c_uint32, c_char_p]),
    "mtmd_bitmap_free": (None, [c_void_p]),
    "mtmd_input_chunks_init": (c_void_p, []),
    "mtmd_input_chunks_free": (None, [c_void_p]),
    "mtmd_input_chunks_size": (c_size_t, [c_void_p]),
    "mtmd_input_chunks_get": (c_void_p, [c_void_p, c_size_t]),
    "mtmd_input_chunk_get_type": (c_int32, [c_void_p]),
    "mtmd_input_chunk_get_n_tokens": (c_size_t, [c_void_p]),
    "mtmd_tokenize": (c_int32, [c_void_p, c_void_p, POINTER(_Text), POINTER(c_void_p), c_size_t]),
    "mtmd_encode_chunk": (c_int32, [c_void_p, c_void_p]),
    "mtmd_get_output_embd": (POINTER(c_float), [c_void_p]),
}
_IMAGE = 1  # of mtmd_input_chunk_type


def image_embeddings(model: Path, mmproj: Path, image: np.ndarray, width: int) -> np.ndarray:
    """float32 [tokens, width]: what the vision tower gives the language model for an image.

    image  uint8 [height, width, 3]
    width  the language model's hidden size, times the layers that deepstack feeds and one

    Raises RuntimeError where llama.cpp cannot load a file or encode the image.
    """
    lib = ggml.library()
    with LlamaCpp(model) as text:
        ggml.declare(lib, _SIGNATURES)
        params = lib.mtmd_context_params_default()
        params.use_gpu = False
        context = lib.mtmd_init_from_file(str(mmproj).encode(), text._model, params)
        if not context:
            raise RuntimeError(f"llama.cpp cannot load {mmproj}")
        bitmap = lib.mtmd_bitmap_init(image.shape[1], image.shape[0], np.ascontiguousarray(image).tobytes())
        chunks = lib.mtmd_input_chunks_init()
        try:
            marker = lib.mtmd_default_marker()
            asked = _Text(marker, len(marker), False, True)
            if lib.mtmd_tokenize(context, chunks, ctypes.byref(asked), ctypes.byref(c_void_p(bitmap)), 1):
                raise RuntimeError(f"{mmproj}: llama.cpp cannot prepare the image")
            found = []
            for i in range(lib.mtmd_input_chunks_size(chunks)):
                chunk = lib.mtmd_input_chunks_get(chunks, i)
                if lib.mtmd_input_chunk_get_type(chunk) != _IMAGE:
                    continue
                if lib.mtmd_encode_chunk(context, chunk):
                    raise RuntimeError(f"{mmproj}: llama.cpp cannot encode the image")
                count = lib.mtmd_input_chunk_get_n_tokens(chunk)
                found.append(np.ctypeslib.as_array(lib.mtmd_get_output_embd(context), (count, width)).copy())
            return np.concatenate(found)
        finally:
            lib.mtmd_input_chunks_free(chunks)
            lib.mtmd_bitmap_free(bitmap)
            lib.mtmd_free(context)
