"""`gguf-bridge run` and `gguf-bridge perplexity`, and what `chat` shares with them."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from bridge.cli.options import Once, add_numa, add_options, command, given
from bridge.cli.use.terminal import generated
from bridge.errors import BridgeError
from bridge.gguf_file.reader import LOADS
from bridge.runtime.sampling import Sampling
from bridge.system.kernels import compiling
from bridge.system.progress import Bar, say
from bridge.system.storage.files import read_text
from bridge.system.text import tell

Piece = TypeVar("Piece")


def add_parser(commands: Any) -> None:
    p = model_parser(commands, "run", run)
    take_checkpoints(p)
    p.add_argument("-p", "--prompt", required=True, metavar="TEXT", help="text to continue; -: from standard input")
    p.add_argument("--chat", action="store_true", help="the text is a user's message, by the model's chat template")
    p.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    add_template_options(p, ", with --chat")
    p.add_argument(
        "--logprobs", type=int, metavar="N",
        help="print a line for each token: the logarithm of its probability, its text, and the N most likely tokens",
    )  # fmt: skip
    add_sampling(p)
    p = model_parser(commands, "perplexity", perplexity)
    p.add_argument("gguf", type=Path, help="GGUF file, or its first shard")
    p.add_argument("-f", "--file", required=True, type=Path, metavar="TEXT.txt", help="text in UTF-8")
    p.add_argument(
        "--reference", type=Path, metavar="OTHER.gguf",
        help="GGUF whose predictions to compare with: prints the divergences",
    )  # fmt: skip
    p.add_argument("--windows", type=int, metavar="N", help="number of windows (default: the whole text)")
    p.add_argument("--length", type=int, default=256, metavar="N", help="tokens in a window (default: 256)")


def take_checkpoints(p: argparse.ArgumentParser) -> None:
    """The model to run, which may be a checkpoint; `gguf_of` returns the GGUF of either."""
    p.add_argument("model", help="GGUF (first shard), or a checkpoint, which is converted first: folder, Hub id or .pt")
    p.add_argument("--config", metavar="DIR", type=Path, help="folder with the config.json and tokenizer of a bare .pt")


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
    grammar = p.add_mutually_exclusive_group()
    grammar.add_argument(
        "--schema", type=Path, metavar="FILE.json", help="JSON schema that the reply fits (the extra: schema)"
    )
    grammar.add_argument("--regex", metavar="REGEX", help="regular expression that the whole reply matches")
    p.add_argument(
        "--draft", metavar="ngram|mtp|FILE.gguf",
        help="what guesses tokens, for the same reply sooner: ngram (what followed the last tokens before), mtp (the "
        "file's own layer for that), or a smaller model of the same vocabulary",
    )  # fmt: skip
    add_options(p, Sampling)


def add_template_options(p: argparse.ArgumentParser, when: str = "") -> None:
    """What the chat template is given besides the messages; `template_options` reads it."""
    p.add_argument("--tools", type=Path, metavar="FILE.json", help=f"list of the tools that the model may call{when}")
    p.add_argument("--documents", type=Path, metavar="FILE.json", help=f"list of documents to quote from{when}")
    p.add_argument("--no-think", action="store_true", help=f"ask the chat template for a reply without thinking{when}")
    p.add_argument(
        "--template-option", action="append", default=[], type=_named_value, metavar="NAME=VALUE",
        help=f"variable of the chat template, a text or JSON{when}; may be repeated",
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
    if a.draft is None:
        return None
    from bridge.runtime.replies.speculation import NAMES

    return a.draft if a.draft in NAMES else load(a, Path(a.draft), a.context)


def model_parser(commands: Any, name: str, handler: Any) -> argparse.ArgumentParser:
    parser = command(commands, name, handler)
    add_loading(parser)
    parser.add_argument(
        "--lora", action=Once, type=Path, metavar="ADAPTER.gguf",
        help="adapter that convert-lora wrote, added to the model's weights",
    )  # fmt: skip
    return parser


def add_loading(parser: argparse.ArgumentParser) -> None:
    """The options that `load` reads."""
    parser.add_argument("--threads", type=int, metavar="N", help="number of CPU threads (default: one per core)")
    add_numa(parser)
    parser.add_argument(
        "--context", type=int, metavar="N",
        help="tokens that prompt and reply may have (default: the model's, at most 4096)",
    )  # fmt: skip
    parser.add_argument(
        "--kv", default="f16", choices=("f16", "q8_0", "f32"), help="type of keys and values (default: f16)"
    )
    parser.add_argument(
        "--precision", default="int8", choices=("int8", "f32"),
        help="precision of activations (default: int8, as in llama.cpp)",
    )  # fmt: skip
    parser.add_argument(
        "--load", default="mmap", choices=LOADS,
        help="mmap, or memory: read the whole file, which others may then truncate or overwrite (default: mmap)",
    )  # fmt: skip
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1 ..., or auto: cuda if possible")


def load(a: argparse.Namespace, path: Path, context: int | None, lora: Path | None = None) -> Any:
    say(f"loading {path}")
    from bridge.runtime.model import Model

    model = Model.load(path, a.threads, a.kv, context, a.precision, a.device, a.load, lora, numa=a.numa)
    if model.note:
        tell(model.note)
    if model.context > model.config.context:
        tell(f"{path}: trained for {model.config.context} tokens, fewer than the requested context")
    return model


def run(a: argparse.Namespace) -> int:
    """Stream a continuation to standard output; the speeds go to standard error."""
    text = _standard_input() if a.prompt == "-" else a.prompt
    if a.system is not None and not a.chat:
        raise BridgeError("--system needs --chat")
    if not a.chat and (a.tools or a.documents or a.no_think or a.template_option):
        raise BridgeError("--tools, --documents, --no-think and --template-option need --chat")
    system = [{"role": "system", "content": a.system}] if a.system is not None else []
    messages = [*system, {"role": "user", "content": text}] if a.chat else None
    options = template_options(a)
    prompt: str | list[int] = text
    model = load(a, gguf_of(a, messages), a.context, a.lora)
    if messages is not None:
        prompt = model.chat_tokens(messages, {**without_thinking(a, model.chat_template), **options})
    if a.logprobs is not None:
        for token in without_pauses(model.generate_scored(prompt, logprobs=a.logprobs, **reply_options(a)), model):
            print(_scored_line(model, token), flush=True, file=generated())
    else:
        pieces = without_pauses(model.generate(prompt, **reply_options(a)), model)
        first = next(pieces, "")
        try:
            print(first if a.chat else text + first, end="", flush=True, file=generated())
            for piece in pieces:
                print(piece, end="", flush=True, file=generated())
        finally:
            print(flush=True)
    tell(speeds(model))
    return 0


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
