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
    """A language model, embedding model or reranker of a GGUF; `Model.load` makes one.

    path       the GGUF
    config     sizes of the model, from the metadata
    context    number of tokens that prompt and reply may have together
    tokenizer  text to token ids and back
    timing     number of tokens and seconds of the last generation

    A model serves one caller at a time. Each call of `generate`, `chat` or `logits` takes the context: an unfinished
    generation then raises BridgeError when it is asked for more. Tokens at the start of a prompt that equal those of
    the call before are not computed again.
    """

    path: Path
    config: DecoderConfig
    context: int
    tokenizer: Tokenizer
    timing: Timing

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
        """Open a GGUF.

        path       a GGUF; for `bridge.Model` also a Hub id that has one, or a checkpoint, which is converted into the
                   cache first
        threads    threads of the CPU, for the whole process; None: BRIDGE_THREADS, else one per core
        kv         dtype of the cache of keys and values: "f16", "q8_0" or "f32"
        context    number of tokens that prompt and reply may have together; None: the model's own, at most 4096
        precision  "int8" rounds activations to 8 bits in blocks, as ggml does; "f32" does not
        device     "cpu", "cuda", "cuda:1" ... or torch's device; "auto": CUDA where it can be used, otherwise the CPU,
                   and `note` has the reason
        load       "mmap", or "memory" for a file that others may truncate or overwrite meanwhile; see `open_gguf`
        lora       the GGUF of an adapter to add to the weights, as `convert_lora` and llama.cpp write it; on the CPU,
                   and not to experts or to embeddings that are also the head
        config     folder with the config.json and tokenizer of a bare .pt, for `bridge.Model`
        numa       "distribute" or "isolate": where threads run on a machine with several NUMA nodes, for the whole
                   process; None: BRIDGE_NUMA, else the system decides

        Returns the model. Raises BridgeError where the file is missing, damaged or of an unknown architecture or
        tokenizer, where the device is missing or has too little memory, and for an adapter of another model.
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
        """Where the model runs: "cpu", "cuda:0" ..."""
        return self._shared.device

    @property
    def note(self) -> str | None:
        """Why device "auto" chose the CPU; None if it did not."""
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
        """Number of rows of the embeddings, and of logits: the tokenizer may use fewer."""
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
        """Repack the weights now instead of with the first token; on a GPU, upload them and compile the kernels.

        Returns the model itself. Raises BridgeError where a scale is not finite, or memory does not suffice.
        """
        self._shared.prepare()
        return self

    def logits(self, tokens: Sequence[int], last: int | None = None) -> np.ndarray:
        """The logits after each token of a text, from an empty context.

        tokens  token ids [n]
        last    return only so many rows, for the last tokens; None: all

        Returns float32 [n, vocab], or [last, vocab]. Raises BridgeError where the tokens do not fit the context.
        """
        self.check_continues()
        ids = self.checked_ids(tokens)
        if last is not None:
            check_integer("last", last, 1)
        with self.taken() as decoder:
            return decoder.scores(ids, len(ids) if last is None else min(last, len(ids)))

    def loglikelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        """How likely `continuation` is after `context`.

        Both are cut into tokens as one text. The tokens of the continuation are those after as many as the context has
        alone.

        Returns the natural logarithm of the probability, and whether each token is the most likely one in its place.
        Raises BridgeError where one of the two has no tokens, or both do not fit the context.
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
        """As `loglikelihood`, for several continuations of one context, which is read once.

        context        token ids [n]
        continuations  token ids of each

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
        """How likely each token of a text is after the tokens before it.

        text  a text or token ids
        top   number of the most likely tokens to list for each place

        Returns a `bridge.runtime.replies.generation.ScoredToken` for each token but the first, which has none before
        it. Raises BridgeError where the text does not fit the context.
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
        """Continue a text.

        prompt      a text, before which BOS is added where the file asks for it, or token ids
        max_tokens  the most tokens of the reply
        stop        texts that end the reply and are not part of it, besides the model's own end tokens
        draft       what guesses tokens, which are then checked several at a time. The reply stays the same, and comes
                    sooner where guesses are right. "ngram": the tokens that followed the last ones before; "mtp": the
                    file's layer that predicts further tokens; a path: the GGUF of a drafter (EAGLE-3, DFlash, Gemma 4's
                    assistant), on the CPU; or another Model of the same vocabulary
        sampling    fields of `bridge.runtime.sampling.Sampling`, such as temperature=0 for the most likely token; and
                    schema, a JSON schema (a dict or its text) that the reply fits, or regex, a regular expression (in
                    Rust's syntax, without look-around) that the whole reply matches

        Returns an iterator of pieces of text, which are whole characters. Raises BridgeError, before anything is
        computed, where the prompt does not fit the context, an option is out of range or a schema cannot be followed.
        """
        tokens = self._started(prompt, max_tokens, Sampler.of(self.tokenizer, **sampling), draft)
        return until(self.tokenizer.stream(tokens), stop_texts(stop))

    @checked
    def generate_tokens(
        self, prompt: str | Sequence[int], max_tokens: int = 256, draft: "str | Path | Model | None" = None,
        **sampling: Unpack[ReplyKeywords],
    ) -> Iterator[int]:  # fmt: skip
        """As `generate`, in token ids and without stop texts.

        prompt, max_tokens, draft, sampling   as in `generate`

        Returns an iterator of token ids, without the end token. Raises BridgeError as `generate` does.
        """
        return self._started(prompt, max_tokens, Sampler.of(self.tokenizer, **sampling), draft)

    @checked
    def generate_scored(
        self, prompt: str | Sequence[int], max_tokens: int = 256, logprobs: int = 0,
        stop: str | Sequence[str] | None = (), draft: "str | Path | Model | None" = None,
        **sampling: Unpack[ReplyKeywords],
    ) -> Iterator[ScoredToken]:  # fmt: skip
        """As `generate`, token by token with probabilities.

        prompt, max_tokens, stop, draft, sampling   as in `generate`
        logprobs  number of the most likely tokens to list for each place

        Returns an iterator of `bridge.runtime.replies.generation.ScoredToken`. Probabilities are the model's own,
        before biases, penalties and temperature. Raises BridgeError as `generate` does.
        """
        sampler = Sampler.of(self.tokenizer, logprobs, **sampling)
        return scored(self.tokenizer, self._started(prompt, max_tokens, sampler, draft), sampler, stop_texts(stop))

    @checked
    def generate_batch(
        self, prompts: Sequence[str | Sequence[int]], max_tokens: int | Sequence[int] = 256,
        stop: str | Sequence[str] | None = (), stops: Sequence[str | Sequence[str] | None] | None = None,
        **sampling: Unpack[ReplyKeywords],
    ) -> list[str]:  # fmt: skip
        """Reply to several prompts: up to 8 sequences share each pass over the weights. On the CPU only.

        prompts     texts or token ids
        max_tokens  the most tokens of each reply: a number for all, or one for each
        stop        texts that end any of the replies
        stops       further texts for each reply
        sampling    as in `generate`; each sequence draws as it would by itself with the same seed

        Each sequence takes as much memory as a context of the model while it lasts.

        Returns the replies in the order of the prompts. Raises BridgeError, before anything is computed, where a prompt
        does not fit the context, and on a GPU.
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
        """Make several sequences together, which may be added and cancelled at any time. On the CPU only.

        sequences  number of contexts, at most 8; further sequences wait until one is free
        draft      "ngram", "mtp" or the GGUF of a drafter, which guesses tokens as in `generate` while at most 4
                   sequences are made at once

        Each context takes as much memory as that of the model.

        Returns a `bridge.runtime.replies.batch.Batch`. Raises BridgeError on a GPU.
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
        """Reply in a conversation, by the file's own chat template.

        messages          [{"role": "user", "content": "..."}, ...]
        max_tokens        the most tokens of the reply
        template_options  as in `chat_tokens`
        stop, draft, sampling   as in `generate`

        Returns an iterator of pieces of text. Raises BridgeError as `generate` does, and where the file has no chat
        template or the template fails.
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

        messages          [{"role": "user", "content": "..."}, ...]
        template_options  further variables of the chat template: "tools" and "documents" (lists of objects, as in the
                          OpenAI API), "enable_thinking" and others that the template reads
        most              stop cutting the text into tokens once there are more than this

        Raises BridgeError where the file has no chat template or the template fails.
        """
        self.check_continues()
        return self._template.tokens(self.tokenizer, messages, template_options, most)

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], template_options: Mapping[str, Any] | None = None
    ) -> str:
        """A conversation as text: what `chat_tokens` cuts into tokens, of the same `messages`, `template_options`."""
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
