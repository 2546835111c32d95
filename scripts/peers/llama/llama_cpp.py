"""llama.cpp through its C API, by ctypes over the same shared library as `ggml.py`, or over those of `tuned.py`.

The wheel's Python layer serves requests; the tests need logits at every position, so they call the C functions below
it. Two parameter structs are passed by value and grow with every llama.cpp release. They are declared larger than they
are: a callee returns such a struct through a hidden pointer and reads only the part of an argument that it knows, so an
oversized one is safe on x86-64 and Arm64. The fields of the context's struct below are set only after their documented
defaults were found in their places, so a release that moves them is noticed.
"""

import ctypes
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int8, c_int32, c_size_t, c_uint32, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np

from scripts.peers.llama import ggml, tuned

_GGML_TYPE_F32 = 0
_log_tail: list[str] = []  # llama.cpp's messages since the last load began


class _Params(ctypes.Structure):
    """An opaque struct by value, as int32 words; the real ones are under 200 bytes."""

    _fields_ = (("words", c_int32 * 256),)


# word offset in llama_context_params -> (field, default value that must be found there)
_CONTEXT_WORDS = {
    0: ("n_ctx", 512), 1: ("n_batch", 2048), 2: ("n_ubatch", 512), 3: ("n_seq_max", 1),
    11: ("pooling_type", -1), 13: ("flash_attn_type", -1), 26: ("type_k", 1), 27: ("type_v", 1),
}  # fmt: skip


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", c_int32), ("token", POINTER(c_int32)), ("embd", POINTER(c_float)), ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)), ("seq_id", POINTER(POINTER(c_int32))), ("logits", POINTER(c_int8)),
    )  # fmt: skip


@ctypes.CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)
def _on_log(_level: int, text: bytes, _user: int | None) -> None:
    _log_tail.append(text.decode("utf-8", "replace"))


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [c_void_p, c_void_p]),
    "llama_model_default_params llama_context_default_params": (_Params, []),
    "llama_model_load_from_file": (c_void_p, [c_char_p, _Params]),
    "llama_model_free llama_free": (None, [c_void_p]),
    "llama_adapter_lora_init": (c_void_p, [c_void_p, c_char_p]),
    "llama_set_adapters_lora": (c_int32, [c_void_p, POINTER(c_void_p), c_size_t, POINTER(c_float)]),
    "llama_model_get_vocab llama_get_memory": (c_void_p, [c_void_p]),
    "llama_model_meta_count llama_vocab_n_tokens llama_vocab_bos llama_vocab_eos": (c_int32, [c_void_p]),
    "llama_model_meta_key_by_index llama_model_meta_val_str_by_index": (
        c_int32, [c_void_p, c_int32, c_char_p, c_size_t],
    ),
    "llama_init_from_model": (c_void_p, [c_void_p, _Params]),
    "llama_n_ctx llama_n_batch": (c_uint32, [c_void_p]),
    "llama_set_n_threads": (None, [c_void_p, c_int32, c_int32]),
    "llama_memory_clear": (None, [c_void_p, c_bool]),
    "llama_batch_init": (_Batch, [c_int32, c_int32, c_int32]), "llama_batch_free": (None, [_Batch]),
    "llama_decode": (c_int32, [c_void_p, _Batch]), "llama_get_logits": (POINTER(c_float), [c_void_p]),
    "llama_set_embeddings": (None, [c_void_p, c_bool]),
    "llama_get_embeddings_seq": (POINTER(c_float), [c_void_p, c_int32]),
    "llama_model_n_embd": (c_int32, [c_void_p]),
    "llama_vocab_is_eog": (c_bool, [c_void_p, c_int32]),
    "llama_tokenize": (c_int32, [c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool]),
    "llama_token_to_piece": (c_int32, [c_void_p, c_int32, c_char_p, c_int32, c_int32, c_bool]),
}  # fmt: skip


@cache
def _library(folder: Path | None) -> Any:
    """The library with llama.cpp's functions typed."""
    lib = ggml.library() if folder is None else tuned.load(folder).llama
    ggml.declare(lib, _SIGNATURES)
    lib.llama_backend_init()
    return lib


