"""docs/measurements/: the journal's tables are those of docs/measured/, and every figure's run can be repeated."""

from __future__ import annotations

import re

import numpy as np
import pytest

from scripts.peers import nvfp4
from scripts.peers.gguf_file import Blocks
from scripts.peers.llama import ggml
from scripts.tables.guide_tables import CONVERT, FLOAT32, PEER, PEER_IMATRIX, QUANTIZE, measured
from tests.conftest import ROOT
from tests.test_docs import cells

PROVENANCE = ("date", "version", "machine", "command")
QUANTIZING, FORMATS = "measurements/quantizing.md", "measurements/formats.md"
TEXTS = ("wikitext", "shakespeare", "python", "law", "french-german")
ROWS = {
    PEER: "llama-quantize without an imatrix",
    PEER_IMATRIX: "llama-quantize with the imatrix: KL",
    CONVERT: "`convert --imatrix`",
    "gguf-bridge quantize --method imatrix": "`quantize --method imatrix`",
    QUANTIZE: "`quantize`",
}  # what plots call a maker -> what the journal calls it


def scientific(value: float) -> str:
    """Three digits: "3.02e-1", "1.36"."""
    return re.sub(r"e([-+])0", r"e\1", f"{value:.2e}").removesuffix("e+0")


def losses(row: dict) -> list[str]:
    """A row of bench_real's JSON: the ratio on each kind of text, or the divergence that others are compared with."""
    texts = [row["texts"][FLOAT32][name] for name in TEXTS]
    lost = [
        f"{text['ratio']:.3f} ± {text['ratio_error']:.3f}" if row["over"] else scientific(text["kl"]) for text in texts
    ]
    return [*lost, f"{row['cpu_seconds']:.0f}"]


@pytest.mark.parametrize("name", ["formats", "gemma", "quantize", "sizes", "smollm2"])
def test_figures_tell_how_they_were_measured(name: str) -> None:
    record = measured(name)
    assert list(record)[: len(PROVENANCE)] == list(PROVENANCE)
    for key in PROVENANCE:
        assert isinstance(record[key], str), key
        assert record[key], key
    assert re.match(r"20\d\d-\d\d-\d\d", record["date"])
    script = re.match(r"python -m ([\w.]+) ", record["command"])
    assert script
    assert (ROOT / f"{script[1].replace('.', '/')}.py").is_file()
    assert record["peer"].keys() == {"quantizer", "build", "settings"}


def test_the_table_of_gemma_is_of_the_figures_that_were_measured() -> None:
    shown = {row[0]: row[1:] for row in cells(QUANTIZING, "| Gemma 3 270M | WikiText")}
    tails = {row[0]: row[1:] for row in cells(QUANTIZING, "| Gemma 3 270M, WikiText | mean")}
    rows = {ROWS[row["maker"]]: row for row in measured("gemma")["formats"]}
    assert shown == {name: losses(row) for name, row in rows.items()}
    for name, row in rows.items():
        text = row["texts"][FLOAT32]["wikitext"]
        figures = [scientific(text[key]) for key in ("kl", "median", "p99")]
        assert tails[name.removesuffix(": KL")] == [*figures, f"{text['same_top']:.1%}"]
    assert len(tails) == len(rows) == 5


def test_the_table_of_smollm2_is_of_the_figures_that_were_measured() -> None:
    shown = {row[0]: row[1:] for row in cells(QUANTIZING, "| SmolLM2 135M, all methods | WikiText")}
    rows = {f"{row['name']}, {ROWS[row['maker']]}": losses(row) for row in measured("smollm2")["formats"]}
    assert shown == rows
    assert len(shown) == 10


def test_the_table_of_sizes_is_of_the_figures_that_the_picture_shows() -> None:
    shown = {tuple(row[:2]): row[2:] for row in cells(QUANTIZING, "| SmolLM2 135M | MB |")}
    expected = {}
    for row in measured("sizes")["formats"]:
        name = f"{row['name']}, {ROWS[row['maker']]}"
        if row["maker"].endswith("two-sided"):
            of_size = "`quantize --size`" if row["over"] else "`quantize --size`: KL"
            name = of_size if "MB" in row["name"] else f"{row['name']}, `quantize --type`"
        expected[name, f"{row['bytes'] / 1e6:.1f}"] = losses(row)
    assert shown == expected
    assert len(shown) == 12


