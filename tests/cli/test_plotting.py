"""Pictures of reports and benchmarks: what they show, on light and dark pages, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import bridge
from bridge.cli import main
from tests.conftest import CHECKPOINT, ROOT

pytest.importorskip("matplotlib", reason="the extra plot is not installed")

from bridge.cli.plot import fidelity_figure, kl_figure, matvec_figure, plot, report_figure
from bridge.cli.plot.theme import DARK, LIGHT

FORMATS = {
    "model": "tiny-llama",
    "formats": [
        {"name": "F16", "maker": "llama.cpp", "bpw": 16.0, "kl": None},
        {"name": "Q4_K_M", "maker": "llama.cpp", "bpw": 4.9, "kl": 4e-3, "kl_error": 1e-4},
        {"name": "Q2_K", "maker": "llama.cpp", "bpw": 3.0, "kl": 6e-2},
        {"name": "Q4_K", "maker": "gguf-bridge quantize", "bpw": 4.6, "kl": 1e-3},
    ],
}
CHECKPOINTS = {
    "checkpoints": [
        {
            "name": "4 bits", "kl_linears": 4e-7, "kl_file": 2e-5, "kl_checkpoint": 3e-3,
            "usual": [{"preset": "Q4_K_M", "imatrix": m, "kl": kl} for m, kl in ((False, 4.2e-3), (True, 3.1e-3))],
        },
        {"name": "8 bits", "kl_linears": 0.0, "kl_file": 4e-5, "kl_checkpoint": None},
    ],
}  # fmt: skip
PRODUCTS = {
    "machine": "a machine",
    "products": [
        {"type": t, "shape": shape, "threads": 2, "gbs": 20.0 + i, "read_gbs": 30.0, "ggml_gbs": 10.0 + i}
        for shape in ([2048, 4096], [40960, 4096])
        for i, t in enumerate(("Q4_K", "Q6_K", "Q8_0"))
    ],
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the project's own checkpoint; of its 4 layers, one has Q8_0 for down_proj, which is exact."""
    folder = tmp_path_factory.mktemp("report")
    bridge.convert(CHECKPOINT, folder / "m.gguf", tensor_types=[(r"blk\.2\.ffn_down", "Q8_0")]).save(folder / "m.json")
    return folder / "m.json"


