"""What HQQ and AutoAWQ unpack from exported layers, with their own functions, where the whole programs do not run.

    PYTHONPATH=FOLDER_OF_PACKAGES python -m scripts.check.check_unpacking MODEL

The float model is converted to each type and the GGUF exported. Printed is the squared error of all unpacked layers,
from the GGUF's weights, over their squares (NMSE), and that which `export` states: the greatest of a layer. HQQ
computes in float32. Of AutoAWQ only the file of the function is loaded, and its weights are compared as halves.
"""

import argparse
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

import bridge
from bridge.conversion.gguf_input.gguf_source import GgufSource
from bridge.gguf_file.reader import read_gguf
from scripts.benchlib import Lines, bench

Parts = dict[str, torch.Tensor]  # of a layer


def hqq(parts: Parts) -> np.ndarray:
    """float32 [out, in]."""
    from hqq.core.quantize import Quantizer

    packing = bytes(parts["packing"].numpy()).decode()
    settings = {
        **{name: int(parts[name]) for name in ("nbits", "group_size", "axis")},
        **{name: parts[name].float() for name in ("scale", "zero")},
        "shape": torch.Size(parts["shape"].tolist()),
        "packing": packing,
        "unpack_view_dtype": torch.uint8 if packing.endswith("u8") else torch.int32,
        "view_as_float": False,
        "compute_dtype": torch.float32,
    }
    return Quantizer.dequantize(parts["W_q"], settings).numpy()


def autoawq(parts: Parts) -> np.ndarray:
    """float16 [out, in]."""
    found = importlib.util.find_spec("awq")
    assert found is not None
    assert found.submodule_search_locations
    file = Path(found.submodule_search_locations[0]) / "utils/packing_utils.py"
    spec = importlib.util.spec_from_file_location("packing_utils", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    size = parts["qweight"].shape[0] // parts["scales"].shape[0]
    return module.dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"], 4, size).T.numpy()


CASES: tuple[tuple[str, Callable[[Parts], np.ndarray], str, tuple[str, ...]], ...] = (
    ("HQQ", hqq, "hqq", ("Q4_0", "Q8_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "Q3_K", "Q2_K")),
    ("AutoAWQ", autoawq, "awq", ("Q4_0",)),
)


def measure(options: argparse.Namespace) -> Lines:
    model = options.model
    with tempfile.TemporaryDirectory(prefix="gguf-bridge-unpacking-") as folder:
        for program, unpack, format, types in CASES:
            for type in types:
                path, out = Path(folder) / f"{type}.gguf", Path(folder) / format
                if not path.exists():
                    bridge.convert(model, path, type=type)
                done = bridge.export(path, out, format, config=model, force=True)
                stated = {t.name.removesuffix(".weight"): t.nmse for t in done.tensors if t.bits}
                error = _error(path, out, model, unpack, list(stated))
                yield program, type, f"{error:.1e}", f"{max(stated.values()):.1e}"


def _error(path: Path, out: Path, model: Path, unpack: Callable[[Parts], np.ndarray], layers: list[str]) -> float:
    """The NMSE of all layers together."""
    source, tensors = GgufSource(read_gguf(path), model, "F32"), load_file(out / "model.safetensors")
    error = signal = 0.0
    for name in layers:
        parts = {key.rpartition(".")[2]: value for key, value in tensors.items() if key.rpartition(".")[0] == name}
        found = unpack(parts)
        weights = source.sources[f"{name}.weight"].floats().astype(found.dtype).astype(np.float32)
        error += float(np.square(found.astype(np.float32) - weights).sum())
        signal += float(np.square(weights).sum())
    return error / signal


if __name__ == "__main__":
    bench(__doc__, ["model"], measure, ("functions of", "GGUF", "NMSE, unpacked", "NMSE, stated"))
