"""The measuring instruments are right: without that, no figure that rests on them means anything."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import gguf
import numpy as np
import pytest

from bridge.blocks import BLOCKS, BlockType
from bridge.system.cpu import targets
from scripts.peers import reference
from scripts.peers.gguf_file import gguf_weights, unpermute
from scripts.peers.llama import ggml_matvec
from scripts.peers.llama.llama_cpp import LlamaCpp
from scripts.peers.predictions import mean_kl
from tests.support.pairs import in_pairs
from tests.support.random_blocks import random_matrix

VOCAB, HIDDEN, HEADS, KV_HEADS, WIDTH, LAYERS = 256, 64, 4, 2, 96, 2
CONFIG = f"""{{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": {VOCAB},
 "hidden_size": {HIDDEN}, "num_attention_heads": {HEADS}, "num_key_value_heads": {KV_HEADS}, "head_dim": 16,
 "intermediate_size": {WIDTH}, "num_hidden_layers": {LAYERS}, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
 "max_position_embeddings": 128, "tie_word_embeddings": false, "torch_dtype": "float16",
 "quantization_config": {{"quant_method": "gptq", "bits": 4}}}}"""


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as llama.cpp wants them: 2j and 2j + 1 of a head are its rows j and j + half."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def matrix(out: int, columns: int) -> np.ndarray:
        return rng.normal(0, columns**-0.5, (out, columns)).astype(np.float32)

    made = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "lm_head.weight": matrix(VOCAB, HIDDEN)}
    made["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    for layer in range(LAYERS):
        for part, out, columns in (
            ("self_attn.q_proj", HEADS * 16, HIDDEN),
            ("self_attn.k_proj", KV_HEADS * 16, HIDDEN),
            ("self_attn.v_proj", KV_HEADS * 16, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HEADS * 16),
            ("mlp.gate_proj", WIDTH, HIDDEN),
            ("mlp.up_proj", WIDTH, HIDDEN),
            ("mlp.down_proj", HIDDEN, WIDTH),
        ):
            made[f"model.layers.{layer}.{part}.weight"] = matrix(out, columns)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made[f"model.layers.{layer}.{norm}.weight"] = rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32)
    return made


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def float_gguf(model_folder: Path, weights: dict[str, np.ndarray]) -> Path:
    """The model as an F32 GGUF, with the 256 bytes for a vocabulary."""
    path = model_folder / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in printable]
    writer.add_token_list([chr(b) if b in printable else chr(256 + hidden.index(b)) for b in range(256)])
    writer.add_token_types([1] * 256)
    writer.add_token_merges(["a b"])  # makes no token: llama.cpp wants the list, the test wants bytes
    writer.add_add_bos_token(False)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, values in weights.items():
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else None
        rows = values if heads is None else permute(values, heads)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)) or name, rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCAB, (2, 48))


def test_kl_divergence_of_a_hand_example_is_in_nats_and_averaged_over_positions() -> None:
    p = np.log(np.array([[0.5, 0.5], [0.9, 0.1]]))
    q = np.log(np.array([[0.25, 0.75], [0.9, 0.1]]))
    first = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    assert mean_kl(p, q) == pytest.approx(first / 2, rel=1e-12)


def test_kl_divergence_ignores_a_constant_added_to_logits() -> None:
    logits = np.random.default_rng(2).normal(0, 3, (300, 50)).astype(np.float32)
    assert mean_kl(logits, logits + np.float32(8)) < 1e-12


def test_kl_divergence_does_not_depend_on_how_positions_are_chunked() -> None:
    p, q = np.random.default_rng(3).normal(0, 1, (2, 5, 130, 20))
    rows = [mean_kl(p[i], q[i]) for i in range(5)]
    assert mean_kl(p, q) == pytest.approx(np.mean(rows), rel=1e-12)


def test_unpermute_undoes_permute_and_permute_interleaves_a_heads_halves() -> None:
    rows = np.arange(2 * 8)[:, None]
    assert permute(rows, 2)[:8, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert np.array_equal(unpermute(permute(rows, 2), 2), rows)


def test_a_float_gguf_reads_back_as_the_weights_it_was_written_from(float_gguf: Path, weights: dict) -> None:
    read = gguf_weights(float_gguf)
    assert read.keys() == weights.keys()
    assert all(np.array_equal(read[name], weights[name]) for name in weights)


def test_llama_cpp_and_transformers_agree_on_a_float_model_to_float_rounding(
    float_gguf: Path, model_folder: Path, weights: dict, tokens: np.ndarray
) -> None:
    expected = reference.logits(reference.hf_model(model_folder, weights), tokens)
    with LlamaCpp(float_gguf, n_ctx=64) as model:
        found = np.stack([model.logits(row) for row in tokens.tolist()])
    assert mean_kl(expected, found) < 1e-10
    assert np.array_equal(expected.argmax(-1), found.argmax(-1))


def test_llama_cpp_forgets_what_it_was_asked_before(float_gguf: Path, tokens: np.ndarray) -> None:
    with LlamaCpp(float_gguf, n_ctx=64) as model:
        first = model.logits(tokens[0].tolist())
        model.logits(tokens[1].tolist())
        assert np.array_equal(model.logits(tokens[0].tolist()), first)


def test_greedy_generation_follows_the_most_probable_token(float_gguf: Path, tokens: np.ndarray) -> None:
    start = tokens[0, :8].tolist()
    with LlamaCpp(float_gguf, n_ctx=64) as model:
        made = model.generate_greedy(start, 10)
        whole = model.logits(start + made)
    assert len(made) == 10
    assert made == whole[len(start) - 1 : -1].argmax(-1).tolist()


def test_llama_cpp_tokenizes_bytes_and_writes_them_back(float_gguf: Path) -> None:
    text = "ein Größenvergleich\n\t1 2"
    with LlamaCpp(float_gguf, n_ctx=64) as model:
        ids = model.tokenize(text)
        assert len(ids) == len(text.encode())
        assert model.detokenize(ids) == text


def test_llama_cpp_refuses_more_tokens_than_its_context(float_gguf: Path) -> None:
    with LlamaCpp(float_gguf, n_ctx=64) as model, pytest.raises(ValueError, match="do not fit a context of"):
        model.logits([0] * (model.n_ctx + 1))


def test_a_file_llama_cpp_cannot_load_raises_its_own_message(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF but not really")
    with pytest.raises(RuntimeError, match=r"bad\.gguf.*(fail|error)"):
        LlamaCpp(bad)


@pytest.mark.skipif(targets.available() == [targets.PORTABLE], reason="ggml repacks for vector units")
@pytest.mark.parametrize("block", [BLOCKS["Q4_0"], BLOCKS["Q4_K"]], ids=str)
def test_ggml_multiplies_weights_that_it_repacked_where_it_has_a_kernel_for_them(block: BlockType) -> None:
    x = np.random.default_rng(3).standard_normal((1, 512)).astype(np.float32)
    for rows in (64, 60):  # eight rows are interleaved; 60 are no multiple
        tensor, weights = random_matrix(block, rows, 512)
        products, layouts = [], []
        for repack in (False, True):
            matrix = ggml_matvec.Matrix(
                ggml_matvec.wheel(), block.name, tensor.raw.reshape(rows, -1), 512, repack=repack
            )
            products.append(matrix.matmul(x))
            layouts.append(matrix.layout)
            matrix.close()
        assert layouts[0] == "CPU"
        assert (layouts[1] == "CPU") == (rows == 60)
        assert np.allclose(*products, atol=1e-4 * np.abs(x @ weights.T).max())


def test_combinations_of_every_run_have_each_pair_of_values() -> None:
    values = ["abcd", "efg", "hi", "jk"]
    params = in_pairs(*values)
    assert len(params) == 48
    rows = {param.values for param in params if not param.marks}
    assert len(rows) == 12
    for i, j in combinations(range(4), 2):
        assert {(row[i], row[j]) for row in rows} == set(product(values[i], values[j]))
