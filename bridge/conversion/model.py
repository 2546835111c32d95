"""`bridge.Model`: the runtime's model, which also loads what can be converted."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from bridge.errors import BridgeError, parameter
from bridge.runtime.model import Model as GGUFModel
from bridge.system.progress import Progress


def gguf_of(
    model: str | Path,
    config: str | Path | None = None,
    progress: Progress | None = None,
    messages: Sequence[Mapping[str, str]] | None = None,
) -> Path:
    """The GGUF of a name: itself, that of a Hub repository, or the one in the cache that `converted` makes of a
    checkpoint."""
    if str(model).endswith(".gguf") and config is None:
        return Path(model)  # without the time that it takes to import what follows
    from bridge.checkpoint.files.hub import kind_of

    kind = kind_of(model, config)
    if kind == "gguf" and config is not None:
        why = f"is a GGUF, which has its configuration and tokenizer in it; leave out {parameter('config', config)}"
        raise BridgeError(f"{model}: {why}")
    if kind in ("gguf", "part"):
        return Path(model)
    from bridge.conversion.cache import converted
    from bridge.gguf_file.architectures import ARCHITECTURES

    return converted(model, config, ARCHITECTURES, progress, messages)


class Model(GGUFModel):
    """`bridge.runtime.model.Model`, which also loads a checkpoint (a folder, a Hub id, a .pt): it is converted into the
    cache first. `config` is the folder with the config.json and tokenizer of a bare .pt. Raises BridgeError as
    `convert` does, too."""

    @staticmethod
    def _gguf(path: str | Path, config: str | Path | None) -> Path:
        return gguf_of(path, config)
