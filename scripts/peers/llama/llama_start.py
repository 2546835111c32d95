"""The first token by llama.cpp, as little around it as possible: `bench_start.py` measures this program as a whole.

    python scripts/peers/llama/llama_start.py LIBRARIES MODEL.gguf PROMPT THREADS

ctypes alone, over the libraries that node-llama-cpp distributes through npm; a context of 512 tokens, llama.cpp's
defaults otherwise, and its own greedy sampler. It imports nothing of this project, so that it starts as fast as it can.
"""

import ctypes
import sys
from ctypes import c_bool, c_char_p, c_int32, c_void_p
from pathlib import Path


class _Params(ctypes.Structure):
    """A struct of parameters by value, larger than llama.cpp's own (see llama_cpp.py)."""

    _fields_ = (("words", c_int32 * 256),)


class _Batch(ctypes.Structure):
    _fields_ = (("n_tokens", c_int32), ("pointers", c_void_p * 6))


def main() -> None:
    folder, model, prompt, threads = sys.argv[1:]
    base, ggml, llama = ("libggml-base.so", "libggml.v*.so", "libllama.v*.so")
    _, backends, lib = (
        ctypes.CDLL(str(next(Path(folder).glob(name))), ctypes.RTLD_GLOBAL) for name in (base, ggml, llama)
    )
    silent = ctypes.CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)(lambda *_: None)
    lib.llama_log_set(silent, None)
    backends.ggml_backend_load_all_from_path(folder.encode())
    for name, result in (
        ("llama_model_default_params", _Params), ("llama_context_default_params", _Params),
        ("llama_batch_get_one", _Batch), ("llama_model_load_from_file", c_void_p), ("llama_init_from_model", c_void_p),
        ("llama_model_get_vocab", c_void_p), ("llama_sampler_init_greedy", c_void_p), ("llama_sampler_sample", c_int32),
    ):  # fmt: skip
        getattr(lib, name).restype = result
    loaded = c_void_p(lib.llama_model_load_from_file(model.encode(), lib.llama_model_default_params()))
    context = c_void_p(lib.llama_init_from_model(loaded, lib.llama_context_default_params()))
    lib.llama_set_n_threads(context, int(threads), int(threads))
    vocabulary = c_void_p(lib.llama_model_get_vocab(loaded))
    text, room = prompt.encode(), (c_int32 * 512)()
    count = lib.llama_tokenize(vocabulary, text, len(text), room, 512, c_bool(True), c_bool(True))
    if lib.llama_decode(context, lib.llama_batch_get_one(room, count)):
        sys.exit("llama_decode failed")
    token = lib.llama_sampler_sample(c_void_p(lib.llama_sampler_init_greedy()), context, -1)
    piece = ctypes.create_string_buffer(256)
    size = lib.llama_token_to_piece(vocabulary, token, piece, 256, 0, c_bool(True))
    print(prompt + piece.raw[:size].decode())


if __name__ == "__main__":
    main()
