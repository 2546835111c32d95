"""A checkpoint's float model in `transformers`, its decoder blocks loaded one at a time.

The model is built on the meta device, where tensors have shapes and no memory. A block is loaded when calibration
reaches it and freed afterwards, so memory holds one block. Quantized modules are dequantized: GPTQ, AWQ and 8-bit
checkpoints can be calibrated as well.

Names differ in two ways. Mixtral's checkpoints say block_sparse_moe.experts.3.w1 where `transformers` has mlp and
gate_proj, Laguna's shared_expert where it has shared_experts. And `transformers` holds experts in 3-D tensors, which
are split here into one layer for each matrix; a checkpoint may have them as single matrices, or as those 3-D tensors,
[experts, out, in] or [experts, in, out].

Of a model that also sees or hears, the language model is calibrated: the other parts are left out.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from bridge.checkpoint import Checkpoint
from bridge.checkpoint.tensor_names import TEXT_PREFIXES
from bridge.errors import BridgeError
from bridge.quantize.model.block_inputs import head_of, is_layer, matrix_shape, set_matrix
from bridge.quantize.model.experts import halves, split_experts
from bridge.quantize.model.streamed_model import decoder_blocks, positions_of
from bridge.system.cpu.row_threads import chunks

_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_LAGUNA = {
    ".mlp.gate.e_score_correction_bias": ".mlp.experts.e_score_correction_bias",
    ".mlp.shared_experts.": ".mlp.shared_expert.",
}
_OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")


def arithmetic(ckpt: Checkpoint, device: torch.device | str = "cpu") -> torch.dtype:
    """bfloat16 where all of a checkpoint's floats are in it and the CPU multiplies it; else float32."""
    exact = not ckpt.modules and all(t.dtype == "BF16" for t in ckpt.tensors.values())
    return fast_arithmetic(device) if exact and torch.device(device).type == "cpu" else torch.float32


def fast_arithmetic(device: torch.device | str = "cpu") -> torch.dtype:
    """bfloat16 where the device multiplies it, for what needs no more than its 8 bits; else float32."""
    if torch.device(device).type == "cpu":
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    else:
        fast = torch.cuda.is_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


