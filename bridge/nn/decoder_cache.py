"""`generate` of a transformers model on this project's decoder: one table of calls a token instead of modules.

transformers' modules cost about 1 ms of Python a layer and token. So `generate` gets a cache of its own, and the
model's `forward` gives tokens that come with it to a `Decoder` on the same packed weights. Everything else (a forward
pass by itself, other caches, hidden states, attention weights, embeddings as inputs, gradients) goes through the
modules, and so does `generate` once anything in the model was changed: a module, a parameter, a hook, the device.

    cache    a `KVCache` for each row of the batch; columns that the attention mask leaves out are in none of them
    step     a token of each row together, as `Batch` does
    rest     prompts and candidates of assisted generation row by row
"""

import threading
from collections.abc import Sequence
from functools import partial, update_wrapper
from typing import Any, Self

import numpy as np
import torch
from transformers import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from bridge.errors import BridgeError
from bridge.nn.quant_experts import ExpertStack
from bridge.nn.quant_linear import Placed
from bridge.runtime import GGUFFile
from bridge.runtime.config.config_reader import read_config
from bridge.runtime.config.decoder_config import DecoderConfig
from bridge.runtime.decoder.decoder import Decoder
from bridge.runtime.layers.kv_cache import KVCache
from bridge.runtime.model import DEFAULT_CONTEXT
from bridge.runtime.replies.batch import MAX_BATCH

_CAPTURING = "transformers.utils.output_capturing"  # hooks that stay once hidden states were asked for
_CACHE = "cache" if hasattr(CausalLMOutputWithPast, "cache") else "past_key_values"  # 5.24 renamed it
_ARGUMENTS = ("input_ids", "attention_mask", "position_ids", _CACHE)  # of `forward`, in this order
_MODULES_ONLY = ("labels", "inputs_embeds", "output_hidden_states", "output_attentions")


class Decoders:
    """Makes decoders of a file for as many tokens as are needed; they share its packed weights.

    lock  held while one of them computes
    """

    def __init__(self, file: GGUFFile, config: DecoderConfig, precision: str):
        self.file, self.config, self.precision = file, config, precision
        self.kv = "f32" if precision == "f32" else "f16"
        self.lock = threading.Lock()
        self._last: Decoder | None = None

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def of(self, context: int) -> Decoder:
        """One for at least `context` tokens."""
        if self._last is None or self._last.cache.context < context:
            size = max(DEFAULT_CONTEXT, 1 << (context - 1).bit_length())
            self._last = Decoder(self.file, self.config, size, self.kv, self.precision)
        return self._last


class DecoderCache(Cache):
    """What `generate` keeps between steps: the keys and values of each row, and which columns are tokens.

    columns  bool [rows, columns]: False where the attention mask is 0
    dtype    of the logits: the model's
    """

    def __init__(self, decoders: Decoders, context: int, dtype: torch.dtype):
        super().__init__(layers=[])
        self.decoders, self.dtype = decoders, dtype
        self.decoder = decoders.of(context)
        self.rows: list[KVCache] = []
        self.columns = np.zeros((0, 0), bool)

    def logits(self, ids: np.ndarray, mask: np.ndarray, keep: int) -> np.ndarray:
        """Append tokens: float32 [rows, keep, vocab] of what follows the last `keep` columns.

        ids, mask  integers and bool [rows, new columns]; scores of columns that are masked are 0
        """
        if not self.rows:
            self.rows = [self.decoder.new_cache() for _ in ids]
            self.columns = np.zeros((len(ids), 0), bool)
        if len(ids) != len(self.rows):
            raise BridgeError(f"input_ids has {len(ids)} rows, {_CACHE} {len(self.rows)}; must be as many")
        self._reserve(max(int(n) for n in (self.columns.sum(1) + mask.sum(1))))
        self.columns = np.concatenate([self.columns, mask], 1)
        with self.decoders.lock:
            if ids.shape[1] == 1 and mask.all():
                return self._step(ids[:, 0].tolist())[:, None]
            scores = np.zeros((len(ids), keep, self.decoder.vocab), np.float32)
            for row, tokens, present, cache in zip(scores, ids, mask, self.rows, strict=True):
                scored = present[-keep:]
                if present.any():
                    states = self.decoder.run(tokens[present].tolist(), max(1, int(scored.sum())), cache)
                    row[scored] = self.decoder.logits(states)[-int(scored.sum()) or len(states) :]
            return scores

    def _step(self, tokens: list[int]) -> np.ndarray:
        parts = range(0, len(tokens), MAX_BATCH)
        steps = [(self.rows[i : i + MAX_BATCH], tokens[i : i + MAX_BATCH]) for i in parts]
        return np.concatenate([self.decoder.step(caches, part).copy() for caches, part in steps])

    def _reserve(self, tokens: int) -> None:
        """Move to a decoder that has room for so many tokens."""
        if tokens <= self.decoder.cache.context:
            return
        self.decoder = self.decoders.of(tokens)
        self.rows = [self._copy(cache) for cache in self.rows]

    def _copy(self, cache: KVCache) -> KVCache:
        copy = self.decoder.new_cache()
        copy.copy_prefix(cache, cache.length)
        return copy

    # what transformers asks of a cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far, those of padding included."""
        return self.columns.shape[1]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.columns.shape[1] + query_length, 0

    @property
    def is_linear(self) -> list[bool]:
        return [False]  # no recurrent state: `generate` gives the new tokens alone

    @property
    def batch_size(self) -> int:
        return len(self.rows) or -1

    def reset(self) -> None:
        self.rows, self.columns = [], np.zeros((0, 0), bool)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last columns; transformers gives their number as a negative one."""
        gone = abs(int(tokens_to_remove))
        count = self.columns.shape[1] - gone
        for cache, present in zip(self.rows, self.columns, strict=True):
            cache.length -= int(present[count:].sum())
        self.columns = self.columns[:, :count]

    def batch_select_indices(self, indices: Any) -> None:
        self._pick([int(i) for i in torch.arange(len(self.rows))[indices]])

    def reorder_cache(self, beam_idx: Any) -> None:
        self._pick(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._pick([i for i in range(len(self.rows)) for _ in range(repeats)])

    def _pick(self, rows: Sequence[int]) -> None:
        """Let row i be what row rows[i] was; a row that is taken more than once is copied."""
        used: set[int] = set()
        picked = []
        for row in rows:
            picked.append(self._copy(self.rows[row]) if row in used else self.rows[row])
            used.add(row)
        self.rows, self.columns = picked, self.columns[list(rows)]


class Snapshot:
    """What a model was made of when it was loaded."""

    def __init__(self, model: Any):
        self.modules = tuple(model.modules())
        self.versions = [parameter._version for parameter in model.parameters()]
        self.forward = model.forward

    def holds(self, model: Any) -> bool:
        """Whether no module has changed since the snapshot."""
        modules = tuple(model.modules())
        same = len(modules) == len(self.modules) and all(a is b for a, b in zip(modules, self.modules, strict=True))
        hooks = [hook for m in modules for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
        hooked = any(not getattr(hook, "__module__", "").startswith(_CAPTURING) for hook in hooks)
        versions = [parameter._version for parameter in model.parameters()]
        compiled = model._compiled_call_impl is not None or model.forward is not self.forward
        return same and not hooked and versions == self.versions and not compiled and model.device.type == "cpu"


def attach(model: Any, file: GGUFFile, precision: str) -> None:
    """Let `generate` of a model with a file's packed weights run on the decoder, where there is one for it."""
    try:
        config = read_config(file.metadata, file.path)
        if config.recurrent is not None:
            return  # a cache that cannot be cropped; the modules keep their own states
        decoders = Decoders(file, config, precision)
        needed = decoders.of(DEFAULT_CONTEXT)
    except BridgeError:  # an architecture that the decoder does not run
        return
    tensors = {id(matrix) for module in model.modules() if isinstance(module, Placed) for matrix in _matrices(module)}
    if "rope_factors_long.weight" in file or not all(id(matrix) in tensors for matrix in needed.matrices):
        return  # two sets of angles, or packed weights that the modules do not share
    model.forward = update_wrapper(partial(_forward, model.forward), model.forward)
    prepare = model._prepare_cache_for_generation
    model._prepare_cache_for_generation = partial(_prepare_cache, prepare, model, decoders, Snapshot(model))


