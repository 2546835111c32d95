"""check_weights: each kind of damage is found in the tensor that has it, and nothing in models that have none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.conversion.weight_check.check import WeightCheck, check_weights
from bridge.conversion.weight_check.finding import KINDS
from bridge.conversion.weight_check.rows import RowCounts, row_findings
from bridge.conversion.weight_check.vocabulary import Tokens
from bridge.errors import BridgeError
from bridge.gguf_file.reader import read_gguf
from tests.conftest import CHECKPOINT, SHARED
from tests.support.command_line import GATE
from tests.support.encode import write_awq, write_folder, write_gptq
from tests.support.raw import Raw, edit_raw

TYPES = {"F16": np.float16, "F32": np.float32, "I32": np.int32, "U32": np.uint32, "U8": np.uint8}
EMBEDDINGS = "model.embed_tokens.weight"
SCALES = {
    "gptq": "scales", "gptq-act-order": "scales", "awq": "scales", "compressed": "weight_scale", "mlx": "scales",
    "fp8": "weight_scale_inv", "nvfp4": "weight_scale", "int8": "weight_scale",
}  # fmt: skip


def write(format: str, folder: Path, model: Path) -> None:
    if format == "float":
        shutil.copytree(model, folder)
    elif format.startswith("gptq"):
        write_gptq(folder, model, 4, 128, sym=format == "gptq", desc_act=format == "gptq-act-order")
    elif format == "awq":
        write_awq(folder, model)
    elif format == "mlx":
        from tests.support.encode_formats import write_mlx

        write_mlx(folder, model)
    elif format == "nvfp4":
        pytest.importorskip("torch")
        from tests.support.encode_fp4 import write_modelopt

        write_modelopt(folder, model)
    else:
        pytest.importorskip("torch")
        from tests.support.encode_compressed import write_float8, write_int8, write_packed

        if format == "fp8":
            write_float8(folder, model, (128, 128), "fp8")
        elif format == "int8":
            write_int8(folder, model)
        else:
            write_packed(folder, model, 4)


@pytest.fixture(scope="module")
def written(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """written(format): the project's model in a format."""
    folders: dict[str, Path] = {}

    def get(format: str) -> Path:
        if format not in folders:
            folders[format] = tmp_path_factory.mktemp("written") / format
            write(format, folders[format], small_model)
        return folders[format]

    return get


@pytest.fixture
def damaged(written: Callable[[str], Path], tmp_path: Path) -> Callable[[str, Callable[[Raw], Any]], WeightCheck]:
    """damaged(format, change): the check of that model after a change of its tensors."""

    def check(format: str, change: Callable[[Raw], Any]) -> WeightCheck:
        folder = tmp_path / "damaged"
        shutil.copytree(written(format), folder)
        edit_raw(folder / "model.safetensors", change)
        return check_weights(folder)

    return check


