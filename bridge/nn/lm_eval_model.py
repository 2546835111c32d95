"""`gguf-bridge` as a model of EleutherAI's evaluation harness (lm_eval), on `bridge.Model`: no PyTorch in between.

    python -m bridge.lm_eval --model gguf-bridge --model_args path=model.gguf --tasks hellaswag

Requests are sorted by their tokens, so those of one context follow each other and share its keys and values, and so do
the examples that all contexts of a task begin with. Replies are made several at a time, longest prompts first.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from tqdm import tqdm

from bridge.conversion.model import Model
from bridge.errors import BridgeError
from bridge.gguf_file.chat_template import TemplateFailed, keep_renderer, render_chats

_TOGETHER = 32  # prompts that are handed over at once; a progress bar moves as often
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")

Scored = tuple[Any, list[int], list[int]]  # what was asked, context, continuation


@register_model("gguf-bridge")
class BridgeLM(TemplateLM):
    """A GGUF, or a checkpoint's folder or Hub id, which is converted into the cache.

    path          model.gguf, a folder, or a Hub id
    precision     "int8" rounds activations to 8 bits in blocks, as ggml does; "f32" does not
    max_length    tokens of context and continuation together: by default the model's own, at most 4096
    max_gen_toks  tokens of a reply, where the task does not say
    threads, kv, device  as for `bridge.Model.load`
    """

    def __init__(
        self, path: str, precision: str = "int8", max_length: int | None = None, max_gen_toks: int = 256,
        threads: int | None = None, kv: str = "f16", device: str | None = None, batch_size: Any = None,
        max_batch_size: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        del batch_size, max_batch_size  # the harness passes them; batches are made of what is alike
        self.model = Model.load(
            str(path), threads=threads, kv=kv, context=max_length, precision=precision, device=device or "cpu"
        ).prepare()
        self.max_gen_toks = int(max_gen_toks)
        self._rendered: dict[str, str] = {}

    @property
    def max_length(self) -> int:
        return self.model.context

    @property
    def tokenizer_name(self) -> str:
        return str(self.model.path).replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        eos = self.model.tokenizer.eos
        if eos is None:
            raise BridgeError(f"{self.model.path}: has no end token, which lm_eval needs; convert the model again")
        return eos

    @property
    def prefix_token_id(self) -> int:
        """What an empty context is: BOS, or the end token of a model without one."""
        bos = self.model.tokenizer.bos
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; BOS where the file asks for it and the text, of a chat template, does not have it already."""
        tokenizer = self.model.tokenizer
        bos = tokenizer.text(tokenizer.bos)
        special = add_special_tokens if add_special_tokens is not None else not (bos and string.startswith(bos))
        ids = tokenizer.encode(string, add_special=special)
        return ids[:-1] if special and tokenizer.add_eos else ids

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.model.chat_template if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation; without a generation prompt, the last message is to be continued.

        Raises BridgeError where the file has no template, or it refuses the conversation.
        """
        key = json.dumps([chat_history, add_generation_prompt])
        if key not in self._rendered:
            keep_renderer()  # the harness asks for one prompt after another
            self._rendered[key] = self._render(chat_history, add_generation_prompt)
        return self._rendered[key]

    def _render(self, chat_history: list[dict[str, str]], add_generation_prompt: bool) -> str:
        template, tokenizer = self.model.chat_template, self.model.tokenizer
        if template is None:
            raise BridgeError(f"{self.model.path}: has no chat template; run without --apply_chat_template")
        tokens = {"bos_token": tokenizer.text(tokenizer.bos), "eos_token": tokenizer.text(tokenizer.eos)}
        histories = [chat_history, [message for message in chat_history if message["role"] != "system"]]
        for text in render_chats(template, [(history, add_generation_prompt) for history in histories], tokens):
            if isinstance(text, TemplateFailed):
                problem = text
                continue
            last = chat_history[-1]["content"].strip()
            return text if add_generation_prompt else text[: text.rindex(last) + len(last)]
        raise BridgeError(f"{self.model.path}: the chat template cannot be used: {problem}") from problem

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        indices: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for i, (_text, before, after) in enumerate(requests):
            tokens = [*before, *after][-(self.max_length + 1) :]
            start = max(1, len(tokens) - len(after))
            indices.setdefault((tuple(tokens[:start]), tuple(tokens[start:])), []).append(i)
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests")
        for context, group in groupby(sorted(indices), lambda pair: pair[0]):
            continuations = [continuation for _, continuation in group]
            asked = [continuation for continuation in continuations if continuation]
            scores = dict(zip(asked, self.model.score_continuations(context, asked), strict=True)) if asked else {}
            for continuation in continuations:
                for i in indices[context, continuation]:
                    results[i] = scores.get(continuation, (0.0, True))
                    bar.update()
                    if requests[i][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[i][0], results[i])
        bar.close()
        return results

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        windows: list[Scored] = []
        owners: list[int] = []
        for i, request in enumerate(requests):
            for window in self._windows(request.args[0]):
                windows.append(window)
                owners.append(i)
        totals = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _windows(self, text: str) -> Iterator[Scored]:
        tokens = self.tok_encode(text)
        rolling = utils.get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
        for context, continuation in map(utils.make_disjoint_window, rolling):
            yield None, context, continuation

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        replies = [""] * len(requests)
        alike: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(i)
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests")
        for numbers in alike.values():
            how = normalize_gen_kwargs(dict(requests[numbers[0]].args[1]), self.max_gen_toks)
            stop = handle_stop_sequences(how.pop("until", None), eos=None)
            limit = int(how.pop("max_gen_toks"))
            if limit >= self.max_length:
                raise BridgeError(f"max_gen_toks {limit}: must be below max_length {self.max_length}")
            prompts = {i: self.tok_encode(requests[i].args[0])[-(self.max_length - limit) :] for i in numbers}
            sampling = {key: how[key] for key in _SAMPLING if how.get(key) is not None}
            if not how.get("do_sample"):
                sampling["temperature"] = 0.0
            order = sorted(numbers, key=lambda i: -len(prompts[i]))
            for first in range(0, len(order), _TOGETHER):
                part = order[first : first + _TOGETHER]
                for i, reply in zip(
                    part, self._replies([prompts[i] for i in part], limit, stop, sampling), strict=True
                ):
                    replies[i] = reply
                    self.cache_hook.add_partial("generate_until", requests[i].args, reply)
                    bar.update()
        bar.close()
        return replies

    def _replies(self, prompts: list[list[int]], limit: int, stop: list[str], sampling: dict[str, Any]) -> list[str]:
        if self.model.device == "cpu":
            return self.model.generate_batch(prompts, limit, stop, **sampling)
        return ["".join(self.model.generate(prompt, limit, stop, **sampling)) for prompt in prompts]
