"""`gguf-bridge run` and `gguf-bridge perplexity`, and what `chat` shares with them."""

import argparse
import json
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from bridge.cli.json_output import add_json, print_json
from bridge.cli.options import Once, add_numa, add_options, as_flag, command, further, given
from bridge.cli.use.terminal import generated
from bridge.errors import BridgeError
from bridge.gguf_file.reader import LOADS
from bridge.runtime.sampling import Sampling
from bridge.system.kernels import compiling
from bridge.system.progress import Bar, say
from bridge.system.storage.files import read_text
from bridge.system.text import tell

_DESCRIPTION = """\
Answer a prompt with a GGUF or a checkpoint, or without one chat. Words after the model, and text that is piped into
the command, are a message to the model where it has a chat template, and otherwise a text to continue; --prompt is
always a text to continue, unless with --chat.
"""
Piece = TypeVar("Piece")


def add_parser(commands: Any) -> None:
    p = model_parser(commands, "perplexity", perplexity)
    p.add_argument("gguf", help="GGUF file, or its first shard, or a Hub id of one (org/name:Q4_K_M)")
    p.add_argument("-f", "--file", required=True, type=Path, metavar="TEXT.txt", help="text in UTF-8")
    p.add_argument(
        "--reference", metavar="OTHER.gguf",
        help="GGUF whose predictions to compare with: prints the divergences",
    )  # fmt: skip
    p.add_argument("--windows", type=int, metavar="N", help="number of windows (default: the whole text)")
    p.add_argument("--length", type=int, default=256, metavar="N", help="tokens in a window (default: 256)")
    add_json(p)


def add_run_parser(commands: Any, handler: Any) -> argparse.ArgumentParser:
    """The parser of `gguf-bridge run`."""
    p = model_parser(commands, "run", handler, _DESCRIPTION)
    take_checkpoints(p)
    p.add_argument("words", nargs="*", metavar="PROMPT", help="message to the model, or text to continue; see above")
    p.add_argument("-p", "--prompt", metavar="TEXT", help="text to continue; -: from standard input")
    p.add_argument("--chat", action="store_true", help="--prompt is a message, by the model's chat template")
    p.add_argument("--system", metavar="TEXT", help="system message")
    add_template_options(p)
    further(p).add_argument(
        "--logprobs", type=int, metavar="N",
        help="print a line for each token: the logarithm of its probability, its text, and the N most likely tokens",
    )  # fmt: skip
    add_sampling(p)
    return p


def take_checkpoints(p: argparse.ArgumentParser) -> None:
    """The model to run, which may be a checkpoint; `gguf_of` returns the GGUF of either."""
    p.add_argument(
        "model",
        help="GGUF (first shard), or a checkpoint, which is converted first: folder or .pt; or a Hub id of either "
        "(org/name, org/name:Q4_K_M)",
    )  # fmt: skip
    further(p).add_argument(
        "--config", metavar="DIR", type=Path, help="folder with the config.json and tokenizer of a bare .pt"
    )


def gguf_of(a: argparse.Namespace, messages: Sequence[dict[str, str]] | None = None) -> Path:
    """The GGUF that the command was given, or one of its checkpoint, whose chat template must accept `messages`."""
    from bridge.conversion.model import gguf_of as converted

    say(f"loading {a.model}")
    with Bar("converting") as bar:
        return converted(a.model, a.config, bar, messages)


