"""What a decoder's GGUF metadata says."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bridge.errors import BridgeError, parameter
from bridge.gguf_file.architectures import ARCHITECTURES, DRAFTERS, MAMBA, MOST_BLOCKS, Graph, read_windows
from bridge.gguf_file.reader import expect_model
from bridge.runtime.config.decoder_config import DecoderConfig, Heads, Latent, Routing
from bridge.runtime.config.recurrent_config import read_recurrent
from bridge.runtime.cpu.ops.stream_ops import STREAMS

_POOLINGS = {0: "", 1: "mean", 2: "cls", 3: "last", 4: "rank"}  # pooling_type
_LEAST_LIMIT = 1e-6  # of swiglu_clamp_exp and _shexp; up to it there is none
_GATINGS = {1: False, 2: True, 3: False}  # expert_gating_func -> whether it is a sigmoid


def _elsewhere(arch: Any) -> str:
    """Whether llama.cpp knows an architecture, as far as gguf does."""
    from importlib.metadata import version

    from gguf.constants import MODEL_ARCH_NAMES

    if arch in MODEL_ARCH_NAMES.values():
        return "; llama.cpp has it"
    return f", and is not among those of llama.cpp that gguf {version('gguf')} lists"


def read_config(metadata: Mapping[str, Any], path: Path, graph: Graph | None = None) -> DecoderConfig:
    """The decoder of a GGUF; BridgeError where a key is missing, of the wrong kind, or a rule unknown.

    graph  of an architecture that is no model by itself
    """
    arch = metadata.get("general.architecture")
    expect_model(metadata, path)
    if arch in DRAFTERS and graph is None:
        raise BridgeError(
            f"{path}: is a drafter ({arch}), which only guesses tokens for another model: run that, with "
            f"{parameter('draft', path)}"
        )
    graph = graph or ARCHITECTURES.get(str(arch))
    if graph is None:
        raise BridgeError(
            f"{path}: architecture {arch!r} cannot run here{_elsewhere(arch)}. Known: {', '.join(ARCHITECTURES)}"
        )
    try:
        return _read(metadata, str(arch), path, graph)
    except (TypeError, ValueError, LookupError, ArithmeticError) as problem:  # of some 100 keys, lists and numbers
        raise BridgeError(
            f"{path}: a key of {arch} is missing or has a value of the wrong kind ({problem}); convert the model again"
        ) from problem


def _read(metadata: Mapping[str, Any], arch: str, path: Path, graph: Graph) -> DecoderConfig:
    """`read_config` of an architecture that runs; other errors than BridgeError are of values of the wrong kind."""

    def get(key: str, kind: type, default: Any = None) -> Any:
        value: Any = metadata.get(f"{arch}.{key}", default)
        if value is None:
            raise BridgeError(f"{path}: {arch}.{key} is missing; convert the model again")
        numbers: Any = (int, float) if kind is float else kind
        if not isinstance(value, numbers) or isinstance(value, bool) or (kind is not str and value <= 0):
            must = "a text" if kind is str else "above 0"
            raise BridgeError(f"{path}: {arch}.{key} is {value!r}; must be {must}; convert the model again")
        return kind(value)

    experts = get("expert_count", int) if metadata.get(f"{arch}.expert_count") else 0
    if experts == 1 and graph.one_is_dense:
        experts = 0
    predicting = int(metadata.get(f"{arch}.nextn_predict_layers", 0))
    blocks = get("block_count", int)
    if blocks > MOST_BLOCKS:
        raise BridgeError(f"{path}: {arch}.block_count is {blocks}; must be at most {MOST_BLOCKS}")
    if not 0 <= predicting < blocks:
        raise BridgeError(
            f"{path}: {arch}.nextn_predict_layers is {predicting} of {blocks} blocks; convert the model again"
        )
    layers = blocks - predicting
    hidden = get("embedding_length", int)
    inner, inners = _inner_sizes(metadata, arch, graph, layers, get, path)
    networks = {layer for layer, size in enumerate(inners) if size} if graph.alone else set()
    recurrent = read_recurrent(metadata, arch, graph.state, layers, networks, get, path)
    try:
        window, windows = read_windows(arch, lambda key: metadata.get(f"{arch}.{key}"), layers)
    except BridgeError as problem:
        raise BridgeError(f"{path}: {problem}") from None
    heads = kv_heads = local_kv = head_dim = rotated = 0
    query_heads: tuple[int, ...] = ()
    if recurrent is None or graph.side_by_side or not all(recurrent.layers):
        heads, query_heads = _each_layers(metadata, arch, "attention.head_count", blocks, get, path)
        kv_heads, local_kv = _kv_heads(metadata, arch, heads, windows, path)
        head_dim = get("attention.key_length", int, max(1, hidden // heads))
        rotated = get("rope.dimension_count", int, head_dim)
    if recurrent is not None and recurrent.kind == MAMBA and metadata.get(f"{arch}.rope.scaling.finetuned") is False:
        rotated = 0  # llama.cpp's sign for it
    for layer, count in enumerate(query_heads[:layers] or (heads,) * layers):
        shared = local_kv if layer < len(windows) and windows[layer] else kv_heads
        if shared and (count < 1 or count % shared):
            raise BridgeError(f"{path}: {count} heads cannot share {shared} key-value heads; convert the model again")
    latent = _read_latent(metadata, arch, head_dim, rotated, get, path) if graph.latent else None
    local_heads = _read_local_heads(Heads(local_kv, head_dim, rotated), get, path) if windows else None
    if graph.windows is not None and graph.windows.alone_whole:
        rotated //= 2
    if local_heads == Heads(kv_heads, head_dim, rotated):
        local_heads = None
    usual = head_dim if latent is None else latent.rank
    values = get("attention.value_length", int, usual) if heads and latent is None else usual
    same = values <= usual
    if not same or head_dim % 2 or rotated % 2 or rotated > head_dim:
        raise BridgeError(
            f"{path}: heads of {head_dim} for keys, {values} for values with {rotated} rotated cannot run here; keys "
            "must have an even size, and values no larger one"
        )
    scaling, factor = get("rope.scaling.type", str, "none"), get("rope.scaling.factor", float, 1.0)
    if scaling == "none" and f"{arch}.rope.scale_linear" in metadata:
        scaling, factor = "linear", get("rope.scale_linear", float)
    if scaling == "longrope":  # the divisors, which are tensors, are all there is to it
        scaling = "none"
    if scaling not in ("none", "linear", "yarn"):
        raise BridgeError(f"{path}: unknown rope scaling {scaling!r}: must be none, linear or yarn")
    base = get("rope.freq_base", float, 10000.0)
    local_base = base
    if graph.windows is not None and graph.windows.base is not None:
        local_base = get("rope.freq_base_swa", float, graph.windows.base or base)
    share = hidden // heads if graph.scaled_by_width == layers else head_dim or 1
    scale = get("attention.scale", float, 1.0 if graph.unscaled else share**-0.5)
    size = get("rope.scaling.attn_factor", float, 1.0)
    growth = float(metadata.get(f"{arch}.rope.scaling.yarn_log_multiplier", 0.0)) * math.log(factor)
    if scaling == "yarn" and growth:  # what cos and sin grow by is divided out, see `angles`
        size /= 1 + 0.1 * (math.log(factor) if latent else growth)
    if latent is not None:
        scale = (1 + growth) ** 2 / (latent.plain + rotated) ** 0.5
    caps_logits = graph.logit_cap or (graph.scaled and f"{arch}.final_logit_softcapping" in metadata)
    context, indexer = get("context_length", int), f"{arch}.attention.indexer.top_k"
    chosen = get("attention.indexer.top_k", int) if indexer in metadata else 0
    chosen *= get("attention.indexer.block_size", int, 1)  # MiniMax M3's chooses blocks
    expert_inner = get("expert_feed_forward_length", int, inner) if experts else 0
    leading, shared_inner = int(metadata.get(f"{arch}.leading_dense_block_count", graph.leading)), 0
    if experts and (graph.shared_gate or f"{arch}.expert_shared_feed_forward_length" in metadata):
        shared_inner = get("expert_shared_feed_forward_length", int)
    elif graph.shared_experts is not None:
        shared_inner = expert_inner * int(metadata.get(f"{arch}.expert_shared_count", graph.shared_experts))
    plain = leading or inners or graph.beside or graph.expert_every != 1 or graph.by_router  # some layers have none
    temperature, length, offset = float(metadata.get(f"{arch}.attention.temperature_scale", 0.0)), 0, 0
    original = get("rope.scaling.original_context_length", int, context)
    if graph.temperature is not None and windows:
        temperature, length, offset = graph.temperature
    if graph.chunked and not windows:  # MobileLLM-R1's, whose window is 0: all layers are rotated
        graph = replace(graph, unrotated_every=0)
    if graph.unit_norms and experts == graph.no_unit_norms:
        graph = replace(graph, unit_norms=False)
    if graph.halves_of_images and all(metadata.get(f"{arch}.rope.dimension_sections", [0])[:2]):
        graph = replace(graph, neighbours=False)
    if metadata.get(f"{arch}.hidden_activation") == "silu":
        graph = replace(graph, gelu=False)
    causal = bool(metadata.get(f"{arch}.attention.causal", graph.causal))
    unscaled = None if graph.factors_said else 1.0
    logit_scale = get("logit_scale", float, unscaled)
    rms = "" if f"{arch}.attention.layer_norm_epsilon" in metadata else "rms_"
    if graph.rms_by_key and f"{arch}.attention.layer_norm_rms_epsilon" in metadata:
        graph, rms = replace(graph, layer_norm=False), "rms_"
    return DecoderConfig(
        arch=arch, layers=layers, predicting=predicting, hidden=hidden,
        inner=expert_inner if experts and not plain else inner,
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, rotated=rotated,
        context=min(context, chosen) if chosen else context, chosen=chosen,
        norm_eps=get(f"attention.layer_norm_{rms}epsilon", float), attention_scale=scale, graph=graph, rope_base=base,
        rope_scaling=scaling, rope_factor=factor, rope_original_context=original, rope_attention_factor=size,
        rope_betas=(get("rope.scaling.yarn_beta_fast", float, 32.0), get("rope.scaling.yarn_beta_slow", float, 1.0)),
        latent=latent, experts=experts, leading=leading,
        expert_every=graph.expert_every or get("interleave_moe_layer_step", int, 1), expert_inner=expert_inner,
        expert_latent=int(metadata.get(f"{arch}.moe_latent_size") or metadata.get(f"{arch}.expert_latent_length", 0)),
        shared_inner=shared_inner,
        routing=_read_routing(metadata, graph, get, path, experts, shared_inner) if experts else Routing(),
        embedding_scale=get("embedding_scale", float, float(np.float32(hidden**0.5)) if graph.scaled else unscaled),
        residual_scale=get("residual_scale", float, unscaled),
        logit_scale=1 / logit_scale if graph.logits_times else logit_scale,
        score_cap=get("attn_logit_softcapping", float, graph.score_cap) if graph.score_cap else 0.0,
        logit_cap=get("final_logit_softcapping", float, graph.logit_cap) if caps_logits else 0.0, window=window,
        value_dim=0 if values == usual else values, value_scale=get("attention.value_scale", float, 1.0),
        windows=windows, query_heads=query_heads, local_heads=local_heads,
        shared_kv=_read_shared(metadata, arch, windows or (False,) * layers, path), local_base=local_base,
        temperature=temperature, temperature_length=length or original, temperature_offset=offset,
        each_input=int(metadata.get(f"{arch}.embedding_length_per_layer_input", 0)),
        streams=_read_streams(metadata, arch, path) if graph.streams else 0,
        sparsity=tuple(metadata.get(f"{arch}.activation_sparsity_scale", ())),
        xielu=_read_xielu(metadata, layers, path) if graph.xielu else (),
        situ=_read_situ(metadata, arch, get) if graph.situ else (),
        aside_every=_read_aside(metadata, arch, path) if graph.put_aside else 0,
        rotated_layers=_read_rotated(metadata, arch, layers, path), causal=causal,
        pooling=_read_pooling(metadata, arch, "pooling_type", path),
        head_pooling=_read_pooling(metadata, arch, "classifier.pooling_type", path)
        or ("mean" if graph.head_mean else "last" if causal else "cls"),
        relu2=graph.relu2 or metadata.get(f"{arch}.hidden_activation") == "relu2", inners=inners, recurrent=recurrent,
        limits=_read_limits(metadata, arch, blocks, path),
    )  # fmt: skip


def _read_pooling(metadata: Mapping[str, Any], arch: str, key: str, path: Path) -> str:
    kind = metadata.get(f"{arch}.{key}", 0)
    if not isinstance(kind, int) or kind not in _POOLINGS:
        raise BridgeError(f"{path}: {arch}.{key} is {kind!r:.60}, which is unknown; known are 0 to {max(_POOLINGS)}")
    return _POOLINGS[kind]


def _read_latent(
    metadata: Mapping[str, Any], arch: str, head_dim: int, rotated: int, get: Callable[..., Any], path: Path
) -> Latent:
    query_rank = get("attention.q_lora_rank", int) if f"{arch}.attention.q_lora_rank" in metadata else 0
    plain = get("attention.key_length_mla", int) - rotated
    latent = Latent(get("attention.kv_lora_rank", int), query_rank, plain, get("attention.value_length_mla", int))
    if latent.rank % 16 or latent.rank + rotated != head_dim or plain < 1:
        raise BridgeError(
            f"{path}: a latent vector of {latent.rank} elements, with {rotated} rotated ones in keys of {head_dim} "
            "cannot run here; must be a multiple of 16, and together the keys"
        )
    return latent


def _read_local_heads(heads: Heads, get: Callable[..., Any], path: Path) -> Heads:
    """Those of layers with a window, which have the sizes of the others unless keys say otherwise."""
    dim = get("attention.key_length_swa", int, heads.dim)
    rotated = get("rope.dimension_count_swa", int, heads.rotated if dim == heads.dim else dim)
    values = get("attention.value_length_swa", int, dim)
    if values != dim or rotated % 2 or rotated > dim:
        raise BridgeError(
            f"{path}: heads of {dim} for keys, {values} for values with {rotated} rotated in layers with a window "
            "cannot run here; convert the model again"
        )
    return Heads(heads.kv, dim, rotated)


def _inner_sizes(
    metadata: Mapping[str, Any], arch: str, graph: Graph, layers: int, get: Callable[..., Any], path: Path
) -> tuple[int, tuple[int, ...]]:
    """Elements between the matrices of a network: the most, and those of each layer where they differ."""
    value = metadata.get(f"{arch}.feed_forward_length")
    if value == 0 and graph.alone:
        return 0, ()
    return _each_layers(metadata, arch, "feed_forward_length", layers, get, path)


def _each_layers(
    metadata: Mapping[str, Any], arch: str, key: str, layers: int, get: Callable[..., Any], path: Path
) -> tuple[int, tuple[int, ...]]:
    """The largest of a key's numbers, and those of each layer where they differ."""
    value = metadata.get(f"{arch}.{key}")
    if not isinstance(value, list):
        return get(key, int), ()
    sizes = tuple(int(size) for size in value[:layers])
    if len(sizes) < layers or min(sizes) < 0 or max(sizes) < 1:
        raise BridgeError(
            f"{path}: {arch}.{key} is {value!r}; must be a size for each of {layers} layers; convert the model again"
        )
    return max(sizes), sizes if len({*sizes}) > 1 else ()


