"""A language model from a GGUF alone: text in, text out.

    model = bridge.Model.load("model.gguf")
    for piece in model.generate("Once upon a time", max_tokens=100):
        print(piece, end="", flush=True)
    model.logits(model.tokenizer.encode("Once"))          float32 [tokens, vocab]

Loading reads the header; the weights are repacked for this machine while the first tokens are computed, or by
`prepare`. Every call of `generate`, `chat` or `logits` takes the context from the call before: a generation that has
not ended then raises BridgeError when it is asked for more. So a model serves one caller at a time; two models may run
at once, each in a thread of its own. Tokens with which the call before began as well are not read again, except by
`logits`: the second question of a conversation costs its own tokens.
"""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

import numpy as np

from bridge.errors import BridgeError, parameter
from bridge.runtime.chat.reply_form import ReplyForm
from bridge.runtime.chat.templates import ChatTemplate
from bridge.runtime.config.config_reader import read_config
from bridge.runtime.config.decoder_config import DecoderConfig
from bridge.runtime.decoder.decoder import Decoder
from bridge.runtime.decoder.prediction import PredictionHead
from bridge.runtime.decoder.shared import SharedDecoder
from bridge.runtime.drafters.drafter import Drafter
from bridge.runtime.drafters.opened import open_drafter
from bridge.runtime.layers.lora import add_adapter
from bridge.runtime.reader import GGUFFile, open_gguf
from bridge.runtime.replies.batch import MAX_BATCH, Batch
from bridge.runtime.replies.continuations import continuation_scores
from bridge.runtime.replies.drawing import Timing, reply_tokens, run_batch
from bridge.runtime.replies.generation import ScoredToken, scored, stop_texts, until
from bridge.runtime.replies.scoring import TokenScorer
from bridge.runtime.replies.speculation import drafter_for
from bridge.runtime.sampling import ReplyKeywords, Sampler
from bridge.runtime.tokenizer import Tokenizer
from bridge.runtime.vectors import Vectors
from bridge.system.operands import check_precision
from bridge.system.options import check_integer, checked

if TYPE_CHECKING:
    import torch

DEFAULT_CONTEXT = 4096  # tokens, where the model was trained for more
_LONGEST_CONTEXT = 1 << 24  # tokens, more than any model was trained for


