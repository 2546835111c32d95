"""Finds a model by name: a local folder or file, or a Hub id that huggingface_hub downloads or has in its cache.

org/name          the repository's checkpoint, or where it has GGUFs alone, one of them
org/name@branch   that of a branch, tag or commit
org/name:Q4_K_M   the repository's GGUF of this type, as llama.cpp names them
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from bridge.checkpoint import Checkpoint, open_checkpoint
from bridge.checkpoint.files.weight_files import WEIGHTS, checkpoint_files
from bridge.errors import BridgeError, parameter
from bridge.system.status_line import LINE
from bridge.system.storage.files import (
    OLD_GGML,
    expanded,
    first_bytes,
    missing,
    near_names,
    refuse_pointer,
    without_shard,
)
from bridge.system.text import few_of, meant, size_text, tell

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?(?::([\w.-]+))?")
_SNAPSHOT = re.compile(r"models--[\w.-]+?--([\w.-]+)/snapshots/[0-9a-f]+$")  # in huggingface_hub's cache
_FILES = (".gguf", ".json", *WEIGHTS)  # a name with such an ending is a mistyped file rather than a model
# GGUF names: of 4 bits a weight or more, of files without a language model, and a shard's number
_FINE = re.compile(r"(?<![A-Z])(Q[4-8]_[0-9A-Z_]+|B?F16|F32)(?![0-9A-Z])", re.IGNORECASE)
_NO_MODEL = re.compile(r"mmproj|imatrix|(?<![a-z])lora(?![a-z])|(^|/)mtp-", re.IGNORECASE)
_TAG = re.compile(r"(?<![A-Za-z0-9])((?:UD-)?(?:I?Q\d|TQ\d|MXFP4|NVFP4|B?F16|F32)\w*)(?=[./-]|$)", re.IGNORECASE)
_DEFAULT_TAGS = ("Q4_K_M", "Q8_0")  # where none is given, as llama.cpp has it
_TIMEOUT = 20.0  # seconds to wait for the Hub's first answer


def kind_of(
    argument: str | Path, config: str | Path | None = None
) -> Literal["checkpoint", "part", "gguf", "hub", "none"]:
    """What an argument names.

    checkpoint  a folder; a .pt file, or any file of weights if `config` is the folder that has its config.json
    part        another file of a checkpoint: weights, JSON
    gguf        any other file, whatever its ending; a .gguf that does not exist; weights that begin like a GGUF or GGML
    hub         a Hub id, org/name, org/name@branch or org/name:Q4_K_M
    none        none of these
    """
    path = expanded(argument)
    if path.is_file() and path.suffix in WEIGHTS and first_bytes(path)[:4] in (b"GGUF", *OLD_GGML):
        return "gguf"
    if path.is_dir() or (path.is_file() and path.suffix in (WEIGHTS if config is not None else (".pt",))):
        return "checkpoint"
    if path.is_file() and path.suffix in (".json", *WEIGHTS):
        return "part"
    if path.is_file() or path.suffix == ".gguf":
        return "gguf"
    named = isinstance(argument, str) and path.suffix not in _FILES and not path.exists()
    return "hub" if named and _HUB_ID.fullmatch(str(argument)) else "none"


def is_repository(name: Any) -> bool:
    """Whether this can be the name of a repository on the Hub: org/name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if not isinstance(name, str) or not _HUB_ID.fullmatch(name) or "@" in name or ":" in name:
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def resolve(checkpoint: str | Path, config: str | Path | None = None) -> Path:
    """The folder of a checkpoint; `org/name` or `org/name@branch` is downloaded if no such folder exists.

    A .pt file is returned as it is, and so is any other file of weights if `config` is the folder with
    its config.json. Raises BridgeError for a missing folder, an unknown or gated repository, or no network.
    """
    path = _local(checkpoint, config)
    return path if path is not None else _download(str(checkpoint), gguf=False)


def resolve_model(model: str | Path, config: str | Path | None = None) -> Path:
    """As `resolve`, of a checkpoint or a GGUF, which a repository may have instead."""
    if kind_of(model, config) == "gguf":
        return expanded(model)
    path = _local(model, config)
    return path if path is not None else _download(str(model), gguf=True)


def resolve_gguf(name: str | Path) -> Path:
    """The GGUF of a name: the file itself, or that of a repository on the Hub, downloaded. BridgeError as `resolve`."""
    if kind_of(name) != "hub":
        return expanded(name)
    path = _download(str(name), gguf=True)
    if path.suffix != ".gguf":
        raise BridgeError(f"{name}: is a checkpoint; `gguf-bridge convert` makes a GGUF of it")
    return path


