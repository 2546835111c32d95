"""Adapters of mixtures of experts: of stacks, as PEFT has them with transformers 5, and of each expert's layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.errors import BridgeError
from scripts.peers.llama.llama_cpp import LlamaCpp
from tests.conversion.test_lora import tensors_of
from tests.models.test_logits import divergence, reference_logits
from tests.support.adapters import Arrays, low_rank, of_stacks, write_adapter
from tests.support.encode import write_awq, write_gptq
from tests.support.family_models import copy_tokenizer, new_model, randomized

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch

from tests.support.tiny_models import dequantized, predict, save_model

TOKENS = np.random.default_rng(1).integers(3, 300, 40).tolist()
FLOATS = [(".*", "F32")]
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
QWEN3 = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "head_dim": 32,
         "norm_topk_prob": True}  # fmt: skip
SELDOM = [pytest.mark.exhaustive]
FAMILIES = [
    "gpt-oss", "llama4", "gemma4-moe",
    *(
        pytest.param(name, marks=SELDOM)
        for name in ("qwen3.5-moe", "deepseek3", "qwen3-next", "jamba", "lfm2-moe", "granite-moe", "nemotron-h-moe")
    ),
]  # fmt: skip


def stacks_of(model: Any) -> dict[str, dict[str, tuple[int, int, int]]]:
    """Module -> its stacks of experts, and their shapes."""
    found: dict[str, dict[str, tuple[int, int, int]]] = {}
    for name, parameter in model.named_parameters():
        if ".experts." in name and parameter.ndim == 3:
            found.setdefault(name.rpartition(".")[0], {})[name] = tuple(parameter.shape)
    return found


def says_transposed(model: Any) -> bool:
    return any(getattr(module, "is_transposed", False) for module in model.modules())


def adapt(model: Any, folder: Path, **config: Any) -> Path:
    """An adapter of all stacks of a model, which is changed as PEFT changes it."""
    parameters, tensors = dict(model.named_parameters()), Arrays()
    for seed, stacks in enumerate(stacks_of(model).values()):
        pairs, products = of_stacks(stacks, transposed=says_transposed(model), seed=seed)
        tensors |= pairs
        with torch.no_grad():
            for name, product in products.items():
                parameters[name] += torch.tensor(2 * product)
    targets = sorted({".".join(name.split(".")[-2:]) for name in parameters if ".experts." in name})
    return write_adapter(folder, tensors, target_parameters=targets, **config)


@pytest.mark.parametrize("name", FAMILIES)
def test_base_and_adapter_and_the_merged_file_are_the_adapted_model(name: str, tmp_path: Path) -> None:
    model = randomized(new_model(name))
    model.save_pretrained(tmp_path / "base", save_original_format=True)
    copy_tokenizer(tmp_path / "base")
    before = reference_logits(model, TOKENS)
    adapter = adapt(model, tmp_path / "adapter")
    expected = reference_logits(model, TOKENS)
    base, merged, lora = (tmp_path / f"{part}.gguf" for part in ("base-model", "merged", "lora"))
    bridge.convert(tmp_path / "base", base, tensor_types=FLOATS, mmproj_type="none")
    bridge.convert(tmp_path / "base", merged, tensor_types=FLOATS, mmproj_type="none", merge=adapter)
    bridge.convert_lora(adapter, lora, base=tmp_path / "base")
    assert divergence(expected, before) > 0.01
    for path, of_path in ((base, lora), (merged, None)):
        with LlamaCpp(path, n_ctx=64, lora=of_path) as loaded:
            assert divergence(expected, loaded.logits(TOKENS)) < 1e-6
    own = bridge.Model.load(base, lora=lora, precision="f32", kv="f32").logits(TOKENS)
    assert divergence(expected, own) < 1e-6


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model with a module for each expert's matrix, as it is published, and with stacks."""
    folder = tmp_path_factory.mktemp("mixtral")
    return {
        form: save_model(folder / form, "MixtralConfig", original_format=form == "modules", **MIXTRAL)
        for form in ("modules", "stacks")
    }


STACKS = {"gate_up_proj": (4, 512, 256), "down_proj": (4, 256, 256)}


def of_layer(layer: int, **shapes: tuple[int, int, int]) -> tuple[Arrays, Arrays]:
    module = f"model.layers.{layer}.mlp.experts"
    return of_stacks({f"{module}.{name}": shape for name, shape in (shapes or STACKS).items()})


