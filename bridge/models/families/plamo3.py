"""PLaMo 3: norms before and after attention and network, normalized heads, a window in all layers but every eighth.

Norms are stored less what they are at first: one, and for what is added a fifth of it or less. q, k and v are rows of
one matrix, and so are the network's first two.
"""

from typing import Any

from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.families.windows import local_base
from bridge.models.family import NO_BIASES, NORM, SILU, Expected, Family, Row, decoder

_PERIOD = 8  # layers, of which the last has no window
_FULL, _LOCAL = "full_attention", "sliding_attention"
_BASES = {  # the names of each kind's rope_theta
    _FULL: ("global_rope_theta", "rope_global_theta", "rope_theta"),
    _LOCAL: ("local_rope_theta", "rope_local_theta", "rope_local_base_freq"),
}


def _usual(config: dict[str, Any]) -> dict[str, Any]:
    """The rules of rotation as transformers has them, of the keys of the model's own code."""
    if "rope_parameters" in config:
        return config
    rules: dict[str, Any] = {}
    for kind, names in _BASES.items():
        theta = next((config[name] for name in names if config.get(name) is not None), 1e6 if kind == _FULL else 1e4)
        rules[kind] = {"rope_type": "default", "rope_theta": theta}
    if (factor := config.get("rope_scaling_factor", 1)) != 1:
        original = config.get("initial_context_length")
        rules[_FULL] |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        rules[_FULL] |= {"truncate": False}
    return {**config, "rope_parameters": rules}


def _metadata(config: Config, args: Arguments) -> dict[str, Any]:
    window = config.get("window_size", config.get("sliding_window"))
    if window is None:
        return {"rope.freq_base_swa": local_base(config)}
    return {
        "rope.freq_base_swa": local_base(config),
        "attention.sliding_window": config.integer("window_size", window),
        "attention.sliding_window_pattern": config.integer("sliding_window_pattern", _PERIOD),
    }


def _config(stored: StoredKeys) -> dict[str, Any]:
    rules = stored.values["rope_parameters"]
    config = {
        "rope_theta": rules["rope_theta"], "rope_local_theta": stored.get("rope.freq_base_swa", 1e4),
        "window_size": stored.get("attention.sliding_window"),
        "sliding_window_pattern": stored.get("attention.sliding_window_pattern", _PERIOD),
    }  # fmt: skip
    if rules["rope_type"] == "yarn":
        original = rules["original_max_position_embeddings"]
        config |= {"rope_scaling_factor": rules["factor"], "initial_context_length": original}
    return config


PLAMO3 = Family(
    titles=("PLaMo 3",), arch="plamo3", architectures=("Plamo3ForCausalLM", "PLaMo3ForCausalLM"), model_type="plamo3",
    keys={"tie_word_embeddings": True, "head_dim": 128, "rope_theta": 1e6, "truncate": False},
    expects=(SILU, NO_BIASES, Expected("scale_embedding", (False,))),
    usual=_usual,
    metadata=(Computed(_metadata, _config),),
    lacks=("rope_parameters",),
    table=decoder(
        Row("pre_mixer_norm", "hidden", change="+1"),
        Row("mixer.qkv_proj", "q+kv+kv hidden"),
        Row("mixer.q_norm", "head", change="+1"),
        Row("mixer.k_norm", "head", change="+1"),
        Row("mixer.o_proj", "hidden q"),
        Row("post_mixer_norm", "hidden", change="+1/5", name="post_attention_norm"),
        Row("pre_mlp_norm", "hidden", change="+1"),
        Row("mlp.gate_up_proj", "inner+inner hidden"),
        Row("mlp.down_proj", "hidden inner"),
        Row("post_mlp_norm", "hidden", change="+1/5^1.5", name="post_ffw_norm"),
        norm=Row(NORM.source, "hidden", change="+1"), block="model.layers.layers",
    ),
)  # fmt: skip
