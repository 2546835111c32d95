"""From a Hugging Face directory (config, tokenizer, tensor names) to GGUF names and metadata.

    spec = describe_model(config, folder, names)
    spec.tensors              what to write, from which tensor, with rows in which order
    spec.add_metadata(writer) every key-value pair but the file type

One module per family (llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe) over one decoder, with
the experts of mixtures in moe; tokenizer, bpe, sentencepiece,
pretokenizer and special for the vocabulary; chat and modelfile for Ollama.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf

from bridge.errors import BridgeError
from bridge.files import read_json
from bridge.models.decoder import Family, add_decoder_metadata, build_tensors
from bridge.models.gguf_tokenizer import read_tokenizer
from bridge.models.llama import LLAMA
from bridge.models.mistral import MISTRAL
from bridge.models.mixtral import MIXTRAL
from bridge.models.model_config import Config
from bridge.models.provenance import read_provenance
from bridge.models.qwen2 import QWEN2
from bridge.models.qwen2_moe import QWEN2_MOE
from bridge.models.qwen3 import QWEN3
from bridge.models.qwen3_moe import QWEN3_MOE
from bridge.models.spec import Fold, ModelSpec, TensorSpec

__all__ = ["FAMILIES", "Fold", "ModelSpec", "TensorSpec", "describe_model"]

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "MixtralForCausalLM": MIXTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
}
_BY_MODEL_TYPE = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "qwen2": QWEN2,
    "qwen2_moe": QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
}


def describe_model(
    config: dict[str, Any], folder: Path, names: Mapping[str, Sequence[int]] | Collection[str], pre: str | None = None
) -> ModelSpec:
    """What a checkpoint becomes in GGUF.

    config  the parsed config.json
    folder  the Hugging Face directory, for tokenizer, generation config and model card
    names   every tensor as a float checkpoint names it, "<module>.weight" and "<module>.bias";
            a quantized module is listed by its weight too. With shapes, none of config's counts
            may be beyond them
    pre     overrides the recognition of tokenizer.ggml.pre

    Raises:
        BridgeError: an architecture, a rule of the config or a tokenizer that is unknown here; a key
            or a tensor that is missing; a tensor that nobody knows.
    """
    folder = Path(folder)
    sides = {name: max(shape, default=0) for name, shape in names.items()} if isinstance(names, Mapping) else {}
    longest = max(sides.items(), key=lambda side: side[1], default=None)
    values = Config(config, folder / "config.json", longest)
    family = _family(values)
    args = family.read(values)
    tensors, folds, unused, zero_only, optional = build_tensors(family, args, names)
    generation = read_json(folder / "generation_config.json", optional=True)
    tokenizer = read_tokenizer(values, folder, generation, pre)
    spec = ModelSpec(
        arch=family.arch,
        n_layers=args.n_layers,
        n_heads=args.n_heads,
        n_kv_heads=args.n_kv_heads,
        head_dim=args.head_dim,
        hidden=args.hidden,
        intermediate=args.intermediate,
        vocab=args.vocab,
        context=args.context,
        tied=args.tied,
        tensors=tensors,
        folds=folds,
        unused=unused,
        zero_only=zero_only,
        notes=[*args.rope.notes, *family.notes(args), *tokenizer.notes],
        tokenizer=tokenizer,
        generation=generation,
        experts=args.experts.count if hasattr(args, "experts") else 0,
        optional=optional,
    )
    provenance, notes = read_provenance(values, folder, spec.n_parameters)
    spec.notes += notes

    def general(writer: gguf.GGUFWriter) -> None:
        writer.add_type(gguf.GGUFType.MODEL)
        provenance.set_gguf_meta_model(writer)

    spec.hparams = [
        general,
        lambda writer: add_decoder_metadata(args, writer),
        lambda writer: family.add_metadata(args, writer),
    ]
    return spec


def _family(config: Config) -> Family:
    architectures, model_type = config.get("architectures") or [], config.get("model_type", "")
    architectures = architectures if isinstance(architectures, list) else [architectures]
    if not all(isinstance(name, str) for name in [*architectures, model_type]):
        raise BridgeError(
            f"{config.path}: architectures is {architectures!r:.80} and model_type {model_type!r:.80}, names are "
            "expected; take the config.json of the original model"
        )
    for name in architectures:
        name = name.replace("LLaMA", "Llama")  # as it was spelled in its first weeks
        if name in FAMILIES:
            return FAMILIES[name]
    if not architectures and model_type in _BY_MODEL_TYPE:
        return _BY_MODEL_TYPE[model_type]
    if not architectures and not model_type:
        raise BridgeError(
            f"{config.path}: the keys 'architectures' and 'model_type' are missing; one of them must be there"
        )
    named = ", ".join(architectures) or model_type
    raise BridgeError(
        f"{config.path}: the architecture is {named}; {', '.join(FAMILIES)} are known; for any other give "
        "--template MODEL.gguf, a GGUF of the same model in any type: from the Hub, or made by llama.cpp's "
        "convert_hf_to_gguf.py from the unquantized model"
    )
