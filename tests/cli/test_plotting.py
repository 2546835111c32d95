"""Pictures of reports and benchmarks: what they show, on light and dark pages, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import bridge
from bridge.cli import main
from tests.conftest import CHECKPOINT, ROOT

pytest.importorskip("matplotlib", reason="the extra plot is not installed")

from bridge.cli.plot import fidelity_figure, kl_figure, matvec_figure, plot, report_figure
from bridge.cli.plot.layout import Labels
from bridge.cli.plot.logarithms import plain_number, tick_names
from bridge.cli.plot.theme import DARK, LIGHT, WIDTH

PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
FORMATS = {
    "model": "a model",
    "formats": [
        {"name": "F16", "maker": "llama.cpp", "bpw": 16.0, "kl": None},
        {"name": "Q4_K_M", "maker": "llama.cpp", "bpw": 4.9, "kl": 4e-3, "kl_error": 1e-4},
        {"name": "Q2_K", "maker": "llama.cpp", "bpw": 3.0, "kl": 6e-2},
        {"name": "Q4_K", "maker": "gguf-bridge quantize", "bpw": 4.6, "kl": 1e-3},
    ],
}
SIZES = {
    "model": "a model",
    "formats": [
        {"name": "Q2_K", "maker": "llama.cpp's quantizer", "bpw": 5.0, "kl": 0.8, "bytes": 8_000_000},
        {"name": "Q2_K", "maker": "llama.cpp's quantizer, imatrix", "bpw": 5.0, "kl": 0.4, "bytes": 8_000_000},
        {"name": "Q4_K", "maker": "llama.cpp's quantizer, imatrix", "bpw": 6.0, "kl": 0.1, "bytes": 9_600_000},
        {"name": "Q2_K", "maker": "gguf-bridge convert --imatrix", "bpw": 5.0, "kl": 0.3, "bytes": 8_000_000},
        {"name": "Q2_K", "maker": "gguf-bridge quantize --method two-sided", "bpw": 5.0, "kl": 0.2, "bytes": 8_000_000},
        {
            "name": "7.0 MB",
            "maker": "gguf-bridge quantize --method two-sided",
            "bpw": 4.4,
            "kl": 0.2,
            "bytes": 6_990_000,
        },
        {
            "name": "8.2 MB",
            "maker": "gguf-bridge quantize --method two-sided",
            "bpw": 5.1,
            "kl": 0.1,
            "bytes": 8_150_000,
        },
        {
            "name": "9.6 MB",
            "maker": "gguf-bridge quantize --method two-sided",
            "bpw": 6.0,
            "kl": 0.025,
            "bytes": 9_590_000,
        },
    ],
}
MAKERS = {
    "model": "a model",
    "formats": [
        {
            "name": type, "maker": maker, "bpw": bits, "bytes": 1e6 * bits, "kl": kl / bits,
            "texts": {"float32": {"a": {"kl": kl / bits}}, "llama.cpp": {"a": {"kl": kl}, "b": {"kl": 3 * kl}}},
        }
        for type, bits in (("Q4_K", 4.5), ("Q2_K", 2.5))
        for maker, kl in (
            ("llama.cpp's quantizer", 0.4), ("llama.cpp's quantizer, imatrix", 0.2),
            ("gguf-bridge quantize --method gptq", 0.1), ("gguf-bridge quantize --method two-sided", 0.05),
        )
    ],
}  # fmt: skip
TYPES = {
    "model": "a model",
    "bits_of": "linears",
    "formats": [
        {"name": type, "maker": maker, "bpw": bits, "kl": kl / bits}
        for type, bits, theirs in (
            ("Q4_K", 4.5, "llama.cpp's quantizer, imatrix"),
            ("MXFP4", 4.25, "llama.cpp's quantizer"),
        )
        for maker, kl in ((theirs, 0.4), ("gguf-bridge quantize", 0.1))
    ],
}
CHECKPOINTS = {
    "checkpoints": [
        {
            "name": "Model 1B, a tool 4-bit", "kl_file": 2e-5, "kl_checkpoint": 3e-3,
            "usual": [{"imatrix": False, "kl": 9e-3}, {"imatrix": True, "kl": 4e-3}],
        },
        {"name": "Model 1B, a tool 8-bit", "kl_file": 0.0, "kl_checkpoint": None},
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
    assert lines["llama.cpp"].get_color() == LIGHT.theirs
    assert lines["gguf-bridge quantize"].get_color() == LIGHT.ours
    assert axes.get_yscale() == "log"
    assert {text.get_text() for text in axes.texts} >= {"Q4_K_M", "Q2_K", "Q4_K", "llama.cpp"}


def test_size_budgets_are_drawn_beside_files_of_the_same_size():
    axes = kl_figure.figure(SIZES, LIGHT).axes[0]
    points = [container.lines[0].get_xydata().tolist() for container in axes.containers]
    assert sorted(points) == [[[4.4, 0.2], [5.1, 0.1], [6.0, 0.025]], [[5.0, 0.2]], [[5.0, 0.4], [6.0, 0.1]]]
    shown = {text.get_text() for text in axes.texts} - {""}
    assert {"Q2_K", "Q4_K", "--type Q2_K", "--size 7M", "--size 8.2M", "--size 9.6M"} < shown
    assert {"llama.cpp\nwith imatrix", "gguf-bridge\nquantize"} < shown
    # 8.2 MB are more than Q2_K has, and 7 MB far less: only one file is as large as one of llama.cpp
    assert {text for text in shown if "times" in text} == {"same size,\n0.25 times\nthe divergence"}


def test_a_row_for_each_maker_shows_both_arithmetics():
    axes = kl_figure.figure(MAKERS, LIGHT).axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    group = ["llama.cpp", "llama.cpp with imatrix", "quantize --method gptq", "quantize"]
    assert names == ["Q4_K, 4 MB, 4.50 bits", *group, "Q2_K, 2 MB, 2.50 bits", *group]
    marks = [line for line in axes.lines if line.get_marker() in "oD"]
    assert [line.get_xdata()[0] for line in marks[:4]] == pytest.approx([0.4 / 4.5, 0.8, 0.2 / 4.5, 0.4])
    assert [line.get_color() for line in marks[:8:2]] == [LIGHT.theirs] * 2 + [LIGHT.ours] * 2
    assert {text.get_text() for text in axes.texts} > {"in float32", "0.089"}


def test_a_row_for_each_type_shows_the_ratio_to_the_peer():
    picture = kl_figure.figure(TYPES, LIGHT)
    (axes,) = picture.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["Q4_K, 4.50 bits", "MXFP4, 4.25 bits"]
    assert [text.get_text() for text in axes.texts] == ["0.25", "0.25", "ratio"]
    legend = [text.get_text() for text in picture.texts]
    assert {"llama.cpp with imatrix", "llama.cpp", "gguf-bridge quantize"} < set(legend)
    assert "bits per weight of the linear layers" in " ".join(legend)


def test_products_are_marks_up_to_the_speed_of_plain_reading():
    picture = matvec_figure.figure(PRODUCTS, LIGHT)
    large, small = picture.axes
    assert large.get_title("left") == "40960 x 4096\n2 threads; reading: 30 GB/s"
    assert small.get_title("left") == "2048 x 4096\n2 threads; reading: 30 GB/s"
    lines = {line.get_label(): line for line in large.lines}
    assert lines["gguf-bridge"].get_xdata().tolist() == [20 / 30, 21 / 30, 22 / 30]
    assert lines["ggml"].get_xdata().tolist() == [10 / 30, 11 / 30, 12 / 30]
    assert any(list(line.get_xdata()) == [1, 1] for line in large.lines)
    assert {"a machine", "gguf-bridge", "ggml"} < {text.get_text() for text in picture.texts}
    assert "right is better" in " ".join(text.get_text() for text in picture.texts)


@pytest.mark.parametrize(
    ("cache", "large"), [(32 << 20, ", from memory"), (128 << 20, ""), (480 << 20, ", in the cache")]
)
def test_a_matrix_is_from_memory_where_the_cache_cannot_hold_it(cache, large):
    above, below = matvec_figure.figure({**PRODUCTS, "cache_bytes": cache}, LIGHT).axes
    assert above.get_title("left").startswith(f"40960 x 4096{large}\n2 threads")
    assert below.get_title("left").startswith("2048 x 4096, in the cache\n2 threads")


def test_fidelity_is_compared_with_the_usual_way_and_the_checkpoints_own_cost():
    picture = fidelity_figure.figure(CHECKPOINTS, LIGHT)
    (axes,) = picture.axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["Model 1B", "a tool 4-bit", "a tool 8-bit"]  # the model is the heading
    marks = [(line.get_color(), line.get_xdata()[0]) for line in axes.lines if line.get_marker() in "osD"]
    assert marks == [
        (LIGHT.other, 3e-3),
        (LIGHT.theirs, 4e-3),
        (LIGHT.ours, 2e-5),
        (LIGHT.ours, 1e-8),
    ]  # exact: at the left
    assert [text.get_text() for text in axes.texts] == ["200 times", "usual way:"]
    legend = [text.get_text() for text in picture.texts]
    assert "dequantizing and llama.cpp with imatrix add" in legend
    assert any("left is better; 1e-08 is exact" in text for text in legend)


def test_a_carried_file_is_drawn_with_its_checkpoint():
    carried = {"name": "GPTQ", "maker": "carried", "bpw": 5.0, "kl": 2.6e-3, "checkpoint_kl": 2.5e-3}
    picture = kl_figure.figure({**FORMATS, "formats": [*FORMATS["formats"], carried]}, LIGHT)
    rings = [line for line in picture.axes[0].lines if line.get_color() == LIGHT.ink and line.get_marker() == "o"]
    assert [line.get_xydata().tolist() for line in rings] == [[[5.0, 2.5e-3]]]
    assert "the checkpoint itself, at its GGUF's size" in [text.get_text() for text in picture.texts]


@pytest.mark.parametrize("record", [FORMATS, SIZES, MAKERS, TYPES, PRODUCTS, CHECKPOINTS])
def test_an_svg_follows_the_page_it_is_shown_on(record, tmp_path):
    (tmp_path / "x.json").write_text(json.dumps(record))
    text = plot(tmp_path / "x.json").read_text()
    rules = re.findall(r'\[style\*="(\w+): (#\w+)"\]\{\1:(#\w+)!important\}', text)
    assert ("fill", LIGHT.ink, DARK.ink) in rules
    inks = set(re.findall(r'<text style="[^"]*fill: (#\w+)', text))
    assert inks <= {LIGHT.ink, LIGHT.ours, LIGHT.theirs, LIGHT.other}  # all of which become light
    dark = plot(tmp_path / "x.json", tmp_path / "dark.svg", dark=True).read_text()
    swapped = dict(zip(astuple(LIGHT), astuple(DARK), strict=True))
    assert set(re.findall(r'<text style="[^"]*fill: (#\w+)', dark)) == {swapped[ink] for ink in inks}
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


def luminance(colour: str) -> float:
    """WCAG's relative luminance of "#rrggbb"."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def drawn(svg: Path) -> list[tuple[str, dict[str, str]]]:
    """Tag and style of all that an SVG draws."""
    nodes = ElementTree.parse(svg).iter()
    styled = ((node.tag.rpartition("}")[2], node.get("style")) for node in nodes)
    return [(tag, dict(re.findall(r"([\w-]+): ([^;]+)", style))) for tag, style in styled if style and tag != "style"]


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_colours_of_a_theme_can_be_seen_on_its_page(theme):
    least = dict.fromkeys(("ink", "ours", "theirs", "other"), 4.5) | {"frame": 3}
    for name, ratio in least.items():
        assert contrast(getattr(theme, name), theme.page) >= ratio, name
    assert set(least) | {"page", "grid"} == {field.name for field in fields(theme)}


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_a_picture_of_the_docs_can_be_read_on_light_and_dark_pages(picture):
    rules = re.findall(r'\[style\*="(\w+): (#\w+)"\]\{\1:(#\w+)!important\}', picture.read_text(encoding="utf-8"))
    dark = {(use, light): other for use, light, other in rules}
    styles = drawn(picture)
    page = next(style["fill"] for tag, style in styles if tag == "path")  # the background, which is opaque
    assert (page, dark["fill", page]) == (LIGHT.page, DARK.page)
    shades = {LIGHT.grid} if picture.stem != "actorder" else None  # the colours of a map are between others
    texts = 0
    for tag, style in styles:
        for use in ("fill", "stroke"):
            colour = style.get(use, "none")
            if colour in ("none", LIGHT.page, "#000001", "#fffffe"):  # the last two: in the cells of a map
                continue
            on_dark = dark.get((use, colour), colour)
            if tag == "text":
                texts += 1
                assert min(contrast(colour, page), contrast(on_dark, DARK.page)) >= 4.5, colour
            elif shades is not None and colour not in shades:
                assert min(contrast(colour, page), contrast(on_dark, DARK.page)) >= 3, colour
    assert texts > 10


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_a_picture_of_the_docs_can_be_read_on_a_phone(picture):
    root = ElementTree.parse(picture).getroot()
    assert float(root.get("width").removesuffix("pt")) == WIDTH
    sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", picture.read_text(encoding="utf-8"))]
    assert len(sizes) > 10
    assert min(sizes) * 358 / WIDTH >= 9  # CSS pixels in a column of 358


