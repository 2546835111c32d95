"""Which files of a folder hold the checkpoint's weights, and whether they are all there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath, PureWindowsPath

from bridge.checkpoint.files.store import Store
from bridge.checkpoint.files.torch_store import TorchStore
from bridge.errors import BridgeError
from bridge.system.files import read_json

WEIGHTS = (".safetensors", ".bin", ".pt")  # endings of files with weights
NOT_WEIGHTS = {"training_args.bin", "optimizer.bin", "scheduler.bin", "sentencepiece.bpe.bin", "optimizer.pt",
                "scheduler.pt", "adapter_model.safetensors", "adapter_model.bin"}  # fmt: skip
_RUN = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\..*)")  # the name of one of several files


def open_store(path: Path, stem: str | None = None) -> Store:
    """The weights of a checkpoint folder: safetensors before .bin before .pt, an index before single files.

    `path` may also be the one file that holds them all. `stem` is the file's name without its ending where
    the config gives one (AutoGPTQ's model_file_base_name). Raises BridgeError where files are missing,
    damaged or lie elsewhere.
    """
    if path.is_file():
        shard = _RUN.fullmatch(path.name)
        if shard and int(shard[3]) > 1:
            raise BridgeError(f"{path}: is one file of several; give the folder that it is in")
        return _open([path])
    for name, ending in (("model", "safetensors"), ("pytorch_model", "bin"), ("model", "pt")):
        stems = [s for s in (stem, name) if s]
        indexes = [path / f"{s}.{ending}.index.json" for s in stems]
        found = [f for f in indexes if f.exists()] or sorted(path.glob(f"*.{ending}.index.json"))
        files = [f for s in stems if (f := path / f"{s}.{ending}").exists()][:1]
        if not files:
            files = [f for f in sorted(path.glob(f"*.{ending}")) if f.name not in NOT_WEIGHTS]
        # consolidated.* is Mistral's own copy of the same weights
        files = [f for f in files if not f.name.startswith("consolidated")] or files
        if found:
            return _indexed(path, found[0], files)
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
    """The shards that an index names, each within the folder, each with what the index says it holds.

    files  what would be opened without an index: where it is one file and no shard is there, the index came along
           with the unquantized model's config
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise BridgeError(f"{index}: has no weight_map; download it again")
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        path, windows = PurePosixPath(shard), PureWindowsPath(shard)
        if windows.anchor or path.is_absolute() or ".." in windows.parts or not shard:
            raise BridgeError(f"{index}: names the shard {shard!r} outside its folder; do not trust this checkpoint")
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing == shards and len(files) == 1:
        _check_run(files)
        return _open(files)
    if missing:
        raise BridgeError(f"{folder / missing[0]}: named by {index.name} but missing; is the download complete?")
    store = _open(folder / shard for shard in shards)
    for name, shard in weight_map.items():
        if name in store.tensors:
            continue
        if name.rpartition(".")[0].endswith("lm_head"):  # of tied embeddings; where it is needed, it will be missed
            store.notes.append(f"{name} is in {index.name} and in no file")
        else:
            raise BridgeError(f"{folder / shard}: lacks {name}, which {index.name} says it holds; download it again")
    return store


def _check_run(files: list[Path]) -> None:
    """Shards without an index must at least be all there: name-00002-of-00003."""
    for file in files:
        match = _RUN.fullmatch(file.name)
        if match:
            for i in range(1, min(int(match[3]), 100_000) + 1):
                shard = file.with_name(f"{match[1]}-{i:05}-of-{match[3]}{match[4]}")
                if not os.path.exists(shard):
                    raise BridgeError(f"{shard}: missing beside {file.name}; is the download complete?")
