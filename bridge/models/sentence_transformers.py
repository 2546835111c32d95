"""What sentence-transformers does with a model's states, as GGUF has it: modules.json, and a folder for each module.

Pooling     one vector of all tokens' states: pooling_type
Dense       a matrix that the vector is multiplied by: dense_2, dense_3, where llama.cpp's graph has them
Normalize   the vector divided by its length: programs do so whenever they are not told otherwise
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf import PoolingType

from bridge.errors import BridgeError
from bridge.system.storage.files import read_json, read_json_objects

DENSE = ("2_Dense", "3_Dense")  # the folders of the dense layers that GGUF has places for
_POOLINGS = {
    "mean": PoolingType.MEAN, "mean_tokens": PoolingType.MEAN, "cls": PoolingType.CLS, "cls_token": PoolingType.CLS,
    "lasttoken": PoolingType.LAST,
}  # fmt: skip
_FLAGS = ("cls_token", "mean_tokens", "lasttoken")
_KNOWN = ("Transformer", "Pooling", "Dense", "Normalize", "Dropout")


def pooling_type(folder: Path) -> int | None:
    """The number of pooling_type of a model's folder; None where modules.json names no pooling.

    Raises BridgeError for a pooling, or a module after it, that llama.cpp does not have.
    """
    modules = read_json_objects(folder / "modules.json")
    kinds = {str(module.get("type", "")).rpartition(".")[2]: module for module in modules}
    if unknown := next((kind for kind in kinds if kind not in _KNOWN), None):
        raise BridgeError(f"{folder / 'modules.json'}: llama.cpp has no {unknown} after a model; it cannot be kept")
    if "Pooling" not in kinds:
        return None
    file = folder / str(kinds["Pooling"].get("path", "")) / "config.json"
    modes = _modes(read_json(file))
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise BridgeError(
            f"{file}: pools by {' and '.join(modes) or 'nothing'}; llama.cpp has the mean, the first token and the "
            "last token alone"
        )
    return int(_POOLINGS[modes[0]])


def module_files(pooling: object, hidden: object) -> dict[str, str]:
    """What `pooling_type` reads, as the files' texts by name: modules.json and the folders of its modules."""
    mode = next((name for name, each in _POOLINGS.items() if each == pooling and name in _FLAGS), None)
    if mode is None:
        return {}
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(paths.items())
    ]
    config = {"word_embedding_dimension": hidden} | {f"pooling_mode_{flag}": flag == mode for flag in _FLAGS}
    return {"modules.json": json.dumps(modules, indent=2), "1_Pooling/config.json": json.dumps(config, indent=2)}


def _modes(config: Mapping[str, Any]) -> list[str]:
    """The ways in which states are pooled, as the names of the older flags have them, or of the newer key."""
    newer = config.get("pooling_mode")
    if newer is not None:
        return list(map(str, newer if isinstance(newer, list) else [newer]))
    start = "pooling_mode_"
    return [key.removeprefix(start) for key, used in config.items() if key.startswith(start) and used]


def dense_sizes(folder: Path, hidden: int) -> dict[str, int]:
    """What each dense layer of a model's folder reads and makes, by the GGUF's keys: dense_2_feat_in ...

    Raises BridgeError for layers that llama.cpp cannot express: it begins and ends with `hidden` numbers.
    """
    sizes: dict[str, int] = {}
    for name in DENSE:
        if not (file := folder / name / "config.json").is_file():
            continue
        config = read_json(file)
        activation = str(config.get("activation_function", "Identity")).rpartition(".")[2]
        if activation != "Identity" or config.get("bias", True):
            raise BridgeError(f"{file}: has a bias or an activation ({activation}); llama.cpp's dense layers have none")
        reads, makes = config.get("in_features"), config.get("out_features")
        if not isinstance(reads, int) or not isinstance(makes, int) or min(reads, makes) < 1:
            raise BridgeError(f"{file}: in_features is {reads!r}, out_features {makes!r}; must be numbers above 0")
        sizes |= {f"dense_{name[0]}_feat_in": reads, f"dense_{name[0]}_feat_out": makes}
    first, last = sizes.get("dense_2_feat_in", hidden), sizes.get("dense_3_feat_out", hidden)
    if sizes and (first, last) != (hidden, hidden):
        raise BridgeError(
            f"{folder}: dense layers read {first} numbers and make {last}; llama.cpp's begin and end with {hidden}"
        )
    return sizes
