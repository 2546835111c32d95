"""What calibrating takes, as it is said beforehand, and that it stays within what was asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bridge.checkpoint import open_checkpoint
from bridge.errors import BridgeError
from bridge.quantize.model import activations, float_model, forward_passes
from bridge.quantize.model.activations import ActivationStore, StoredActivation
from bridge.quantize.model.float_model import FloatModel, arithmetic
from bridge.quantize.model.forward_passes import Passes
from bridge.quantize.run import needs
from bridge.quantize.run.needs import Job, needs_of
from bridge.quantize.settings import Calibration
from bridge.system.cpu.cpus import usable_cpus
from bridge.system.text import duration_text
from tests.support.tiny_models import save_model

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip


def hollow(folder: Path, config: dict[str, Any]) -> Path:
    """A checkpoint in bfloat16 whose file has a header and the size that belongs to it, and no data."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config.get("head_dim", 128)
    heads, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (hidden,)}
    shapes |= {f"{name}.weight": (config["vocab_size"], hidden) for name in ("model.embed_tokens", "lm_head")}
    for i in range(config["num_hidden_layers"]):
        layers = {
            "self_attn.q_proj": (heads, hidden), "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, heads), "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }  # fmt: skip
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layers.items()}
    entries, at = {}, 0
    for name, shape in shapes.items():
        stop = at + 2 * int(np.prod(shape))
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (at, stop)}
        at = stop
    head = json.dumps(entries).encode()
    folder.mkdir()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + at)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def job_of(model: FloatModel, sequences: int = 48, **options: Any) -> Job:
    bits = dict.fromkeys([*model.linears(), *model.embedding_and_head()], 4.5)
    return Job(model, (sequences, 2048), bits, Calibration(**options))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("config", "limit"), [(QWEN3_8B, 12), (LLAMA_70B, 24)], ids=["8B", "70B"])
def test_models_of_real_size_fit_into_a_laptops_memory(
    config: dict[str, Any], limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "resident", lambda: 700 << 20)
    sequences = 8 * config["intermediate_size"] // 2048
    with open_checkpoint(hollow(tmp_path / "model", config)) as ckpt:
        job = job_of(FloatModel(ckpt, torch.bfloat16), sequences)
        found = needs_of(job, limit * 10**9)
        assert found.memory <= limit * 10**9
        assert found.disk > needs_of(job, 200 * 10**9).disk


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("needs") / "model", "LlamaConfig", num_hidden_layers=2)


def test_activations_beyond_the_limit_go_to_disk_and_too_small_a_limit_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "resident", lambda: 0)
    monkeypatch.setattr(needs, "_LATER", 0)
    with open_checkpoint(model) as ckpt:
        job = job_of(FloatModel(ckpt), 64)
        whole = needs_of(job, 1 << 40)
        half = needs_of(job, whole.memory - whole.layers // 2)
        assert whole.memory - half.memory >= whole.layers // 2
        assert half.disk - whole.disk >= whole.layers - half.layers > 0
        doubled = needs_of(replace(job, tokens=(128, 2048)), 1 << 40)
        assert doubled.layers == 2 * whole.layers
        assert doubled.gradients == 2 * whole.gradients
        monkeypatch.setattr(needs, "_rate", lambda dtype: 1e11)
        plain = Calibration(method="imatrix")  # no gradients, products, or float inputs
        one_sided = needs_of(replace(job, settings=plain), 1 << 40)
        unrefined = needs_of(replace(job, settings=replace(plain, sweeps=0)), 1 << 40)
        solved = one_sided.seconds - unrefined.seconds
        weights = sum(rows * n for rows, n in [*job.model.linears().values(), *2 * [job.model.head()[1]]])
        assert solved >= 2 * needs._REFINED * weights / usable_cpus()
        assert needs_of(job, 1 << 40).seconds > one_sided.seconds > unrefined.seconds
        longer = needs_of(replace(job, settings=plain, tokens=(32, 4096)), 1 << 40)
        rows, _ = next(shape for name, shape in job.model.linears().items() if "q_proj" in name)  # heads * head_dim
        more_pairs = 64 * 2048 * 1024  # of tokens in a block; a score and a part of a mean take 4 * rows operations
        expected = needs._ATTENTION * 2 * more_pairs * 4 * rows / 1e11
        assert longer.seconds - one_sided.seconds == pytest.approx(expected)
        assert 2 * one_sided.layers == whole.layers
        assert one_sided.gradients == 0
        assert str(whole).endswith("on this machine")
        monkeypatch.setattr(needs, "free_memory", lambda: 1_000_000)
        assert str(needs_of(job)).endswith("; only 1.0 MB of memory can be had")
        with pytest.raises(BridgeError, match=r"^memory=1000000: too little; .* block by block takes [\d.]+ MB$"):
            needs_of(job, 1_000_000)


def test_a_store_of_activations_keeps_as_much_in_memory_as_it_may(tmp_path: Path) -> None:
    x = torch.randn(8, 64)
    with ActivationStore(tmp_path, 2 * x.nbytes) as store:
        kept = [StoredActivation(x, store) for _ in range(3)]
        assert len(list(tmp_path.glob("*/*.pt"))) == 1
        assert all(torch.equal(own.value(), x) for own in kept)
        kept[0].drop()
        kept.append(StoredActivation(x, store))
        assert len(list(tmp_path.glob("*/*.pt"))) == 1
    assert not list(tmp_path.iterdir())
    with ActivationStore(None, dtype=torch.bfloat16) as store:
        found = StoredActivation(x, store).value()
    assert found.dtype == torch.float32
    assert torch.equal(found, x.bfloat16().float())


def test_memory_without_a_folder_limits_only_what_can_be_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "free_memory", lambda: 1000)
    store = ActivationStore(None)
    assert store.file_for(800) is None
    assert not store.has_room(1)
    store.free(800)
    assert store.has_room(500)


