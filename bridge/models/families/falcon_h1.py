"""Falcon-H1: every layer adds what Mamba-2 and attention make of the same input.

The model multiplies activations by numbers of its config; llama.cpp's graph does not, so GGUF has the weights
multiplied: their codes stay, their scales change.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bridge.errors import BridgeError
from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.families.mamba2 import mamba2, mamba2_keys, mamba2_sizes
from bridge.models.family import HEAD, NO_BIASES, SILU, Expected, Family, Row, attention, decoder, gated_mlp


def _sizes(config: Config, args: Arguments) -> dict[str, int]:
    inner = config.side("mamba_d_ssm", config.integer("mamba_expand", 2) * args.hidden)
    if config.get("mamba_rms_norm", False):
        config.expect("mamba_norm_before_gate", (False,), True)
    return mamba2_sizes(config, args, inner)


def _config(stored: StoredKeys) -> dict[str, Any]:
    """Keys of config.json from a GGUF, without the factors: its weights are multiplied by them already."""
    inner = stored.get("ssm.inner_size")
    return {
        "mamba_d_head": inner // stored.get("ssm.time_step_rank"), "mamba_d_ssm": inner,
        "mamba_rms_norm": stored.has("ssm_norm.weight"), "mamba_norm_before_gate": False,
    }  # fmt: skip


def _factors(config: Config, _args: Arguments) -> dict[str, Sequence[float]]:
    """One number each; z, x, B, C and the time steps, the rows of in_proj, have their own."""

    def numbers(key: str, count: int) -> list[float]:
        values = config.get(key, count * [1.0])
        if not isinstance(values, list) or len(values) != count or not all(isinstance(x, int | float) for x in values):
            raise BridgeError(f"{config.path}: {key} is {values!r:.80}, must be {count} numbers")
        return [float(x) for x in values]

    gate, down = numbers("mlp_multipliers", 2)
    read, into = config.number("attention_in_multiplier", 1.0), config.number("ssm_in_multiplier", 1.0)
    return {
        "self_attn.q_proj": [read], "self_attn.k_proj": [read * config.number("key_multiplier", 1.0)],
        "self_attn.v_proj": [read], "self_attn.o_proj": [config.number("attention_out_multiplier", 1.0)],
        "mamba.in_proj": [into * factor for factor in numbers("ssm_multipliers", 5)],
        "mamba.out_proj": [config.number("ssm_out_multiplier", 1.0)],
        "feed_forward.gate_proj": [gate], "feed_forward.down_proj": [down],
        "model.embed_tokens": [config.number("embedding_multiplier", 1.0)],
        "lm_head": [config.number("lm_head_multiplier", 1.0)],
    }  # fmt: skip


def _has_head(args: Arguments) -> bool:
    """Whether the GGUF has a head: tied embeddings need one where the two have different factors."""
    return not args.tied or args.factors["lm_head"] != args.factors["model.embed_tokens"]


FALCON_H1 = Family(
    titles=("Falcon-H1",), arch="falcon-h1", architectures=("FalconH1ForCausalLM",), model_type="falcon_h1",
    keys={"head_dim": None, "rms_norm_eps": 1e-5},
    expects=(
        SILU, NO_BIASES, Expected("mlp_bias", (False,)), Expected("projectors_bias", (False,)),
        Expected("mamba_proj_bias", (False,)), Expected("mamba_conv_bias", (True,)),
    ),
    sizes=_sizes,
    factors=_factors,
    metadata=(
        *mamba2_keys(("mamba_d_conv", 4), ("mamba_d_state", None), ("mamba_n_groups", 1), ("mamba_n_heads", None)),
        Computed(lambda _config, args: {"context_length": args.context}, _config),
    ),
    divided=True,
    table=decoder(
        Row("input_layernorm", "hidden"),
        *(replace(row, optional=row.source == "mamba.norm") for row in mamba2("mamba")),
        *attention(),
        Row("pre_ff_layernorm", "hidden", name="ffn_norm"),
        *gated_mlp("feed_forward", "inner"),
        norm=Row("model.final_layernorm", "hidden"),
        head=replace(HEAD, when=_has_head),
    ),
)  # fmt: skip
