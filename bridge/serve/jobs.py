"""Checked requests as sequences for the engine: prompts in token ids, samplers, and what reads the replies."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bridge.errors import BridgeError
from bridge.runtime.chat.parser import PlainParser, ReplyParser
from bridge.runtime.model import Model
from bridge.runtime.replies.pooling import Pooler
from bridge.runtime.replies.scoring import TokenScorer
from bridge.runtime.sampling import Sampler
from bridge.serve.engine import Job
from bridge.serve.request_json import MOST_TEXTS, BadRequest, EmbeddingRequest, ReplyRequest, naming

_GRAMMAR_TOKENS = 2048  # the most of a reply that fits a grammar, where the request does not say


@dataclass
class ReplyJobs:
    """The sequences of a request: one after another for each prompt, `n` of each."""

    jobs: list[Job]
    prompts: list[list[int]]
    scorers: list[TokenScorer]  # of prompts, with echo and logprobs
    parsers: list[ReplyParser]  # of replies


def reply_jobs(asked: ReplyRequest, model: Model, most: int, awaited: Callable[[], bool]) -> ReplyJobs:
    """The jobs of a request for text, at most so many; takes milliseconds, for the chat template and the grammar.

    awaited  whether somebody still waits for them: nothing more is made where not

    Raises BadRequest where a prompt does not fit, and BridgeError where the sampler or the template refuses.
    """
    model.check_continues()
    replies = max(1, len(asked.prompts)) * asked.n
    if replies > most:
        raise BadRequest(
            f"{replies} replies are asked for; the most is {most}", "n" if asked.n > 1 else "prompt"
        )  # fmt: skip
    result = ReplyJobs([], [], [], [])
    prompts = asked.prompts
    if asked.messages:
        with naming(asked.prompt_field):
            prompts = [model.chat_tokens(asked.messages, asked.variables, model.context)]
        prompts = [_ids_of(prompts[0], model, asked.prompt_field)]
    if not prompts:
        return result
    with naming("tools" if asked.tools.required else asked.grammar_field):
        sampler = _sampler(asked, model, prompts[0])
    with naming("logit_bias"):
        sampler.check(model.vocab)
    functions = asked.tools.functions or None
    shown = model.reply_form.shown(functions is not None) if asked.messages else frozenset[int]()
    for prompt in prompts:
        if not awaited():
            break
        ids = prompt if asked.messages else _ids_of(prompt, model, asked.prompt_field)
        result.prompts.append(ids)
        if (max_tokens := asked.max_tokens) is None:
            max_tokens = model.context - len(ids) + 1
            max_tokens = min(max_tokens, _GRAMMAR_TOKENS) if asked.grammar else max_tokens
        reader = model.token_scorer(ids, asked.logprobs) if asked.echo and asked.logprobs is not None else None
        if reader is not None:
            result.scorers.append(reader)
        for number in range(asked.n):
            copy = sampler.copy(None if asked.seed is None else asked.seed + number)
            result.jobs.append(
                Job(copy, ids, max_tokens, asked.stop, bool(asked.messages), None if number else reader, shown)
            )
            result.parsers.append(model.reply_form.parser(ids, functions) if asked.messages else PlainParser())
    return result


def _sampler(asked: ReplyRequest, model: Model, prompt: Sequence[int]) -> Sampler:
    """What draws a reply, which fits what it must; a call that it begins is one of the functions, where that can be."""
    sampling = {**asked.sampling, "seed": asked.seed}
    may_call = asked.tools.functions and not asked.tools.required and not asked.grammar
    if asked.messages and may_call and model.reply_form.has_begin:
        with suppress(BridgeError):  # no grammar can be made of the tools, which need not be called
            return Sampler.of(model.tokenizer, asked.logprobs, around=_around(asked, model, prompt), **sampling)
    return Sampler.of(model.tokenizer, asked.logprobs, **_grammar_of(asked, model, prompt), **sampling)


def _grammar_of(asked: ReplyRequest, model: Model, prompt: Sequence[int]) -> dict[str, Any]:
    """The arguments of `Constraint`."""
    if not asked.messages or not (asked.grammar or asked.tools.required):
        return asked.grammar
    return {**({} if asked.tools.required else asked.grammar), "around": _around(asked, model, prompt)}


def _around(asked: ReplyRequest, model: Model, prompt: Sequence[int]) -> Callable[[str], str]:
    """The grammar of a reply in a chat: what the model thinks may precede, and calls replace, what must fit a rule."""
    tools = asked.tools
    free = not tools.required and not asked.grammar
    return lambda rule: model.reply_form.grammar(prompt, rule, tools.functions or None, tools.several, free)


def _ids_of(prompt: Any, model: Model, name: str, cut: bool = False) -> list[int]:
    """The token ids of a text, or these ids; BadRequest unless the model takes them; `cut`: or as many as it takes."""
    with naming(name):
        ids = model.tokenizer.encode_within(prompt, model.context) if isinstance(prompt, str) else prompt
        ids = ids[: model.context] if cut else ids
        if len(ids) > model.context:  # of a text that is much longer, not all were counted
            raise BadRequest(f"the prompt has at least {len(ids)} tokens; the context holds {model.context}", name,
                             "context_length_exceeded")  # fmt: skip
        return model.checked_ids(ids)


def embedding_jobs(
    asked: EmbeddingRequest, model: Model, awaited: Callable[[], bool]
) -> tuple[list[Job], list[Pooler]]:
    """The jobs of a request for vectors, and what makes a vector of each; `awaited` as in `reply_jobs`."""
    if len(asked.texts) > MOST_TEXTS:
        raise BadRequest(f"input has {len(asked.texts)} texts; the most is {MOST_TEXTS}", "input")
    jobs, poolers = [], []
    for text in asked.texts:
        if not awaited():
            break
        ids = _ids_of(text, model, "input", asked.cut)
        poolers.append(model.pooler(asked.pooling))
        jobs.append(Job(Sampler.of(model.tokenizer), ids, 0, [], reader=poolers[-1]))
    return jobs, poolers