@pytest.fixture(scope="module")
def ggufs(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The project's model as GGUFs of a K-quant and of floats."""
    folder = tmp_path_factory.mktemp("ggufs")
    files = {"Q4_K": CHECKPOINT, "F32": small_model}
    for type, source in files.items():
        bridge.convert(source, folder / f"{type}.gguf", type=type)
    return {type: folder / f"{type}.gguf" for type in files}


def values(tensors: Raw, name: str) -> np.ndarray:
    """A tensor's elements, in a new array."""
    entry, data = tensors[name]
    return np.frombuffer(data, TYPES.get(entry["dtype"], np.uint8)).reshape(entry["shape"]).copy()


def put(tensors: Raw, name: str, new: np.ndarray) -> None:
    tensors[name] = (tensors[name][0], np.ascontiguousarray(new).tobytes())


def edit(name: str, change: Callable[[np.ndarray], Any]) -> Callable[[Raw], None]:
    """What edits one tensor in place."""

    def edited(tensors: Raw) -> None:
        new = values(tensors, name)
        change(new)
        put(tensors, name, new)

    return edited


def fill(index: Any, value: Any) -> Callable[[np.ndarray], None]:
    def filled(array: np.ndarray) -> None:
        array[index] = value

    return filled


def only(checked: WeightCheck, tensor: str, kind: str) -> str:
    """The text of the one finding, which is of that tensor and kind."""
    assert [(f.tensor, f.kind) for f in checked.findings] == [(tensor, kind)], checked.lines()
    return checked.findings[0].text


# what is not damaged


@pytest.mark.parametrize("format", ["float", *SCALES])
def test_nothing_is_found_in_models_that_are_not_damaged(written, format):
    checked = check_weights(written(format))
    assert checked.findings == []
    assert checked.notes == []
    assert checked.weights > 3.6e6


@pytest.mark.parametrize("type", ["Q4_K", "F32"])
def test_nothing_is_found_in_ggufs_that_are_not_damaged(ggufs, type):
    assert check_weights(ggufs[type]).findings == []


@pytest.mark.parametrize("folder", ["checkpoints", "more", "models"])
def test_nothing_is_found_in_checkpoints_of_the_real_tools(folder):
    models = [path for path in (SHARED / folder).glob("*") if (path / "config.json").exists()]
    if not models:
        pytest.skip(f"no {SHARED / folder}")
    assert {path.name: check_weights(path).findings for path in models} == {path.name: [] for path in models}


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "olmoe", "falcon-h1", "qwen3-vl"])
def test_nothing_is_found_in_untrained_models(family, tmp_path):
    """Norms of ones, biases of zeros, embeddings with a row for padding."""
    pytest.importorskip("transformers")
    from tests.support.family_models import new_model

    new_model(family).save_pretrained(tmp_path)
    assert check_weights(tmp_path).findings == []


def test_norms_and_biases_of_zeros_or_ones_are_usual(damaged):
    def change(tensors: Raw) -> None:
        for name, (entry, _) in list(tensors.items()):
            if name.endswith("norm.weight"):
                put(tensors, name, np.ones(entry["shape"], np.float16))
            if name.endswith("q_proj.weight"):
                rows = entry["shape"][0]
                zeros = np.zeros(rows, np.float16).tobytes()
                tensors[name.replace("weight", "bias")] = ({"dtype": "F16", "shape": [rows]}, zeros)

    assert damaged("float", change).findings == []


def test_a_head_with_the_bytes_of_the_embeddings_is_no_copy(damaged):
    def change(tensors: Raw) -> None:
        tensors["lm_head.weight"] = tensors[EMBEDDINGS]

    assert damaged("float", change).findings == []


def test_a_pruned_model_is_a_note(damaged):
    """Half of the weights, and some rows."""

    def change(tensors: Raw) -> None:
        for name in list(tensors):
            if name.endswith("proj.weight"):
                matrix = values(tensors, name)
                matrix[np.abs(matrix) < np.median(np.abs(matrix))] = 0
                matrix[7] = 0
                put(tensors, name, matrix)

    checked = damaged("float", change)
    assert checked.findings == []
    assert [note.split(":")[0] for note in checked.notes] == ["28 matrices are pruned"]


def test_rows_of_zeros_at_the_end_pad_a_side(damaged):
    name = f"{GATE}.weight"
    assert damaged("float", edit(name, fill(np.s_[700:], 0))).findings == []


# all zeros, rows, what was not written


def test_a_zeroed_matrix_is_found(damaged):
    name = f"{GATE}.weight"
    assert only(damaged("float", edit(name, fill(..., 0))), name, "zeros") == "all 196608 weights are 0"


EIGHTS = np.uint32(0x88888888).view(np.int32)


@pytest.mark.parametrize(
    ("format", "parts"),
    [
        ("gptq", {"qweight": EIGHTS}),
        ("awq", {"qweight": EIGHTS, "qzeros": EIGHTS}),
        ("compressed", {"weight_packed": EIGHTS}),
        ("mlx", {"weight": 0, "biases": 0}),
        ("fp8", {"weight": 0}),
        ("nvfp4", {"weight": 0}),
        ("int8", {"weight": 0}),
    ],
)
def test_a_module_whose_codes_all_mean_zero_is_found(damaged, format, parts):
    def change(tensors: Raw) -> None:
        for part, value in parts.items():
            edit(f"{GATE}.{part}", fill(..., value))(tensors)

    found = [f for f in damaged(format, change).findings if f.kind == "zeros"]
    assert [f.tensor.removesuffix(".weight") for f in found] == [GATE]
    assert found[0].text == "all 196608 weights are 0"


