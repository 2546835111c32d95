"""`generate` of a packed transformers model on the decoder, beside the same model's modules."""

from copy import deepcopy
from typing import Any

import pytest

import bridge
from bridge.errors import BridgeError
from tests.support.tiny_models import save_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("accelerate")  # transformers asks for it where a GGUF is loaded

from transformers import AutoModelForCausalLM, DynamicCache  # noqa: E402

from bridge.nn import decoder_cache  # noqa: E402
from bridge.nn.decoder_cache import DecoderCache  # noqa: E402
from bridge.transformers import PackedConfig  # noqa: E402

KINDS = {
    "llama": ("LlamaConfig", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 4}),
    "phi3": ("Phi3Config", {"pad_token_id": 0}),  # q, k and v are one matrix: no decoder shares it
}
TOKENS = torch.tensor([[5, 7, 11, 2, 30, 100]])
PADDED = torch.cat([TOKENS, torch.tensor([[0, 0, 0, 5, 7, 11]])])
MASK = torch.tensor([[1] * 6, [0] * 3 + [1] * 3])
HOW = {
    "max_new_tokens": 8,
    "do_sample": False,
    "eos_token_id": None,
    "pad_token_id": 0,
    "return_dict_in_generate": True,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Any] = {}

    def model(kind: str) -> Any:
        if kind not in made:
            name, fields = KINDS[kind]
            root = tmp_path_factory.mktemp(kind)
            save_model(root / "checkpoint", name, vocab_size=512, num_hidden_layers=2, **fields)
            bridge.convert(root / "checkpoint", root / "m.gguf", tensor_types=[(".*", "Q8_0")])
            made[kind] = AutoModelForCausalLM.from_pretrained(
                root, gguf_file="m.gguf", quantization_config=PackedConfig("f32")
            )
        return made[kind]

    return model


def by_modules(model: Any, ids: Any, **options: Any) -> Any:
    return model.generate(ids, past_key_values=DynamicCache(config=model.config), **HOW | options)


@pytest.mark.parametrize("kind", KINDS)
def test_the_decoder_generates_what_the_modules_do(kind: str, models: Any) -> None:
    model = models(kind)
    found = model.generate(TOKENS, output_logits=True, **HOW)
    expected = by_modules(model, TOKENS, output_logits=True)
    assert isinstance(found.past_key_values, DecoderCache) == (kind != "phi3")
    assert found.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}, {"min_p": 0.1}])
def test_padding_beams_and_processors(options: dict[str, Any], models: Any) -> None:
    model = models("llama")
    found = model.generate(PADDED, attention_mask=MASK, **HOW | options)
    expected = by_modules(model, PADDED, attention_mask=MASK, **options)
    assert isinstance(found.past_key_values, DecoderCache)
    assert found.sequences.tolist() == expected.sequences.tolist()


def test_more_rows_than_a_step_takes(models: Any) -> None:
    rows = torch.arange(1, 11)[:, None] + torch.arange(3)
    found, expected = models("llama").generate(rows, **HOW), by_modules(models("llama"), rows)
    assert found.sequences.tolist() == expected.sequences.tolist()


def test_a_conversation_goes_on_in_its_cache(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_cache, "DEFAULT_CONTEXT", 1)
    model = deepcopy(models("llama"))
    model._prepare_cache_for_generation.args[2]._last = None  # its decoders are longer already
    first = model.generate(TOKENS, **HOW)
    before = first.past_key_values.decoder.cache.context
    more = torch.cat([first.sequences, torch.tensor([[9, 8]])], 1)
    then = model.generate(more, past_key_values=first.past_key_values, **HOW | {"max_new_tokens": 20})
    assert then.past_key_values.decoder.cache.context > before
    assert then.sequences.tolist() == by_modules(model, more, max_new_tokens=20).sequences.tolist()


def test_a_changed_model_runs_by_its_modules(models: Any) -> None:
    model = models("llama")
    norm = model.model.norm
    handle = norm.register_forward_hook(lambda module, args, out: out * 0)
    found = model.generate(TOKENS, **HOW)
    handle.remove()
    assert not isinstance(found.past_key_values, DecoderCache)
    assert found.sequences[0, 6:].tolist() == [0] * 8
    copied = deepcopy(model)
    assert isinstance(copied.generate(TOKENS, **HOW).past_key_values, DecoderCache)
    with torch.no_grad():
        copied.model.layers[0].input_layernorm.weight.mul_(0)
    assert isinstance(copied.generate(TOKENS, **HOW).past_key_values, DynamicCache)
    model.model.layers[1].mlp, taken = torch.nn.Identity(), model.model.layers[1].mlp
    assert isinstance(model.generate(TOKENS, **HOW).past_key_values, DynamicCache)
    model.model.layers[1].mlp = taken
    assert isinstance(model.generate(TOKENS, **HOW).past_key_values, DecoderCache)
    shown = model.generate(TOKENS, output_hidden_states=True, **HOW)
    assert len(shown.hidden_states) == 8
    with pytest.raises(BridgeError, match=r"output_hidden_states is not known to the cache that generate made; give"):
        model(TOKENS[:, :1], past_key_values=model.generate(TOKENS, **HOW).past_key_values, output_hidden_states=True)


def test_logits_of_candidates_and_after_a_crop(models: Any) -> None:
    model = models("llama")
    cache = model.generate(TOKENS, **HOW | {"max_new_tokens": 1}).past_key_values
    with torch.no_grad():
        expected = model(torch.cat([TOKENS, torch.tensor([[3, 4, 5]])], 1)).logits[:, -2:]
        model(torch.tensor([[1, 2, 3]]), past_key_values=cache)
        cache.crop(-3)
        found = model(torch.tensor([[3, 4, 5]]), past_key_values=cache, logits_to_keep=2).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