def test_the_table_of_speeds_is_of_the_figures_that_were_measured() -> None:
    formats = {"s": ".2f", "tokens/s": ",.4g", "MB": ".0f"}
    shown = cells("measurements/cpu.md", "| Gemma 3 270M, 2 threads | unit |")
    expected = [
        [row["what"], unit, *(f"{row[side]:{formats[unit]}}" for side in ("ours", "theirs")), f"{row['ratio']:.2f}"]
        for row in measured("speed")["rows"]
        for unit in [row["unit"]]
    ]
    assert shown == expected
    assert len(shown) == 6


def test_the_table_of_quantizing_is_of_the_figures_that_the_picture_shows() -> None:
    record = measured("quantize")
    theirs, ours = (
        {row["name"]: row for row in record["formats"] if row["maker"].startswith(maker)} for maker in ("llama", "gguf")
    )
    shown = {row[0]: row[1:] for row in cells(QUANTIZING, "| type | bits | ggml |")}
    assert shown.keys() == ours.keys() == theirs.keys()
    assert set(ours) == {name for run in record["runs"] for name in run["types"]}
    for name, row in ours.items():
        ratios = {text: figures["ratio"] for text, figures in row["texts"].items()}
        assert shown[name] == [
            f"{row['bpw']:g}", scientific(theirs[name]["kl"]), scientific(row["kl"]),
            f"{ratios['wiki_test']:.3f}", f"{ratios['shakespeare_val']:.2f}",
            "ignored" if name in ("MXFP4", "NVFP4") else "used",
        ]  # fmt: skip


def test_the_table_of_4_bit_floats_is_of_figures_that_were_measured() -> None:
    shown = {(row[0], row[1].partition(" ")[0]): row[2:] for row in cells(QUANTIZING, "| type | rounded by |")}
    expected = {}
    for row in measured("quantize")["formats"]:
        if row["name"] in ("NVFP4", "MXFP4") and not row["maker"].startswith("gguf"):
            maker = "ggml," if row["maker"].startswith("llama") else row["maker"].partition(" ")[0]
            texts = row["texts"].values()
            figures = [f"{scientific(text['kl'])} ± {text['kl_error']:.0e}".replace("e-0", "e-") for text in texts]
            expected[row["name"], maker] = figures
    assert shown == expected
    assert len(shown) == 3


def test_the_table_of_formats_is_of_the_figures_that_the_picture_shows() -> None:
    shown = {row[0]: row[1:] for row in cells(FORMATS, "| format |")}
    formats = {row["name"]: row for row in measured("formats")["formats"]}
    assert shown.keys() == formats.keys()
    for name, row in formats.items():
        divergence = f"{scientific(row['kl'])} ± {row['kl_error']:.0e}".replace("e-0", "e-") if "kl" in row else ""
        assert shown[name] == [
            f"{row['bpw']:.2f}", f"{row['bytes'] / 1e6:.1f}",
            f"{row['perplexity']:.2f} ± {row['perplexity_error']:.2f}", divergence,
            f"{row['same_top']:.1%}" if "same_top" in row else "",
        ]  # fmt: skip


@pytest.mark.parametrize("type", ["MXFP4", "NVFP4", "Q4_K"])
def test_ggml_heeds_the_imatrix_but_for_4_bit_floats(type: str) -> None:
    random = np.random.default_rng(0)
    weights = random.standard_normal((8, 512)).astype(np.float32) / 50
    importance = random.lognormal(size=512).astype(np.float32)
    same = np.array_equal(ggml.quantize(weights, type, importance), ggml.quantize(weights, type))
    assert same == (type != "Q4_K")


@pytest.mark.parametrize(("deviation", "least", "most"), [(1.0, 0.98, 1.02), (0.02, 1.1, 1.3)])
def test_ggmls_nvfp4_loses_precision_where_weights_are_small(deviation: float, least: float, most: float) -> None:
    """It has no scale of the matrix: below 2^-6, the scales of 16 weights are subnormal."""
    weights = (np.random.default_rng(0).standard_normal((64, 512)) * deviation).astype(np.float32)

    def error(values: np.ndarray) -> float:
        return float(np.square(values - weights, dtype=np.float64).sum())

    ggmls = Blocks("NVFP4", ggml.quantize(weights, "NVFP4")).values()
    assert least < error(ggmls) / error(nvfp4.quantize(weights).values()) < most
