"""Vision towers, against what `convert_hf_to_gguf.py --mmproj` of llama.cpp makes of them (tests/data/towers).

A golden has config.json, the checkpoint's names and shapes, and of the converter's files in F16 and Q8_0 the keys and
every tensor with its shape, type and a checksum of its bytes. `tests.support.make_towers` wrote them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import bridge
from bridge.cli import main
from bridge.conversion.converter import plan_checkpoint
from bridge.conversion.writing.verify import failures
from bridge.errors import BridgeError
from bridge.models.towers import ALL
from tests.conftest import CHECKPOINT
from tests.support.encode import write_gptq
from tests.support.family_models import randomized
from tests.support.make_families import plain, values_of
from tests.support.make_towers import (
    GOLDENS,
    PROCESSOR,
    add_processor,
    digest,
    digest_of,
    new_model,
    save_checkpoint,
)

NAMES = sorted(path.stem for path in GOLDENS.glob("*.json"))
BREAK = "v.token_embd.img_break"  # llama.cpp's loader demands it, its converter leaves it out


def golden_of(name: str) -> dict[str, Any]:
    return dict(json.loads((GOLDENS / f"{name}.json").read_text()))


def write_checkpoint(golden: dict[str, Any], folder: Path, scale: float = 1) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(golden["config"]))
    values = {n: np.asarray(values_of(n, tuple(s)) * scale, np.float32) for n, s in golden["checkpoint"].items()}
    save_file(values, folder / "model.safetensors")
    return add_processor(folder)


def contents(path: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Keys and tensors of a GGUF, as in a golden."""
    reader = gguf.GGUFReader(path)
    keys = {key: plain(field.contents()) for key, field in reader.fields.items()}
    own = ("general.architecture", "general.type", "general.file_type")
    tensors = {t.name: [[int(n) for n in reversed(t.shape)], t.tensor_type.name, digest(t)] for t in reader.tensors}
    return {key: value for key, value in keys.items() if key.startswith("clip.") or key in own}, tensors


@pytest.mark.parametrize("type", ["F16", "Q8_0"])
@pytest.mark.parametrize("name", NAMES)
def test_a_towers_gguf_is_what_llama_cpps_converter_makes_of_it(name: str, type: str, tmp_path: Path) -> None:
    golden = golden_of(name)
    report = bridge.convert(write_checkpoint(golden, tmp_path / name), tmp_path / "m.gguf", mmproj_type=type)
    assert report.outputs == [tmp_path / "m.gguf", tmp_path / "mmproj-m.gguf"]
    keys, tensors = contents(report.outputs[1])
    assert keys == golden[f"{type} keys"]
    if (end := tensors.pop(BREAK, None)) is not None:
        table = values_of("language_model.model.embed_tokens.weight", (2048, 32))
        assert end[2] == digest_of(table[2047])
    rounded = {t.name: t for t in gguf.GGUFReader(report.outputs[1]).tensors if t.tensor_type.name == "Q8_0"}
    ours = {name for name in tensors if name in rounded or name.endswith("per_dim_scale.weight")}
    expected = {
        name: [*entry[:2], tensors[name][2] if name in ours else entry[2]]
        for name, entry in golden[f"{type} tensors"].items()
    }
    assert tensors == expected
    if rounded:  # the converter's own rounding is simpler
        bridge.convert(tmp_path / name, tmp_path / "f.gguf", mmproj_type="F32")
        floats = {t.name: np.array(t.data) for t in gguf.GGUFReader(tmp_path / "mmproj-f.gguf").tensors}
        simple = gguf.GGMLQuantizationType.Q8_0
        for key, t in rounded.items():
            theirs = gguf.quants.dequantize(gguf.quants.quantize(floats[key], simple), simple)
            ours = gguf.quants.dequantize(t.data, simple)
            assert np.square(ours - floats[key]).sum() <= np.square(theirs - floats[key]).sum()


def test_what_scales_sound_is_the_softplus_that_pytorch_rounds_otherwise(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    converted("gemma4-audio", tmp_path)
    tensors = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "mmproj-m.gguf").tensors}
    for layer in (0, 1):
        stored = values_of(f"model.audio_tower.layers.{layer}.self_attn.per_dim_scale", (32,))
        expected = torch.nn.functional.softplus(torch.from_numpy(stored)).numpy()
        np.testing.assert_array_max_ulp(tensors[f"a.blk.{layer}.per_dim_scale.weight"], expected, 2)


def converted(name: str, folder: Path, scale: float = 1, **options: Any) -> Path:
    """The GGUF of a golden's checkpoint."""
    bridge.convert(write_checkpoint(golden_of(name), folder / name, scale), folder / "m.gguf", **options)
    return folder / "m.gguf"


