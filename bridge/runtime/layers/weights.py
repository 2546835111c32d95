"""The weights of a decoder, found in a GGUF and checked against its metadata. Matrices stay in the file."""

from dataclasses import replace

import numpy as np

from bridge.errors import BridgeError, parameter
from bridge.runtime.config.decoder_config import DecoderConfig
from bridge.runtime.layers.layer_reader import LayerReader, expect, vector
from bridge.runtime.layers.layers import Inputs, Streams, Weights
from bridge.runtime.reader import GGUFFile


def read_weights(file: GGUFFile, config: DecoderConfig) -> Weights:
    """Find every tensor; BridgeError where one is missing or of another shape than the metadata says."""
    shared = read_shared(file, config)
    return replace(shared, layers=[LayerReader(file, config, i).layer() for i in range(config.layers)])


def check_context(file: GGUFFile, config: DecoderConfig, context: int) -> None:
    """Raises BridgeError for more tokens than a model can attend to, or has positions for."""
    if config.chosen and context > config.chosen:
        raise BridgeError(
            f"{parameter('context', context)}: must be at most {config.chosen}; beyond, {config.arch} chooses the "
            "tokens to attend to, which cannot run here; llama.cpp can run it"
        )
    if config.graph.positions and context > config.context:
        raise BridgeError(
            f"{parameter('context', context)}: must be at most {config.context}, the positions that {file.path} has"
        )


def read_shared(file: GGUFFile, config: DecoderConfig) -> Weights:
    """What belongs to no layer; `layers` is empty."""
    embedding = file["token_embd.weight"]
    vocab = embedding.shape[0]
    expect(embedding, vocab, config.hidden)
    output = file.tensors.get("output.weight", embedding)
    expect(output, vocab, config.hidden)
    pairs = config.rotated // 2
    if config.graph.windows is not None and config.graph.windows.alone_whole:  # twice as many there, which are ones
        pairs *= 2
    factors = {name: vector(file, f"rope_{name}.weight", pairs) for name in ("freqs", "factors_short", "factors_long")}
    last = f"blk.{config.layers - 1}.layer_output_norm" if config.graph.renormed else config.graph.output_norm
    output_norm = vector(file, f"{last}.weight", config.hidden, True)
    embedding_norm = embedding_norm_bias = positions = None
    if config.graph.embedding_norm:
        embedding_norm = vector(file, "token_embd_norm.weight", config.hidden, True)
        embedding_norm_bias = vector(file, "token_embd_norm.bias", config.hidden)
    elif config.graph.unit_embedding_norm:
        embedding_norm = np.ones(config.hidden, np.float32)
    if config.graph.positions:
        positions = expect(file["position_embd.weight"], config.context, config.hidden).dequantize()
    return Weights(
        embedding=embedding, layers=[], output_norm=output_norm / np.float32(config.logit_scale), output=output,
        rope_factors=factors["freqs"] if factors["factors_short"] is None else factors["factors_short"],
        long_factors=factors["factors_long"], output_norm_bias=vector(file, f"{last}.bias", config.hidden),
        output_bias=vector(file, "output.bias", vocab), type=_type(file, config),
        embedding_norm=embedding_norm, embedding_norm_bias=embedding_norm_bias,
        inputs=_inputs(file, config, vocab) if config.each_input else None,
        streams=_streams(file, config) if config.streams else None, positions=positions,
        output_score=vector(file, "output_res_score.weight", config.hidden, True) if config.aside_every else None,
    )  # fmt: skip


def _type(file: GGUFFile, c: DecoderConfig) -> np.ndarray | None:
    """The first row of the types of tokens, where a file has these."""
    types = file.tensors.get("token_types.weight")
    return None if types is None else expect(types, types.shape[0], c.hidden).rows([0])[0]


def _inputs(file: GGUFFile, c: DecoderConfig, vocab: int) -> Inputs:
    size = c.layers * c.each_input
    return Inputs(
        expect(file["per_layer_token_embd.weight"], vocab, size),
        expect(file["per_layer_model_proj.weight"], size, c.hidden),
        vector(file, "per_layer_proj_norm.weight", c.each_input, True),
    )


def _streams(file: GGUFFile, c: DecoderConfig) -> Streams:
    names, others = ("altup_proj.weight", "altup_unembd_proj.weight"), c.streams - 1
    begin, end = (expect(file[name], others, c.hidden, c.hidden) for name in names)
    return Streams([begin[i] for i in range(others)], [end[i] for i in range(others)])