def _read_shared(metadata: Mapping[str, Any], arch: str, windows: Sequence[bool], path: Path) -> int:
    """The number of the last layers that use the keys of the last one before them with a window, or without, as they
    have; BridgeError if there is none."""
    shared = metadata.get(f"{arch}.attention.shared_kv_layers", 0)
    first_shared = len(windows) - shared if isinstance(shared, int) and shared >= 0 else 0
    if first_shared < 1 or not {*windows[first_shared:]} <= {*windows[:first_shared]}:
        raise BridgeError(
            f"{path}: {arch}.attention.shared_kv_layers is {shared!r} of {len(windows)} layers, so that some have "
            "no keys to use; convert the model again"
        )
    return shared


def _read_streams(metadata: Mapping[str, Any], arch: str, path: Path) -> int:
    """How many streams of activations there are; BridgeError for others than cpu/ops/stream_ops.py knows."""
    count, active = metadata.get(f"{arch}.altup.num_inputs"), metadata.get(f"{arch}.altup.active_idx", 0)
    if (count, active) != (STREAMS, 0):
        raise BridgeError(
            f"{path}: {count} streams of activations (altup.num_inputs), of which layers read number {active}, cannot "
            f"run here; must be {STREAMS}, and the first"
        )
    return STREAMS


def _read_rotated(metadata: Mapping[str, Any], arch: str, layers: int, path: Path) -> tuple[bool, ...]:
    """Whether each layer is rotated, where the metadata says so of each."""
    key = f"{arch}.attention.rope_pattern"
    value = metadata.get(key, [])
    if not isinstance(value, list) or not all(isinstance(one, int) for one in value) or 0 < len(value) < layers:
        raise BridgeError(
            f"{path}: {key} is {value!r:.80}; must say of each of {layers} layers whether it is rotated; convert the "
            "model again"
        )
    return tuple(map(bool, value[:layers]))