class LlamaCpp:
    """A GGUF file loaded in llama.cpp on the CPU; use as a context manager.

    path        the GGUF (for a split file: its first shard)
    n_ctx       tokens the context holds; one call's tokens must fit
    n_threads   of the CPU
    float_kv    keys and values kept in float32 and attention computed plainly, so that what
                remains of a difference to a float model lies in the weights and the activations
    n_batch     tokens of a call at most; default: as many as the context holds
    n_ubatch    of these, those that pass through the layers together; default: all
    n_seq_max   sequences that share the context
    lora        an adapter's GGUF
    flash       flash attention with float_kv too: where it is sparse, llama.cpp computes it so alone
    pooling     number of pooling_type; None: the file's own
    libraries   the folder of `tuned.download`; None: the xllamacpp wheel
    """

    def __init__(
        self, path: str | Path, n_ctx: int = 512, n_threads: int = 1, float_kv: bool = True, n_batch: int | None = None,
        lora: str | Path | None = None, flash: bool = False, libraries: Path | None = None, n_ubatch: int | None = None,
        n_seq_max: int = 1, pooling: int | None = None,
    ) -> None:  # fmt: skip
        self._lib = lib = _library(libraries)
        self._model = self._context = None
        _log_tail.clear()
        # to the list instead of the terminal; anew for each model, as the wheel's server takes the log for itself
        lib.llama_log_set(ctypes.cast(_on_log, c_void_p), None)
        self._model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}: {_complaint()}")
        self._vocab = lib.llama_model_get_vocab(self._model)
        n_batch = n_batch or n_ctx
        params = _context_params(lib, n_ctx, float_kv, n_batch, n_ubatch or n_batch, n_seq_max, flash)
        if pooling is not None:
            params.words[11] = pooling
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            self.close()
            raise RuntimeError(f"llama.cpp cannot run {path}: {_complaint()}")
        if lora is not None:
            self._adapt(lora)
        self.n_ctx = lib.llama_n_ctx(self._context)
        assert self.n_ctx >= n_ctx, "llama_context_params was not understood"
        assert lib.llama_n_batch(self._context) >= n_batch, "llama_context_params was not understood"
        lib.llama_set_n_threads(self._context, n_threads, n_threads)
        self.vocab_size = lib.llama_vocab_n_tokens(self._vocab)
        self.bos, self.eos = lib.llama_vocab_bos(self._vocab), lib.llama_vocab_eos(self._vocab)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the model; the object is of no use afterwards."""
        if self._context:
            self._lib.llama_free(self._context)
        if self._model:
            self._lib.llama_model_free(self._model)
        self._context = self._model = None

    def _adapt(self, lora: str | Path) -> None:
        """Add an adapter, which is freed with the model."""
        adapter = self._lib.llama_adapter_lora_init(self._model, str(lora).encode())
        if not adapter:
            self.close()
            raise RuntimeError(f"llama.cpp cannot load {lora}: {_complaint()}")
        self._lib.llama_set_adapters_lora(self._context, (c_void_p * 1)(adapter), 1, (c_float * 1)(1.0))

    def meta(self) -> dict[str, str]:
        """The file's scalar metadata, as llama.cpp prints it."""

        def text(function: Any, index: int) -> str:
            room = ctypes.create_string_buffer(function(self._model, index, None, 0) + 1)
            function(self._model, index, room, len(room))
            return room.value.decode("utf-8", "replace")

        key, value = self._lib.llama_model_meta_key_by_index, self._lib.llama_model_meta_val_str_by_index
        return {text(key, i): text(value, i) for i in range(self._lib.llama_model_meta_count(self._model))}

    def tokenize(self, text: str, add_special: bool = False, parse_special: bool = True) -> list[int]:
        """Token ids of `text`; with `add_special`, BOS and EOS as the file asks for them."""
        data = text.encode()
        room = (c_int32 * (len(data) + 8))()
        count = self._lib.llama_tokenize(self._vocab, data, len(data), room, len(room), add_special, parse_special)
        if count < 0:
            raise RuntimeError(f"llama_tokenize wants room for {-count} tokens, {len(room)} given")
        return list(room[:count])

    def detokenize(self, tokens: list[int], special: bool = True) -> str:
        """The text of token ids, piece by piece as llama.cpp streams it; with `special`, control tokens too.

        (llama_detokenize would also drop spaces before punctuation for some tokenizers.)
        """
        pieces = []
        for token in tokens:
            room = ctypes.create_string_buffer(256)
            count = self._lib.llama_token_to_piece(self._vocab, token, room, len(room), 0, special)
            if count < 0:
                raise RuntimeError(f"token {token} is {-count} bytes long")
            pieces.append(room.raw[:count])
        return b"".join(pieces).decode("utf-8", "replace")

    def logits(self, tokens: list[int]) -> np.ndarray:
        """float32 [len(tokens), vocab]: what follows each position, from an empty context."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        return self._decode(tokens, 0)

    def embedding(self, tokens: list[int], size: int | None = None) -> np.ndarray:
        """float32 [size]: the pooled vector of a text, or its scores; by default as wide as the hidden states."""
        if memory := self._lib.llama_get_memory(self._context):  # encoders have none
            self._lib.llama_memory_clear(memory, True)
        self._lib.llama_set_embeddings(self._context, True)
        self._compute([(int(token), i, 0, True) for i, token in enumerate(tokens)])
        row = self._lib.llama_get_embeddings_seq(self._context, 0)
        size = size or self._lib.llama_model_n_embd(self._model)
        return np.ctypeslib.as_array(row, (size,)).copy()

    def next_logits(self, tokens: list[int], start: int = 0) -> np.ndarray:
        """float32 [vocab] of what follows the last of the tokens; the context holds `start` others before them."""
        if not start:
            self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        row: np.ndarray = self._decode(tokens, start, every=False)[0]
        return row

    def generate_greedy(self, tokens: list[int], n: int) -> list[int]:
        """The n most probable next tokens, one by one; stops before an end-of-generation token."""
        reply: list[int] = []
        rows = self.logits(tokens)
        while len(reply) < n:
            token = int(rows[-1].argmax())
            if self._lib.llama_vocab_is_eog(self._vocab, token):
                break
            reply.append(token)
            rows = self._decode([token], len(tokens) + len(reply) - 1)
        return reply

    def step(self, tokens: list[int], position: int) -> np.ndarray:
        """float32 [n, vocab] of what follows one token at a position in each of the first n sequences."""
        return self._run([(token, position, sequence, True) for sequence, token in enumerate(tokens)])

    def _decode(self, tokens: list[int], start: int, every: bool = True) -> np.ndarray:
        """float32 [n, vocab] after every token, or after the last one alone."""
        if not tokens or start + len(tokens) > self.n_ctx:
            raise ValueError(f"{start + len(tokens)} tokens do not fit a context of {self.n_ctx}")
        last = len(tokens) - 1
        return self._run([(int(token), start + i, 0, every or i == last) for i, token in enumerate(tokens)])

    def _run(self, entries: list[tuple[int, int, int, bool]]) -> np.ndarray:
        """float32 [n, vocab] after those of the (token, position, sequence, wanted) that are wanted."""
        self._compute(entries)
        rows = self._lib.llama_get_logits(self._context)
        return np.ctypeslib.as_array(rows, (sum(entry[3] for entry in entries), self.vocab_size)).copy()

    def _compute(self, entries: list[tuple[int, int, int, bool]]) -> None:
        batch = self._lib.llama_batch_init(len(entries), 0, 1)
        try:
            batch.n_tokens = len(entries)
            for i, (token, position, sequence, wanted) in enumerate(entries):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            status = self._lib.llama_decode(self._context, batch)
        finally:
            self._lib.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}: {_complaint()}")


def window_logits(path: Path, windows: np.ndarray, n_threads: int = 1, lora: Path | None = None) -> np.ndarray:
    """float32 [windows, length, vocab]: what follows each position of windows int64 [windows, length]."""
    with LlamaCpp(path, n_ctx=windows.shape[1], n_threads=n_threads, lora=lora) as runtime:
        return np.stack([runtime.logits(window.tolist()) for window in windows])


def _context_params(
    lib: Any, n_ctx: int, float_kv: bool, n_batch: int, n_ubatch: int, n_seq_max: int, flash: bool
) -> _Params:
    params = lib.llama_context_default_params()
    for word, (field, default) in _CONTEXT_WORDS.items():
        if params.words[word] != default:
            raise RuntimeError(f"llama_context_params.{field} is not where this llama.cpp keeps it; adapt llama_cpp.py")
    # one decode call takes all tokens of a batch, and yields logits for all of them
    params.words[:4] = n_ctx, n_batch, n_ubatch, n_seq_max
    if float_kv:
        params.words[13] = int(flash)
        params.words[26] = params.words[27] = _GGML_TYPE_F32
    return params


def _complaint() -> str:
    """The last messages of llama.cpp that sound like the cause."""
    lines = [line.strip() for line in "".join(_log_tail).splitlines() if line.strip()]
    blamed = [line for line in lines if "error" in line.lower() or "fail" in line.lower()]
    return "; ".join(blamed[:3]) or "; ".join(lines[-3:]) or "it gave no reason"