def _local(checkpoint: str | Path, config: str | Path | None) -> Path | None:
    """The folder or file of a checkpoint that is here; None for a Hub id."""
    path, kind = expanded(checkpoint), kind_of(checkpoint, config)
    if config is not None and not expanded(config).is_dir():
        raise BridgeError(f"{config}: no such folder; {parameter('config')} must be one with config.json and tokenizer")
    if kind == "checkpoint":
        return path
    if path.suffix == ".gguf" and path.is_file():
        raise _no_checkpoint(checkpoint)
    if path.is_file():
        refuse_pointer(path)
    if path.exists():
        raise BridgeError(f"{checkpoint}: is a file; give the folder that holds config.json and the weights")
    if path.suffix in _FILES:
        raise missing(path)
    if kind != "hub":
        raise BridgeError(f"{checkpoint}: no such folder, and not a Hub id (org/name){near_names(path)}")
    return None


def _no_checkpoint(name: str | Path) -> BridgeError:
    return BridgeError(f"{name}: is a GGUF, not a checkpoint; `gguf-bridge export` makes one of it")


def open_by_name(
    checkpoint: str | Path, config: str | Path | None = None, *, needs_config: bool = True, detect_lattice: bool = False
) -> Checkpoint:
    """Like `open_checkpoint`, for a folder or a Hub id. Raises BridgeError as `resolve` and that do."""
    folder = resolve(checkpoint, config)
    return open_checkpoint(folder, config, needs_config=needs_config, detect_lattice=detect_lattice)


def model_name(checkpoint: str) -> str:
    """The model's name: the name of the folder, the file or the Hub repository; of a link, its own."""
    path = Path(os.path.abspath(expanded(checkpoint)))
    if not path.exists():
        name, revision, _ = _parts(checkpoint)
        name = re.sub("-gguf$", "", name.rsplit("/", 1)[-1], flags=re.IGNORECASE)
        return "-".join([name, *(revision or "").split("/")]).rstrip("-")
    if match := _SNAPSHOT.search(path.resolve().as_posix()):
        return match[1]
    return path.name if path.is_dir() else path.stem


def _parts(hub_id: str) -> tuple[str, str | None, str | None]:
    """The repository, the revision and the tag of a Hub id; of another name, the name itself."""
    match = _HUB_ID.fullmatch(hub_id)
    return (match[1], match[2], match[3]) if match else (hub_id, None, None)


def _download(hub_id: str, gguf: bool) -> Path:
    """The folder of a repository's checkpoint, or with `gguf`, where it has none or a tag is given, the GGUF."""
    name, revision, tag = _parts(hub_id)
    if tag is not None and not gguf:
        raise _no_checkpoint(hub_id)
    listing = _files(name, revision)
    sizes = _sizes(listing)
    files = checkpoint_files(sizes)
    models = _models(sizes)
    if tag is None and (any(file.endswith(WEIGHTS) for file in files) or not models):
        if isinstance(listing, Path):
            return listing
        if not any(file.endswith(WEIGHTS) for file in files):
            raise BridgeError(f"{name}: this model on the Hub has no *.safetensors, *.bin or *.pt; choose another one")
        return _fetched(name, revision, files, listing)
    if not gguf:
        raise _no_checkpoint(hub_id)
    shards = _tagged(name, tag, models)
    tell(f"{name}: takes {few_of(shards, 1)}, {size_text(sum(sizes[file] for file in shards))}")
    return _fetched(name, revision, shards, sizes) / shards[0]


def _sizes(listing: dict[str, int] | Path) -> dict[str, int]:
    """Bytes of the files of a repository, or of the folder that was downloaded of one."""
    if isinstance(listing, dict):
        return listing
    return {f.relative_to(listing).as_posix(): f.stat().st_size for f in listing.rglob("*") if f.is_file()}


def _models(files: Iterable[str]) -> dict[str, list[str]]:
    """The language models among a repository's GGUFs: all shards of each, by the name without a shard's number."""
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.endswith(".gguf") and not _NO_MODEL.search(file):
            models.setdefault(without_shard(file), []).append(file)
    return models