def _read_xielu(metadata: Mapping[str, Any], layers: int, path: Path) -> tuple[tuple[float, ...], ...]:
    """Of each layer alpha_n, alpha_p, beta and eps, as cpu/ops/decoder_ops.py takes them: the checkpoint's are bent."""
    numbers = []
    for key in ("xielu.alpha_n", "xielu.alpha_p", "xielu.beta", "xielu.eps"):
        value = metadata.get(key)
        value = [value] * layers if isinstance(value, float) else value
        if not isinstance(value, list) or len(value) < layers or not all(isinstance(one, float) for one in value):
            raise BridgeError(f"{path}: {key} is {value!r:.80}; must be {layers} numbers; convert the model again")
        numbers.append(value[:layers])
    softplus = partial(np.logaddexp, 0.0)
    return tuple(
        (float(beta + softplus(alpha_n)), float(softplus(alpha_p)), beta, eps)
        for alpha_n, alpha_p, beta, eps in zip(*numbers, strict=True)
    )


def _read_situ(metadata: Mapping[str, Any], arch: str, get: Callable[..., Any]) -> tuple[float, float]:
    """As cpu/ops/decoder_ops.py takes them."""
    return get("activation.situ_beta", float), max(0.0, float(metadata[f"{arch}.activation.situ_linear_beta"]))


