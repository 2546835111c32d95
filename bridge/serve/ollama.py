"""Ollama's interface: requests as those of OpenAI's with the same meaning, and what it tells about a model.

Its fields are checked here under their own names; what they mean is decided by `request_json`, once for all.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from bridge.gguf_file.chat_template import thinking_switches
from bridge.runtime.model import Model
from bridge.serve import request_json
from bridge.serve.request_json import BadRequest, EmbeddingRequest, ReplyRequest, RequestFields
from bridge.system.fields import anything, flag, object_, of_type

VERSION = "0.12.11"  # of Ollama's interface, the first with logprobs
TAG = ":latest"
_NEVER = "9999-12-31T23:59:59Z"  # when the model is unloaded
_TEXT, _NUMBER, _INTEGER = of_type(str, "a text"), of_type((int, float), "a number"), of_type(int, "an integer")

# options of how the model is loaded, which it is already, and of what no version of Ollama does any more
_IGNORED = (
    "numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap",
    "use_mlock", "embedding_only", "num_thread", "num_keep", "penalize_newline",
)  # fmt: skip
# options of samplers that are not computed here, with the values that turn them off
_OFF: dict[str, tuple[Any, ...]] = {
    "tfs_z": (1,),
    "typical_p": (1,),
    "mirostat": (0,),
    "penalize_newline": (True, False),
}
_SAMPLING = {
    "temperature": _NUMBER, "top_p": _NUMBER, "min_p": _NUMBER, "repeat_penalty": _NUMBER, "repeat_last_n": _INTEGER,
    "frequency_penalty": _NUMBER, "presence_penalty": _NUMBER, "stop": anything,
}  # fmt: skip


def chat(body: Any, model: Model, defaults: Mapping[str, Any]) -> ReplyRequest:
    """The body of /api/chat."""
    fields = RequestFields(body)
    asked = _common(fields, model)
    messages = fields.take("messages", of_type(list, "a list of messages"), [])
    asked["tools"] = fields.take("tools", anything)
    fields.end()
    if not messages:
        return _load(asked, model, defaults)
    asked["messages"] = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    request = request_json.chat(asked, model, defaults)
    request.grammar_field = "format"
    return request


def generate(body: Any, model: Model, defaults: Mapping[str, Any]) -> ReplyRequest:
    """The body of /api/generate: a message to the model's chat template, or with `raw`, or where the model has no
    template, a text to go on from."""
    fields = RequestFields(body)
    asked = _common(fields, model)
    prompt, system = fields.take("prompt", _TEXT, ""), fields.take("system", _TEXT, "")
    raw = fields.take("raw", flag, False) or model.chat_template is None
    for key in ("suffix", "template"):
        fields.unchanged(key, "")
    for key in ("images", "context"):
        fields.unchanged(key, [])
    fields.end()
    if not prompt:
        return _load(asked, model, defaults)
    if not raw:
        asked["messages"] = [{"role": "system", "content": system}] if system else []
        asked["messages"].append({"role": "user", "content": prompt})
        request = request_json.chat(asked, model, defaults)
        request.grammar_field = "format"
        return request
    if system:
        raise BadRequest("system needs a chat template, and no raw; put it into the prompt", "system")
    if asked.pop("logprobs"):
        asked["logprobs"] = asked.get("top_logprobs") or 0
    for key in ("top_logprobs", "chat_template_kwargs", "reasoning_effort"):
        asked.pop(key, None)
    unlimited = asked["max_tokens"] is None
    request = request_json.completion({**asked, "prompt": prompt}, model, defaults)
    request.max_tokens = None if unlimited else request.max_tokens
    request.grammar_field = "format"
    return request


def _load(asked: Mapping[str, Any], model: Model, defaults: Mapping[str, Any]) -> ReplyRequest:
    """A request without a prompt, which has the model loaded, and no reply."""
    request = request_json.completion({"prompt": " ", "stream": asked["stream"]}, model, defaults)
    request.prompts = []
    return request


def _common(fields: RequestFields, model: Model) -> dict[str, Any]:
    """The fields that /api/chat and /api/generate share, as those of OpenAI's interface."""
    asked = {
        "model": fields.take("model", _TEXT), "stream": fields.take("stream", flag, True),
        "logprobs": fields.take("logprobs", flag, False), "top_logprobs": fields.take("top_logprobs", _INTEGER),
    }  # fmt: skip
    if not asked["logprobs"] and not asked["top_logprobs"]:
        del asked["top_logprobs"]
    fields.take("keep_alive", anything)
    for key in ("truncate", "shift"):  # what is too long for the context is refused, and a reply ends where it is full
        fields.take(key, flag)
    fields.unchanged("_debug_render_only", False)
    form = fields.take("format", of_type((str, dict), "json or a JSON schema"), "")
    if isinstance(form, str) and form not in ("", "json"):
        raise BadRequest("format must be json or a JSON schema", "format")
    if form:
        schema = {"type": "object"} if form == "json" else form
        asked["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    asked |= _options(fields.take("options", object_, {}), model)
    return asked | _thinking(fields.take("think", _think), model)


def _think(value: Any, name: str) -> bool | str:
    if not isinstance(value, bool | str):
        raise BadRequest(f"{name} must be true, false, low, medium or high", name)
    return value


def _options(options: Any, model: Model) -> dict[str, Any]:
    fields = RequestFields(options, "options")
    for key in _IGNORED:
        fields.take(key, anything)
    for key, neutral in _OFF.items():
        fields.unchanged(key, *neutral)
    for key in ("mirostat_tau", "mirostat_eta"):  # without mirostat they say nothing
        fields.take(key, _NUMBER)
    context = fields.take("num_ctx", _INTEGER, 0)
    if context > model.context:
        raise BadRequest(
            f"options.num_ctx is {context}; the context holds {model.context}: start the server with --context "
            f"{context}", "options.num_ctx",
        )  # fmt: skip
    asked = {key: fields.take(key, kind) for key, kind in _SAMPLING.items()}
    asked["top_k"] = max(0, fields.take("top_k", _INTEGER, 0)) if "top_k" in fields else None
    limit, seed = fields.take("num_predict", _INTEGER, -1), fields.take("seed", _INTEGER, -1)
    asked["max_tokens"], asked["seed"] = limit if limit > 0 else None, seed if seed >= 0 else None
    fields.end()
    return asked


def _thinking(think: bool | str | None, model: Model) -> dict[str, Any]:
    """What `think` means for the model's chat template."""
    template = model.chat_template or ""
    if not think:
        return {} if think is None else {"reasoning_effort": "none"}
    switches = thinking_switches(template)
    if not (switches or model.reply_form.thinks or "reasoning_effort" in template):
        raise BadRequest("think: the model does not think, or its chat template does not say so; leave it out", "think")
    on = {name: True for name, off in switches.items() if off is False}
    return {"chat_template_kwargs": on, "reasoning_effort": think if isinstance(think, str) else None}


def _message(message: Any, where: str) -> Any:
    """A message in OpenAI's form; what is wrong with one is found there."""
    fields = RequestFields(message, where)
    fields.unchanged("images", [])
    of_ollama = ("thinking", "tool_calls", "tool_name")
    converted = {name: value for name, value in fields.left.items() if name not in of_ollama}
    if thinking := fields.take("thinking", _TEXT, ""):
        converted["reasoning_content"] = thinking
    if name := fields.take("tool_name", _TEXT, ""):
        converted["name"] = name
    calls = fields.take("tool_calls", of_type(list, "a list of calls"), [])
    if calls:
        converted["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return converted


def _call(call: Any, where: str) -> dict[str, Any]:
    fields = RequestFields(call, where)
    function = RequestFields(fields.needed("function", object_), f"{where}.function")
    name, arguments = function.needed("name", _TEXT), function.take("arguments", object_, {})
    return {
        "type": "function",
        "id": fields.take("id", _TEXT, where),
        "function": {"name": name, "arguments": json.dumps(arguments)},
    }


def embed(body: Any, model: Model, pooling: str | None) -> EmbeddingRequest:
    """The body of /api/embed, or of the older /api/embeddings, which has one `prompt`."""
    fields = RequestFields(body)
    fields.take("keep_alive", anything)
    _options(fields.take("options", object_, {}), model)
    cut = fields.take("truncate", flag, True)
    older = fields.take("prompt", _TEXT)
    asked = {"input": fields.take("input", anything) if older is None else older,
             "dimensions": fields.take("dimensions", _INTEGER), "model": fields.take("model", _TEXT)}  # fmt: skip
    fields.end()
    request = request_json.embeddings(asked, model, pooling)
    request.cut = cut
    return request


class ModelCard:
    """What Ollama's interface tells about the one model; `name` is without a tag."""

    def __init__(self, model: Model, name: str):
        self._model, self.name = model, name + TAG
        file = model.file
        types = Counter[str]()
        for tensor in file.values():
            types[tensor.type] += math.prod(tensor.shape)
        self._weights = types.total()
        self._details = {
            "parent_model": "", "format": "gguf", "family": file.arch, "families": [file.arch],
            "parameter_size": _in_short(self._weights), "quantization_level": types.most_common(1)[0][0],
        }  # fmt: skip
        changed = model.path.stat().st_mtime if model.path.exists() else 0
        self._modified = datetime.fromtimestamp(changed, UTC).isoformat()
        identity = f"{name} {file.nbytes} {changed}"  # a digest of all weights would take seconds
        self._digest = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()

    def _check_name(self, name: str) -> None:
        """Raise BadRequest if another model is asked for."""
        if name.removesuffix(TAG) + TAG != self.name:
            raise BadRequest(f"the model {name!r} is not served; this server has {self.name!r}", "model",
                             "model_not_found", 404)  # fmt: skip

    def listed(self) -> dict[str, Any]:
        """An entry of /api/tags."""
        return {"name": self.name, "model": self.name, "modified_at": self._modified, "size": self._model.file.nbytes,
                "digest": self._digest, "details": self._details}  # fmt: skip

    def running(self) -> dict[str, Any]:
        """An entry of /api/ps."""
        return {**self.listed(), "expires_at": _NEVER, "size_vram": 0, "context_length": self._model.context}

    def embedded(self, vectors: Sequence[np.ndarray], tokens: int, _: EmbeddingRequest) -> dict[str, Any]:
        """The answer of /api/embed."""
        embeddings = [vector.tolist() for vector in vectors]
        return {"model": self.name, "embeddings": embeddings, "load_duration": 0, "prompt_eval_count": tokens}

    def show(self, body: Any) -> dict[str, Any]:
        """The body of /api/show -> its answer; lists of the metadata only if it is `verbose`."""
        fields = RequestFields(body)
        older = fields.take("name", _TEXT, "")
        self._check_name(fields.take("model", _TEXT, "") or older or self.name)
        verbose = fields.take("verbose", flag, False)
        for key, neutral in (("system", ""), ("template", ""), ("options", {})):  # as Ollama's command sends them
            fields.unchanged(key, neutral)
        fields.end()
        model, template = self._model, self._model.chat_template or ""
        values = {
            key: None if isinstance(value, list) and not verbose else value
            for key, value in model.file.metadata.items()
        }
        thinks = bool(thinking_switches(template)) or model.reply_form.thinks
        abilities = {"completion": model.config.causal, "embedding": True, "tools": bool(template), "thinking": thinks}
        return {
            "modelfile": f"FROM {model.path.name}\n", "parameters": "", "template": template, "license": "",
            "details": self._details, "modified_at": self._modified,
            "model_info": {**values, "general.parameter_count": self._weights},
            "capabilities": [name for name, has in abilities.items() if has],
        }  # fmt: skip


def _in_short(count: int) -> str:
    """134.52M of 134,515,008."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.2f}{unit}"
    return str(count)