def add_sampling(p: argparse.ArgumentParser) -> None:
    """The options of a reply; `reply_options` reads them."""
    p.add_argument(
        "-n", "--max-tokens", type=int, default=256, metavar="N",
        help="maximum number of tokens in the reply (default: 256)",
    )  # fmt: skip
    p.add_argument(
        "--stop", action="append", default=[], metavar="TEXT",
        help="text that ends the reply and is not printed; may be repeated",
    )  # fmt: skip
    grammar = further(p).add_mutually_exclusive_group()
    grammar.add_argument(
        "--schema", type=Path, metavar="FILE.json", help="JSON schema that the reply fits (the extra: schema)"
    )
    grammar.add_argument("--regex", metavar="REGEX", help="regular expression that the whole reply matches")
    further(p).add_argument(
        "--draft", metavar="ngram|mtp|FILE.gguf",
        help="what guesses tokens, for the same reply sooner: ngram (what followed the last tokens before), mtp (the "
        "file's own layer for that), a drafter made for the model (EAGLE-3, DFlash, Gemma 4's assistant), or a "
        "smaller model of the same vocabulary",
    )  # fmt: skip
    add_options(p, "sampling", Sampling)


def add_template_options(p: argparse.ArgumentParser) -> None:
    """What the chat template is given besides the messages; `template_options` reads it."""
    p.add_argument("--no-think", action="store_true", help="ask for a reply without thinking")
    more = further(p, "chat template")
    more.add_argument("--tools", type=Path, metavar="FILE.json", help="list of the tools that the model may call")
    more.add_argument("--documents", type=Path, metavar="FILE.json", help="list of documents to quote from")
    more.add_argument(
        "--template-option", action="append", default=[], type=_named_value, metavar="NAME=VALUE",
        help="variable of the chat template, a text or JSON; may be repeated",
    )  # fmt: skip


def template_options(a: argparse.Namespace) -> dict[str, Any]:
    """The variables that the command line gives chat templates, but for --no-think; BridgeError for a bad file."""
    variables = dict(a.template_option)
    for name in ("tools", "documents"):
        if (file := getattr(a, name)) is not None:
            try:
                variables[name] = json.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as problem:
                raise BridgeError(f"{file}: {getattr(problem, 'strerror', None) or 'not JSON in UTF-8'}") from problem
            if not isinstance(variables[name], list) or not all(isinstance(value, dict) for value in variables[name]):
                raise BridgeError(f"{file}: must be a list of objects, as in the OpenAI API")
    return variables


def without_thinking(a: argparse.Namespace, template: str | None) -> dict[str, Any]:
    """What --no-think gives the chat template of a model; BridgeError if it has no switch."""
    from bridge.gguf_file.chat_template import thinking_switches

    switches = thinking_switches(template) if a.no_think and template is not None else {}
    if a.no_think and template is not None and not switches:
        raise BridgeError("--no-think: the model's chat template has no switch for thinking; leave the option out")
    return switches


def _named_value(text: str) -> tuple[str, Any]:
    """(name, value) of "reasoning_effort=low" or "thinking_budget=512"; a value that is JSON is read as such."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a name and a value, as reasoning_effort=low")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def reply_options(a: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `Model.generate` after the prompt."""
    grammar = {"schema": a.schema and read_text(a.schema), "regex": a.regex}
    return {"max_tokens": a.max_tokens, "stop": a.stop, "draft": _draft(a), **grammar, **given(a, Sampling)}


def _draft(a: argparse.Namespace) -> Any:
    """What guesses tokens: a name, a model that is loaded, or None."""
    draft = draft_of(a.draft)
    if draft is None or draft in _draft_names():
        return draft
    from bridge.gguf_file.reader import read_gguf
    from bridge.runtime.drafters.draft_file import is_drafter

    return draft if is_drafter(read_gguf(draft).metadata) else load(a, draft, a.context)


def draft_of(draft: str | None) -> str | Path | None:
    """What --draft names: nothing, a drafter's name, or a file."""
    return draft if draft is None or draft in _draft_names() else _gguf_path(draft)


def _draft_names() -> tuple[str, ...]:
    from bridge.runtime.replies.speculation import NAMES  # the import takes time

    return NAMES


def model_parser(commands: Any, name: str, handler: Any, description: str | None = None) -> argparse.ArgumentParser:
    parser = command(commands, name, handler, description)
    add_loading(parser)
    further(parser).add_argument(
        "--lora", action=Once, type=Path, metavar="ADAPTER.gguf",
        help="adapter that convert-lora wrote, added to the model's weights",
    )  # fmt: skip
    return parser