def _read_aside(metadata: Mapping[str, Any], arch: str, path: Path) -> int:
    """Every how many layers the state is put aside; 0: it never is."""
    count = metadata.get(f"{arch}.attn_res.block_size")
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise BridgeError(
            f"{path}: {arch}.attn_res.block_size is {count!r:.80}; must be a number of layers, or 0; convert the model "
            "again"
        )
    return count


def _read_limits(metadata: Mapping[str, Any], arch: str, blocks: int, path: Path) -> tuple[tuple[float, float], ...]:
    """What bounds each layer's activations, see `DecoderConfig.limits`; () where nothing does."""
    limits = []
    for key in (f"{arch}.swiglu_clamp_exp", f"{arch}.swiglu_clamp_shexp"):
        value = metadata.get(key, 0.0)
        each = value if isinstance(value, list) else blocks * [value]
        if len(each) < blocks or not all(isinstance(one, float) and one >= 0 for one in each):
            raise BridgeError(
                f"{path}: {key} is {value!r:.80}; must be a number for each of {blocks} layers, 0 or more; convert the "
                "model again"
            )
        limits.append([one if one > _LEAST_LIMIT else 0.0 for one in each[:blocks]])
    return tuple(zip(*limits, strict=True)) if any(map(any, limits)) else ()