PATCHES_IN_A_ROW = {"pixtral": 4, "mistral3": 3}  # of 56 x 56 pixels, where [IMG_BREAK] ends a row


def patches(name: str, embeddings: np.ndarray) -> np.ndarray:
    """The embeddings of 56 x 56 pixels without those of [IMG_BREAK], which stand between Pixtral's rows of patches.

    llama.cpp adds that to 0 times memory that it has not written to, which may be NaN.
    """
    row = PATCHES_IN_A_ROW.get(name)
    return np.delete(embeddings, slice(row, None, row + 1), axis=0) if row else embeddings


@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_makes_embeddings_of_an_image_with_it(name: str, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    from tests.support.mtmd import image_embeddings

    # with larger weights values pass the largest of F16, to which llama.cpp's attention rounds keys and values
    model = converted(name, tmp_path, 0.25, tensor_types=[(".*", "F32")], mmproj_type="F32")
    image = np.random.default_rng(0).integers(0, 255, (56, 56, 3), dtype=np.uint8)
    width = 32 * (1 + len(golden_of(name)["config"]["vision_config"].get("deepstack_visual_indexes") or []))
    seen = patches(name, image_embeddings(model, tmp_path / "mmproj-m.gguf", image, width))
    assert len(seen) >= 4
    assert np.isfinite(seen).all()
    assert np.ptp(seen, axis=0).max() > 0.1  # patches differ


def without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda golden: golden["checkpoint"].pop(name)


def with_tensor(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda golden: golden["checkpoint"].update({name: [4]})


def with_sound(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda golden: golden["config"]["audio_config"].update({key: value})


def with_key(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda golden: golden["config"]["vision_config"].update({key: value})


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("qwen2.5-vl", without("visual.blocks.2.attn.qkv.weight"), "visual.blocks.2.attn.qkv.weight is missing"),
        ("qwen2.5-vl", without("visual.blocks.2.attn.proj.bias"), "visual.blocks.2.attn.proj.bias is missing"),
        ("qwen3-vl", with_tensor("model.visual.blocks.0.attn.extra"), "visual.blocks.0.attn.extra: the vision tower"),
        ("qwen3-vl", with_key("depth", 3), r"visual.blocks.3.* has no such tensor \(12 in all"),
        ("qwen3-vl", with_key("deepstack_visual_indexes", [9]), "must be a list of layers"),
        ("qwen2.5-vl", with_key("fullatt_block_indexes", [0, 3]), "every n-th layer only"),
        ("mistral3", with_key("hidden_act", "relu"), "hidden_act is 'relu'"),
        ("internvl", with_key("use_qk_norm", True), "use_qk_norm is True"),
        ("gemma4", with_key("rope_parameters", {"rope_theta": 10000.0}), "rope_theta is 10000.0; llama.cpp has 100.0"),
        ("gemma4", with_tensor("model.audio_tower.output_proj.weight"), "audio_tower.output_proj.weight: the vision"),
        ("gemma4-unified", with_sound("audio_embed_dim", 320), "audio_embed_dim is 320; llama.cpp has 640 samples"),
        ("gemma4-unified", without("model.vision_embedder.pos_norm.bias"), "vision_embedder.pos_norm.bias is missing"),
        ("gemma4-audio", without("model.embed_audio.embedding_projection.weight"), "embed_audio.* is missing"),
    ],
)
def test_a_tower_that_does_not_match_its_table_is_refused(
    name: str, change: Callable[[dict[str, Any]], None], problem: str, tmp_path: Path
) -> None:
    golden = golden_of(name)
    change(golden)
    folder = write_checkpoint(golden, tmp_path / name)
    with pytest.raises(BridgeError, match=problem):
        bridge.convert(folder, tmp_path / "m.gguf")
    assert not list(tmp_path.glob("*.gguf"))


def test_what_is_done_to_images_must_be_known(tmp_path: Path) -> None:
    folder = write_checkpoint(golden_of("gemma3"), tmp_path / "gemma3")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(BridgeError, match=r"image_mean is None, must be three numbers; take .* mmproj_type='none'"):
        bridge.convert(folder, tmp_path / "m.gguf")


def test_the_tokens_of_an_image_must_be_known_where_llama_cpp_has_no_default(tmp_path: Path) -> None:
    folder = write_checkpoint(golden_of("glm5-next"), tmp_path / "glm5-next")
    settings = {key: value for key, value in PROCESSOR.items() if key != "max_image_tokens"}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(BridgeError, match=r"max_image_tokens is None, must be a number of tokens; take .*'none'"):
        bridge.convert(folder, tmp_path / "m.gguf")


def test_the_sizes_of_images_must_be_known_where_llama_cpp_has_no_others(tmp_path: Path) -> None:
    folder = write_checkpoint(golden_of("exaone4.5"), tmp_path / "model")
    processor = {**PROCESSOR, "min_pixels": None, "max_pixels": None, "size": {"shortest_edge": 3136}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    with pytest.raises(
        BridgeError, match=r"max_pixels is None, must be a number of pixels; take .* mmproj_type='none'"
    ):
        bridge.convert(folder, tmp_path / "m.gguf")
    processor["size"] = {"shortest_edge": 3136, "longest_edge": 50176}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    bridge.convert(folder, tmp_path / "m.gguf")
    assert bridge.open_gguf(tmp_path / "mmproj-m.gguf").metadata["clip.vision.image_min_pixels"] == 3136


def test_the_tower_can_be_left_out_and_files_are_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_checkpoint(golden_of("gemma3"), tmp_path / "gemma3")
    (tmp_path / "mmproj-m.gguf").write_bytes(b"mine")
    with pytest.raises(BridgeError, match=r"mmproj-m.gguf: exists"):
        bridge.convert(folder, tmp_path / "m.gguf")
    assert main(["convert", str(folder), str(tmp_path / "m.gguf"), "--no-mmproj"]) == 0
    assert (tmp_path / "mmproj-m.gguf").read_bytes() == b"mine"
    said = capsys.readouterr().out
    count = sum("language_model" not in name for name in golden_of("gemma3")["checkpoint"])
    assert f"only the language model is converted: {count} tensors of multi_modal_projector.*, vision_tower.*" in said
    assert "--mmproj-type none leaves out the file (mmproj)" in said


def test_report_modelfile_and_inspect_name_the_tower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(golden_of("gemma3"), tmp_path / "gemma3")
    assert main(["convert", str(folder), str(tmp_path / "m.gguf"), "--modelfile"]) == 0
    said = capsys.readouterr().out
    assert f"wrote {tmp_path / 'mmproj-m.gguf'}" in said
    assert f"llama-mtmd-cli -m {tmp_path / 'm.gguf'} --mmproj {tmp_path / 'mmproj-m.gguf'}" in said
    written = "the vision tower, 71 tensors, is written beside the language model as mmproj-*.gguf (F16)"
    assert written in said
    assert (tmp_path / "Modelfile").read_text().startswith("FROM ./m.gguf\nFROM ./mmproj-m.gguf\n")
    assert main(["inspect", str(folder)]) == 0
    assert written in capsys.readouterr().out


def test_a_plan_holds_the_towers_type_and_the_first_shard_writes_it(tmp_path: Path) -> None:
    folder = write_checkpoint(golden_of("gemma3"), tmp_path / "gemma3")
    plan_checkpoint(folder, out=tmp_path / "plan.json", mmproj_type="Q8_0", split_max_size=100_000)
    for shard in ((2, 2), (1, 2)):
        bridge.convert(out=tmp_path / "m.gguf", plan=tmp_path / "plan.json", shard=shard)
        assert (tmp_path / "mmproj-m.gguf").exists() == (shard == (1, 2))
    _, tensors = contents(tmp_path / "mmproj-m.gguf")
    assert tensors["v.blk.0.ffn_up.weight"][1] == "Q8_0"


def test_verify_compares_the_tower_that_lies_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside a model of several shards too, and a file that is named."""
    folder = write_checkpoint(golden_of("gemma3"), tmp_path / "gemma3")
    bridge.convert(folder, tmp_path / "m.gguf", split_max_size=100_000, mmproj_type="Q8_0")
    first = next(tmp_path.glob("m-00001-*.gguf"))
    names = {t.name for t in bridge.verify(first, folder).tensors}
    assert {"blk.0.attn_q.weight", "v.blk.0.attn_q.weight"} <= names
    tower = (tmp_path / "mmproj-m.gguf").rename(tmp_path / "moved.gguf")
    assert "v.blk.0.attn_q.weight" not in {t.name for t in bridge.verify(first, folder).tensors}
    damaged = next(t for t in gguf.GGUFReader(tower).tensors if t.name == "v.blk.0.ffn_up.weight")
    with tower.open("r+b") as file:
        file.seek(int(damaged.data_offset))
        file.write(bytes(200))
    assert main(["verify", str(first), str(folder), "--mmproj", str(tower)]) == 1
    assert "FAILED v.blk.0.ffn_up.weight" in capsys.readouterr().out
    with pytest.raises(BridgeError, match=r"moved.gguf: is a vision tower's, and .* has none that is known"):
        bridge.verify(converted_text(tmp_path), CHECKPOINT, mmproj=tower)


def test_verify_compares_the_towers_of_two_checkpoints_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under today's names of the parts too; one that was lost is an error, or a note."""
    first = write_checkpoint(golden_of("gemma3"), tmp_path / "first")
    second = write_checkpoint(golden_of("gemma3"), tmp_path / "second")
    tensors = load_file(second / "model.safetensors")
    assert {name.partition(".")[0] for name in tensors} == {"language_model", "vision_tower", "multi_modal_projector"}
    new = {
        f"model.{name}".replace("model.language_model.model.", "model.language_model."): tensors[name]
        for name in tensors
    }
    save_file(new, second / "model.safetensors")
    report = bridge.verify(second, first)
    assert len(report.tensors) == len(tensors)
    assert failures(report, exact=True) == []
    [note] = [note for note in report.notes if note.startswith("compared by the checkpoints' names")]
    assert "multi_modal_projector.mm_input_projection_weight" in note
    name = "model.vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight"
    new[name][1, 2] += 1
    save_file(new, second / "model.safetensors")
    [line] = failures(bridge.verify(second, first))
    assert line.startswith(f"{name.removeprefix('model.')}: NMSE ")
    save_file(
        {name: values for name, values in new.items() if "vision_tower" not in name}, second / "model.safetensors"
    )
    assert main(["verify", str(second), str(first)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(
        r"second: vision_tower\.\S+, \S+, \S+ and \d+ more of \S+first are missing\. --allow-missing", error
    )
    assert main(["verify", str(second), str(first), "--allow-missing", "--exact"]) == 0
    assert "note: not compared: vision_tower." in capsys.readouterr().out
    bridge.convert(first, tmp_path / "m.gguf", mmproj_type="none", type="F32")
    assert any(
        "the GGUF has no place for multi_modal" in note for note in bridge.verify(first, tmp_path / "m.gguf").notes
    )


def converted_text(folder: Path) -> Path:
    bridge.convert(CHECKPOINT, folder / "text.gguf")
    return folder / "text.gguf"


def test_every_tower_has_a_golden() -> None:
    known = {name for golden in NAMES for name in golden_of(golden)["config"]["architectures"]}
    assert not [tower.projector for tower in ALL if known.isdisjoint(tower.architectures)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["gemma3", "pixtral", "minimax-m3", "glm4v-moe", "glm5-next", "exaone4.5"])
def test_llama_cpps_embeddings_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    pytest.importorskip("xllamacpp")
    from tests.support.mtmd import image_embeddings

    model = randomized(new_model(name))
    save_checkpoint(name, tmp_path / name, model)
    bridge.convert(tmp_path / name, tmp_path / "m.gguf", tensor_types=[(".*", "F32")], mmproj_type="F32")
    merged = name in ("minimax-m3", "glm4v-moe", "glm5-next", "exaone4.5")
    side = 84 if merged else 56  # llama.cpp enlarges smaller ones for these
    image = np.random.default_rng(0).integers(0, 255, (side, side, 3), dtype=np.uint8)
    pixels = (image / 255 - PROCESSOR["image_mean"]) / PROCESSOR["image_std"]
    pixels = torch.tensor(pixels.transpose(2, 0, 1)[None], dtype=torch.float32)
    sizes = {"image_sizes": torch.tensor([[56, 56]])} if name == "pixtral" else {}
    if merged:  # two frames of a patch; four patches, which are merged, after each other
        pixels = pixels.reshape(3, 3, 2, 14, 3, 2, 14).permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)
        pixels = pixels.expand(-1, -1, -1, -1, -1, 2, -1, -1).reshape(36, -1)
        sizes = {"image_grid_thw": torch.tensor([[1, 6, 6]])}
    with torch.inference_mode():
        expected = model.model.get_image_features(pixel_values=pixels, **sizes).pooler_output
    expected = torch.cat(list(expected)).reshape(-1, 32).numpy()
    seen = image_embeddings(tmp_path / "m.gguf", tmp_path / "mmproj-m.gguf", image, 32)
    seen = patches(name, seen)
    assert np.abs(seen - expected).max() < 2e-3 * np.abs(expected).max()


def test_the_codes_of_a_quantized_tower_are_carried_to_q8_0(tmp_path: Path) -> None:
    floats = write_checkpoint(golden_of("gemma3"), tmp_path / "floats")
    stored = write_gptq(tmp_path / "gptq", floats, group_size=32)
    add_processor(tmp_path / "gptq")
    module = "vision_tower.vision_model.encoder.layers.0.self_attn.k_proj"
    for type, limit in (("Q8_0", 0.0), ("F16", 1e-3)):
        report = bridge.convert(tmp_path / "gptq", tmp_path / f"{type}.gguf", mmproj_type=type)
        made = {t.name: t for t in gguf.GGUFReader(report.outputs[1]).tensors}["v.blk.0.attn_k.weight"]
        values = gguf.quants.dequantize(made.data, made.tensor_type)
        assert made.tensor_type.name == type
        assert np.abs(values - stored[module].dequantize()).max() <= limit