def add_loading(parser: argparse.ArgumentParser) -> None:
    """The options that `load` reads."""
    parser.add_argument(
        "--context", type=int, metavar="N",
        help="tokens that prompt and reply may have (default: the model's, at most 4096)",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, metavar="N", help="number of CPU threads (default: one per core)")
    parser.add_argument(
        "--device", default="cpu", metavar="NAME", help="cpu (default), cuda, cuda:1 ..., or auto: cuda if possible"
    )
    add_numa(parser)
    more = further(parser)
    more.add_argument(
        "--kv", default="f16", choices=("f16", "q8_0", "f32"), help="type of keys and values (default: f16)"
    )
    more.add_argument(
        "--precision", default="int8", choices=("int8", "f32"),
        help="precision of activations (default: int8, as in llama.cpp)",
    )  # fmt: skip
    more.add_argument(
        "--load", default="mmap", choices=LOADS,
        help="mmap, or memory: read the whole file, which others may then truncate or overwrite (default: mmap)",
    )  # fmt: skip


def _gguf_path(path: str | Path) -> str | Path:
    """The file of a path, or of a name on the Hub or in Ollama."""
    if str(path).endswith(".gguf"):
        return path
    from bridge.checkpoint.files.hub import resolve_gguf  # the import takes time

    return resolve_gguf(path)


def load(a: argparse.Namespace, path: str | Path, context: int | None, lora: Path | None = None) -> Any:
    say(f"loading {path}")
    from bridge.runtime.model import Model

    model = Model.load(_gguf_path(path), a.threads, a.kv, context, a.precision, a.device, a.load, lora, numa=a.numa)
    if model.note:
        tell(model.note)
    if model.context > model.config.context:
        tell(f"{path}: trained for {model.config.context} tokens, fewer than the requested context")
    return model


def prompt_of(a: argparse.Namespace) -> str | None:
    """The prompt of `run`: --prompt, or words with what is piped before them; None: a terminal will tell.

    Sets --chat, or to None where the model's chat template decides.
    """
    if a.prompt is not None and a.words:
        raise BridgeError("--prompt and words are two prompts; give one")
    if a.prompt is not None:
        if not a.chat and (asked := _for_chats(a)):
            raise BridgeError(f"{asked} needs a message: give the prompt as words, or --chat")
        return _standard_input() if a.prompt == "-" else a.prompt
    if not a.words and sys.stdin.isatty():
        return None
    a.chat = True if a.chat or _for_chats(a) else None
    piped = _standard_input().removesuffix("\n") if not a.words or _piped() else ""
    prompt = "\n".join(filter(None, [piped, " ".join(a.words)]))
    if not prompt:
        raise BridgeError("the prompt is empty; give it after the model, by --prompt or on standard input")
    return prompt


def _for_chats(a: argparse.Namespace) -> str | None:
    """The first option that was given and is for messages alone."""
    names = ("system", "tools", "documents", "no_think", "template_option")
    return next((as_flag(name) for name in names if getattr(a, name) not in (None, False, [])), None)


