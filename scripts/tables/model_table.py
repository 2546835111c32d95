"""The table of models of docs/checkpoints.md, made of the families that the program knows.

python -m scripts.tables.model_table
"""

from bridge.gguf_file.architectures import ARCHITECTURES
from bridge.models.families import ALL
from bridge.models.family import Family

HEAD = "| the GGUF | models |"
TEXT, VECTORS = "runs here and in llama.cpp", "makes vectors or scores, here and in llama.cpp"
DRAFTS, ELSEWHERE = "[drafts](#drafters) for another model", "runs in llama.cpp only"


def use_of(family: Family) -> str:
    """What the GGUF of a family is good for."""
    if family.drafter:
        return DRAFTS
    graph = ARCHITECTURES.get(family.arch)
    return ELSEWHERE if graph is None else TEXT if graph.causal else VECTORS


def rows() -> list[str]:
    """A row for each use, with the titles of its families."""
    titles: dict[str, list[str]] = {use: [] for use in (TEXT, VECTORS, DRAFTS, ELSEWHERE)}
    for family in ALL:
        titles[use_of(family)] += family.titles
    return [f"| {use} | {', '.join(sorted(names, key=str.casefold))} |" for use, names in titles.items()]


if __name__ == "__main__":
    print(HEAD, "|---|---|", *rows(), sep="\n")