def _matrices(module: Placed) -> list[Any]:
    held = module.tensor
    return [matrix for network in held.networks for matrix in network] if isinstance(held, ExpertStack) else [held]


def _prepare_cache(
    original: Any, model: Any, decoders: Decoders, loaded: Snapshot, config: Any, model_kwargs: dict[str, Any],
    generation_mode: Any, batch_size: int, max_cache_length: int,
) -> Any:  # fmt: skip
    """transformers' `_prepare_cache_for_generation`: a `DecoderCache` where it would make a plain cache."""
    plain = config.cache_implementation in (None, "dynamic") and config.use_cache is not False
    shown = config.output_hidden_states or config.output_attentions
    supplied = any(model_kwargs.get(name) is not None for name in (_CACHE, "inputs_embeds"))
    if plain and not shown and not supplied and not torch.is_grad_enabled() and loaded.holds(model):
        model_kwargs[_CACHE] = DecoderCache(decoders, max_cache_length, model.dtype)
        return None
    return original(config, model_kwargs, generation_mode, batch_size, max_cache_length)


def _forward(original: Any, *positional: Any, **options: Any) -> Any:
    """A model's forward pass: tokens that come with a `DecoderCache` through its decoder, all others as they were."""
    arguments = dict(zip(_ARGUMENTS, positional, strict=False)) | options
    cache = arguments.get(_CACHE, arguments.get("past_key_values"))
    if not isinstance(cache, DecoderCache):
        return original(*positional, **options)
    input_ids, attention_mask = arguments.get("input_ids"), arguments.get("attention_mask")
    asked = [name for name in _MODULES_ONLY if arguments.get(name) not in (None, False)]
    if asked or input_ids is None or (attention_mask is not None and attention_mask.ndim != 2):
        raise BridgeError(
            f"{asked[0] if asked else 'attention_mask'} is not known to the cache that generate made; give "
            f"{_CACHE}=transformers.DynamicCache(config=model.config)"
        )
    rows, n = input_ids.shape
    mask = np.ones((rows, n), bool) if attention_mask is None else attention_mask[:, -n:].numpy().astype(bool)
    keep = arguments.get("logits_to_keep", 0)
    picked = keep if isinstance(keep, torch.Tensor) else slice(None)
    count = n if isinstance(keep, torch.Tensor) or not keep else min(keep, n)
    scores = cache.logits(input_ids.numpy(), mask, count)
    logits = torch.from_numpy(scores)[:, picked].to(cache.dtype)
    out = CausalLMOutputWithPast(logits=logits, **{_CACHE: cache})
    return out if arguments.get("return_dict", True) is not False else out.to_tuple()
