"""The table of docs/architectures.md, made of what the program knows of each architecture.

python -m scripts.tables.architecture_table
"""

from bridge.gguf_file.architectures import ARCHITECTURES, CONVOLUTION, DELTA, KDA, MAMBA, MAMBA1, Graph
from bridge.models.families import ALL

_STATES = {
    CONVOLUTION: "short convolutions",
    DELTA: "gated delta nets",
    KDA: "delta attention",
    MAMBA: "Mamba-2",
    MAMBA1: "Mamba",
}
HEAD = "| architecture in GGUF | models, as transformers names them | layers beside plain attention and networks |"


def rows() -> list[str]:
    """A row for each architecture that runs."""
    made = []
    for arch, graph in sorted(ARCHITECTURES.items()):
        names = dict.fromkeys(name for family in ALL if family.arch == arch for name in family.architectures)
        made.append(f"| `{arch}` | {', '.join(names) or '-'} | {', '.join(parts(graph)) or '-'} |")
    return made


def parts(graph: Graph) -> list[str]:
    """What layers of a graph have or do, in a few words each."""
    named = {
        "attention both ways": not graph.causal,
        "latent attention": graph.latent, "windows": graph.windows is not None and not graph.chunked,
        "chunks": graph.chunked, "capped scores": graph.score_cap, "sinks": graph.sinks,
        "gated heads": graph.output_gate or graph.gate_matrix, "heads normalized together": graph.normed_together,
        "heads normalized after their rotation": graph.norms_rotated, "layers without rotation": graph.unrotated_every,
        "scores less distances": graph.alibi,
        "temperatures": graph.temperature, "layer norms": graph.layer_norm, "norms of what is added": graph.post_norm,
        "norms of the state with what is added": graph.renormed,
        "norms within": graph.sub_norm, "networks beside attention": graph.parallel,
        "networks without a gate": not graph.gated, "experts beside a network": graph.beside,
        "states put aside": graph.put_aside, "streams": graph.streams, "embeddings of positions": graph.positions,
    }  # fmt: skip
    state = [] if graph.state is None else [_STATES[graph.state.kind]]
    return [*state, *(name for name, there in named.items() if there)]


if __name__ == "__main__":
    print(HEAD, "|---|---|---|", *rows(), sep="\n")
