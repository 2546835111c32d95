"""Llama 1 to 3.x, and the many other models published as LlamaForCausalLM.

SmolLM3 is its decoder without rotation in every fourth layer, an interval that is compiled into llama.cpp. Seed-OSS is
it with biases on q, k and v; heads are rotated by halves, their size is configured.
"""

from dataclasses import replace
from typing import Any

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import ATTENTION_BIAS, Computed, Present
from bridge.models.config.model_config import Config
from bridge.models.family import SILU, Expected, Family, configured, decoder, gated_mlp, pre_norm_attention

LLAMA = Family(
    titles=("Llama 1 to 3.x", "MiniCPM 5"), arch="llama",
    architectures=("LlamaForCausalLM", "LLaMAForCausalLM"),  # the second is from its first weeks
    model_type="llama",
    # 2048 is transformers' default, for the configs of the first Llama
    keys={"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
    metadata=(ATTENTION_BIAS, Present("mlp_bias", "ffn_gate.bias")),
    in_gguf=lambda get: not get("expert_count") and not get("attention.sliding_window"),
    divided=True,
    table=decoder(
        *pre_norm_attention(bias=configured, o_bias=configured, interleaved=True),
        *gated_mlp("mlp", "inner", bias=lambda args: args.mlp_bias),
    ),
)  # fmt: skip


def _every_fourth(config: Config, args: Arguments) -> dict[str, Any]:
    rotated = config.get("no_rope_layers")
    if rotated and list(map(bool, rotated)) != [(layer + 1) % 4 != 0 for layer in range(args.layers)]:
        raise BridgeError(f"{config.path}: no_rope_layers is {rotated}; llama.cpp omits rotation in every fourth layer")
    return {}


SMOLLM3 = replace(
    LLAMA,
    divided=False,
    titles=("SmolLM3",), arch="smollm3", architectures=("SmolLM3ForCausalLM",), model_type="smollm3",
    keys={**LLAMA.keys, "tie_word_embeddings": True, "rope_theta": 2000000.0},
    expects=(SILU, Expected("no_rope_layer_interval", (4,), "llama.cpp omits rotation in every fourth layer")),
    metadata=(Computed(_every_fourth),),
)  # fmt: skip

_NONE = "llama.cpp's graph for this architecture has no such biases"

SEED_OSS = Family(
    titles=("Seed-OSS",), arch="seed_oss", architectures=("SeedOssForCausalLM",), model_type="seed_oss",
    keys={"attention_bias": True, "head_dim": 128, "max_position_embeddings": 524288},
    expects=(
        SILU, Expected("attention_out_bias", (False,), _NONE, written=True), Expected("mlp_bias", (False,), _NONE),
    ),
    metadata=(ATTENTION_BIAS,),
    table=decoder(*pre_norm_attention(bias=configured), *gated_mlp("mlp", "inner")),
)  # fmt: skip