@pytest.mark.parametrize("form", ["modules", "stacks"])
def test_stacks_and_the_layers_of_experts_are_the_same_to_an_adapter(
    form: str, mixtral: dict[str, Path], tmp_path: Path
) -> None:
    """gate and up of the old form have a rank each; PEFT loads it as a stack of twice the rank."""
    old = "model.layers.0.block_sparse_moe.experts.{}.{}"
    shapes = {old.format(expert, part): (256, 256) for expert in range(4) for part in ("w1", "w2", "w3")}
    adapter = write_adapter(tmp_path / "adapter", pairs := low_rank(shapes))
    bridge.convert(mixtral[form], tmp_path / "base.gguf", tensor_types=FLOATS)
    bridge.convert(mixtral[form], tmp_path / "merged.gguf", tensor_types=FLOATS, merge=adapter)
    bridge.convert_lora(adapter, tmp_path / "lora.gguf", base=mixtral[form])
    base, found, lora = (tensors_of(tmp_path / f"{part}.gguf") for part in ("base", "merged", "lora"))
    for name, part in {"gate": "w1", "down": "w2", "up": "w3"}.items():
        tensor = f"blk.0.ffn_{name}_exps.weight"
        modules = [old.format(expert, part) for expert in range(4)]
        product = np.stack([2 * pairs[f"{m}.lora_B.weight"] @ pairs[f"{m}.lora_A.weight"] for m in modules])
        np.testing.assert_allclose(found[tensor], base[tensor] + product, atol=1e-5)
        rank = lora[f"{tensor}.lora_a"].shape[1]
        np.testing.assert_allclose(8 / rank * lora[f"{tensor}.lora_b"] @ lora[f"{tensor}.lora_a"], product, atol=1e-5)
    np.testing.assert_array_equal(found["blk.1.ffn_up_exps.weight"], base["blk.1.ffn_up_exps.weight"])


@pytest.mark.parametrize("rs", [False, True])
def test_patterns_are_compared_with_names_of_parameters(rs: bool, mixtral: dict[str, Path], tmp_path: Path) -> None:
    module = "model.layers.0.mlp.experts"
    pairs, products = of_stacks({f"{module}.down_proj": (4, 256, 256)}, r=2)
    adapter = write_adapter(
        tmp_path / "adapter", pairs, target_parameters=["experts.down_proj"], use_rslora=rs,
        rank_pattern={r".*\.down_proj": 2, "experts": 9}, alpha_pattern={"experts.down_proj": 6},
    )  # fmt: skip
    bridge.convert_lora(adapter, tmp_path / "lora.gguf", base=mixtral["modules"])
    lora = tensors_of(tmp_path / "lora.gguf")
    a, b = (lora[f"blk.0.ffn_down_exps.weight.lora_{part}"] for part in "ab")
    alpha = 8 * 4**0.5 if rs else 8
    expected = 6 / (2**0.5 if rs else 2) * products[f"{module}.down_proj"]
    np.testing.assert_allclose(alpha / 2 * b @ a, expected, rtol=1e-4, atol=1e-5)


def test_a_router_that_is_a_parameter_is_a_matrix(mixtral: dict[str, Path], tmp_path: Path) -> None:
    """Its name is another one in the published file."""
    pairs = low_rank({"model.layers.0.mlp.gate": (4, 256)}, r=2)
    adapter = write_adapter(
        tmp_path / "adapter", pairs, target_parameters=["mlp.gate.weight"], rank_pattern={"gate.weight": 2}
    )
    bridge.convert_lora(adapter, tmp_path / "lora.gguf", base=mixtral["modules"])
    found = tensors_of(tmp_path / "lora.gguf")
    np.testing.assert_array_equal(
        found["blk.0.ffn_gate_inp.weight.lora_a"], pairs["model.layers.0.mlp.gate.lora_A.weight"]
    )