class FloatModel:
    """A `transformers` decoder that reads its weights from an opened checkpoint; a `StreamedModel`.

    dtype   of the weights and of all arithmetic

    Raises BridgeError if `transformers` does not know the model.
    """

    def __init__(self, ckpt: Checkpoint, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"):
        self.ckpt, self.dtype, self.device = ckpt, dtype, torch.device(device)
        self.model: Any = _build(ckpt, dtype)
        self.blocks: Sequence[nn.Module]
        self.prefix, self.blocks = decoder_blocks(self.model)  # type: ignore[assignment]
        for block in self.blocks:
            split_experts(block)
        _fill_buffers(self.model, self.device)

    @property
    def vocabulary(self) -> int:
        return self.model.get_input_embeddings().weight.shape[0]

    def linears(self, blocks: slice = slice(None)) -> dict[str, tuple[int, int]]:
        """(out, in) of the layers of some blocks that can be quantized, by their names in the checkpoint."""
        return {n: shape for i in range(len(self.blocks))[blocks] for n, shape in self.layers_of(i).items()}

    def layers_of(self, block: int) -> dict[str, tuple[int, int]]:
        """(out, in) of a block's layers that can be quantized, by their names in the checkpoint."""
        layers = ((name, module) for name, module in self.blocks[block].named_modules() if is_layer(module))
        return {self.name(f"{self.prefix}.{block}.{name}"): matrix_shape(module) for name, module in layers}

    def load(self, block: int | None) -> None:
        """Load a block's weights; None: those of everything outside the blocks except the head.

        Raises BridgeError if the checkpoint lacks a tensor, or has it in another shape.
        """
        for name, module in self._modules(block):
            for param, value in _tensors(module):
                if value.device.type == "meta":
                    self._set(module, param, value, f"{name}.{param}")

    def load_head(self) -> None:
        """Load the output head's weights; a tied head gets the embeddings."""
        embeddings: Any = self.model.get_input_embeddings()
        name, head = head_of(self.model)
        for param, value in _tensors(head):
            if param == "weight" and self._stored(f"{name}.{param}") is None and self.model.config.tie_word_embeddings:
                head.weight = embeddings.weight
            elif value.device.type == "meta":
                self._set(head, param, value, f"{name}.{param}")

    def drop_head(self) -> None:
        head = head_of(self.model)[1]
        for param, value in _tensors(head):
            _put(head, param, torch.empty_like(value, device="meta"))

    @property
    def stored_in_bfloat16(self) -> bool:
        """Whether the checkpoint's floats are in bfloat16, and so activations lose nothing that matters in it."""
        return any(tensor.dtype == "BF16" for tensor in self.ckpt.tensors.values())

    def head(self) -> tuple[str, tuple[int, int]]:
        """The output head's name in the checkpoint, the embeddings' if it is tied to them, and (out, columns)."""
        return self.embedding_and_head()[1], matrix_shape(head_of(self.model)[1])

    def untied_head(self) -> tuple[str, tuple[int, int]] | None:
        """`head`; None if it is tied to the embeddings."""
        head = self.head()
        return None if head[0] == self.embedding_and_head()[0] else head

    def head_rows(self, rows: slice) -> torch.Tensor:
        """Some rows of the output head's weights, float32; only these are read."""
        return self._rows(*head_of(self.model), rows)

    def embedding_rows(self, rows: slice) -> torch.Tensor:
        """Some rows of the embeddings, float32; only these are read."""
        embeddings = self.model.get_input_embeddings()
        return self._rows(next(n for n, m in self.model.named_modules() if m is embeddings), embeddings, rows)

    def _rows(self, name: str, module: nn.Module, rows: slice) -> torch.Tensor:
        columns = matrix_shape(module)[1]
        stored = self._required(f"{name}.weight")
        coded = stored.removesuffix(".weight")
        if coded in self.ckpt.modules:
            tensor = self.ckpt.read_module(coded, np.arange(rows.start, rows.stop))
            if 0 <= tensor.shape[1] - columns < tensor.padding:
                tensor = tensor.crop(tensor.shape[0], columns)
            self._expect(f"{name}.weight", tensor.shape, (rows.stop - rows.start, columns))
            values = tensor.dequantize()
        else:
            self._expect(f"{name}.weight", self.ckpt.tensors[stored].shape, matrix_shape(module))
            values = self.ckpt.read_float(stored, (rows.start, rows.stop))
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, torch.float32)

    def set_head_rows(self, rows: slice, values: torch.Tensor) -> None:
        """The head is read again where it is needed again."""

    def drop(self, block: int | None) -> None:
        """Free the weights that `load` has loaded."""
        for _, module in self._modules(block):
            for param, value in _tensors(module):
                _put(module, param, torch.empty_like(value, device="meta"))

    def name(self, layer: str) -> str:
        """A layer's name in the checkpoint. Experts of a 3-D tensor are named like single matrices."""
        stored = self._stored(f"{layer}.weight")
        if stored is None:
            return layer
        if stored.endswith(".weight"):
            return stored.removesuffix(".weight")
        _, separator, rest = layer.rpartition(".experts.")
        return f"{stored.rpartition('.')[0]}.{rest}" if separator else layer

    def embedding_and_head(self) -> tuple[str, str]:
        """The names of the embeddings and the output head in the checkpoint; one name twice if they are tied."""
        head, _ = head_of(self.model)
        embeddings = next(n for n, m in self.model.named_modules() if m is self.model.get_input_embeddings())
        tied = self._stored(f"{head}.weight") is None and self.model.config.tie_word_embeddings
        return self.name(embeddings), self.name(embeddings if tied else head)

    def _modules(self, block: int | None) -> Iterator[tuple[str, nn.Module]]:
        if block is not None:
            yield from self.blocks[block].named_modules(prefix=f"{self.prefix}.{block}")
            return
        head = self.model.get_output_embeddings()
        for name, module in self.model.named_modules():
            if module is not head and not name.startswith(f"{self.prefix}."):
                yield name, module

    def _stored(self, name: str) -> str | None:
        """The checkpoint's name of a tensor, or of the 3-D tensor that holds it; None: it is missing."""
        base = f"{self.model.base_model_prefix}."
        names = [name]
        if ".mlp." in name:
            head, _, tail = name.rpartition(".mlp.")
            if tail.startswith("experts."):
                tail = re.sub(r"\w+_proj", lambda match: _MIXTRAL.get(match[0], match[0]), tail)
            names.append(f"{head}.block_sparse_moe.{tail}")
        names += [name.replace(loaded, stored) for loaded, stored in _LAGUNA.items() if loaded in name]
        part = _OF_EXPERT.fullmatch(name)
        if part:
            suffix = "" if part[4] == "weight" else "_bias"
            names.append(f"{part[1]}.{'down_proj' if part[3] == 'down' else 'gate_up_proj'}{suffix}")
        names += [n.removeprefix(base) if n.startswith(base) else base + n for n in names]
        for stored, alone in TEXT_PREFIXES if "text_config" in self.ckpt.config else ():
            names += [alone + n.removeprefix(stored) for n in names if n.startswith(stored)]
            names += [stored + n.removeprefix(alone) for n in names if n.startswith(alone)]
        return next(
            (n for n in names if n in self.ckpt.tensors or n.removesuffix(".weight") in self.ckpt.modules), None
        )

    def _required(self, name: str) -> str:
        """`_stored`; BridgeError where the tensor is missing."""
        stored = self._stored(name)
        if stored is None:
            raise BridgeError(
                f"{self.ckpt.path}: has no {name}, a part of transformers' {type(self.model).__name__}, which "
                "calibration needs; `gguf-bridge convert --type` rounds a model without it"
            )
        return stored

    def _set(self, module: nn.Module, param: str, value: torch.Tensor, name: str) -> None:
        stored = self._required(name)
        quantized = stored.removesuffix(".weight")
        if param == "weight" and quantized in self.ckpt.modules and is_layer(module):
            _put(module, param, torch.empty(value.shape, dtype=self.dtype, device=self.device))
            rows, columns = value.T.shape if type(module).__name__ == "Conv1D" else value.flatten(1).shape
            tensor = self.ckpt.read_module(quantized)
            if all(0 <= a - b < tensor.padding for a, b in zip(tensor.shape, (rows, columns), strict=True)):
                tensor = tensor.crop(rows, columns)
            self._expect(name, tensor.shape, (rows, columns))
            set_matrix(module, torch.from_numpy(tensor.dequantize()))
            return
        if stored in self.ckpt.tensors and value.ndim == 2 and stored.endswith(".weight"):
            self._expect(name, self.ckpt.tensors[stored].shape, tuple(value.shape))
            _put(module, param, torch.empty(value.shape, dtype=self.dtype, device=self.device))
            for rows in chunks(*value.shape):  # float32 of the whole embeddings would take twice their memory
                part = torch.from_numpy(self.ckpt.read_float(stored, (rows.start, rows.stop)))
                getattr(module, param).data[rows] = part.to(self.device, self.dtype)
            return
        floats = self._floats(stored, name)
        self._expect(name, floats.shape, tuple(value.shape))
        _put(module, param, torch.from_numpy(np.ascontiguousarray(floats)).to(self.device, self.dtype))

    def _floats(self, stored: str, name: str) -> np.ndarray:
        if stored.removesuffix(".weight") in self.ckpt.modules:  # embeddings may be quantized too
            return self.ckpt.read_module(stored.removesuffix(".weight")).dequantize()
        part = _OF_EXPERT.fullmatch(name)
        if part is None or stored.endswith((".weight", ".bias")):
            return self.ckpt.read_float(stored)
        experts: Any = self.model.get_submodule(part[1])
        values = self.ckpt.read_float(stored, (int(part[2]), int(part[2]) + 1))[0]
        if part[4] == "weight" and self._turned(stored.rpartition(".")[0], experts):
            values = values.T
        if part[3] == "down":
            return values
        return halves(values, experts.interleaved)[part[3] == "up"]

    def _turned(self, stored: str, experts: Any) -> bool:
        """Whether the 3-D tensors of experts are [experts, in, out]; if one is square, the other tells."""
        inner, hidden = matrix_shape(experts.get_submodule("0.gate_proj"))
        both, down = (self.ckpt.tensors[f"{stored}.{name}"].shape[1:] for name in ("gate_up_proj", "down_proj"))
        return both == (hidden, 2 * inner) and down == (inner, hidden)

    def _expect(self, name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if shape != wanted:
            raise BridgeError(
                f"{self.ckpt.path}: {name} is {list(shape)}, but {list(wanted)} by config.json; correct its sizes"
            )


def positions(ckpt: Checkpoint) -> int | None:
    """The most tokens that the model takes at once; None where there is no limit. Raises BridgeError as FloatModel."""
    with _understood(ckpt) as transformers:
        return positions_of(_config(transformers, ckpt).get_text_config(decoder=True))


@contextmanager
def _understood(ckpt: Checkpoint) -> Iterator[Any]:
    """The module `transformers`; BridgeError where it fails to make something of config.json."""
    try:
        import transformers
    except ImportError:
        raise BridgeError("calibration needs transformers; pip install transformers") from None
    try:
        yield transformers
    except Exception as problem:  # unknown kinds, and whatever a damaged config.json causes
        why = str(problem).strip().splitlines()
        raise BridgeError(
            f"{ckpt.home / 'config.json'}: transformers {transformers.__version__} cannot build a text model of "
            f"{ckpt.config.get('model_type')} ({why[0] if why else type(problem).__name__}); calibration supports only "
            "models that it includes"
        ) from None


def _config(transformers: Any, ckpt: Checkpoint) -> Any:
    return transformers.AutoConfig.for_model(**{k: v for k, v in ckpt.config.items() if k != "quantization_config"})


def _build(ckpt: Checkpoint, dtype: torch.dtype) -> nn.Module:
    """The model of config.json on the meta device."""
    with _understood(ckpt) as transformers:
        config = _config(transformers, ckpt)
        text = config.get_text_config(decoder=True)
        if text is not config and "tie_word_embeddings" in ckpt.config:
            text.tie_word_embeddings = ckpt.config["tie_word_embeddings"]
        alone = text is config or type(text) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        options = {"dtype": dtype, "trust_remote_code": False}
        with torch.device("meta"):
            if alone:
                model = transformers.AutoModelForCausalLM.from_config(text, **options)
            else:
                model = transformers.AutoModelForImageTextToText.from_config(config, **options)
                _drop_other_parts(model)
    return model.eval().requires_grad_(False)


def _drop_other_parts(model: Any) -> None:
    """Leave only the language model and the head of a model of several parts."""
    language_parts = {model.get_input_embeddings(), model.get_output_embeddings()}
    for parent in (model, model.base_model):
        for name, child in list(parent.named_children()):
            if language_parts.isdisjoint(child.modules()):
                setattr(parent, name, None)


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """A module's own parameters, and the buffers that a checkpoint stores."""
    persistent = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
    return [(n, t) for n, t in {**module._parameters, **persistent}.items() if t is not None]


def _put(module: nn.Module, name: str, value: torch.Tensor) -> None:
    if name in module._buffers:
        module._buffers[name] = value
    else:
        module._parameters[name] = nn.Parameter(value, requires_grad=False)


def _fill_buffers(model: Any, device: torch.device) -> None:
    """Fill buffers that no checkpoint stores (rotary frequencies) with the values that `transformers` computes."""
    owners: dict[str, Any] = {}  # of each module, the innermost PreTrainedModel, whose attributes may be used
    for name, module in model.named_modules():
        owners[name] = module if hasattr(module, "_init_weights") else owners[name.rpartition(".")[0]]
        buffers = [n for n in module._non_persistent_buffers_set if module._buffers[n] is not None]
        computed = []
        for filler in (0, 1):  # what is computed does not depend on what was there
            for n in buffers:
                module._buffers[n] = torch.full_like(module._buffers[n], filler, device=device)
            if buffers:
                owners[name]._init_weights(module)
            computed.append({n: module._buffers[n] for n in buffers})
        for n in buffers:
            if not torch.equal(computed[0][n], computed[1][n]):
                raise BridgeError(
                    f"{type(model).__name__}: this version of transformers does not compute the values of {name}.{n}; "
                    "pip install --upgrade transformers, or calibrate the model in memory"
                )