def texts(svg: Path) -> list[str]:
    """All that can be read in an SVG."""
    return ["".join(node.itertext()) for node in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_a_report_becomes_maps_of_its_layers_and_kinds(report, capsys):
    assert main(["plot", str(report)]) == 0
    svg = report.with_suffix(".svg")
    assert capsys.readouterr().out == f"wrote {svg}\n"
    found = texts(svg)
    kinds = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    assert {kind: found.count(kind) for kind in kinds} == dict.fromkeys(kinds, 3)  # three maps
    assert found.count("Q4_K 4.50") == 27
    assert found.count("Q8_0 8.50") == 1
    assert {"4.50 Q4_K", "8.50 Q8_0"} < set(found)  # the scale
    assert found.count("exact") == 1
    assert found.count("100%") == 28 + 1
    assert "bits per weight in the GGUF, scales included" in found
    assert "share of the checkpoint's codes in the GGUF" in found
    assert svg.stat().st_size < 120_000
    assert "<image" not in svg.read_text()  # viewers smear bitmaps of a few pixels


def test_a_map_shows_every_tensors_own_figures(report):
    record = json.loads(report.read_text())
    axes = report_figure.figure(record, LIGHT).axes
    kinds = [label.get_text() for label in axes[0].get_yticklabels()]
    for tensor in record["tensors"]:
        if tensor["fidelity"] is None or not tensor["name"].startswith("blk."):
            continue
        row, column = kinds.index(tensor["kind"]), int(tensor["name"].split(".")[1])
        nmse, kept, bits = (float(map_.collections[0].get_array()[row, column]) for map_ in axes[:3])
        if tensor["fidelity"]["nmse"]:
            assert nmse == tensor["fidelity"]["nmse"]
        else:
            assert nmse < min(axes[0].collections[0].get_clim())  # grey
        assert kept == tensor["fidelity"]["codes_kept"]
        assert bits == tensor["bpw"]


def test_a_model_that_came_as_floats_has_no_map_of_codes(report):
    record = json.loads(report.read_text())
    for tensor in record["tensors"]:
        if tensor["fidelity"]:
            tensor["fidelity"]["codes_kept"] = None
    titles = [axes.get_title("left") for axes in report_figure.figure(record, LIGHT).axes]
    assert len(list(filter(None, titles))) == 2


def test_kl_is_drawn_against_bits_a_line_for_each_maker():
    axes = kl_figure.figure(FORMATS, LIGHT).axes[0]
    lines = {c.get_label(): c.lines[0] for c in axes.containers}
    assert lines["llama.cpp"].get_xydata().tolist() == [[3.0, 6e-2], [4.9, 4e-3]]  # what has no KL is left out
    assert lines["gguf-bridge quantize"].get_xydata().tolist() == [[4.6, 1e-3]]
    assert axes.get_yscale() == "log"
    assert "nats" in axes.get_ylabel()
    assert {text.get_text() for text in axes.texts} == {"Q4_K_M", "Q2_K", "Q4_K"}


def test_products_are_bars_up_to_the_speed_of_plain_reading():
    picture = matvec_figure.figure(PRODUCTS, LIGHT)
    large, small = picture.axes
    assert large.get_title("left") == "40960 x 4096, 2 threads"
    assert small.get_title("left") == "2048 x 4096, 2 threads"
    ours, theirs = large.containers
    assert [bar.get_height() for bar in ours] == [20 / 30, 21 / 30, 22 / 30]
    assert [bar.get_height() for bar in theirs] == [10 / 30, 11 / 30, 12 / 30]
    (line,) = large.lines
    assert set(line.get_ydata()) == {1}
    assert [text.get_text() for text in large.texts] == ["30 GB/s"]
    assert "higher is better" in picture.get_suptitle()


@pytest.mark.parametrize(
    ("cache", "large"), [(32 << 20, ", from memory"), (128 << 20, ""), (480 << 20, ", in the cache")]
)
def test_a_matrix_is_from_memory_where_the_cache_cannot_hold_it(cache, large):
    above, below = matvec_figure.figure({**PRODUCTS, "cache_bytes": cache}, LIGHT).axes
    assert above.get_title("left").startswith(f"40960 x 4096{large}, 2 threads")
    assert below.get_title("left").startswith("2048 x 4096, in the cache, 2 threads")


def test_fidelity_is_compared_with_the_checkpoints_own_cost():
    axes = fidelity_figure.figure(CHECKPOINTS, LIGHT).axes[0]
    drawn = {line.get_label(): np.asarray(line.get_xydata()).tolist() for line in axes.lines}
    assert [label.get_text() for label in axes.get_yticklabels()] == ["8 bits", "4 bits"]
    assert drawn["added by converting the linears"] == [[1e-8, 0], [4e-7, 1]]  # an exact one is at the left edge
    assert drawn["the checkpoint itself, from its float model"] == [[3e-3, 1]]
    assert drawn["dequantized, then quantized by llama.cpp"] == [[4.2e-3, 1]]  # in its own row
    assert drawn["dequantized, then quantized by llama.cpp, with an imatrix"] == [[3.1e-3, 1]]
    assert "left is better" in axes.get_xlabel()


def test_a_carried_file_is_drawn_with_its_checkpoint():
    carried = {"name": "GPTQ", "maker": "carried", "bpw": 5.0, "kl": 2.6e-3, "checkpoint_kl": 2.5e-3}
    axes = kl_figure.figure({**FORMATS, "formats": [*FORMATS["formats"], carried]}, LIGHT).axes[0]
    rings = [line for line in axes.lines if str(line.get_label()).startswith("the checkpoint itself")]
    assert [line.get_xydata().tolist() for line in rings] == [[[5.0, 2.5e-3]]]


@pytest.mark.parametrize("record", [FORMATS, PRODUCTS, CHECKPOINTS])
def test_an_svg_follows_the_page_it_is_shown_on(record, tmp_path):
    (tmp_path / "x.json").write_text(json.dumps(record))
    text = plot(tmp_path / "x.json").read_text()
    rules = re.findall(r'\[style\*="(\w+): (#\w+)"\]\{\1:(#\w+)!important\}', text)
    assert ("fill", LIGHT.ink, DARK.ink) in rules
    inks = set(re.findall(r'<text style="[^"]*fill: (#\w+)', text))
    assert inks == {LIGHT.ink}  # all of which become light
    dark = plot(tmp_path / "x.json", tmp_path / "dark.svg", dark=True).read_text()
    assert set(re.findall(r'<text style="[^"]*fill: (#\w+)', dark)) == {DARK.ink}
    assert "prefers-color-scheme" not in dark
    assert plot(tmp_path / "x.json", tmp_path / "again.svg").read_text() == text  # the same bytes


@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_other_kinds_of_pictures_go_by_the_name(ending, start, tmp_path):
    (tmp_path / "x.json").write_text(json.dumps(FORMATS))
    assert plot(tmp_path / "x.json", tmp_path / f"x.{ending}").read_bytes().startswith(start)


REFUSED: dict[str, tuple[Any, str]] = {
    "no file": (None, "no such file; give the report"),
    "no JSON": ("{", "is not JSON"),
    "a list": ([], "is not a report; give the report"),
    "another object": ({"version": 1, "tensors": 3}, "is not a report"),
    "nothing measured": ({"tensors": []}, "its list of tensors is empty"),
    "no checkpoints": ({"checkpoints": []}, "its list of checkpoints is empty"),
    "no divergence": ({"model": "m", "formats": [FORMATS["formats"][0]]}, "none of its formats has a KL divergence"),  # type: ignore[index]
    "a field missing": ({"model": "m", "formats": [{"kl": 0.1}]}, "has been changed"),
    "a word for a number": ({"products": [{"shape": ["many", 2], "threads": 1}]}, "has been changed"),
    "tensors of a plan": ({"tensors": [{"name": "blk.0.attn_q.weight"}]}, "has been changed"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_report_is_refused_in_one_line(what, tmp_path, capsys):
    content, said = REFUSED[what]
    if content is not None:
        (tmp_path / "x.json").write_text(content if isinstance(content, str) else json.dumps(content))
    assert main(["plot", str(tmp_path / "x.json")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / 'x.json'}: ")
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "x.svg").exists()


def test_a_report_of_floats_as_they_were_has_nothing_to_draw(report, tmp_path, capsys):
    record = json.loads(report.read_text())
    record["tensors"] = [{**tensor, "fidelity": None} for tensor in record["tensors"]]
    (tmp_path / "x.json").write_text(json.dumps(record))
    assert main(["plot", str(tmp_path / "x.json")]) == 2
    assert "no tensor of a layer was carried or quantized; there is nothing to draw" in capsys.readouterr().err


def test_pictures_are_replaced_with_force_alone_and_go_by_known_endings(tmp_path, capsys):
    source = tmp_path / "x.json"
    source.write_text(json.dumps(FORMATS))
    (tmp_path / "x.svg").write_text("mine")
    assert main(["plot", str(source)]) == 2
    assert "--force replaces it" in capsys.readouterr().err
    assert (tmp_path / "x.svg").read_text() == "mine"
    assert main(["plot", str(source), "--force"]) == 0
    for name, said in (
        (source, "choose a name that ends in .svg, .png, .pdf"),
        ("x.json/y.svg", "x.json: is not a folder"),
    ):
        assert main(["plot", str(source), "-o", str(tmp_path / name), "--force"]) == 2
        assert said in capsys.readouterr().err
    assert json.loads(source.read_text()) == FORMATS


def test_without_matplotlib_one_line_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "x.json").write_text(json.dumps(FORMATS))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "bridge.cli.plot.theme")
    monkeypatch.delattr("bridge.cli.plot.theme")
    assert main(["plot", str(tmp_path / "x.json")]) == 2
    assert capsys.readouterr().err == "error: plot needs matplotlib; pip install gguf-bridge[plot]\n"


def test_the_pictures_of_the_docs_are_drawn_from_the_figures_beside_them(tmp_path):
    """Their texts: where a glyph lies is for the version of matplotlib to say."""
    pictures = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
    assert len(pictures) >= 4
    for picture in pictures:
        again = plot(ROOT / "docs" / "measured" / f"{picture.stem}.json", tmp_path / picture.name)
        assert texts(again) == texts(picture), f"`make pictures` draws {picture.name} anew"
