"""Scores of documents for a query, in the forms of Jina's and llama-server's interface, and of TEI's ("texts")."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bridge.errors import BridgeError
from bridge.runtime.model import Model
from bridge.runtime.replies.pooling import Pooler
from bridge.runtime.sampling import Sampler
from bridge.serve.engine import Job
from bridge.serve.request_json import MOST_TEXTS, BadRequest, RequestFields, between, naming
from bridge.system.fields import anything, flag, of_type

_TEXT, _LIST = of_type(str, "a text"), of_type(list, "a list of texts")


@dataclass
class RerankRequest:
    """The checked fields of a request; `poolers` get the states of each document."""

    query: str
    documents: list[str]
    field: str  # that the documents are in: "documents", or TEI's "texts"
    most: int  # results
    with_texts: bool
    poolers: list[Pooler]


def rerank_jobs(body: Any, model: Model, awaited: Callable[[], bool]) -> tuple[RerankRequest, list[Job]]:
    """The body of /v1/rerank, and a job for each document, which reads it behind the query.

    awaited  whether somebody still waits: nothing more is made where not

    Raises BadRequest where a field is wrong, and BridgeError where the model is no reranker.
    """
    ranker = model.ranker
    fields = RequestFields(body)
    fields.take("model", _TEXT)
    query, field = fields.needed("query", _TEXT), "texts" if "texts" in fields else "documents"
    documents = fields.needed(field, _LIST)
    if not documents or not all(isinstance(document, str) for document in documents):
        raise BadRequest(f"{field} must be a list of texts, at least one", field)
    if len(documents) > MOST_TEXTS:
        raise BadRequest(f"{field} has {len(documents)} texts; the most is {MOST_TEXTS}", field)
    most = fields.take("top_n", between(1, 1 << 30), len(documents))
    with_texts = fields.take("return_text" if field == "texts" else "return_documents", flag, False)
    for name in ("truncate", "raw_scores", "user"):
        fields.take(name, anything)
    fields.end()
    asked, jobs = RerankRequest(query, documents, field, most, with_texts, []), []
    for document in documents:
        if not awaited():
            break
        with naming(field):
            ids = ranker.tokens(query, document)
            if len(ids) > model.context:
                raise BridgeError(f"query and document have {len(ids)} tokens; the context holds {model.context}")
            ids = model.checked_ids(ids)
        asked.poolers.append(Pooler(ranker.pooling))
        jobs.append(Job(Sampler.of(model.tokenizer), ids, 0, [], reader=asked.poolers[-1]))
    return asked, jobs


def ranked(asked: RerankRequest, model: Model, name: str, tokens: int) -> Any:
    """The answer: the best documents first."""
    scores = [model.ranker.score(pooler.vector(normalize=False)) for pooler in asked.poolers]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: asked.most]
    if asked.field == "texts":
        texts = ({"text": asked.documents[i]} if asked.with_texts else {} for i in order)
        return [{"index": i, "score": scores[i], **text} for i, text in zip(order, texts, strict=True)]
    documents = ({"document": {"text": asked.documents[i]}} if asked.with_texts else {} for i in order)
    results = [{"index": i, "relevance_score": scores[i], **text} for i, text in zip(order, documents, strict=True)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"model": name, "object": "list", "usage": usage, "results": results}
