"""The tables of figures in README and the guide, made of docs/measured/*.json.

    python -m scripts.tables.guide_tables    prints them all, to be pasted

`tests/test_docs.py` compares each page with what is made here, so that a figure can change only with its measurement.
KL divergences are in thousandths of a nat a token.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from textwrap import wrap
from typing import Any, NamedTuple

MEASURED = Path(__file__).resolve().parents[2] / "docs" / "measured"
FLOAT32, LLAMA_CPP = "float32", "llama.cpp"
PEER, PEER_IMATRIX = "llama.cpp's quantizer", "llama.cpp's quantizer, imatrix"
CONVERT, QUANTIZE = "gguf-bridge convert --imatrix", "gguf-bridge quantize --method two-sided"
TEXTS = {
    "wikitext": "WikiText",
    "shakespeare": "Shakespeare",
    "python": "Python code",
    "manual": "Python's manual",
    "law": "licences",
    "french-german": "French and German",
}
# what bench_model calls a measurement -> what README does
SPEEDS = {
    "decode after 8 tokens": "decoding",
    "prompt, 512 tokens": "a prompt of 512 tokens",
    "start to first token": "start to first token",
}
SIDES = "ours", "theirs"


class Table(NamedTuple):
    """A table of a page, and the sentence below it that says how it was measured."""

    page: str  # relative to the checkout
    head: list[str]
    rows: list[list[str]]
    note: str = ""

    @property
    def lines(self) -> list[str]:
        first, *others = (f"| {' | '.join(cells)} |" for cells in (self.head, *self.rows))
        return [
            first,
            f"|{'---|' * len(self.head)}",
            *others,
            *(["", *wrap(self.note, 120, break_on_hyphens=False)] if self.note else []),
        ]


def measured(name: str) -> dict[str, Any]:
    """The figures of a measurement, as its script wrote them with --json."""
    return json.loads((MEASURED / f"{name}.json").read_text(encoding="utf-8"))


def how_measured(record: dict[str, Any]) -> str:
    """Date, version, machine and command of a measurement."""
    machine = ", ".join(record["machine"].split(", ")[:3])
    return f"Measured on {record['date']} with version {record['version']} on {machine}: `{record['command']}`"


def file_of(record: dict[str, Any], name: str, maker: str) -> dict[str, Any]:
    """The file of a type, or of a size, that a quantizer made."""
    return next(file for file in record["formats"] if (file["name"], file["maker"]) == (name, maker))


def thousandths(kl: float) -> str:
    """Nats -> thousandths of a nat, with three digits."""
    return f"{1000 * kl:,.0f}" if kl >= 0.1 else f"{1000 * kl:#.3g}"


def divergence(figures: dict[str, float]) -> str:
    """Mean, and median and 99th percentile of the tokens."""
    return f"{thousandths(figures['kl'])} ({thousandths(figures['median'])}, {thousandths(figures['p99'])})"


def over(figures: dict[str, float]) -> str:
    return f"{figures['ratio']:.3f} ± {figures['ratio_error']:.3f}"


def texts_mean(file: dict[str, Any], arithmetic: str) -> float:
    """The mean divergence of the kinds of text."""
    return mean(figures["kl"] for figures in file["texts"][arithmetic].values())


def by_text(record: dict[str, Any], type_name: str, shown_model: str) -> Table:
    """One type of a real model by llama.cpp's quantizer, `convert --imatrix` and `quantize`, text by text."""
    peer, convert, ours = (file_of(record, type_name, maker) for maker in (PEER_IMATRIX, CONVERT, QUANTIZE))
    files = peer, convert, ours
    head = [f"{shown_model}, {type_name}", "llama-quantize, imatrix", "`convert --imatrix`", "`quantize`", "ratio"]
    rows = []
    for text, shown in TEXTS.items():
        if text not in ours["texts"][FLOAT32]:
            continue
        figures = [file["texts"][FLOAT32][text] for file in files]
        rows.append([shown, *map(divergence, figures), over(figures[-1])])
    for arithmetic, shown in ((FLOAT32, "mean of these"), (LLAMA_CPP, "the same in llama.cpp")):
        if arithmetic in ours["texts"]:
            means = [texts_mean(file, arithmetic) for file in files]
            rows.append([shown, *map(thousandths, means), f"{means[-1] / means[0]:.3f}"])
    rows.append(["CPU seconds", *(f"{file['cpu_seconds']:,.0f}" for file in files), ""])
    return Table("docs/quantize.md", head, rows, how_measured(record))