def _piped() -> bool:
    """Whether standard input is a pipe or a file."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # closed, or none of the system's
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def run(a: argparse.Namespace, text: str) -> int:
    """Stream the reply to a prompt to standard output; the speeds go to standard error."""
    system = [{"role": "system", "content": a.system}] if a.system is not None else []
    messages = [*system, {"role": "user", "content": text}]
    options = template_options(a)
    prompt: str | list[int] = text
    model = load(a, gguf_of(a, messages if a.chat else None), a.context, a.lora)
    chats = a.chat if a.chat is not None else model.chat_template is not None
    if chats:
        prompt = model.chat_tokens(messages, {**without_thinking(a, model.chat_template), **options})
    if a.logprobs is not None:
        for token in without_pauses(model.generate_scored(prompt, logprobs=a.logprobs, **reply_options(a)), model):
            print(_scored_line(model, token), flush=True, file=generated())
    else:
        pieces = without_pauses(model.generate(prompt, **reply_options(a)), model)
        first = next(pieces, "")
        try:
            print(first if chats else text + first, end="", flush=True, file=generated())
            for piece in pieces:
                print(piece, end="", flush=True, file=generated())
        finally:
            print(flush=True)
    tell(speeds(model))
    tell_full_context(a, model)
    return 0


def tell_full_context(a: argparse.Namespace, model: Any) -> None:
    """Say so where the last reply ended because the context was full."""
    if model.timing.full:
        trained = model.config.context
        more = f"; --context raises it, up to the {trained} that the model was trained for" * (trained > model.context)
        tell(f"the reply ends here because the context is full: {model.context} tokens{more}")


def without_pauses(pieces: Iterator[Piece], model: Any) -> Iterator[Piece]:
    """The pieces of a model's reply; until the first comes, a line says how much of the prompt is read.

    Where kernels are compiled for it, it waits until those of the second are, too.
    """
    before = compiling.steps()
    with Bar("reading the prompt", unit=" tokens", follow=lambda: model.prompt_read):
        ready = list(islice(pieces, 1))
        if compiling.steps() > before:
            ready += islice(pieces, 1)
    yield from ready
    yield from pieces


def _scored_line(model: Any, token: Any) -> str:
    """A token's log-probability and text, then those of the most likely tokens, between tabs."""

    def pair(logprob: float, text: str) -> str:
        return f"{logprob:.4f} {json.dumps(text, ensure_ascii=False)}"

    return "\t".join([pair(token.logprob, token.text), *(pair(p, model.tokenizer.decode([t])) for t, p in token.top)])


def speeds(model: Any) -> str:
    """The speeds of the last reply."""
    t = model.timing
    cached = f" ({t.kept_tokens} of them kept)" if t.kept_tokens else ""
    guesses = f"; {t.speculation.accepted} of {t.speculation.drafted} guesses right" if t.speculation else ""
    return (
        f"prompt: {t.prompt_tokens} tokens{cached}, {_speed(t.prompt_tokens - t.kept_tokens, t.prompt_seconds)}; "
        f"generation: {t.tokens} tokens, {_speed(t.tokens, t.seconds)}{guesses}"
    )


def _standard_input() -> str:
    """The text on standard input; BridgeError where it is not UTF-8."""
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as problem:
        raise BridgeError(f"standard input is not UTF-8 (byte {problem.start}); convert it first") from None


def perplexity(a: argparse.Namespace) -> int:
    """Print perplexity, and with a reference the divergences from it."""
    from bridge.runtime.replies import perplexity as measure

    text = read_text(a.file)
    context = a.length if a.context is None else a.context
    model = load(a, a.gguf, context, a.lora)
    reference = load(a, a.reference, context) if a.reference else None
    say(f"cutting {a.file} into tokens")
    with Bar("measuring", unit=" windows") as bar:
        total = measure.perplexity(model, text, a.length, a.windows, reference, bar)
    if a.json:
        print_json(asdict(total))
        return 0
    print(f"perplexity {total.perplexity:.4f} +- {total.error:.4f} ({total.windows} windows of {total.window} tokens)")
    if (d := total.divergence) is not None:
        ratio = total.perplexity / d.reference_perplexity
        print(f"the reference's perplexity {d.reference_perplexity:.4f}; ratio {ratio:.6f}")
        print(f"KL divergence: mean {d.mean:.6f} +- {d.mean_error:.6f}, median {d.median:.6f}, 99% {d.p99:.6f}, "
              f"maximum {d.maximum:.6f}")  # fmt: skip
        print(f"same top token: {d.same_top:.3%}")
        print(f"delta p: mean {d.delta_p:+.4%}, RMS {d.delta_p_rms:.4%}")
    return 0


def _speed(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:.1f} tokens/s" if tokens and seconds else "no time measured"
