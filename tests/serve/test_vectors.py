"""Encoders and rerankers behind the server."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import bridge
from bridge.cli import main
from bridge.errors import BridgeError
from bridge.runtime.model import Model
from bridge.runtime.replies.speculation import check_draft_model
from tests.models.test_encoders import DOCUMENTS, QUERY, converted
from tests.serve.conftest import client_of
from tests.support.command_line import one_line
from tests.support.encoder_models import ENCODERS, RERANKERS, TEXTS, new_encoder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("encoder") / "bert-cls"
    new_encoder(ENCODERS["bert-cls"], folder)
    return bridge.Model.load(converted(folder))


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("reranker") / "bert-reranker"
    new_encoder(RERANKERS["bert-reranker"], folder)
    return bridge.Model.load(converted(folder))


@pytest.fixture
def client(encoder: Model) -> Iterator[Any]:
    with client_of(encoder) as client:
        yield client


@pytest.fixture
def ranking(reranker: Model) -> Iterator[Any]:
    with client_of(reranker) as client:
        yield client


def vectors_of(answer: Any) -> np.ndarray:
    return np.array([row["embedding"] for row in answer.json()["data"]])


def test_an_encoders_vectors_are_pooled_as_its_file_says(client: Any, encoder: Model) -> None:
    texts = list(TEXTS)
    np.testing.assert_allclose(
        vectors_of(client.post("/v1/embeddings", json={"input": texts})), encoder.embed(texts), atol=1e-5
    )
    assert np.abs(encoder.embed(texts) - encoder.embed(texts, "cls")).max() == 0
    mean = vectors_of(client.post("/v1/embeddings", json={"input": texts, "pooling": "mean"}))
    np.testing.assert_allclose(mean, encoder.embed(texts, "mean"), atol=1e-5)
    embedded = client.post("/api/embed", json={"model": "bert-cls", "input": texts}).json()["embeddings"]
    np.testing.assert_allclose(embedded, encoder.embed(texts), atol=1e-5)


def test_a_text_longer_than_a_part_of_a_prompt_attends_to_all_of_itself(client: Any, encoder: Model) -> None:
    text = "the cat sat " * 60
    assert len(encoder.tokenizer.encode(text)) > 128
    (vector,) = vectors_of(client.post("/v1/embeddings", json={"input": text}))
    np.testing.assert_allclose(vector, encoder.embed(text)[0], atol=1e-5)


@pytest.mark.parametrize("option", [("--draft", "ngram"), ("--draft", "mtp"), ("--temp", "0.5"), ("--top-k", "5")])
def test_options_of_replies_are_refused_for_an_encoder(
    option: tuple[str, str], encoder: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(encoder.path), "--port", "0", *option]) == 2
    said = one_line(capsys.readouterr().err)
    assert said == f"error: {encoder.path}: bert is an encoder, which cannot continue a text; leave out {option[0]}\n"


def test_an_encoder_neither_takes_guesses_nor_makes_them(encoder: Model) -> None:
    with pytest.raises(BridgeError, match=r"is an encoder, which cannot continue a text; leave out draft"):
        encoder.batch(draft="ngram")
    with pytest.raises(BridgeError, match=r"is an encoder, which cannot continue a text; it makes vectors"):
        check_draft_model(SimpleNamespace(tokenizer=encoder.tokenizer), encoder)


def test_replies_of_an_encoder_are_refused(client: Any) -> None:
    messages = [{"role": "user", "content": "the cat"}]
    for path, body in (
        ("/v1/completions", {"prompt": "the cat", "max_tokens": 3}), ("/v1/chat/completions", {"messages": messages}),
        ("/v1/responses", {"input": "the cat"}), ("/api/chat", {"model": "bert-cls", "messages": messages}),
    ):  # fmt: skip
        answer = client.post(path, json=body)
        assert answer.status_code == 400
        assert "is an encoder, which cannot continue a text" in answer.text


def test_ollamas_clients_are_told_that_an_encoder_makes_vectors_alone(client: Any) -> None:
    assert client.post("/api/show", json={"model": "bert-cls"}).json()["capabilities"] == ["embedding"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/reranking", "/v1/reranking"])
def test_documents_come_back_best_first(path: str, ranking: Any, reranker: Model) -> None:
    scores = reranker.rerank(QUERY, DOCUMENTS)
    answer = ranking.post(path, json={"query": QUERY, "documents": DOCUMENTS, "top_n": 2}).json()
    order = np.argsort(-scores)[:2].tolist()
    assert [result["index"] for result in answer["results"]] == order
    np.testing.assert_allclose([result["relevance_score"] for result in answer["results"]], scores[order], atol=1e-5)
    assert answer["object"] == "list"
    tokens = sum(len(reranker.ranker.tokens(QUERY, document)) for document in DOCUMENTS)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


def test_documents_come_with_their_texts_where_asked(ranking: Any) -> None:
    asked = {"query": QUERY, "documents": DOCUMENTS, "return_documents": True}
    for result in ranking.post("/v1/rerank", json=asked).json()["results"]:
        assert result["document"] == {"text": DOCUMENTS[result["index"]]}


def test_teis_form_is_a_list_of_scores(ranking: Any) -> None:
    asked = {"query": QUERY, "texts": DOCUMENTS, "return_text": True}
    answer = ranking.post("/rerank", json=asked).json()
    assert [result["text"] for result in answer] == [DOCUMENTS[result["index"]] for result in answer]
    assert sorted((result["score"] for result in answer), reverse=True) == [result["score"] for result in answer]


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({"documents": ["a"]}, "query", "query is missing"),
        ({"query": "a"}, "documents", "documents is missing"),
        ({"query": "a", "documents": []}, "documents", "must be a list of texts, at least one"),
        ({"query": "a", "documents": [{"text": "b"}]}, "documents", "must be a list of texts, at least one"),
        ({"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "must be between"),
        ({"query": "a", "documents": ["b"], "x": 0}, "x", "is not supported"),
        ({"query": "a", "documents": 300 * ["b"]}, "documents", "the most is 256"),
        ({"query": "a", "documents": ["the " * 300]}, "documents", "the context holds 256"),
    ],
)
def test_what_makes_no_sense_is_refused(body: dict[str, Any], field: str, message: str, ranking: Any) -> None:
    answer = ranking.post("/v1/rerank", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == field


def test_a_model_without_a_head_is_no_reranker(client: Any) -> None:
    answer = client.post("/v1/rerank", json={"query": "a", "documents": ["b"]})
    assert answer.status_code == 400
    assert "is no reranker, it has no head that scores documents; use embed" in answer.json()["error"]["message"]