def test_rows_of_zeros_and_of_one_value_are_counted(damaged):
    def change(matrix: np.ndarray) -> None:
        matrix[5:17] = 0.25
        matrix[100] = 0

    text = only(damaged("float", edit(f"{GATE}.weight", change)), f"{GATE}.weight", "rows")
    assert text == "1 of 768 rows is 0, the first is row 100; 12 of 768 rows are constant, the first is row 5"


@pytest.mark.parametrize("format", ["gptq", "gptq-act-order"])
def test_rows_of_one_code_are_found(damaged, format):
    """GPTQ's words are of one row: 8 columns each."""

    def change(words: np.ndarray) -> None:
        words[:, 5:8] = 0x33333333

    assert "3 of 768 rows are constant, the first is row 5" in only(
        damaged(format, edit(f"{GATE}.qweight", change)), GATE, "rows"
    )


def test_codes_that_were_not_written_are_found(damaged):
    text = only(damaged("gptq", edit(f"{GATE}.qweight", fill(np.s_[24:], 0))), GATE, "unwritten")
    assert text == "6 pages of 4096 bytes of its codes are zero bytes, as if they had not been written"


def test_floats_that_were_not_written_are_found_within_their_rows():
    matrix = np.random.default_rng(0).normal(size=(4, 8192)).astype(np.float32)
    matrix[2, 2048:6144] = 0
    counts = RowCounts(1, 4, 8192)
    counts.add(matrix)
    assert [(f.kind, f.numbers["runs"]) for f in row_findings("layer.weight", counts)] == [("unwritten", 4)]


def test_nan_and_infinite_weights_are_counted(damaged):
    def change(matrix: np.ndarray) -> None:
        matrix[3, 4:6] = np.nan
        matrix[9, 0] = np.inf

    text = only(damaged("float", edit(f"{GATE}.weight", change)), f"{GATE}.weight", "not finite")
    assert text == "3 of 196608 (0.0015%) weights are NaN or infinite, the first in row 3"


def test_a_norm_of_zeros_in_one_layer_of_several_is_found(damaged):
    name = "model.layers.2.input_layernorm.weight"
    assert "in 3 other layers are not" in only(damaged("float", edit(name, fill(..., 0))), name, "zeros")


# scales


@pytest.mark.parametrize("format", SCALES)
def test_a_scale_of_nan_is_a_finding_of_its_module_and_the_others_are_read(damaged, format):
    nan = 0x7F if format == "nvfp4" else np.nan
    checked = damaged(format, edit(f"{GATE}.{SCALES[format]}", fill(np.s_[:1, :1], nan)))
    (finding,) = checked.findings
    assert finding.tensor.removesuffix(".weight") == GATE
    assert finding.kind == ("unreadable" if format == "nvfp4" else "scales")
    assert "NaN" in finding.text


@pytest.mark.parametrize("format", ["gptq", "awq", "compressed", "fp8"])
def test_scales_of_zero_are_found(damaged, format):
    checked = damaged(format, edit(f"{GATE}.{SCALES[format]}", fill(np.s_[1:2, 1:2], 0)))
    (finding,) = checked.findings
    assert (finding.tensor.removesuffix(".weight"), finding.kind) == (GATE, "scales")
    assert finding.text.startswith(f"1 of {12 if format == 'fp8' else 1536} scales is 0")


def test_a_scale_of_zero_of_codes_of_zero_is_usual(damaged):
    def change(tensors: Raw) -> None:
        edit(f"{GATE}.scales", fill(np.s_[0, 3], 0))(tensors)
        edit(f"{GATE}.qweight", fill(np.s_[:16, 3], EIGHTS))(tensors)

    assert damaged("gptq", change).findings == []


def test_zero_block_scales_of_nvfp4_are_usual_unless_many(damaged):
    name = f"{GATE}.weight_scale"
    assert damaged("nvfp4", edit(name, fill(np.s_[0, :4], 0))).findings == []


def test_many_zero_block_scales_of_nvfp4_are_found(damaged):
    checked = damaged("nvfp4", edit(f"{GATE}.weight_scale", fill(np.s_[0:20, :12], 0)))
    assert "scales are 0 though their codes are not" in only(checked, GATE, "scales")


