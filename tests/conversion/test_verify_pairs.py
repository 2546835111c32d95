"""verify: any two of checkpoints and GGUFs, whatever their formats."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import bridge
from bridge.conversion.planning.checkpoint_outline import outline_of
from bridge.conversion.planning.part_reader import PartReader
from bridge.conversion.writing.report import CARRIED, FLOAT, REQUANTIZED, Report, TensorReport
from bridge.conversion.writing.tensor_rows import PartRows
from bridge.conversion.writing.verify import failures
from bridge.errors import BridgeError
from tests.conftest import CHECKPOINT, shared
from tests.support import encode_compressed as compressed
from tests.support import encode_formats as write
from tests.support import encode_fp4 as fp4
from tests.support.encode import load_floats, write_awq, write_gptq
from tests.support.raw import Raw, edit_raw

WEIGHTS = "model.safetensors"
DOWN = "model.layers.1.mlp.down_proj"
FORMATS: dict[str, Callable[[Path, Path], Any]] = {
    "gptq": partial(write_gptq, sym=False),
    "gptq_v2": partial(write_gptq, bits=8, checkpoint_format="gptq_v2"),
    "gptq act-order": partial(write_gptq, sym=False, desc_act=True),
    "awq": write_awq,
    "compressed-tensors": partial(compressed.write_packed, bits=4),
    "mlx": partial(write.write_mlx, own={"model.embed_tokens": False}),
    "hqq": write.write_hqq,
    "modelopt": fp4.write_modelopt,
    "fp8": partial(compressed.write_float8, block=(128, 128)),
}


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's checkpoint as a float one, of halves."""
    folder = tmp_path_factory.mktemp("floats")
    bridge.convert(CHECKPOINT, folder / "m.gguf", type="F32")
    bridge.export(folder / "m.gguf", folder / "floats", config=CHECKPOINT, dtype="F16")
    return folder / "floats"


@pytest.fixture(scope="module")
def gptq(floats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gptq") / "gptq"
    write_gptq(folder, floats, sym=False)
    return folder


def copied(folder: Path, to: Path, change: Callable[[Raw], Any]) -> Path:
    """A copy of a checkpoint with tensors changed."""
    shutil.copytree(folder, to)
    edit_raw(to / WEIGHTS, change)
    return to


def changed_byte(name: str, at: int = 0) -> Callable[[Raw], None]:
    """A bit of a tensor's byte flipped."""

    def change(tensors: Raw) -> None:
        entry, data = tensors[name]
        tensors[name] = entry, data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]

    return change


def stored_weights(stored: Any) -> dict[str, np.ndarray]:
    """What a writer stored, as floats."""
    return {name: np.asarray(q if isinstance(q, np.ndarray) else q.dequantize()) for name, q in stored.items()}


def dequantized(folder: Path, floats: Path, weights: dict[str, np.ndarray]) -> Path:
    """The float checkpoint with these weights, float32."""
    shutil.copytree(floats, folder)
    new = load_floats(floats) | {f"{name}.weight": weight.astype(np.float32) for name, weight in weights.items()}
    save_file({name: np.ascontiguousarray(weight) for name, weight in new.items()}, folder / WEIGHTS)
    return folder


def by_source(report: Report) -> dict[str | None, TensorReport]:
    return {tensor.source: tensor for tensor in report.tensors}


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_checkpoint_has_the_error_of_its_codes_against_the_floats(name, floats, tmp_path):
    weights = stored_weights(FORMATS[name](tmp_path / "q", floats))
    report = bridge.verify(tmp_path / "q", floats)
    tensor, original = by_source(report)[f"{DOWN}.weight"], load_floats(floats)[f"{DOWN}.weight"]
    difference = weights[DOWN].astype(np.float64) - original
    assert tensor.fidelity is not None
    assert tensor.fidelity.nmse == pytest.approx(np.square(difference).sum() / np.square(original).sum(), rel=1e-4)
    assert tensor.largest_difference == pytest.approx(np.abs(difference).max(), rel=1e-4)
    assert tensor.outcome == FLOAT
    assert report.as_dict()["format"] == "float"


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_of_its_weights_as_floats_is_equal_in_both_directions(name, floats, tmp_path):
    weights = stored_weights(FORMATS[name](tmp_path / "q", floats))
    same = dequantized(tmp_path / "same", floats, weights)
    for report in (bridge.verify(tmp_path / "q", same), bridge.verify(same, tmp_path / "q")):
        assert failures(report) == []
        # MLX adds an offset where the reader subtracts a zero point: a rounding of float32 is between them
        assert len(failures(report, exact=True)) == (28 if name == "mlx" else 0)
    assert (report.total() is None) == (name == "fp8")