def _kv_heads(
    metadata: Mapping[str, Any], arch: str, heads: int, windows: tuple[bool, ...], path: Path
) -> tuple[int, int]:
    """Key-value heads of the layers that have some: all the same number, or those with a window another one."""
    count = metadata.get(f"{arch}.attention.head_count_kv", heads)
    each = count if isinstance(count, list) else [count] * max(1, len(windows))
    pairs = list(zip(each, windows or (False,) * len(each), strict=False))
    counts, local = ({one for one, window in pairs if window == kind} - {0} for kind in (False, True))
    counts, local = set(counts or local), set(local or counts)
    if len(counts) != 1 or len(local) != 1 or not all(isinstance(one, int) and one > 0 for one in counts | local):
        raise BridgeError(f"{path}: {arch}.attention.head_count_kv is {count!r}; attention must be alike in all layers")
    return counts.pop(), local.pop()


def _read_routing(
    metadata: Mapping[str, Any], graph: Graph, get: Callable[..., Any], path: Path, experts: int, shared: int
) -> Routing:
    """The rules of a router; BridgeError for those that are unknown, or contradict themselves."""
    arch = metadata["general.architecture"]
    used = get("expert_used_count", int)
    if used > experts:
        raise BridgeError(f"{path}: {used} of {experts} experts are used; convert the model again")
    gating = metadata.get(f"{arch}.expert_gating_func") or 0
    vocab = metadata.get(f"{arch}.vocab_size") or len(metadata.get("tokenizer.ggml.tokens", ()))
    sigmoid = graph.sigmoid or (graph.sigmoid_vocab > 0 and vocab == graph.sigmoid_vocab)
    if gating and gating not in _GATINGS:
        raise BridgeError(f"{path}: expert_gating_func is {gating!r}, which is unknown; known are {sorted(_GATINGS)}")
    step = metadata.get(f"{arch}.interleave_moe_layer_step", 1)
    if graph.expert_every is not None and step != 1:
        raise BridgeError(f"{path}: interleave_moe_layer_step is {step}; {arch} runs here with 1 alone")
    groups = int(metadata.get(f"{arch}.expert_group_count", 0)) or 1
    groups_used = int(metadata.get(f"{arch}.expert_group_used_count", 0)) or groups
    if experts % groups or groups_used > groups or used > experts // groups * groups_used:
        raise BridgeError(
            f"{path}: {used} of {experts} experts in {groups_used} of {groups} groups; convert the model again"
        )
    scale = float(metadata.get(f"{arch}.expert_weights_scale", 0.0)) or 1.0
    return Routing(
        used=used, sigmoid=_GATINGS[gating] if gating else sigmoid,
        normalized=bool(metadata.get(f"{arch}.expert_weights_norm")) or not graph.unnormalized,
        scale=scale / 2 if graph.shared_mean and shared else scale, groups=groups, groups_used=groups_used,
        before=graph.before, mixer=graph.mixer,
    )  # fmt: skip