def test_a_few_negative_scales_are_found_and_half_of_them_are_usual(damaged, written, tmp_path):
    def negated(index: Any) -> Callable[[Raw], None]:
        def change(scales: np.ndarray) -> None:
            scales[index] *= -1

        return edit(f"{GATE}.scales", change)

    text = only(damaged("gptq", negated(np.s_[1, 7])), GATE, "scales")
    assert text == "1 of 1536 scales is negative, the others are not, the first in row 7"
    shutil.copytree(written("gptq"), tmp_path / "half")
    edit_raw(tmp_path / "half" / "model.safetensors", negated(np.s_[:, ::2]))
    assert check_weights(tmp_path / "half").findings == []


def test_scales_beyond_halves_are_found(damaged):
    def change(tensors: Raw) -> None:
        name = f"{GATE}.weight_scale"
        scales = values(tensors, name).astype(np.float32)
        scales[3, 0] = 1e5
        scales[10:50] = 1e-12
        tensors[name] = ({**tensors[name][0], "dtype": "F32"}, scales.tobytes())

    findings = damaged("compressed", change).findings
    assert findings[0].text == (
        "1 of 1536 scales is beyond 65504, infinite in halves, the first in row 3; "
        "80 of 1536 scales are too small for halves, 0 in them, the first in row 10"
    )


def test_an_input_scale_of_zero_is_found(damaged):
    name = f"{GATE}.input_scale"
    text = only(damaged("nvfp4", edit(name, fill(..., 0))), name, "activations")
    assert text == "is 0: no scale of activations, as of an expert that calibration never reached"


def test_an_input_scale_that_one_module_of_a_kind_lacks_is_found(damaged):
    text = only(damaged("nvfp4", lambda tensors: tensors.pop(f"{GATE}.input_scale")), GATE, "activations")
    assert text == "1 of 4 modules lacks input_scale, which the others of the kind have"


# codes


def packed(codes: np.ndarray) -> np.ndarray:
    """GPTQ's words of 4-bit codes [in, out]."""
    lanes = codes.astype(np.uint32).reshape(-1, 8, codes.shape[1])
    return (lanes << (4 * np.arange(8, dtype=np.uint32))[:, None]).sum(axis=1, dtype=np.uint32).view(np.int32)


def test_codes_that_are_all_alike_are_found(damaged):
    checked = damaged("gptq", edit(f"{GATE}.qweight", fill(..., 0x33333333)))
    assert "all 196608 codes are 3" in [f.text for f in checked.findings if f.kind == "codes"]
    assert {f.tensor for f in checked.findings} == {GATE}


def test_codes_as_random_bits_are_found(damaged):
    def change(words: np.ndarray) -> None:
        words[:] = np.random.default_rng(0).integers(-(2**31), 2**31, words.shape)

    text = only(damaged("gptq", edit(f"{GATE}.qweight", change)), GATE, "codes")
    assert text == "all 16 levels of codes occur equally often, within 5%, as in random bits"


def few_levels(words: np.ndarray) -> None:
    words[:] = packed(np.random.default_rng(0).integers(7, 10, (256, words.shape[1])))


def test_a_module_that_uses_few_levels_is_found(damaged):
    text = only(damaged("gptq", edit(f"{GATE}.qweight", few_levels)), GATE, "levels")
    assert text == "the codes lie within 3 of 16 levels, 7 to 9"


def test_few_levels_in_all_modules_are_the_models_own(damaged):
    """As of a ternary model in 4 bits."""

    def change(tensors: Raw) -> None:
        for name in list(tensors):
            if name.endswith(".qweight"):
                words = values(tensors, name)
                words[:] = packed(np.random.default_rng(len(name)).integers(7, 10, (8 * len(words), words.shape[1])))
                put(tensors, name, words + np.int32(0))

    assert {f.kind for f in damaged("gptq", change).findings} <= {"duplicate"}


def test_zero_points_that_are_one_off_are_found(damaged):
    """GPTQ v1's words, 8 - 1, of which one module has those of v2."""
    asymmetric = np.uint32(0x77777778).view(np.int32)

    def change(words: np.ndarray) -> None:
        words[:] = EIGHTS
        words[0, 0] = asymmetric  # the reader mends zero points that are all alike

    text = only(damaged("gptq", edit(f"{GATE}.qzeros", change)), GATE, "codes")
    assert "steps below their zero points on average" in text