def by_size(record: dict[str, Any]) -> Table:
    """Files of given sizes, and those of llama.cpp's quantizer of the same bytes."""
    head = ["SmolLM2 135M", "MB", "KL, mean of the texts", "CPU seconds"]
    rows = []
    for file in sorted(record["formats"], key=lambda file: (file["bytes"], -file["kl"])):
        if file["maker"] in (PEER_IMATRIX, QUANTIZE):
            peer = file["maker"] == PEER_IMATRIX
            sized = "MB" in file["name"]
            what = f"llama-quantize {file['name']}, imatrix" if peer else f"`quantize --type {file['name']}`"
            kl, seconds = thousandths(texts_mean(file, FLOAT32)), f"{file['cpu_seconds']:,.0f}"
            rows.append(["`quantize --size`" if sized else what, f"{file['bytes'] / 1e6:.1f}", kl, seconds])
    return Table("docs/quantize.md", head, rows, how_measured(record))


def in_short() -> Table:
    """README's figures: files of the first picture, and speed, with llama.cpp's."""
    sizes, speed = measured("sizes"), measured("speed")
    ours, convert, peer, plain = (file_of(sizes, "Q4_K_M", maker) for maker in (QUANTIZE, CONVERT, PEER_IMATRIX, PEER))
    mixed = next(file for file in sizes["formats"] if "MB" in file["name"] and file["bytes"] == peer["bytes"])
    files = ("`--size`", mixed), ("`--type Q4_K_M`", ours), ("`convert --imatrix`", convert)
    losses = [f"{name}: {thousandths(texts_mean(file, FLOAT32))}" for name, file in files]
    theirs = [
        f"{name}: {thousandths(texts_mean(file, FLOAT32))}" for name, file in (("imatrix", peer), ("none", plain))
    ]
    seconds = [f"{file['cpu_seconds']:,.0f}" for _, file in files]
    size = f"SmolLM2 135M in {peer['bytes'] / 1e6:.0f} MB"
    carried = measured("fidelity")["checkpoints"][0]
    usual = "; ".join(
        f"{'imatrix' if way['imatrix'] else 'none'}: {thousandths(way['kl'])}" for way in reversed(carried["usual"])
    )
    added = [f"{carried['name']}, as GGUF: added KL", f"codes carried: {thousandths(carried['kl_file'])}", usual]
    rows = [
        added,
        [f"{size}: KL divergence", "; ".join(losses), "; ".join(theirs)],
        [f"{size}: CPU seconds", "; ".join(seconds), f"{peer['cpu_seconds']:.0f}"],
    ]
    there = [texts_mean(file_of(measured("real"), "Q4_K_M", maker), LLAMA_CPP) for maker in (QUANTIZE, PEER_IMATRIX)]
    rows.append(["SmolLM2 135M in Q4_K_M, run by llama.cpp: KL divergence", *map(thousandths, there)])
    for row in speed["rows"]:
        if what := SPEEDS.get(row["what"]):
            values = (f"{row[side]:{'.2f' if row['unit'] == 's' else ',.0f'}} {row['unit']}" for side in SIDES)
            rows.append([f"Gemma 3 270M in Q4_K_M: {what}", *values])
    machine = speed["machine"].split(", ")
    note = (
        "KL divergence in thousandths of a nat per token: what a GGUF adds to a checkpoint (llama.cpp dequantizes and "
        "quantizes it), and of files from their float model, mean of five or six kinds of text. Speeds on "
        f"{machine[0]} with {machine[2]}, two threads, {speed['date']}, version {speed['version']}, and "
        f"{speed['peer']['name']}."
    )
    return Table("README.md", ["in figures", "gguf-bridge", "llama.cpp"], rows, note)


def tables() -> Iterator[Table]:
    yield in_short()
    yield by_text(measured("real"), "Q4_K_M", "SmolLM2 135M")
    yield by_text(measured("gemma"), "Q2_K", "Gemma 3 270M")
    yield by_size(measured("sizes"))


if __name__ == "__main__":
    for table in tables():
        print(table.page, *table.lines, "", sep="\n")
