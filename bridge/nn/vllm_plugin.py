"""QTIP as a quantization method of vLLM, out of its tree: `vllm serve llama-qtip --quantization qtip --enforce-eager`.

vLLM finds `register` by the entry point group vllm.general_plugins. Its loader hands over a checkpoint's tensors one by
one; when a layer has all of its own, this project's reader makes a TrellisLayer of them, or one of each part where
vLLM merges linears (q, k and v, gate and up): each has transforms of its own, so their outputs are joined, not their
codes. A linear that the checkpoint has as floats stays floats, a part of a merged one too. For one process: the
transforms run over whole sides, which tensor parallelism would cut.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from bridge.checkpoint.files.torch_store import HeldStore
from bridge.checkpoint.formats.qtip import QtipReader
from bridge.checkpoint.labels.detect_format import read_quant_config
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.errors import BridgeError
from bridge.nn.trellis_linear import trellis_linear

_INTEGERS = {"trellis": torch.int16, "qweight": torch.int32, "rcp": torch.int64, "tp_rank": torch.int64}
_PARTS = ("weight", *(part for part in QtipReader.parts if part != "bias"))  # vLLM's layers keep biases themselves
_NAMES = {part: part for part in _PARTS} | {"tp_rank": "trellis_tp_rank"}  # layers have a tp_rank of their own
_QKV = ("q", "k", "v")  # vLLM numbers the parts of all other merged layers


class QTIPConfig(QuantizationConfig):
    """A QTIP checkpoint's own settings: quip_params in config.json, or the plain layout's quantize_config.json."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self._config = {"quantization_config": config} if "quant_method" in config else config
        self.quant = QuantConfig()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QTIPConfig:
        """Made from a config.json, or from the quantization_config in one."""
        return cls(config)

    def maybe_update_config(self, model_name: str, *_: Any, **__: Any) -> None:
        """Read the config, with the other files of the model's folder. Raises BridgeError where it is not QTIP's."""
        quant = read_quant_config(Path(model_name), self._config)
        if quant.method != "qtip":
            raise BridgeError(
                f"{model_name}: no quip_params or quantize_config.json of QTIP; is this the folder of its checkpoint?"
            )
        self.quant = quant

    def get_name(self) -> str:
        return "qtip"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75  # the oldest that the CUDA kernels are compiled for

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["/config.json"]  # the end of a path: generation_config.json must not be it

    @staticmethod
    def get_checkpoint_weight_mapper() -> Any:
        """The names that tensors have in a layer; vLLM's loader asks."""
        from vllm.model_executor.models.utils import WeightsMapper

        return WeightsMapper(
            orig_to_new_suffix={f".{part}": f".{name}" for part, name in _NAMES.items() if part != name}
        )

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QTIPLinearMethod | None:
        """One for every linear: the checkpoint's tensors tell which are coded. Others (the head) are floats."""
        return QTIPLinearMethod(self) if isinstance(layer, LinearBase) else None


class QTIPLinearMethod(LinearMethodBase):
    """y = W x + bias with W in trellis codes, or several such W of the same x."""

    def __init__(self, config: QTIPConfig) -> None:
        self.config = config

    def create_weights(
        self, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int,
        output_size: int, params_dtype: torch.dtype, **_: Any,
    ) -> None:  # fmt: skip
        """Names for the loader, without sizes: those of the codes are known when they come.

        Raises BridgeError under tensor parallelism.
        """
        if (input_size_per_partition, sum(output_partition_sizes)) != (input_size, output_size):
            raise BridgeError(
                f"{layer.prefix}: trellis codes cannot be cut for tensor parallelism; set tensor_parallel_size to 1"
            )
        layer.loaded = {}  # {shard: {part: tensor}}; a layer that is not merged has the shard None
        layer.part_sizes = output_partition_sizes
        for part in _PARTS:
            empty = torch.empty(0, dtype=_INTEGERS.get(part, params_dtype))
            parameter: Any = torch.nn.Parameter(empty, requires_grad=False)
            parameter.weight_loader = partial(_keep, layer.loaded, part)
            layer.register_parameter(_NAMES[part], parameter)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Make modules of what was loaded. Raises BridgeError where it is incomplete, or of another model."""
        loaded, sizes = layer.loaded, layer.part_sizes
        device, dtype = layer.weight.device, layer.weight.dtype
        shards = _QKV if "q" in loaded else (None,) if None in loaded else tuple(range(len(sizes)))
        if set(loaded) != set(shards):
            missing = sorted(map(str, set(shards) - set(loaded)))
            raise BridgeError(
                f"{layer.prefix}: nothing was loaded for part {', '.join(missing)} of {list(shards)}; "
                "is the checkpoint complete?"
            )
        if shards == (None,):
            sizes = [sum(sizes)]
        layer.linears = []
        for shard, size in zip(shards, sizes, strict=True):
            name = layer.prefix if shard is None else f"{layer.prefix}[{shard}]"
            tensors = loaded.pop(shard)
            if "weight" in tensors:
                layer.linears.append(partial(linear, weight=tensors["weight"].to(device, dtype)))
                continue
            held = HeldStore({Path("loaded by vLLM"): {f"{name}.{part}": values for part, values in tensors.items()}})
            coded = QtipReader(held, self.config.quant).layer(name)
            layer.linears.append(trellis_linear(coded, name, (size, layer.input_size), "the checkpoint", str(device)))
        for name in _NAMES.values():
            delattr(layer, name)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., in] -> [..., out] of the same type."""
        y = torch.cat([linear(x) for linear in layer.linears], -1)
        return y if bias is None else y + bias


def _keep(
    loaded: dict[Any, dict[str, torch.Tensor]], part: str, parameter: Any, tensor: torch.Tensor, shard: Any = None
) -> None:
    """A tensor from vLLM's loader, which names the shard in an argument or an attribute. Copied: buffers are reused."""
    shard = getattr(tensor, "shard_id", None) if shard is None else shard
    loaded.setdefault(shard, {})[part] = tensor.detach().cpu().clone()


def register() -> None:
    """Make "qtip" known to vLLM, which calls this in each of its processes; a second call changes nothing."""
    register_quantization_config("qtip")(QTIPConfig)
