"""Reads the tensors of .bin and .pt files: zipped pickles, which only torch reads; weights_only lets no code run.

transformers writes pytorch_model.bin, the first GPTQ tools *.pt. bf16, which numpy lacks, is returned as uint16
bits, as from safetensors.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bridge.checkpoint.files.dtypes import TORCH, torch_dtype
from bridge.checkpoint.files.store import Store, TensorInfo
from bridge.errors import BridgeError, needs_torch
from bridge.system.storage.files import TORCH_STARTS, first_bytes, kind_of_contents, refuse_pointer


class HeldStore(Store):
    """Torch tensors that are in memory already, by file: {file: {name: tensor}}."""

    def __init__(self, states: Mapping[Path, Mapping[str, Any]]) -> None:
        import torch

        super().__init__(())
        self.files = list(states)
        self._data: dict[str, Any] = {}
        self._as_bits = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}
        names = {torch_dtype(name): name for name in TORCH}
        for file, state in states.items():
            tensors = {}
            for name, tensor in state.items():
                if isinstance(tensor, torch.Tensor):
                    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
                        raise BridgeError(
                            f"{file}: {name} is a sparse, quantized or empty tensor of torch, which is not supported; "
                            "save it as a plain tensor"
                        )
                    dtype = names.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
                    tensors[str(name)] = TensorInfo(str(name), dtype, tuple(tensor.shape), tensor.nbytes, file)
                    self._data[str(name)] = tensor
            self._add(tensors)

    def rename(self, names: Mapping[str, str]) -> None:
        super().rename(names)
        self._data = {name: self._data[stored] for stored, name in names.items()}

    def _fetch(self, info: TensorInfo, dtype: np.dtype, shape: tuple[int, ...], first: int, stop: int) -> np.ndarray:
        tensor = self._data[info.name].detach()
        if info.shape:
            tensor = tensor[first:stop]
        if tensor.dtype in self._as_bits:
            tensor = tensor.contiguous().view(self._as_bits[tensor.dtype])
        return np.array(tensor.numpy(), order="C").view(dtype)  # a copy: the file may be mapped

    def read_bytes(self, name: str, first: int, stop: int) -> np.ndarray:
        import torch

        stored = self._data[name].detach().contiguous().reshape(-1).view(torch.uint8)
        return np.array(stored[first:stop].numpy())

    def view(self, name: str) -> np.ndarray:
        """The stored elements, which are in memory already."""
        return self.read(name)

    def close(self) -> None:
        self._data.clear()


class TorchStore(HeldStore):
    """The tensors of .bin and .pt files."""

    def __init__(self, files: Iterable[Path]) -> None:
        files = list(files)
        try:
            import torch
        except ImportError:
            raise needs_torch(f"{files[0]}: a {files[0].suffix} file, unlike safetensors,") from None
        super().__init__({file: _state(torch, file) for file in files})


def _state(torch: Any, file: Path) -> dict[str, Any]:
    """The tensors of one file by full name. Raises BridgeError if it is damaged."""
    state = _load(torch, file)
    try:
        return _flat(torch, state)
    except (RecursionError, RuntimeError, TypeError, ValueError) as problem:  # tables in themselves, ragged lists
        raise BridgeError(
            f"{file}: holds a table that cannot be read ({str(problem)[:100]}); ask for the model as safetensors"
        ) from None


def _load(torch: Any, file: Path) -> dict[str, Any]:
    """The state dict of one file, memory-mapped if its layout allows that."""
    import pickle

    try:
        refuse_pointer(file)
        head = first_bytes(file)
        if not head.startswith(TORCH_STARTS) and (other := kind_of_contents(head)) is not None:
            raise BridgeError(f"{file}: is not a file of torch: it {other}")
        try:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # torch's layout before 1.6 cannot be mapped
            state = torch.load(file, map_location="cpu", weights_only=True)
    except BridgeError:
        raise
    except pickle.UnpicklingError:
        raise BridgeError(
            f"{file}: holds pickled objects other than tensors, which could run code; ask for the model as safetensors"
        ) from None
    except OSError as problem:
        raise BridgeError(f"{file}: cannot be read ({problem.strerror}); is the download complete?") from problem
    except Exception:  # a damaged pickle ends in whatever its garbled calls raise
        raise BridgeError(f"{file}: not a file that torch can read; it is damaged, download it again") from None
    if not isinstance(state, dict):
        raise BridgeError(f"{file}: does not hold a table of tensors; ask for the model as safetensors")
    inner = [state[key] for key in ("model", "state_dict", "module") if isinstance(state.get(key), dict)]
    return inner[0] if len(inner) == 1 else state  # training scripts wrap the model's table in their own


def _flat(torch: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Tensors by full name; modules may have tables of their own, as hqq saves them.

    Numbers, texts and shapes in such a table become tensors too: they describe the module's layout.
    """
    flat = {}
    for name, value in state.items():
        if not isinstance(value, dict):
            flat[str(name)] = value
            continue
        table = dict(value)
        if isinstance(table.get("meta"), dict):  # hqq before 0.1.8
            table |= table.pop("meta")
        for part, content in _flat(torch, table).items():
            if isinstance(content, str):
                content = list(content.encode())
            if isinstance(content, (int, float, list, tuple)) and content != []:
                content = torch.tensor(content)
            flat[f"{name}.{part}"] = content
    return flat