@pytest.mark.parametrize("form", ["modules", "stacks"])
def test_one_expert_alone_and_what_was_saved_whole_are_merged(
    form: str, mixtral: dict[str, Path], tmp_path: Path
) -> None:
    pairs, products = of_layer(0)
    for name, values in pairs.items():
        if ".lora_B." in name:
            values.reshape(len(values), -1, 4)[:, :, :3] = 0
    router = np.random.default_rng(0).normal(size=(4, 256)).astype(np.float32)
    adapter = write_adapter(
        tmp_path / "adapter", pairs | {"model.layers.1.mlp.gate.weight": router},
        target_parameters=["gate_up_proj", "down_proj"],
    )  # fmt: skip
    bridge.convert(mixtral[form], tmp_path / "base.gguf", tensor_types=FLOATS)
    bridge.convert(mixtral[form], tmp_path / "merged.gguf", tensor_types=FLOATS, merge=adapter)
    base, found = (tensors_of(tmp_path / f"{part}.gguf") for part in ("base", "merged"))
    down = "blk.0.ffn_down_exps.weight"
    np.testing.assert_array_equal(found[down][:3], base[down][:3])
    product = 2 * products["model.layers.0.mlp.experts.down_proj"][3]
    np.testing.assert_allclose(found[down][3], base[down][3] + product, atol=1e-5)
    np.testing.assert_array_equal(found["blk.1.ffn_gate_inp.weight"], router)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_square_matrix_alone_is_read_as_peft_makes_it(transposed: bool, tmp_path: Path) -> None:
    """PEFT takes the inputs of Llama 4's stacks for outputs, not of gpt-oss, which says that they are transposed."""
    name = "gpt-oss" if transposed else "llama4"
    model = randomized(new_model(name, intermediate_size=32, **({} if transposed else {"intermediate_size_mlp": 64})))
    assert says_transposed(model) == transposed
    model.save_pretrained(tmp_path / "base", save_original_format=True)
    copy_tokenizer(tmp_path / "base")
    module, stacks = next(iter(stacks_of(model).items()))
    down = f"{module}.down_proj"
    assert stacks[down][1] == stacks[down][2]
    pairs, products = of_stacks({down: stacks[down]}, transposed=transposed)
    adapter = write_adapter(tmp_path / "adapter", pairs, target_parameters=["experts.down_proj"])
    bridge.convert(tmp_path / "base", tmp_path / "m.gguf", tensor_types=FLOATS, merge=adapter)
    layer = module.split(".")[module.split(".").index("layers") + 1]
    expected = dict(model.named_parameters())[down].detach().numpy() + 2 * products[down]
    found = tensors_of(tmp_path / "m.gguf")[f"blk.{layer}.ffn_down_exps.weight"]
    np.testing.assert_allclose(found, expected.transpose(0, 2, 1), atol=1e-5)


@pytest.mark.parametrize("form", ["gptq", "gptq, act-order", "awq"])
def test_experts_of_codes_take_a_change_and_those_without_one_keep_their_codes(form: str, tmp_path: Path) -> None:
    """PEFT cannot merge into these. Expert 2 of layer 0 was never chosen, layer 1 is not changed."""
    model = save_model(tmp_path / "model", "Qwen3MoeConfig", **QWEN3)
    base = tmp_path / "base"
    stored = write_awq(base, model) if form == "awq" else write_gptq(base, model, desc_act="act" in form)
    pairs, products = of_layer(0, gate_up_proj=(3, 512, 256), down_proj=(3, 256, 256))
    for name, values in pairs.items():
        if ".lora_B." in name:
            values.reshape(len(values), -1, 3)[:, :, 2] = 0
    adapter = write_adapter(tmp_path / "adapter", pairs, target_parameters=["gate_up_proj", "down_proj"])
    before = {t.name: t for t in bridge.convert(base, tmp_path / "base.gguf").tensors}
    report = bridge.convert(base, tmp_path / "m.gguf", merge=adapter)
    old, new = (bridge.open_gguf(tmp_path / f"{part}.gguf") for part in ("base", "m"))
    touched = {f"blk.0.ffn_{part}_exps.weight" for part in ("gate", "up", "down")}
    coded = sum(q.dequantize().size for q in stored.values())
    kept = 100 * (coded - 6 * 256 * 256) / coded
    assert any(f"6 of them were codes and are requantized, the report has their errors; {kept:.1f}%" in note
               for note in report.notes)  # fmt: skip
    for t in report.tensors:
        if t.name in touched:
            assert t.fidelity is not None
            assert t.fidelity.nmse < 1e-2
        else:
            assert (t.type, t.outcome) == (before[t.name].type, before[t.name].outcome)
            assert np.array_equal(old[t.name].raw, new[t.name].raw)
    for name in touched if form != "gptq, act-order" else ():  # act-order's rows are in another order
        if new[name].type == old[name].type:
            assert np.array_equal(new[name][2].raw, old[name][2].raw)
    floats = {}
    for name, product in products.items():
        module, _, part = name.rpartition(".")
        halves = {"gate_proj": product[:, :256], "up_proj": product[:, 256:]} if part == "gate_up_proj" else {}
        for each, values in (halves or {part: product}).items():
            floats |= {f"{module}.{expert}.{each}": 2 * values[expert] for expert in range(2)}
    changed = {name: Changed(q, floats.get(name)) for name, q in stored.items()}
    expected = predict(dequantized(tmp_path / "reference", model, changed), TOKENS)  # type: ignore[arg-type]
    bridge.convert(base, tmp_path / "f.gguf", tensor_types=FLOATS, merge=adapter)
    with LlamaCpp(tmp_path / "f.gguf", n_ctx=64) as loaded:
        assert divergence(expected, loaded.logits(TOKENS)) < 1e-6


