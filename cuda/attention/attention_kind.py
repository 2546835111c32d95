"""What the attention of a layer is, as far as kernels are compiled for it."""

from dataclasses import dataclass
from typing import Self

from bridge.cuda.attention import attention_shape

from bridge.runtime.config.decoder_config import DecoderConfig


@dataclass(frozen=True)
class AttentionKind:
    """A layer's heads, and what is done with them.

    group       query heads that share a key-value head
    rotated     elements of a head that are rotated, the first ones
    neighbours  rotary pairs are (2i, 2i + 1)
    normed      each head of q and k is normalized; norms_last: after the rotation
    windowed    a token attends to a window; chunked: to its chunk of positions
    capped      scores are c tanh(s / c)
    sinks       each query head has one more score, of no position
    tempered    scores are multiplied by what the token's position says
    stores      the layer has keys and values of its own, which follow its queries
    """

    head_dim: int
    group: int
    rotated: int
    neighbours: bool = False
    normed: bool = False
    norms_last: bool = False
    windowed: bool = False
    chunked: bool = False
    capped: bool = False
    sinks: bool = False
    tempered: bool = False
    stores: bool = True

    @classmethod
    def of(cls, c: DecoderConfig, layer: int, normed: bool) -> Self:
        """The attention of a layer of a model; `normed`: by weights of a head's size."""
        heads, group, windowed = c.heads_of(layer), c.query_heads_of(layer) // c.heads_of(layer).kv, c.windowed(layer)
        return cls(
            heads.dim, group, heads.rotated, bool(heads.rotated) and c.graph.neighbours, normed,
            normed and c.graph.norms_rotated, windowed, windowed and c.graph.chunked, c.score_cap > 0, c.graph.sinks,
            c.temperature != 0 and c.tempered(layer), c.makes_keys(layer),
        )  # fmt: skip

    @property
    def name(self) -> str:
        """As names of kernels say it."""
        flags = {
            "neighbours": self.neighbours, "normed": self.normed, "last": self.norms_last, "window": self.windowed,
            "chunk": self.chunked, "cap": self.capped, "sinks": self.sinks, "tempered": self.tempered,
            "shared": not self.stores,
        }  # fmt: skip
        sizes = f"{self.head_dim}_{self.group}_{self.rotated}"
        return "_".join([sizes, *(name for name, there in flags.items() if there)])


def supported(c: DecoderConfig, kv: str) -> bool:
    """Whether there are kernels for all layers with attention, over a cache of that kind; not for latent vectors."""
    if c.latent is not None:
        return False
    shapes = {(c.query_heads_of(layer), *c.heads_of(layer)[:2]) for layer in c.attending}
    return all(q % kv_heads == 0 and attention_shape.supported(dim, q // kv_heads, kv) for q, kv_heads, dim in shapes)