# other layers and copies


@pytest.mark.parametrize(("format", "part"), [("float", "weight"), ("gptq", "scales")])
def test_weights_of_another_magnitude_than_in_other_layers_are_found(damaged, format, part):
    def change(array: np.ndarray) -> None:
        array *= 100 if part == "weight" else 1 / 64

    name = GATE if format == "gptq" else f"{GATE}.weight"
    text = only(damaged(format, edit(f"{GATE}.{part}", change)), name, "magnitude")
    assert "those of the same kind in 3 other layers" in text


@pytest.mark.parametrize("format", ["float", "gptq", "nvfp4"])
def test_a_layer_with_the_bytes_of_another_is_found(damaged, format):
    def change(tensors: Raw) -> None:
        for name in list(tensors):
            if name.startswith("model.layers.2.mlp.gate_proj."):
                tensors[name] = tensors[name.replace(".2.", ".1.")]

    part = {"float": "weight", "gptq": "qweight", "nvfp4": "weight"}[format]
    text = only(damaged(format, change), f"{GATE}.{part}", "duplicate")
    assert text == f"has the same bytes as {GATE.replace('.2.', '.1.')}.{part}"


def test_dead_and_copied_experts_of_a_stack_are_found(tmp_path):
    rng = np.random.default_rng(0)
    stack = rng.normal(size=(4, 64, 64)).astype(np.float16)
    router = rng.normal(size=(4, 64)).astype(np.float16)
    name, gate = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.gate.weight"
    assert check_weights(write_folder(tmp_path / "live", {name: stack, gate: router}, None)).findings == []
    stack[2], stack[3], router[1] = 0, stack[1], 0
    checked = check_weights(write_folder(tmp_path / "dead", {name: stack, gate: router}, None))
    assert list(map(str, checked.findings)) == [
        f"{name}: 1 of 4 experts is all 0, the first is 2",
        f"{gate}: 1 of 4 rows is 0, the first is row 1; a row is an expert's",
        f"{name}: matrix 3 has the same bytes as {name}[1]",
    ]


# tokens


def test_tokens_without_rows_are_found(damaged):
    text = only(damaged("float", edit(EMBEDDINGS, fill(np.s_[300:400], 0))), EMBEDDINGS, "vocabulary")
    assert text.startswith("100 of 2047 tokens have a row of zeros, the first is 300 (")


def test_a_token_that_was_never_learned_is_a_note(damaged):
    checked = damaged("float", edit(EMBEDDINGS, fill(np.s_[300], 0)))
    assert checked.findings == []
    assert len(checked.notes) == 1
    assert "1 of 2047 tokens have a row of zeros, the first is 300 (" in checked.notes[0]


def test_rows_beyond_the_tokens_are_noted_where_they_are_more_than_padding():
    tokens = Tokens(["a"] * 100, np.ones(100))
    for rows, live, noted in ((1100, True, False), (2000, True, True), (2000, False, False)):
        counts = RowCounts(1, rows, 16)
        matrix = np.random.default_rng(0).normal(size=(rows, 16)).astype(np.float32)
        matrix[100:] *= live
        counts.add(matrix)
        findings, notes = tokens.findings("model.embed_tokens.weight", counts)
        assert findings == []
        assert bool(notes) == noted


# GGUFs


def change_gguf(source: Path, out: Path, name: str, change: Callable[[np.ndarray], Any]) -> WeightCheck:
    """The check of a GGUF after a change of the bytes [rows, row bytes] of a tensor."""
    tensor = read_gguf(source).tensors[name]
    content = bytearray(source.read_bytes())
    raw = np.frombuffer(content, np.uint8, tensor.raw.size, tensor.start).reshape(tensor.shape[0], -1)
    change(raw)
    out.write_bytes(content)
    return check_weights(out)


@pytest.mark.parametrize("type", ["Q4_K", "F32"])
def test_a_zeroed_tensor_of_a_gguf_is_found(ggufs, tmp_path, type):
    name = "blk.2.ffn_gate.weight"
    checked = change_gguf(ggufs[type], tmp_path / "m.gguf", name, fill(..., 0))
    assert only(checked, name, "zeros") == "all 196608 weights are 0"