def test_a_checkpoint_in_bfloat16_is_computed_in_it_where_the_cpu_multiplies_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file, save_file

    halved = tmp_path / "model"
    halved.mkdir()
    for file in model.iterdir():
        (halved / file.name).write_bytes(file.read_bytes())
    weights = load_file(model / "model.safetensors")
    save_file({n: w.bfloat16() for n, w in weights.items()}, halved / "model.safetensors", {"format": "pt"})
    for supported in (True, False):
        monkeypatch.setattr(float_model.torch.cpu, "_is_avx512_bf16_supported", lambda own=supported: own)
        monkeypatch.setattr(float_model.torch.cpu, "_is_amx_tile_supported", lambda: False)
        with open_checkpoint(halved) as ckpt, open_checkpoint(model) as other:
            assert arithmetic(ckpt) == (torch.bfloat16 if supported else torch.float32)
            assert arithmetic(other) == torch.float32
    tokens = torch.randint(0, 300, (4, 32), generator=torch.Generator().manual_seed(0))
    found = []
    with open_checkpoint(halved) as ckpt:
        for dtype in (torch.bfloat16, torch.float32):
            own = FloatModel(ckpt, dtype)
            own.load(0)
            weight = own.blocks[0].get_submodule("mlp.up_proj").weight
            assert weight.dtype == dtype
            assert torch.equal(weight.float(), weights["model.layers.0.mlp.up_proj.weight"].bfloat16().float())
            own.drop(0)
            with ActivationStore(None) as store:
                found.append(dict(forward_passes.output_hessians(own, tokens, store)))
    assert found[0].keys() == found[1].keys()
    for name, outputs in found[0].items():
        own, other = outputs.blocks, found[1][name].blocks
        assert own.dtype == torch.float32
        torch.testing.assert_close(own.sum(), other.sum(), rtol=0.5, atol=own.abs().max() * 100)


def test_gradients_of_some_positions_at_a_time_are_those_of_all(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.randint(0, 300, (2, 32), generator=torch.Generator().manual_seed(0))
    found = []
    monkeypatch.setattr(forward_passes, "drawn", lambda p, _: p.argmax(-1, keepdim=True))
    for logits in (1 << 26, 300 * 2 * 5):
        with open_checkpoint(model) as ckpt:
            passes = Passes(FloatModel(ckpt), tokens, 2)
            monkeypatch.setattr(forward_passes, "LOGITS", logits)
            found.append(passes._last_gradients()[0])
    assert found[0].abs().max() > 0
    torch.testing.assert_close(found[0], found[1])


def test_durations_are_said_as_exactly_as_estimates_are() -> None:
    said = {12.3: "12 s", 89: "89 s", 150: "2 min", 5300: "88 min", 3600 * 2.52: "2.5 h", 3600 * 26.4: "26 h"}
    assert {seconds: duration_text(seconds) for seconds in said} == said


def test_layers_with_heads_of_several_sizes_are_counted(tmp_path: Path) -> None:
    """Gemma 4's, of which transformers tells no single size."""
    kinds = ["sliding_attention", "full_attention"]
    folder = save_model(
        tmp_path / "model", "Gemma4TextConfig", layer_types=kinds, sliding_window=32, head_dim=16,
        hidden_size_per_layer_input=0, num_kv_shared_layers=0, per_layer_config={"1": {"head_dim": 32}},
    )  # fmt: skip
    with open_checkpoint(folder) as checkpoint:
        assert needs_of(job_of(FloatModel(checkpoint))).seconds > 0
