"""QTIP and EXL3 as quantization methods of `transformers`: `from_pretrained` then makes linears of trellis codes.

The layers are read by this project's own readers when the model's skeleton is there, and multiply as they are: floats
of a whole weight never exist. The rest of the checkpoint is left to transformers.
"""

import re
from pathlib import Path
from typing import Any

from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from bridge.checkpoint import open_checkpoint
from bridge.errors import BridgeError
from bridge.nn.trellis_linear import place_layers, settle


class QtipConfig(QuantizationConfigMixin):
    """A QTIP checkpoint, described by its own config.json."""

    def __init__(self, **settings: Any) -> None:
        self.__dict__.update(settings, quant_method="qtip")


class Exl3Config(QuantizationConfigMixin):
    """An EXL3 checkpoint's quantization_config."""

    def __init__(self, **settings: Any) -> None:
        self.__dict__.update(settings, quant_method="exl3")


class TrellisQuantizer(HfQuantizer):
    """Puts trellis-coded linears into a model's skeleton before its other weights are loaded; for inference alone."""

    is_trainable = False

    def __init__(self, quantization_config: Any, **options: Any) -> None:
        super().__init__(quantization_config, **{**options, "pre_quantized": True})

    def is_serializable(self) -> bool:
        return False

    def _process_model_before_weight_loading(self, model: Any, **options: Any) -> None:
        files = options.get("checkpoint_files")
        if not files:
            raise BridgeError("trellis codes are read from files, but from_pretrained has none; give it the folder")
        with open_checkpoint(Path(files[0]).parent) as checkpoint:
            place_layers(model, checkpoint)
            patterns = {f"^{re.escape(t.name)}$" for m in checkpoint.modules.values() for t in m.tensors.values()}
            coded = {f"{name}.weight" for name in checkpoint.modules}
        model._keys_to_ignore_on_load_unexpected = set(model._keys_to_ignore_on_load_unexpected or ()) | patterns
        tied = {key: of for key, of in (model._tied_weights_keys or {}).items() if key not in coded}
        if tied != model._tied_weights_keys:  # a head that is coded by itself
            model._tied_weights_keys = tied
            model.all_tied_weights_keys = {k: v for k, v in model.all_tied_weights_keys.items() if k not in coded}

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> None:
        """Buffers that are not in files have been made anew, where the device map wants them."""
        settle(model)


def register_quantizers() -> None:
    """Make "qtip" and "exl3" known to transformers; a second call changes nothing."""
    for method, config in (("qtip", QtipConfig), ("exl3", Exl3Config)):
        if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
            register_quantization_config(method)(config)
            register_quantizer(method)(TrellisQuantizer)
