"""Recognizes the format of a checkpoint by its tensors, if its configs do not mention quantization, or are wrong."""

from collections import Counter
from dataclasses import replace
from typing import Any

from bridge.checkpoint.files.store import Store
from bridge.checkpoint.formats.bitsandbytes import STATES, BitsAndBytesReader
from bridge.checkpoint.formats.legacy import BITS, FloatZerosReader
from bridge.checkpoint.formats.registry import READERS
from bridge.checkpoint.grouped import fit_group_size
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.errors import BridgeError


def recognise(store: Store, quant: QuantConfig, config: dict[str, Any]) -> QuantConfig:
    """`quant`, or the tensors' format if `quant` names none: one of `Reader.label_of`, float zero points or GPTQ.

    bitsandbytes' 4 bits are read whatever `quant` names: their quant_state says all. `config` is config.json. Raises
    BridgeError if the tensors fit two formats at once.
    """
    states = [name for name in store.tensors if name.endswith(STATES)]
    if states and quant.method != "bitsandbytes":
        return _bitsandbytes(quant, states[0])
    if quant.method is None:
        parts = {name.rpartition(".")[2] for name in store.tensors}
        for method, reader in READERS.items():
            if (label := reader.label_of(parts)) is not None:
                return reader.complete(replace(quant, method=method), label)
        if "trellis" in parts:
            some = next(info for name, info in store.tensors.items() if name.endswith(".trellis"))
            raise BridgeError(
                f"{some.file}: {some.name} is QTIP's, but config.json has no quip_params, which say how it is decoded; "
                "take the config.json that came with the model"
            )
    modules = [name.removesuffix(".qweight") for name in store.tensors if name.endswith(".qweight")]
    if quant.method not in (None, "gptq") or not modules:
        return quant
    products = [m for m in modules if f"{m}.zeros" in store.tensors]
    both = [m for m in products if f"{m}.qzeros" in store.tensors]
    if both:
        raise BridgeError(
            f"{store.tensors[f'{both[0]}.zeros'].file}: {both[0]} has both zeros and qzeros, which exclude each other; "
            "the checkpoint is damaged"
        )
    if products:
        bits = _bits_of_width(store, modules, config) or (quant.bits if quant.labelled else None)
        if bits is None:
            raise BridgeError(
                f"{store.tensors[f'{products[0]}.qweight'].file}: the bits of {products[0]}.qweight are unknown "
                "without config.json's hidden_size; give the model's own config.json"
            )
        shape = store.tensors[f"{products[0]}.zeros"].shape
        size = quant.group_size if quant.labelled else -1 if shape[-1:] == (1,) else 128
        return FloatZerosReader.complete(replace(quant, method="gptq-float-zeros", bits=bits, group_size=size), "")
    return quant if quant.labelled else _from_shapes(store, modules) or quant


def _bitsandbytes(quant: QuantConfig, state: str) -> QuantConfig:
    """The config of bitsandbytes' 4 bits, of which `state` is a quant_state, in place of another or of none."""
    claim = QuantConfig(method="bitsandbytes", raw={"bnb_4bit_quant_type": state[-3:]}, source=quant.source)
    right = BitsAndBytesReader.complete(claim, "")
    if not quant.labelled:
        return replace(right, raw={})
    note = f"{quant.source} says {quant.method}, but {state} is bitsandbytes'; read as {right.title}"
    return replace(right, notes=(*quant.notes, note))


def _bits_of_width(store: Store, modules: list[str], config: dict[str, Any]) -> int | None:
    """Bits of a code; without a g_idx, which gives a layer's width, most layers are taken to be hidden_size wide."""
    rows = Counter(store.tensors[f"{m}.qweight"].shape[0] for m in modules if store.tensors[f"{m}.qweight"].shape)
    for m in modules:
        g_idx = store.tensors.get(f"{m}.g_idx")
        if g_idx and len(g_idx.shape) == 1:
            rows, config = Counter([store.tensors[f"{m}.qweight"].shape[0]]), {"hidden_size": g_idx.shape[0]}
            break
    width = next((config[key] for key in ("hidden_size", "n_embd", "d_model") if type(config.get(key)) is int), 0)
    stored = rows.most_common(1)[0][0] * 32 if rows else 0
    return next((bits for bits in BITS if width > 0 and bits * width == stored), None)


def _from_shapes(store: Store, modules: list[str]) -> QuantConfig | None:
    """The config if the tensors of most modules can only be GPTQ's; None if they may be another format's."""
    counts: Counter[tuple[int, int]] = Counter()
    for module in modules:
        parts = [store.tensors.get(f"{module}.{part}") for part in ("qweight", "qzeros", "scales")]
        if all(part and len(part.shape) == 2 and 0 not in part.shape for part in parts):
            (rows, out), (groups, words), scales = (part.shape for part in parts if part)
            bits = words * 32 // out
            columns = rows * 32 // bits if bits in BITS else 0
            size = fit_group_size(columns, groups, 128)
            if size and scales == (groups, out) and bits * out == words * 32:
                counts[bits, -1 if groups == 1 else size] += 1
    if counts.total() * 2 <= len(modules):
        return None
    bits, size = counts.most_common(1)[0][0]
    quant = QuantConfig(method="gptq", bits=bits, group_size=size, sym=False, checkpoint_format="gptq")
    return replace(quant, title="GPTQ")