def _tagged(name: str, tag: str | None, models: dict[str, list[str]]) -> list[str]:
    """The shards of the model with a tag, or of the default one. BridgeError where there is none of this tag."""
    for wanted in _DEFAULT_TAGS if tag is None else [tag]:
        pattern = re.compile(rf"(?<![A-Za-z0-9]){re.escape(wanted)}(?=[./-])", re.IGNORECASE)
        if chosen := next((model for model in models if pattern.search(model)), None):
            return models[chosen]
    if tag is None:
        return next(iter(models.values()))
    tags = sorted({match[1] for model in models if (match := _TAG.search(Path(model).name))})
    has = f"it has {', '.join(tags or models)}" if models else "it has no model as GGUF"
    raise BridgeError(f"{name}: has no GGUF {tag}; {has}{meant(tag, tags)}")


def find_template(template: str | Path) -> tuple[Path, str | None]:
    """A template's file and a note on it; in a Hub repository, the smallest GGUF of 4 bits a weight or more.

    With fewer bits, the tensors that the checkpoint lacks would be copied too coarsely. Raises BridgeError if there
    is no such file, and as `resolve` does.
    """
    name = Path(template).as_posix()
    if os.path.exists(template) or Path(template).suffix == ".gguf" or not _HUB_ID.fullmatch(name):
        return Path(template), None
    name, revision, tag = _parts(name)
    listing = _sizes(_files(name, revision))
    models = _models(listing)
    if tag is not None:
        files = _tagged(name, tag, models)
        return _fetched(name, revision, files, listing) / files[0], None
    models = {model: files for model, files in models.items() if _FINE.search(model)}
    if not models:
        raise BridgeError(
            f"{name}: has no GGUF of 4 bits a weight or more; give another repository or llama.cpp's conversion"
        )
    sizes = {model: sum(listing[file] for file in files) for model, files in models.items()}
    smallest = min(sizes, key=lambda model: (sizes[model], model))
    files = models[smallest]
    note = f"the template is {files[0]} of {name} ({sizes[smallest] / 1e6:.0f} MB), its smallest suitable file"
    return _fetched(name, revision, files, listing) / files[0], note


def _files(name: str, revision: str | None) -> dict[str, int] | Path:
    """A repository's files and their sizes in bytes; without a network, the folder that an earlier run downloaded."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        # one request, without the retries of the file listing: a missing network is reported at once
        repository = HfApi().model_info(name, revision=revision, timeout=_TIMEOUT, files_metadata=True)
    except HFValidationError:
        raise BridgeError(f"{name}: no such folder, and not a Hub id (org/name){near_names(Path(name))}") from None
    except GatedRepoError as problem:
        raise BridgeError(
            f"{name}: is gated; accept its terms at https://huggingface.co/{name} and log in with `hf auth login`"
        ) from problem
    except RepositoryNotFoundError as problem:
        raise BridgeError(
            f"{name}: no such folder here, and no such model on the Hub (or it is private: `hf auth login`)"
            f"{near_names(Path(name))}"
        ) from problem
    except RevisionNotFoundError as problem:
        raise BridgeError(f"{name}: has no branch, tag or commit {revision!r} on the Hub") from problem
    except Exception as problem:  # the HTTP client's own errors; the client differs between versions
        cached = _cached(name, revision)
        if cached:
            return cached
        raise BridgeError(
            f"{name}: no such folder here, and the Hub cannot be reached ({reason(problem)}); "
            f"check the network, or download the model elsewhere and give its folder{near_names(Path(name))}"
        ) from problem
    return {file.rfilename: getattr(file, "size", None) or 0 for file in repository.siblings or []}


def _fetched(name: str, revision: str | None, files: list[str], sizes: dict[str, int]) -> Path:
    """The folder of a repository with these files downloaded."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    new = [file for file in files if not isinstance(try_to_load_from_cache(name, file, revision=revision), str)]
    if new:  # huggingface_hub's own bars follow, in a terminal
        LINE.hide()
        tell(f"downloading {name}: {len(new)} files, {size_text(sum(sizes.get(file, 0) for file in new))}")
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=files))
    except Exception as problem:
        raise BridgeError(f"{name}: the download failed ({reason(problem)}); run it again to resume") from problem


def _cached(name: str, revision: str | None) -> Path | None:
    """A snapshot that an earlier run downloaded."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:
        return None


def reason(problem: BaseException) -> str:
    """Why the Hub did not answer, in a few words."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(problem, OfflineModeIsEnabled):
        return "its offline mode is on: HF_HUB_OFFLINE"
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")