class Changed:
    """A quantized matrix with a change."""

    def __init__(self, stored: Any, change: np.ndarray | None) -> None:
        self._stored, self._change = stored, change

    def dequantize(self) -> np.ndarray:
        weights: np.ndarray = self._stored.dequantize()
        return weights if self._change is None else weights + self._change


def stack_pairs(**sides: tuple[int, int]) -> Arrays:
    """lora_A and lora_B of these sides [rows of A, in], [out, columns of B] for the experts of layer 0."""
    module = "model.layers.0.mlp.experts"
    (a, b) = sides["a"], sides["b"]
    return {f"{module}.lora_A.weight": np.ones(a, np.float32), f"{module}.lora_B.weight": np.ones(b, np.float32)}


REFUSED: dict[str, tuple[Arrays, dict[str, Any], str]] = {
    "another number of experts": (
        stack_pairs(a=(8 * 4, 256), b=(512, 8 * 4)), {},
        r"gate_up_proj has lora_A \[32, 256\], must have 16 rows, rank 4 for each of 4 experts of the base",
    ),
    "another rank": (
        stack_pairs(a=(4 * 4, 256), b=(512, 4 * 4)), {"r": 8}, r"must have 32 rows, rank 8 for each of 4 experts"
    ),
    "other shapes": (
        stack_pairs(a=(4 * 4, 128), b=(512, 4 * 4)), {},
        r"lora_A \[16, 128\] and lora_B \[512, 16\], which do not fit the base checkpoint's gate_up_proj of 4 experts",
    ),
    "one parameter twice": (
        stack_pairs(a=(4 * 4, 256), b=(512, 4 * 4))
        | {n.replace("experts", "experts.base_layer"): w
           for n, w in stack_pairs(a=(4 * 4, 256), b=(512, 4 * 4)).items()}, {},
        "which do not fit the base checkpoint's",
    ),
    "matrices that do not multiply": (stack_pairs(a=(16, 256), b=(512, 12)), {}, "must be two matrices"),
    "a parameter that is no expert's": (
        {"model.layers.0.conv.lora_A.weight": np.ones((8, 3), "f4"), "model.layers.0.conv.lora_B.weight":
         np.ones((2, 8), "f4")}, {"target_parameters": ["conv.weight"]}, "that are neither matrices nor experts",
    ),
    "an expert that is missing": (
        low_rank({"model.layers.0.mlp.experts.4.w1": (256, 256)}), {}, r"changes .*experts\.4\.w1, which the base",
    ),
    "the old form with another shape": (
        low_rank({"model.layers.0.block_sparse_moe.experts.3.w1": (256, 128)}), {},
        r"experts\.3\.w1 is a change of shape \[256, 128\], the base checkpoint has \[256, 256\]",
    ),
    "parameters that are no list": (
        stack_pairs(a=(16, 256), b=(512, 16)), {"target_parameters": "down_proj"}, "must be a list of names"
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_experts_that_do_not_fit_are_refused_in_a_sentence(why: str, mixtral: dict[str, Path], tmp_path: Path) -> None:
    tensors, config, message = REFUSED[why]
    adapter = write_adapter(
        tmp_path / "adapter", tensors, **{"target_parameters": ["gate_up_proj", "down_proj"], **config}
    )
    with pytest.raises(BridgeError, match=message):
        bridge.convert_lora(adapter, tmp_path / "lora.gguf", base=mixtral["modules"])
    with pytest.raises(BridgeError, match=message):
        bridge.convert(mixtral["stacks"], tmp_path / "m.gguf", merge=adapter)
