"""general.*: name, origin and license of a model.

From the model card (README.md front matter), generation_config.json (sampling defaults), config.json
and the folder's name, by the rules of gguf's `Metadata`; the checkpoint's repository is the source.
"""

import logging
import re
from pathlib import Path
from typing import Any

import gguf

from bridge.models.config.model_config import Config
from bridge.system.storage.files import read_json

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+$")
_CACHE = re.compile(r"models--([\w.-]+?)--([\w.-]+)$")  # huggingface_hub's folder of a repository


def read_provenance(
    config: Config, folder: Path, parameters: tuple[int, int, int, int]
) -> tuple[gguf.Metadata, list[str]]:
    """gguf's metadata of a checkpoint, and notes; `parameters` is from the writer's get_total_parameter_count."""
    notes: list[str] = []
    log = logging.getLogger("metadata")  # gguf's; it reports every guess
    level, log.level = log.level, logging.ERROR
    try:
        metadata = gguf.Metadata.load(model_path=folder, total_params=parameters[0])
    except Exception as error:  # a model card is written by hand and may contain anything
        notes.append(f"README.md is not used for the metadata: {str(error).splitlines()[0]}")
        metadata = gguf.Metadata()
    finally:
        log.setLevel(level)
    _mend_sampling(metadata, folder)
    repository = repository_of(config.get("_name_or_path"), folder)
    if repository is not None:
        metadata.name = metadata.name if _card_has_name(folder) else repository.partition("/")[2]
        metadata.source_url = metadata.source_repo_url = f"https://huggingface.co/{repository}"
    metadata.name = metadata.name or folder.resolve().name
    metadata.basename = metadata.basename or (repository or folder.resolve().name).rpartition("/")[2]
    if metadata.size_label is None:
        metadata.size_label = gguf.size_label(*parameters)
    for key, value in vars(metadata).items():
        if isinstance(value, str):
            setattr(metadata, key, value.encode("utf-8", "replace").decode())  # a folder's name need not be UTF-8
    return metadata, notes


def _mend_sampling(metadata: gguf.Metadata, folder: Path) -> None:
    """Make sampling defaults the types that GGUF has; drop them if do_sample is false."""
    greedy = read_json(folder / "generation_config.json", optional=True).get("do_sample") is False
    for name, value in vars(metadata).items():
        if name.startswith("sampling_") and value is not None:
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1 << 31
            is_count = name in ("sampling_top_k", "sampling_penalty_last_n", "sampling_mirostat")
            setattr(metadata, name, (int(value) if is_count else float(value)) if number and not greedy else None)


def repository_of(name: Any, folder: Path) -> str | None:
    """ "owner/name" on the Hub, from the cache's folder names or a name such as config.json's _name_or_path."""
    for part in reversed(folder.resolve().parts):
        if match := _CACHE.match(part):
            return f"{match[1]}/{match[2]}"
    return name if isinstance(name, str) and _REPOSITORY.match(name) else None


def _card_has_name(folder: Path) -> bool:
    card = folder / "README.md"
    return card.is_file() and re.search(r"^(model_)?name:", card.read_text("utf-8", "replace"), re.M) is not None