def test_formats_with_the_same_codes_are_equal_with_all_codes_kept(gptq, floats, tmp_path):
    write_awq(tmp_path / "awq", floats)
    compressed.write_packed(tmp_path / "ct", floats, 4, sym=False)
    for other in ("awq", "ct"):
        report = bridge.verify(tmp_path / other, gptq)
        assert failures(report, exact=True) == []
        total = report.total()
        assert total is not None
        assert total.kept == total.weights
        assert {t.outcome for t in report.tensors if t.fidelity} == {CARRIED}
        assert {t.type for t in report.tensors if t.fidelity} == {"4 bits"}


def test_rounded_codes_add_a_share_of_the_references_noise(gptq, floats, tmp_path):
    weights = stored_weights(write_gptq(tmp_path / "three", floats, bits=3))
    report = bridge.verify(tmp_path / "three", gptq)
    tensor = by_source(report)[f"{DOWN}.weight"]
    with bridge.open_checkpoint(gptq) as ckpt:
        reference = ckpt.read_module(DOWN)
    error = np.square(weights[DOWN].astype(np.float64) - reference.dequantize()).sum()
    assert tensor.fidelity is not None
    assert tensor.fidelity.share == pytest.approx(error / reference.noise(), rel=1e-4)
    assert tensor.outcome == REQUANTIZED
    assert tensor.notes[0].startswith("blk.1.ffn_down.weight: codes not kept, the other has others; adds ")
    assert len(failures(report)) == 28
    assert failures(report, max_share=100) == []


def test_one_damaged_code_is_found_in_its_tensor_whatever_the_share(gptq, tmp_path):
    damaged = copied(gptq, tmp_path / "damaged", changed_byte(f"{DOWN}.qweight", 300))
    report = bridge.verify(damaged, gptq)
    [line] = failures(report, max_share=100)
    assert line.startswith(
        "blk.1.ffn_down.weight: 0.00051% of its codes are not the checkpoint's, though all others are"
    )
    [note] = by_source(report)[f"{DOWN}.weight"].notes
    assert "of its codes kept, all but 1, with the same scales; adds " in note


def test_one_damaged_scale_or_float_is_found_in_its_tensor_by_exact(gptq, tmp_path):
    for name, tensor in ((f"{DOWN}.scales", "blk.1.ffn_down"), ("model.embed_tokens.weight", "token_embd")):
        damaged = copied(gptq, tmp_path / tensor, changed_byte(name))
        report = bridge.verify(damaged, gptq)
        [line] = failures(report, exact=True)
        assert line.startswith(f"{tensor}.weight: is not equal: weights differ by up to ")
    [note] = by_source(bridge.verify(tmp_path / "blk.1.ffn_down", gptq))[f"{DOWN}.weight"].notes
    assert "100% of its codes kept, with other scales" in note


def test_act_order_is_compared_with_the_same_rows_in_order(floats, tmp_path):
    write_gptq(tmp_path / "ordered", floats, desc_act=True)
    bridge.convert(floats, tmp_path / "floats.gguf", type="F16")
    bridge.convert(tmp_path / "ordered", tmp_path / "ordered.gguf")
    # rows as `convert` permutes them, and as a GGUF of the original model has them
    assert failures(bridge.verify(tmp_path / "ordered.gguf", tmp_path / "ordered")) == []
    plain = bridge.verify(tmp_path / "floats.gguf", tmp_path / "ordered")
    assert max(t.fidelity.nmse for t in plain.tensors if t.fidelity) < 0.02
    for gguf in ("ordered.gguf", "floats.gguf"):
        report = bridge.verify(tmp_path / "ordered", tmp_path / gguf)
        assert max(t.fidelity.nmse for t in report.tensors if t.fidelity) < 0.02