class Model(Vectors):
    """A GGUF ready to run; `Model.load` makes one."""

    path: Path
    config: DecoderConfig
    context: int  # tokens that prompt and reply may have together
    tokenizer: Tokenizer
    timing: Timing  # of the last generation

    def __init__(self, file: GGUFFile, kv: str, context: int | None, precision: str, device: str = "cpu"):
        self.path = file.path
        self.config = read_config(file.metadata, file.path)
        self.context = context or min(self.config.context, DEFAULT_CONTEXT)
        self.tokenizer = Tokenizer(file.metadata)
        self.timing = Timing()
        self._file = file
        self._template = ChatTemplate(file.metadata, file.path)
        self._drafters: dict[Path, Drafter] = {}  # the last one in use
        self._shared = SharedDecoder(file, self.config, self.context, kv, precision, device)
        if len(self.tokenizer) > self._decoder.vocab:
            raise BridgeError(
                f"{self.path}: {len(self.tokenizer)} tokens, but token_embd.weight has {self._decoder.vocab} rows; "
                "convert the model again"
            )

    @classmethod
    @checked
    def load(
        cls, path: str | Path, threads: int | None = None, kv: str = "f16", context: int | None = None,
        precision: str = "int8", device: "str | torch.device" = "cpu", load: str = "mmap",
        lora: str | Path | None = None, config: str | Path | None = None, numa: str | None = None,
    ) -> Self:  # fmt: skip
        """Open a GGUF of an architecture that `architectures.ARCHITECTURES` names.

        threads    of the CPU, for the whole process (default: BRIDGE_THREADS, else its cores)
        kv         how keys and values are kept: "f16", "q8_0" or "f32"
        context    tokens that prompt and reply may have together (default: the model's own, at most 4096)
        precision  "int8" rounds activations to 8 bits in blocks, as ggml does; "f32" does not
        device     "cpu", "cuda", "cuda:1" ..., or "auto": CUDA where it can be used, else `note` says why not;
                   or torch's device. All but "cpu" start CUDA, which children that are forked later cannot use then
        load       "mmap", or "memory" for a file that others may truncate or overwrite meanwhile; see `open_gguf`
        lora       the GGUF of an adapter that is added to the weights, as `convert_lora` and llama.cpp write it; on
                   the CPU, and not to experts or to embeddings that are also the head
        config     of a checkpoint, which `bridge.Model` loads: see there
        numa       "distribute" or "isolate", for the whole process: where threads run on a machine with several NUMA
                   nodes (default: BRIDGE_NUMA, else where the system likes); see docs/commands.md

        Raises:
            BridgeError: no such file, a damaged one, an architecture or a tokenizer that is unknown here; a device
                that is missing or has too little memory; an adapter of another model.
        """
        check_precision(precision)
        if context is not None:
            check_integer("context", context, 1, _LONGEST_CONTEXT)
        if threads is not None or numa is not None:
            from bridge.system.threads import pool

            if numa is not None:
                pool.set_numa(numa)
            if threads is not None:
                pool.set_num_threads(threads)
        file = open_gguf(cls._gguf(path, config), load)
        if lora is not None:
            add_adapter(file, open_gguf(lora, load))
        return cls(file, kv, context, precision, str(device))

    @staticmethod
    def _gguf(path: str | Path, config: str | Path | None) -> str | Path:
        """The GGUF to open for what `load` is given."""
        if config is not None:
            raise BridgeError(f"{path}: {parameter('config', config)} is for checkpoints, which bridge.Model loads")
        return path

    @property
    def device(self) -> str:
        """Where it runs: "cpu" or, for instance, "cuda:0"."""
        return self._shared.device

    @property
    def note(self) -> str | None:
        """Why device "auto" is the CPU; None where another was asked for, or CUDA is used."""
        return self._shared.note

    @property
    def _decoder(self) -> Any:
        return self._shared.decoder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise BridgeError(
            f"{self.path}: a model cannot be pickled or copied, it has threads and memory of its own; pass the path "
            "and load it in each process"
        )

    def __repr__(self) -> str:
        return f"Model({str(self.path)!r}, {self.config.arch}, {self.config.layers} layers, context {self.context})"

    def close(self) -> None:
        """Release the file and the memory; the model cannot be used afterwards."""
        self._shared.close()

    @property
    def name(self) -> str:
        """The model's name as the file has it, or the file's."""
        return str(self._file.metadata.get("general.name") or self.path.stem)

    @property
    def file(self) -> GGUFFile:
        """The open file."""
        return self._file

    @property
    def vocab(self) -> int:
        """Number of token ids that it knows, with those that the tokenizer does not use."""
        return int(self._decoder.vocab)

    @property
    def prompt_read(self) -> tuple[int, int]:
        """How many tokens of the last prompt are read, or were kept, and how many it has."""
        count = self.timing.prompt_tokens
        return min(len(self._decoder.read), count), count

    @property
    def chat_template(self) -> str | None:
        """The file's own chat template, in jinja."""
        return self._template.text

    @property
    def takes_tools(self) -> bool:
        """Whether the file has a chat template with tools."""
        return self._template.takes_tools

    @cached_property
    def reply_form(self) -> ReplyForm:
        """How replies in chats are written: what the model thinks, what it says, and which tools it calls."""
        return ReplyForm(self._template.text or "", self._template.call_format, self.tokenizer)

    def prepare(self) -> Self:
        """Repack the weights now rather than with the first token, or on a GPU upload and compile; returns self."""
        self._shared.prepare()
        return self

    def logits(self, tokens: Sequence[int], last: int | None = None) -> np.ndarray:
        """float32 [tokens, vocab]: what follows each position (of the `last` ones only), from an empty context."""
        self.check_continues()
        ids = self.checked_ids(tokens)
        if last is not None:
            check_integer("last", last, 1)
        with self.taken() as decoder:
            return decoder.scores(ids, len(ids) if last is None else min(last, len(ids)))

    def loglikelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        """The log-probability that a continuation follows a context, and whether it is the most likely one.

        The two are cut into tokens as one text; the continuation's are those after as many as the context has alone.
        """
        start = len(self.tokenizer.encode(context))
        tokens = self.tokenizer.encode(context + continuation)
        if self.tokenizer.add_eos and tokens:
            start, tokens = start - 1, tokens[:-1]
        if not 0 < start < len(tokens):
            raise BridgeError("the context and its continuation must have tokens of their own")
        (score,) = self.score_continuations(tokens[:start], [tokens[start:]])
        return score

    def score_continuations(
        self, context: Sequence[int], continuations: Sequence[Sequence[int]]
    ) -> list[tuple[float, bool]]:
        """As `loglikelihood`, for several continuations of one context, in token ids; the context is read once.

        Raises BridgeError where one of them is empty, or does not fit.
        """
        if not context or not all(continuations):
            raise BridgeError("the context and its continuations must have tokens of their own")
        self.check_continues()
        for tokens in continuations:
            self.checked_ids([*context, *tokens[:-1]])
        with self.taken() as decoder:
            return continuation_scores(decoder, list(context), [list(c) for c in continuations])

    def logprobs(self, text: str | Sequence[int], top: int = 0) -> list[ScoredToken]:
        """The log-probability of each token of a text, given those before it, and of the `top` most likely ones.

        The first token has none, so it is not part of the list: it is BOS where the file asks for it.
        """
        check_integer("top", top, 0)
        self.check_continues()
        ids = self.checked_ids(self.tokenizer.encode(text) if isinstance(text, str) else text)
        with self.taken() as decoder:
            scorer = self.token_scorer(ids, top)
            scorer(0, decoder.states(ids, len(ids)))
        return scorer.tokens

    def token_scorer(self, tokens: Sequence[int], top: int) -> TokenScorer:
        """What makes `logprobs` of a prompt's states in a `Batch`."""
        return TokenScorer(self._decoder, self.tokenizer, tokens, top)

    @checked
    def generate(
        self, prompt: str | Sequence[int], max_tokens: int = 256, stop: str | Sequence[str] | None = (),
        draft: "str | Path | Model | None" = None, **sampling: Unpack[ReplyKeywords],
    ) -> Iterator[str]:  # fmt: skip
        """Continue a text, piece by piece as tokens come; pieces are whole characters.

        prompt    a text (BOS is added where the file asks for it) or token ids
        stop      texts that end the reply and are not part of it, besides the model's own end tokens
        draft     what guesses tokens, which are then checked several at a time: the reply is the same, and comes sooner
                  where guesses are right. "ngram": what followed the last tokens when they last came; "mtp": what the
                  file's own layer for that predicts; a path: a drafter's GGUF (EAGLE-3, DFlash, Gemma 4's assistant),
                  on the CPU; or another Model of the same vocabulary, whose context is taken.
                  See `bridge.runtime.replies.speculation`
        sampling  fields of `bridge.runtime.sampling.Sampling`: temperature (0: always the most likely token), top_k,
                  top_p, min_p, seed, repeat_penalty, repeat_last_n, frequency_penalty, presence_penalty, logit_bias
                  ({token id: number added to its logit});
                  and `schema`, a JSON schema (a dict or its text) that the reply fits, or `regex`, an expression that
                  all of it matches: see `bridge.runtime.constraint.Constraint`

        Raises BridgeError, before anything is computed, if the prompt does not fit.
        """
        tokens = self._started(prompt, max_tokens, Sampler.of(self.tokenizer, **sampling), draft)
        return until(self.tokenizer.stream(tokens), stop_texts(stop))

    @checked
    def generate_tokens(
        self, prompt: str | Sequence[int], max_tokens: int = 256, draft: "str | Path | Model | None" = None,
        **sampling: Unpack[ReplyKeywords],
    ) -> Iterator[int]:  # fmt: skip
        """As `generate`, in token ids; without the end token."""
        return self._started(prompt, max_tokens, Sampler.of(self.tokenizer, **sampling), draft)

    @checked
    def generate_scored(
        self, prompt: str | Sequence[int], max_tokens: int = 256, logprobs: int = 0,
        stop: str | Sequence[str] | None = (), draft: "str | Path | Model | None" = None,
        **sampling: Unpack[ReplyKeywords],
    ) -> Iterator[ScoredToken]:  # fmt: skip
        """As `generate`, token by token with the log-probability of each, and of the `logprobs` most likely ones.

        They are the model's own, before biases, penalties, temperature and what else the sampler does.
        """
        sampler = Sampler.of(self.tokenizer, logprobs, **sampling)
        return scored(self.tokenizer, self._started(prompt, max_tokens, sampler, draft), sampler, stop_texts(stop))

    @checked
    def generate_batch(
        self, prompts: Sequence[str | Sequence[int]], max_tokens: int | Sequence[int] = 256,
        stop: str | Sequence[str] | None = (), stops: Sequence[str | Sequence[str] | None] | None = None,
        **sampling: Unpack[ReplyKeywords],
    ) -> list[str]:  # fmt: skip
        """The replies to several prompts, made together: up to 8 sequences go through the weights at once.

        max_tokens  of every reply, or of each
        stop        texts that end any of them
        stops       further ones for each
        sampling    as in `generate`; each sequence draws as it would by itself, with the same seed

        The model's own context stays as it is; the others take as much memory each while they last. On the CPU alone.

        Raises BridgeError, before anything is computed, where a prompt does not fit.
        """
        if isinstance(prompts, str | bytes):
            raise BridgeError(f"prompts is a {type(prompts).__name__}; must be a list of texts or token ids")
        prompts = list(prompts)
        limits: list[Any] = list(max_tokens) if isinstance(max_tokens, Iterable) else [max_tokens] * len(prompts)
        ends = [None] * len(prompts) if stops is None else list(stops)
        if not len(prompts) == len(limits) == len(ends):
            counts = f"{len(prompts)} prompts, {len(limits)} max_tokens, {len(ends)} stops"
            raise BridgeError(f"{counts}: must be one for each prompt")
        with self.batch() as batch:
            generations = [
                batch.add(prompt, limit, stop_texts(stop) + stop_texts(end), **sampling)
                for prompt, limit, end in zip(prompts, limits, ends, strict=True)
            ]
            self.timing = Timing(prompt_tokens=sum(len(generation.prompt) for generation in generations))
            run_batch(self._shared, self.timing, batch)
        for generation in generations:
            if generation.error is not None:
                raise generation.error
        return [generation.text for generation in generations]

    @checked
    def batch(self, sequences: int = MAX_BATCH, draft: str | Path | None = None) -> Batch:
        """Several sequences that are made together, and may be added and cancelled at any time; see `Batch`.

        sequences  contexts, at most 8; further sequences wait until one is free
        draft      "ngram", "mtp" or a drafter's GGUF: guess tokens as in `generate`, while no more than 4 sequences are
                   made at once

        The model's own context stays as it is; each of these takes as much memory. On the CPU alone.
        """
        _ = self._decoder.vocab  # raises if the model is closed
        if not isinstance(self._decoder, Decoder):  # before it loads anything
            raise BridgeError(
                f"device {self.device}: several sequences at once only run on the CPU; generate one after another"
            )
        drafter = None if draft is None else drafter_for(self, draft)
        return Batch(lambda: self._decoder, self.tokenizer, self._shared.lock, self._start, sequences, drafter)

    @checked
    def chat(
        self, messages: Sequence[Mapping[str, Any]], max_tokens: int = 256,
        template_options: Mapping[str, Any] | None = None, stop: str | Sequence[str] | None = (),
        draft: "str | Path | Model | None" = None, **sampling: Unpack[ReplyKeywords],
    ) -> Iterator[str]:  # fmt: skip
        """The model's reply to [{"role": "user", "content": ...}, ...], by the file's own chat template.

        template_options        as in `chat_tokens`
        stop, draft, sampling   as in `generate`

        Its own replies are not read again, even if it chose other tokens than the tokenizer would.
        """
        tokens = self.chat_tokens(messages, template_options)
        with self._shared.lock:
            tokens = self.tokenizer.spelled_as(tokens, self._decoder.read)
        return self.generate(tokens, max_tokens, stop, draft, **sampling)

    def chat_tokens(
        self, messages: Sequence[Mapping[str, Any]], template_options: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> list[int]:  # fmt: skip
        """A conversation as token ids, up to where the reply begins.

        template_options  further variables of the chat template: "tools" and "documents" (lists of objects, as in the
                          OpenAI API), "enable_thinking" and what else the template asks for. Tools take the file's
                          template for them where it has one
        most              of a conversation of more tokens than that, a beginning that is longer is enough
        """
        self.check_continues()
        return self._template.tokens(self.tokenizer, messages, template_options, most)

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], template_options: Mapping[str, Any] | None = None
    ) -> str:
        """A conversation as the text that `chat_tokens` makes tokens of."""
        return self._template.render(self.tokenizer, messages, template_options)

    def checked_ids(self, tokens: Sequence[int], max_tokens: int = 0) -> list[int]:
        """The token ids of a prompt, with BOS where there are none; BridgeError unless the model and its context take
        them."""
        check_integer("max_tokens", max_tokens, 0)
        try:
            if isinstance(tokens, (str, bytes)):
                raise TypeError
            ids = [operator.index(token) for token in tokens]
        except TypeError:
            raise BridgeError(f"the prompt is a {type(tokens).__name__}; must be a text or token ids [n]") from None
        if not ids and self.tokenizer.bos is not None:
            ids = [self.tokenizer.bos]
        if not ids:
            raise BridgeError("the prompt is empty; give at least one token")
        if len(ids) > self.context:
            fact, trained = f"the prompt has {len(ids)} tokens, the context holds {self.context}", self.config.context
            if len(ids) > trained:
                raise BridgeError(f"{fact}; shorten it: the model was trained for {trained}")
            larger = min(trained, 1 << len(ids).bit_length())
            raise BridgeError(
                f"{fact}; shorten it, or raise that with {parameter('context', larger)}: the model was trained for "
                f"{trained}"
            )
        bad = next((token for token in ids if not 0 <= token < self._decoder.vocab), None)
        if bad is not None:
            raise BridgeError(f"token {bad}: the vocabulary has {self._decoder.vocab} tokens")
        return ids

    def _started(
        self, prompt: str | Sequence[int], max_tokens: int, sampler: Sampler, draft: Any = None
    ) -> Iterator[int]:
        """The reply in token ids; errors in the call are raised now, everything else happens later."""
        ids, sampler = self._start(prompt, max_tokens, sampler)
        return self._tokens(ids, max_tokens, sampler, None if draft is None else drafter_for(self, draft))

    def _start(self, prompt: str | Sequence[int], max_tokens: int, sampler: Sampler) -> tuple[list[int], Sampler]:
        """The prompt in token ids, and the sampler that has seen them; BridgeError for invalid arguments."""
        ids = self.checked_ids(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt, max_tokens)
        if max_tokens:
            self.check_continues()
        sampler.check(self._decoder.vocab)
        sampler.see(ids)
        return ids, sampler

    def _tokens(self, ids: list[int], max_tokens: int, sampler: Sampler, drafter: Drafter | None) -> Iterator[int]:
        timing = self.timing = Timing(prompt_tokens=len(ids))
        limit, ends = min(max_tokens, self.context + 1), self.tokenizer.stops  # a full context has one token fewer
        yield from reply_tokens(self._shared, timing, ids, sampler, drafter, limit, ends)

    def taken(self) -> AbstractContextManager[Any]:
        """Lock the decoder. An unfinished generation of another caller loses its context."""
        return self._shared.taken()

    def prediction_head(self) -> PredictionHead:
        """The layer that predicts a token further (MTP); BridgeError where the file has none."""
        return self._shared.prediction_head()

    def drafter(self, path: str | Path) -> Drafter:
        """What guesses tokens by a drafter's GGUF, opened when first asked for; BridgeError if it does not fit."""
        with self._shared.lock:
            path = Path(path)
            if path not in self._drafters:
                head = open_drafter(path, self._decoder, self.tokenizer)
                self._drafters = {path: head.drafter()}
            return self._drafters[path]
