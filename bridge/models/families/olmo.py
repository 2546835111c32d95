"""OLMo 2: norms after attention and network, not before them; q and k are normalized over all heads at once.

OLMo 3 is the same decoder, in which three of four layers attend only to a window. OLMoE has norms before attention and
network, and experts in every layer, whose weights are not normalized.
"""

from dataclasses import replace
from typing import Any

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed
from bridge.models.config.model_config import Config
from bridge.models.families.windows import one_base_windows
from bridge.models.family import (
    EXPERTS,
    NO_BIASES,
    SILU,
    Expected,
    Family,
    Row,
    attention,
    decoder,
    gated_mlp,
    pre_norm_attention,
)

OLMO2 = Family(
    titles=("OLMo 2",), arch="olmo2", architectures=("Olmo2ForCausalLM",), model_type="olmo2",
    keys={"rms_norm_eps": 1e-5},
    expects=(SILU, NO_BIASES),
    in_gguf=lambda get: not get("attention.sliding_window"),
    table=decoder(
        *attention(Row("self_attn.q_norm", "q"), Row("self_attn.k_norm", "kv")),
        Row("post_attention_layernorm", "hidden"),
        *gated_mlp("mlp", "inner"),
        Row("post_feedforward_layernorm", "hidden"),
    ),
)  # fmt: skip


OLMO3 = replace(
    OLMO2,
    titles=("OLMo 3",), architectures=("Olmo3ForCausalLM",), model_type="olmo3",
    keys={**OLMO2.keys, "rope_theta": 500000.0},
    metadata=(one_base_windows("olmo2"),),
    in_gguf=lambda get: bool(get("attention.sliding_window")),
)  # fmt: skip


def _all_heads(config: Config, args: Arguments) -> dict[str, Any]:
    if args.kv_heads != args.heads or args.heads * args.head_dim != args.hidden:
        raise BridgeError(
            f"{config.path}: {args.heads} heads of {args.head_dim} elements, {args.kv_heads} of keys, in a hidden_size "
            f"of {args.hidden}; llama.cpp has as many heads of keys in OLMoE, and as wide together as the hidden state"
        )
    return {}


OLMOE = Family(
    titles=("OLMoE",), arch="olmoe", architectures=("OlmoeForCausalLM",), model_type="olmoe",
    keys={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "num_experts": None},
    expects=(
        SILU, NO_BIASES, Expected("clip_qkv", (None,)),
        Expected("norm_topk_prob", (False,), "llama.cpp does not normalize this architecture's expert weights"),
    ),
    metadata=(Computed(_all_heads),),
    table=decoder(
        *pre_norm_attention(Row("self_attn.q_norm", "q"), Row("self_attn.k_norm", "kv")),
        *EXPERTS,
        head=Row("lm_head", "vocab hidden"),  # llama.cpp's graph needs one even if the embeddings are tied
    ),
)  # fmt: skip