def test_a_block_scale_of_nan_in_a_gguf_is_counted(ggufs, tmp_path):
    name = "blk.2.ffn_gate.weight"
    checked = change_gguf(ggufs["Q4_K"], tmp_path / "m.gguf", name, fill(np.s_[7, :2], 0xFF))
    assert only(checked, name, "not finite") == "256 of 196608 (0.13%) weights are NaN or infinite, the first in row 7"


def test_a_constant_row_of_a_gguf_is_found(ggufs, tmp_path):
    name = "blk.2.ffn_gate.weight"
    row = np.full(256, 0.5, np.float32).view(np.uint8)
    checked = change_gguf(ggufs["F32"], tmp_path / "m.gguf", name, fill(3, row))
    assert only(checked, name, "rows") == "1 of 768 rows is constant, the first is row 3"


def test_a_copied_tensor_of_a_gguf_is_found(ggufs, tmp_path):
    other = read_gguf(ggufs["Q4_K"]).tensors["blk.1.ffn_gate.weight"].raw.reshape(768, -1)
    name = "blk.2.ffn_gate.weight"
    checked = change_gguf(ggufs["Q4_K"], tmp_path / "m.gguf", name, fill(..., other))
    assert only(checked, name, "duplicate") == "has the same bytes as blk.1.ffn_gate.weight"


def test_tokens_of_a_gguf_without_rows_are_found(ggufs, tmp_path):
    checked = change_gguf(ggufs["Q4_K"], tmp_path / "m.gguf", "token_embd.weight", fill(np.s_[300:400], 0))
    assert only(checked, "token_embd.weight", "vocabulary").startswith("100 of 2047 tokens have a row of zeros")


# files that cannot be read, and the report


def test_a_truncated_file_has_its_usual_error(written, ggufs, tmp_path):
    shutil.copytree(written("gptq"), tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(BridgeError, match="ends at byte"):
        check_weights(tmp_path / "m")
    short = tmp_path / "m.gguf"
    short.write_bytes(ggufs["Q4_K"].read_bytes()[:-1000])
    with pytest.raises(BridgeError, match=str(short)):
        check_weights(short)


def test_wrong_shapes_have_their_usual_error(written, tmp_path):
    shutil.copytree(written("gptq"), tmp_path / "m")
    name = f"{GATE}.scales"
    edit_raw(tmp_path / "m" / "model.safetensors", lambda t: t[name][0].update(shape=[1, 1536]))
    with pytest.raises(BridgeError, match="shapes contradict each other"):
        check_weights(tmp_path / "m")


def test_progress_counts_the_bytes_that_were_read(written):
    calls: list[tuple[int, int, str]] = []
    checked = check_weights(written("gptq"), progress=lambda *call: calls.append(call))
    assert calls[0][0] == 0
    assert calls[-1][0] == calls[-1][1]
    assert len(calls) == 1 + checked.tensors


def test_findings_are_ordered_by_kind_and_plain_in_json(damaged):
    def change(tensors: Raw) -> None:
        edit("model.layers.0.mlp.up_proj.weight", fill(5, 0.5))(tensors)
        edit(f"{GATE}.weight", fill(..., 0))(tensors)

    checked = damaged("float", change)
    record = json.loads(json.dumps(checked.as_dict()))
    assert [finding["kind"] for finding in record["findings"]] == ["zeros", "rows"]
    assert {finding["kind"] for finding in record["findings"]} <= set(KINDS)
    assert record["passed"] is False
    assert record["findings"][1]["numbers"] == {"of": 768, "constant": 1, "first_constant": 5}


def test_files_of_torch_are_checked_too(written, tmp_path):
    torch = pytest.importorskip("torch")
    from tests.support.encode import load_floats

    folder = tmp_path / "m"
    shutil.copytree(written("float"), folder)
    (folder / "model.safetensors").unlink()
    tensors = {
        name: torch.from_numpy(array).to(torch.bfloat16) for name, array in load_floats(written("float")).items()
    }
    tensors[f"{GATE}.weight"] = tensors[f"{GATE}.weight".replace(".2.", ".1.")].clone()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert only(check_weights(folder), f"{GATE}.weight", "duplicate").startswith("has the same bytes as")
