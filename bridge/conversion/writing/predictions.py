"""What the models that `verify` compares predict on a text, in this program's runtime."""

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from bridge.checkpoint import Checkpoint
from bridge.checkpoint.files.hub import model_name
from bridge.conversion.converter import convert
from bridge.conversion.gguf_input.gguf_checkpoint import GgufCheckpoint
from bridge.runtime.decoder.prediction import agreement
from bridge.runtime.model import Model
from bridge.runtime.replies.perplexity import Perplexity, cut_windows, perplexity
from bridge.system.progress import Progress, say
from bridge.system.storage.files import read_text
from bridge.system.text import percent

_WINDOW = 256  # tokens of a text that are read together


def divergence(
    measured: Path | Checkpoint,
    reference: Checkpoint,
    text: str,
    window: int,
    n_windows: int | None,
    template: str | Path | None = None,
    target: str | Path | None = None,
    progress: Progress | None = None,
) -> Perplexity:
    """How a GGUF or a checkpoint predicts a text, compared with the reference; other arguments as for `perplexity`.

    Of both, weights alone differ from floats: activations, keys and values are not rounded. A checkpoint is converted
    to a temporary GGUF of F32. Raises BridgeError where one cannot be converted or run, and as `perplexity` does.
    """
    with ExitStack() as stack:
        models = []
        for model in (measured, reference):
            if isinstance(model, Path):
                path = model
            elif isinstance(model, GgufCheckpoint):
                path = model.path
            else:
                folder = Path(stack.enter_context(TemporaryDirectory()))
                path = folder / f"{model_name(str(model.path))}-F32.gguf"
                say(f"converting {model.path} to F32")
                convert(
                    model.path, path, type="F32", config=None if model.home == model.path else model.home,
                    template=template, target_model=target, mmproj_type="none", no_mtp=True,
                )  # fmt: skip
            models.append(stack.enter_context(Model.load(path, kv="f32", context=window, precision="f32")))
        return perplexity(models[0], text, window, n_windows, models[1], progress)


def tried_prediction(gguf_path: Path, text: Path) -> str:
    """How many tokens the layer that predicts a token further would have guessed, in a sentence."""
    content = read_text(text)
    with Model.load(gguf_path) as model:
        head = model.prediction_head()
        windows = cut_windows(model, content, min(_WINDOW, model.context), None)
        with model.taken() as decoder:
            counts = [agreement(decoder, head, tokens) for tokens in windows]
    right, of = map(sum, zip(*counts, strict=True))
    return (
        f"{text}: the layer that predicts a token further (MTP) guesses {right} of {of} tokens ({percent(right / of)}) "
        "as the model chooses them"
    )
