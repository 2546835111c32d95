"""Selects the files of a checkpoint and those with its weights, and checks that they are complete."""

import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath, PureWindowsPath

from bridge.checkpoint.files.store import Store
from bridge.checkpoint.files.torch_store import TorchStore
from bridge.errors import BridgeError
from bridge.system.storage.files import expanded, read_json, shards_of

WEIGHTS = (".safetensors", ".bin", ".pt")  # endings of files with weights, in order of preference
OTHER_WEIGHTS = (".pth", ".gguf", ".h5", ".msgpack", ".onnx")  # of the same model for other programs
CONFIGS = (".json", ".txt", ".jinja", ".model", "README.md")  # endings of all other files that are read
NOT_WEIGHTS = {"training_args.bin", "optimizer.bin", "scheduler.bin", "sentencepiece.bpe.bin", "optimizer.pt",
                "scheduler.pt", "adapter_model.safetensors", "adapter_model.bin"}  # fmt: skip
_OWN = re.compile(
    r"(model|pytorch_model|gptq_model|consolidated)([.-][\w.-]*)?\.(safetensors|bin|pth?)(\.index\.json)?"
    r"|(config|generation_config|configuration|params|added_tokens|special_tokens_map|vocab|tekken)\.json"
    r"|(quantize|quant|quantization|hf_quant)_config\.json|quant_log\.csv|recipe\.yaml"
    r"|tokenizer(_config)?\.json|(tokenizer|tiktoken|spiece|sentencepiece\.bpe)\.model|(vocab|merges)\.txt"
    r"|(\w+_)?(pre)?processor_config\.json|chat_template\.(json|jinja)|additional_chat_templates/[\w.-]+\.jinja"
    r"|modules\.json|\d+_[A-Z]\w+/config\.json"
    r"|README\.md|LICENSE([.-]\w+)?|\.gitattributes"
)
# of sentence-transformers, in folders beside the model
_DENSE = re.compile(r"\d+_Dense")
_MODULE = re.compile(r"\d+_[A-Z]\w+/(config\.json|model\.safetensors)")


def checkpoint_files(names: Iterable[str]) -> list[str]:
    """The files of a repository that form its checkpoint: weights of one kind, configs and the tokenizer."""
    names = list(names)
    top = [name for name in names if "/" not in name or name.startswith("additional_chat_templates/")]
    weights = next((files for ending in WEIGHTS if (files := _weights(top, ending))), [])
    weights = weights or [name for name in top if name.endswith(WEIGHTS)]
    return weights + [name for name in top if name.endswith(CONFIGS)] + list(filter(_MODULE.fullmatch, names))


def belongs(name: str) -> bool:
    """Whether a file's name, relative to a folder and with slashes, is one that checkpoints' files have."""
    return _OWN.fullmatch(name) is not None


def _weights(names: Iterable[str], ending: str) -> list[str]:
    """The files of weights with that ending; without consolidated.* (Mistral's own copy) if there are others."""
    files = [name for name in names if name.endswith(ending) and name not in NOT_WEIGHTS]
    return [name for name in files if not name.startswith("consolidated")] or files


def config_folder(path: Path, config: str | Path | None = None) -> Path:
    """The folder with a checkpoint's config.json and tokenizer: `config`, or the folder of the weights."""
    return expanded(config) if config is not None else path if path.is_dir() else path.parent


def open_store(path: Path, stem: str | None = None) -> Store:
    """The weights of a checkpoint folder: safetensors before .bin before .pt, an index before single files.

    `path` may also be the one file that holds them all. `stem` is the file's name without its ending, if
    the config gives one (AutoGPTQ's model_file_base_name). Names are those that `Store.unwrap` gives; dense layers
    of sentence-transformers have their folder before them, "2_Dense.linear.weight". Raises
    BridgeError if files are missing, damaged or outside the folder, and as `Store.unwrap` does.
    """
    store = _opened(path, stem)
    store.unwrap()
    if path.is_dir() and not isinstance(store, TorchStore):
        for module in sorted(path.glob("*/model.safetensors")):
            if _DENSE.fullmatch(module.parent.name):
                store.add_below(module)
    return store


def _opened(path: Path, stem: str | None) -> Store:
    """`open_store`, names as they are stored."""
    if path.is_file():
        if len(shards_of(path.name)) > 1:
            raise BridgeError(f"{path}: is one of several shards; give the folder that holds them")
        return _open([path])
    names = sorted(file.name for file in path.glob("*"))
    for usual, ending in zip(("model", "pytorch_model", "model"), WEIGHTS, strict=True):
        stems = [s for s in (stem, usual) if s]
        indexes = [path / f"{s}{ending}.index.json" for s in stems]
        present = [f for f in indexes if f.exists()] or sorted(path.glob(f"*{ending}.index.json"))
        files = [f for s in stems if (f := path / f"{s}{ending}").exists()][:1]
        files = files or [path / name for name in _weights(names, ending)]
        if present:
            return _indexed(path, present[0], files)
        if files:
            _check_run(files)
            return _open(files)
    already = next(path.glob("*.gguf"), None)
    hint = "is the download complete?" if already is None else f"but {already.name}, which is a GGUF already"
    raise BridgeError(f"{path}: holds neither *.safetensors nor pytorch_model.bin nor *.pt; {hint}")


def _open(files: Iterable[Path]) -> Store:
    files = list(files)
    return Store(files) if files[0].suffix == ".safetensors" else TorchStore(files)


def _indexed(folder: Path, index: Path, files: list[Path]) -> Store:
    """The shards that an index names, which must lie within the folder and hold the tensors that it lists.

    files  those to open without an index: if that is one file and no shard exists, the index is a leftover of the
           unquantized model
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise BridgeError(f"{index}: has no weight_map; download it again")
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        path, windows = PurePosixPath(shard), PureWindowsPath(shard)
        if windows.anchor or path.is_absolute() or ".." in windows.parts or not shard:
            raise BridgeError(f"{index}: names the shard {shard!r} outside its folder; do not trust this checkpoint")
    missing = [shard for shard in shards if not os.path.isfile(folder / shard)]  # nor is a name too long for one
    if missing == shards and len(files) == 1:
        _check_run(files)
        return _open(files)
    if missing:
        raise BridgeError(f"{folder / missing[0]}: named by {index.name} but missing; is the download complete?")
    store = _open(folder / shard for shard in shards)
    for name, shard in weight_map.items():
        if name in store.tensors:
            continue
        if name.rpartition(".")[0].endswith("lm_head"):  # of tied embeddings; whoever needs it will report it
            store.notes.append(f"{name} is listed in {index.name}, but no file holds it")
        else:
            raise BridgeError(f"{folder / shard}: lacks {name}, which {index.name} says it holds; download it again")
    return store


def _check_run(files: list[Path]) -> None:
    """Check that all shards without an index exist: name-00002-of-00003."""
    for file in files:
        for shard in map(file.with_name, shards_of(file.name)):
            if not os.path.exists(shard):
                raise BridgeError(f"{shard}: missing, though {file.name} exists; is the download complete?")
