"""What several mixtures of experts have in common: dense layers first, shared experts, a bias for the choice."""

from collections.abc import Callable, Mapping
from typing import Any

from bridge.models.config.arguments import Arguments
from bridge.models.config.gguf_keys import Computed, StoredKeys
from bridge.models.config.model_config import Config
from bridge.models.family import Row


def router_bias(source: str, *also: str) -> Row:
    """What is added to the router's scores to choose experts; `also`: other names of it."""
    return Row(source, "experts", also, exact=True, name="exp_probs_b.bias")


def has_experts(args: Arguments, layer: int) -> bool:
    """Whether a layer has experts: one after the dense layers that predicts no further token."""
    return args.leading <= layer < args.layers


def shared_width(key: str, default: int = 1) -> Callable[[Config, Arguments], Mapping[str, int]]:
    """`Family.sizes` with the width of the shared experts together, whose number config.json has under this key."""
    return lambda config, args: {"shared": args.expert_inner * config.count(key, default)}


# what llama.cpp's converter says of these families' rotations
UNSCALED = Computed(lambda _, args: {} if args.rope.type in ("linear", "yarn") else {"rope.scaling.type": "none"})


def layer_kinds(stored: StoredKeys) -> dict[str, Any]:
    """Dense layers first, then those with experts, as config.json of transformers names them."""
    dense = stored.get("leading_dense_block_count", 0)
    return {"mlp_layer_types": dense * ["dense"] + (stored.values["num_hidden_layers"] - dense) * ["sparse"]}


LEADING = Computed(lambda _config, args: {"leading_dense_block_count": args.leading})
LAYER_KINDS = Computed(config=layer_kinds)  # in config.json; `Arguments.leading` is read from them
