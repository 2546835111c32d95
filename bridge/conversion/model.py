"""`bridge.Model`: the runtime's model, which also loads what can be converted."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from bridge.errors import BridgeError
from bridge.runtime.model import Model as GGUFModel
from bridge.system.progress import Progress


def gguf_of(
    model: str | Path,
    config: str | Path | None = None,
    progress: Progress | None = None,
    messages: Sequence[Mapping[str, str]] | None = None,
) -> Path:
    """The GGUF of a name: itself, or the one in the cache that is made of a checkpoint (a folder, a Hub id, a .pt).

    config, progress, messages  as for `bridge.conversion.cache.converted`
    """
    if not isinstance(model, str | Path):
        raise BridgeError(f"the model is of type {type(model).__name__}; must be the name of a GGUF or a checkpoint")
    if str(model).endswith(".gguf"):
        return Path(model)  # without the time that it takes to import what follows
    from bridge.checkpoint.files.hub import kind_of

    if kind_of(model, config) in ("gguf", "part"):
        return Path(model)
    from bridge.conversion.cache import converted
    from bridge.runtime.decoder_config import ARCHITECTURES

    return converted(model, config, ARCHITECTURES, progress, messages)


class Model(GGUFModel):
    """See `bridge.runtime.model.Model`."""

    @classmethod
    def load(
        cls,
        path: str | Path,
        threads: int | None = None,
        kv: str = "f16",
        context: int | None = None,
        precision: str = "int8",
        device: Any = "cpu",
        load: str = "mmap",
    ) -> Self:
        """Load a GGUF, or a checkpoint (a folder, a Hub id, a .pt), which is converted into the cache first.

        The arguments are those of `bridge.runtime.model.Model.load`; raises BridgeError as that and `convert` do.
        """
        return super().load(gguf_of(path), threads, kv, context, precision, device, load)