def test_a_layer_is_not_kept_once_it_has_been_compared(gptq):
    """Not until Python collects cycles, which it does by the number of objects, however large they are."""
    with bridge.open_checkpoint(gptq) as ckpt:
        tensor = next(t for t in outline_of(ckpt, "default").tensors if t.source == f"{DOWN}.weight")
        gc.disable()
        try:
            rows = PartRows(PartReader(ckpt), tensor)
            rows.values(0, 1)
            reference = weakref.ref(rows)
            del rows
            assert reference() is None
        finally:
            gc.enable()


def test_a_repacked_checkpoint_whose_act_order_was_undone_has_the_same_rows_in_order(floats, tmp_path):
    write_gptq(tmp_path / "ordered", floats, desc_act=True)
    bridge.repack(tmp_path / "ordered", tmp_path / "mlx", "mlx")
    for pair in (("mlx", "ordered"), ("ordered", "mlx"), ("ordered", "ordered")):
        report = bridge.verify(*(tmp_path / name for name in pair))
        assert max(t.fidelity.nmse for t in report.tensors if t.fidelity) < 0.005
        assert by_source(report)[f"{DOWN}.weight"].outcome == CARRIED
    assert failures(report, exact=True) == []


@pytest.mark.parametrize("name", ["llama-gptq-4bit-g128-asym-actorder", "qwen3-awq-4bit-g128-gemm"])
def test_a_checkpoint_is_compared_with_its_own_gguf_as_the_reference(name, tmp_path):
    """Llama's GGUFs have the rows of q and k in another order."""
    folder = shared(f"checkpoints/{name}")
    bridge.convert(folder, tmp_path / "f32.gguf", type="F32")
    assert failures(bridge.verify(folder, tmp_path / "f32.gguf"), exact=True) == []
    bridge.convert(folder, tmp_path / "m.gguf")
    assert failures(bridge.verify(folder, tmp_path / "m.gguf")) == []


def test_an_export_has_the_codes_of_the_gguf_and_adds_to_its_noise_what_its_scales_lose(floats, tmp_path):
    bridge.convert(floats, tmp_path / "m.gguf", type="Q6_K", token_embd_type="F16")
    bridge.export(tmp_path / "m.gguf", tmp_path / "hqq", "hqq")
    report = bridge.verify(tmp_path / "hqq", tmp_path / "m.gguf")
    assert failures(report) == []
    coded = [t for t in report.tensors if t.outcome == CARRIED]
    assert len(coded) == 28
    assert all(t.fidelity is not None and 0 < t.fidelity.share < 1e-3 for t in coded)
    bridge.export(tmp_path / "m.gguf", tmp_path / "coarse", "gptq", bits=4)
    assert len(failures(bridge.verify(tmp_path / "coarse", tmp_path / "m.gguf"))) == 28


def test_two_ggufs_of_other_types_and_shards(floats, tmp_path):
    for type in ("Q8_0", "Q4_K"):
        bridge.convert(floats, tmp_path / f"{type}.gguf", type=type, split_max_size=1_000_000)
    first = {type: next(tmp_path.glob(f"{type}-00001-*")) for type in ("Q8_0", "Q4_K")}
    assert failures(bridge.verify(first["Q4_K"], first["Q4_K"]), exact=True) == []
    report = bridge.verify(first["Q4_K"], first["Q8_0"])
    assert len(report.outputs) > 1
    assert len(failures(report)) == 29  # of them the embeddings
    assert failures(report, max_nmse=0.01) == []


def test_the_scale_of_a_matrix_counts_on_both_sides(floats, tmp_path):
    """NVFP4's is a tensor by itself."""
    fp4.write_modelopt(tmp_path / "nvfp4", floats)
    bridge.convert(tmp_path / "nvfp4", tmp_path / "nvfp4.gguf")
    bridge.convert(tmp_path / "nvfp4", tmp_path / "f32.gguf", type="F32")
    for pair in (("nvfp4.gguf", "nvfp4.gguf"), ("nvfp4.gguf", "f32.gguf"), ("f32.gguf", "nvfp4.gguf")):
        assert failures(bridge.verify(*(tmp_path / name for name in pair))) == []
    coded = bridge.verify(tmp_path / "nvfp4", tmp_path / "nvfp4.gguf")
    assert {t.largest_difference for t in coded.tensors if t.kind == "ffn_up"} == {0}


