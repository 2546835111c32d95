"""Mellum 2: Qwen3-MoE's decoder, in which most layers attend only to a window; those rotate without scaling."""

from dataclasses import replace
from typing import Any

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import ATTENTION_BIAS, Computed
from bridge.models.config.model_config import Config
from bridge.models.config.rope import yarn_betas
from bridge.models.families.qwen import QWEN3_MOE
from bridge.models.families.windows import one_base_windows
from bridge.models.family import EXPERTS, Row, configured, decoder, pre_norm_attention

_WINDOWS = one_base_windows("mellum")


def _metadata(config: Config, args: Arguments) -> dict[str, Any]:
    kinds = config.get("mlp_layer_types")
    if kinds and {*kinds} != {"sparse"}:
        raise BridgeError(f"{config.path}: mlp_layer_types is {kinds!r:.80}; llama.cpp has experts in all layers")
    windows = config.get("layer_types") and config.get("use_sliding_window", True)
    return {**(_WINDOWS.metadata(config, args) if windows else {}), **yarn_betas(config, args.rope)}


MELLUM = replace(
    QWEN3_MOE,
    titles=("Mellum 2",), arch="mellum", named_as="qwen3moe", architectures=("MellumForCausalLM",), model_type="mellum",
    keys={
        "max_position_embeddings": 131072, "head_dim": 128, "attention_bias": False, "num_experts": None,
        "moe_intermediate_size": None, "norm_topk_prob": True, "rope_theta": 500000.0,
    },
    metadata=(Computed(_metadata, _WINDOWS.config), ATTENTION_BIAS),
    predicts="dropped",
    table=decoder(
        *pre_norm_attention(Row("self_attn.q_norm", "head"), Row("self_attn.k_norm", "head"), bias=configured),
        *EXPERTS,
        head=Row("lm_head", "vocab hidden"),  # llama.cpp's graph needs one even if the embeddings are tied
    ),
)  # fmt: skip
