"""GGUF files through transformers' own front doors: from_pretrained, generate, pipeline, save_pretrained."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bridge
from bridge.errors import BridgeError
from bridge.runtime.tokenizer import Tokenizer
from tests.support.tiny_models import save_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("accelerate")  # transformers asks for it where a GGUF is loaded

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from bridge.nn import QuantEmbedding, QuantExperts, QuantLinear  # noqa: E402
from bridge.transformers import PackedConfig  # noqa: E402

# one that transformers maps, one that it does not, a mixture of experts, and one with tied embeddings
KINDS = {
    "llama": ("LlamaConfig", {}),
    "granite": ("GraniteConfig", {"embedding_multiplier": 3.0, "logits_scaling": 2.0}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3": ("Qwen3Config", {"head_dim": 64, "tie_word_embeddings": True}),
}
TOKENS = torch.tensor([[5, 7, 11, 2, 30, 100]])
GREEDY = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            name, fields = KINDS[kind]
            root = tmp_path_factory.mktemp(kind)
            checkpoint = save_model(root / "checkpoint", name, vocab_size=2048, num_hidden_layers=1, **fields)
            bridge.convert(checkpoint, root / "m.gguf", tensor_types=[(".*", "Q8_0")])
            made[kind] = root
        return made[kind]

    return folder


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file="m.gguf", **options)


@pytest.mark.parametrize("kind", KINDS)
def test_from_pretrained_keeps_the_weights_packed(kind: str, folders: Any) -> None:
    model, told = load(folders(kind), quantization_config=PackedConfig("f32"), output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    kinds = {type(module) for module in model.modules()}
    assert {QuantLinear, QuantEmbedding} <= kinds
    assert (QuantExperts in kinds) == (kind == "mixtral")
    assert max(p.numel() for p in model.parameters()) < 2048
    with torch.no_grad():
        own = AutoModelForCausalLM.from_pretrained(folders(kind) / "checkpoint", dtype=torch.float32)(TOKENS).logits
        assert (model(TOKENS).logits - own).norm() < 0.05 * own.norm()  # what Q8_0 costs
        assert model.generate(TOKENS, **GREEDY).shape[1] <= 12
    assert model.generation_config.eos_token_id


def test_a_model_is_loaded_without_its_vocabularys_index(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes 50 MB for 128,000 tokens, and AutoTokenizer makes its own."""
    ends = sorted(Tokenizer(bridge.open_gguf(folders("llama") / "m.gguf").metadata).stops)

    def made(self: Tokenizer, metadata: Any) -> None:
        raise AssertionError("a tokenizer was made")

    monkeypatch.setattr(Tokenizer, "__init__", made)
    assert load(folders("llama")).generation_config.eos_token_id == ends


IMPORTED = """
import sys
import transformers.models.llama.modeling_llama, transformers.generation.utils
before = set(sys.modules)
import bridge.transformers
print(*{name.partition(".")[0] for name in sys.modules.keys() - before} - sys.stdlib_module_names)
print(*{name for name in sys.modules.keys() - before if name.count(".") == 1 and name.startswith("bridge.")})
"""


@pytest.mark.exhaustive
def test_the_import_adds_no_more_than_the_kernels_and_the_table_of_models() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    others, own = (set(line.split()) for line in done.stdout.splitlines())
    assert "numba" in others
    parts = {"bridge", "gguf", "llvmlite", "numba", "numpy", "sentencepiece", "tokenizers", "transformers", "yaml"}
    assert others <= parts
    assert not own & {f"bridge.{part}" for part in ("cli", "conversion", "cuda", "encode", "quantize", "serve")}


def test_a_batch_with_padding_is_generated_as_each_by_itself(folders: Any) -> None:
    model = load(folders("llama"), quantization_config=PackedConfig("f32"))
    how = {**GREEDY, "eos_token_id": None, "pad_token_id": 0}
    batch = torch.cat([TOKENS, torch.tensor([[0, 0, 0, 5, 7, 11]])])
    mask = torch.tensor([[1] * 6, [0] * 3 + [1] * 3])
    found = model.generate(batch, attention_mask=mask, **how)
    assert found[0].tolist() == model.generate(TOKENS, **how)[0].tolist()
    assert found[1, 6:].tolist() == model.generate(TOKENS[:, [0, 1, 2]], **how)[0, 3:].tolist()


def test_another_model_assists(folders: Any) -> None:
    model = load(folders("llama"), quantization_config=PackedConfig("f32"))
    helper = load(folders("qwen3"), quantization_config=PackedConfig("f32"))
    how = {**GREEDY, "eos_token_id": None, "pad_token_id": 0}
    assert model.generate(TOKENS, assistant_model=helper, **how).tolist() == model.generate(TOKENS, **how).tolist()


def test_the_tokenizer_cuts_as_llama_cpp_does_and_a_pipeline_chats(folders: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folders("granite"), gguf_file="m.gguf")
    ours = Tokenizer(bridge.open_gguf(folders("granite") / "m.gguf").metadata)
    for text in ("Hello, w\u00f6rld 12345", "  two\n\n  lines don't"):
        assert tokenizer(text)["input_ids"] == ours.encode(text)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    chat = transformers.pipeline("text-generation", model=load(folders("granite")), tokenizer=tokenizer)
    (reply,) = chat([{"role": "user", "content": "Hello"}], max_new_tokens=4, do_sample=False)
    assert [message["role"] for message in reply["generated_text"]] == ["user", "assistant"]


def test_what_is_saved_is_loaded_again(folders: Any, tmp_path: Path) -> None:
    model = load(folders("mixtral"))
    model.save_pretrained(tmp_path / "saved")
    names = sorted(file.name for file in (tmp_path / "saved").iterdir())
    assert names == ["config.json", "generation_config.json", "m.gguf"]
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path / "saved")(TOKENS).logits, model(TOKENS).logits)
    with pytest.raises(BridgeError, match="push_to_hub does not take GGUF files"):
        model.save_pretrained(tmp_path / "saved", push_to_hub=True)


def test_floats_and_other_architectures_are_left_to_transformers(folders: Any) -> None:
    model = load(folders("llama"), quantization_config=transformers.GgufConfig(dequantize=True))
    assert not [m for m in model.modules() if isinstance(m, QuantLinear)]
    with pytest.raises(BridgeError, match="unknown precision 'int4'"):
        PackedConfig("int4")