def test_a_head_that_is_stored_is_compared_with_the_embeddings_that_another_ties_it_to(floats, tmp_path):
    def untie(tensors: Raw) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    untied = copied(floats, tmp_path / "untied", untie)
    config = json.loads((untied / "config.json").read_text())
    (untied / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    for pair in ((untied, floats), (floats, untied)):
        report = bridge.verify(*pair)
        assert failures(report, exact=True) == []
        assert "output.weight: one of the two has it, and is compared with the embeddings of the other" in report.notes
    edit_raw(untied / WEIGHTS, changed_byte("lm_head.weight", 1))
    [line] = failures(bridge.verify(floats, untied), exact=True)
    assert line.startswith("output.weight: is not equal")


def unknown(folder: Path, to: Path) -> Path:
    """A copy that calls itself a model of an unknown family."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, "architectures": ["NewModel"], "model_type": "new"}))
    return to


def test_an_unknown_family_is_compared_by_the_checkpoints_names(gptq, floats, tmp_path):
    new, new_floats = unknown(gptq, tmp_path / "new"), unknown(floats, tmp_path / "floats")

    def prefixed(tensors: Raw) -> None:
        for name in [*tensors]:
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        tensors["model.rotary_emb.inv_freq"] = ({"dtype": "F32", "shape": [1]}, bytes(4))
        tensors["model.scalar"] = ({"dtype": "F32", "shape": []}, bytes(4))

    edit_raw(new_floats / WEIGHTS, prefixed)
    edit_raw(new / WEIGHTS, lambda tensors: tensors.update({"model.scalar": ({"dtype": "F32", "shape": []}, bytes(4))}))
    report = bridge.verify(new, new_floats)
    known = bridge.verify(gptq, floats)
    assert {t.name: t.fidelity.nmse for t in report.tensors if t.fidelity} == {
        str(t.source): t.fidelity.nmse for t in known.tensors if t.fidelity
    }
    assert report.notes[0].startswith("all tensors are compared by the checkpoints' names, since those of a GGUF are")
    assert "unknown architecture NewModel" in report.notes[0]
    assert "model.layers.*.mlp.down_proj" in {t.kind for t in report.tensors}
    bridge.convert(floats, tmp_path / "m.gguf")
    with pytest.raises(BridgeError, match="unknown architecture NewModel"):
        bridge.verify(new, tmp_path / "m.gguf")


def test_tensors_that_one_side_lacks_are_one_error_or_a_note(floats, gptq, tmp_path):
    def drop(tensors: Raw) -> None:
        for name in [name for name in tensors if ".layers.3." in name]:
            del tensors[name]

    short = copied(gptq, tmp_path / "short", drop)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    names = r"blk\.3\.attn_k\.weight, blk\.3\.attn_k_norm\.weight, blk\.3\.attn_norm\.weight and 8 more"
    with pytest.raises(BridgeError, match=rf"short: {names} of .*floats are missing\. allow_missing=True compares"):
        bridge.verify(short, floats)
    with pytest.raises(BridgeError, match=rf"floats: {names} are not in .*short\. allow_missing=True compares"):
        bridge.verify(floats, short)
    report = bridge.verify(short, floats, allow_missing=True)
    assert len(report.tensors) == 46 - 11
    assert any(note.startswith("not compared: blk.3.attn_k.weight, ") for note in report.notes)


def test_other_architectures_and_sizes_are_refused(gptq, floats, tmp_path):
    other = unknown(floats, tmp_path / "llama")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(
        json.dumps({**config, "architectures": ["MistralForCausalLM"], "model_type": "mistral"})
    )
    edit_raw(
        other / WEIGHTS,
        lambda tensors: [tensors.pop(name) for name in [*tensors] if "_norm.weight" in name and "self_attn" in name],
    )
    with pytest.raises(BridgeError, match=r"llama: is of \w+, .*gptq of qwen3; give two of the same model"):
        bridge.verify(other, gptq)

    def narrow(tensors: Raw) -> None:
        for name in [name for name in tensors if ".mlp." in name]:
            entry, data = tensors[name]
            out, columns = entry["shape"]
            size = [out // 2, columns] if "down" not in name else [out, columns // 2]
            tensors[name] = {**entry, "shape": size}, data[: len(data) // 2]

    small = copied(floats, tmp_path / "small", narrow)
    config = json.loads((small / "config.json").read_text())
    half = config["intermediate_size"] // 2
    (small / "config.json").write_text(json.dumps({**config, "intermediate_size": half}))
    shapes = rf"shape \[{half}, 256\] in .*small, \[{2 * half}, 256\] in .*gptq; they are not of the same model"
    with pytest.raises(BridgeError, match=rf"blk\.0\.ffn_gate\.weight: {shapes}"):
        bridge.verify(small, gptq)


def test_what_is_for_a_gguf_is_refused_for_a_checkpoint(gptq, tmp_path):
    (tmp_path / "t.txt").write_text("Once upon a time")
    for name in ("mtp_text", "mmproj"):
        with pytest.raises(BridgeError, match=f"{name}.*: is for a GGUF, and .*gptq is a checkpoint; leave it out"):
            bridge.verify(gptq, gptq, **{name: tmp_path / "t.txt"})  # type: ignore[arg-type]


def test_progress_counts_the_bytes_of_both(gptq, floats):
    seen: list[tuple[int, int, str]] = []
    bridge.verify(gptq, floats, progress=lambda *step: seen.append(step))
    with bridge.open_checkpoint(gptq) as first, bridge.open_checkpoint(floats) as second:
        assert seen[0] == (0, first.nbytes + second.nbytes, "")
        assert seen[-1] == (first.nbytes + second.nbytes, first.nbytes + second.nbytes, "output_norm.weight")


TEXT = "Once upon a time there was a king, and the king had a daughter. " * 20


def test_both_predict_a_text(gptq, floats, tmp_path):
    """As F32 GGUFs of both do, without rounding of activations."""
    (tmp_path / "t.txt").write_text(TEXT)
    steps: list[tuple[int, int, str]] = []
    report = bridge.verify(
        gptq, floats, text=tmp_path / "t.txt", window=32, n_windows=2, text_progress=lambda *step: steps.append(step)
    )
    found = report.predictions
    assert found is not None
    assert found.divergence is not None
    models = []
    for name, folder in (("gptq", gptq), ("floats", floats)):
        bridge.convert(folder, tmp_path / f"{name}.gguf", type="F32")
        models.append(bridge.Model.load(tmp_path / f"{name}.gguf", precision="f32", kv="f32"))
    tokens = models[0].tokenizer.encode(TEXT)[:64]
    divergences, same = [], []
    for window in (tokens[:32], tokens[32:]):
        first, second = (model.logits(window)[16:-1].astype(np.float64) for model in models)
        first, second = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (first, second))
        divergences.append((np.exp(second) * (second - first)).sum(-1))
        same.append(first.argmax(-1) == second.argmax(-1))
    assert found.divergence.mean == pytest.approx(np.concatenate(divergences).mean(), rel=1e-3)
    assert found.divergence.same_top == pytest.approx(np.concatenate(same).mean())
    assert found.tokens == np.concatenate(same).size
    assert steps[-1][:2] == (2, 2)
    assert report.as_dict()["predictions"]["divergence"]["mean"] == found.divergence.mean
    assert f"KL divergence from the reference {found.divergence.mean:.6f} +- " in report.table()


def test_a_gguf_predicts_as_the_checkpoint_whose_codes_it_has(gptq, tmp_path):
    (tmp_path / "t.txt").write_text(TEXT)
    bridge.convert(gptq, tmp_path / "m.gguf", type="F32")
    for pair in ((gptq, tmp_path / "m.gguf"), (tmp_path / "m.gguf", gptq), (tmp_path / "m.gguf", tmp_path / "m.gguf")):
        found = bridge.verify(*pair, text=tmp_path / "t.txt", window=32, n_windows=1).predictions
        assert found is not None
        assert found.divergence is not None
        assert (found.divergence.mean, found.divergence.same_top) == (0, 1)


def test_texts_that_cannot_be_tried_are_refused(gptq, floats, tmp_path):
    with pytest.raises(BridgeError, match="nowhere"):
        bridge.verify(gptq, floats, text=tmp_path / "nowhere.txt")
    (tmp_path / "t.txt").write_text("Once")
    with pytest.raises(BridgeError, match=r"the text has \d+ tokens, 0 windows of 256; 1 needed"):
        bridge.verify(gptq, floats, text=tmp_path / "t.txt")
    (tmp_path / "t.txt").write_text(TEXT)
    new = unknown(floats, tmp_path / "new")
    with pytest.raises(BridgeError, match="unknown architecture NewModel"):
        bridge.verify(new, new, text=tmp_path / "t.txt")
