"""gpt-oss: experts with biases and a clamped SwiGLU, a learned sink for each head's scores.

Every second layer of the published models, starting with the first, attends only to a window. The experts' gate and up
alternate row by row in one matrix; GGUF separates them. In the published MXFP4 files the reader does that, see
`bridge.checkpoint.formats.fp4_experts`; as floats they are [experts, in, out].
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.config.rope import yarn_betas
from bridge.models.families.windows import window_config, window_keys
from bridge.models.family import SILU, Expected, Family, Row, attention, decoder, required
from bridge.models.outline import Part

_EXPERTS = "mlp.experts"


def _metadata(config: Config, args: Arguments) -> dict[str, Any]:
    return {
        **window_keys(config, args, "gpt-oss", tokens=128),
        "expert_feed_forward_length": args.inner,
        **yarn_betas(config, args.rope),
    }


def _config(stored: StoredKeys) -> dict[str, Any]:
    rules = stored.values["rope_parameters"]
    return {
        "intermediate_size": stored.get("expert_feed_forward_length", stored.values["intermediate_size"]),
        **window_config(stored),
        "rope_parameters": {**rules, **({"truncate": False} if rules["rope_type"] == "yarn" else {})},
    }


def _biases(size: str, start: int = 0, step: int = 1) -> Callable[[Arguments, str], tuple[Part, ...]]:
    """One part per expert: every `step`-th element of its row of [experts, step * size]."""

    def parts(args: Arguments, source: str) -> tuple[Part, ...]:
        count = args.sizes[size]
        rows = start + step * np.arange(count)
        return tuple(Part(source, (count,), rows, matrix=i, stored=(step * count,)) for i in range(args.experts))

    return parts


GPT_OSS = Family(
    titles=("gpt-oss",), arch="gpt-oss", architectures=("GptOssForCausalLM",), model_type="gpt_oss",
    alternative=_EXPERTS,
    keys={
        "num_experts": None, "attention_bias": True, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
        "truncate": False,
    },
    expects=(
        SILU, Expected("attention_bias", (True,)), Expected("swiglu_alpha", (1.702,)), Expected("swiglu_limit", (7.0,)),
    ),
    metadata=(Computed(_metadata, _config),),
    written_as={"num_experts": "num_local_experts"},
    table=decoder(
        Row("input_layernorm", "hidden"),
        *attention(bias=required, o_bias=required),
        Row("self_attn.sinks", "heads", exact=True),
        Row("post_attention_layernorm", "hidden"),
        Row("mlp.router", "experts hidden", bias=required, floats="F32"),
        Row(f"{_EXPERTS}.*.gate_proj", "expert hidden", (f"{_EXPERTS}.gate_up_proj[0::2]^",)),
        Row(f"{_EXPERTS}.*.up_proj", "expert hidden", (f"{_EXPERTS}.gate_up_proj[1::2]^",)),
        Row(f"{_EXPERTS}.*.down_proj", "hidden expert", (f"{_EXPERTS}.down_proj^",)),
        Row(
            f"{_EXPERTS}.gate_up_proj_bias", "experts expert", exact=True, floats="F32", name="ffn_gate_exps.bias",
            parts=_biases("expert", 0, 2),
        ),
        Row(
            f"{_EXPERTS}.gate_up_proj_bias", "experts expert", exact=True, floats="F32", name="ffn_up_exps.bias",
            parts=_biases("expert", 1, 2),
        ),
        Row(
            f"{_EXPERTS}.down_proj_bias", "experts hidden", exact=True, floats="F32", name="ffn_down_exps.bias",
            parts=_biases("hidden"),
        ),
    ),
)  # fmt: skip