def test_pictures_of_the_docs_name_models_as_people_do():
    assert len(PICTURES) >= 4
    folders = r"tiny-|-dithered|smollm2|gemma3|qwen3-|llama-gptq|\bg\d+-(a?sym)|-(a?sym)\b"
    for picture in PICTURES:
        for text in texts(picture):
            assert not re.search(folders, text), f"{picture.name}: {text}: give its JSON a model or title for readers"


def test_labels_keep_clear_of_marks_lines_and_each_other():
    marks = [(100.0, 100.0), (112.0, 104.0)]
    labels = Labels(None, (0, 0, 400, 400), marks, [], [((112.0, 104.0), (300.0, 104.0))])
    for number, mark in enumerate(marks):
        labels.add(mark, f"label {number}", "#000000")
    labels.place()
    (a, b) = (label.box for label in labels.labels)
    assert a is not None
    assert b is not None
    assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    for left, bottom, right, top in (a, b):
        assert not any(left < x < right and bottom < y < top for x, y in marks)
        assert not (bottom < 104 < top and right > 112)  # the line


def test_ticks_are_plain_numbers():
    assert tick_names(0.015, 0.6) == ["0.02", "0.05", "0.1", "0.2", "0.5"]
    assert tick_names(3e-6, 0.3) == ["1e-5", "1e-4", "0.001", "0.01", "0.1"]
    assert [plain_number(value, 2) for value in (0.0123, 0.52, 3.26e-5)] == ["0.012", "0.52", "3.3e-5"]


def test_the_pictures_of_the_docs_are_drawn_from_the_figures_beside_them(tmp_path):
    """Their texts: where a glyph lies is for the version of matplotlib to say."""
    for picture in PICTURES:
        again = plot(ROOT / "docs" / "measured" / f"{picture.stem}.json", tmp_path / picture.name)
        assert texts(again) == texts(picture), f"`make pictures` draws {picture.name} anew"
