"""The way of tokens through a decoder, written once, in the verbs of a machine (machine.py).

    x  = embedding rows
    for each layer:
        q, k, v = W x^        x^ = norm(x)
        a = attention(q, cache of k, v)
        x = x + W_o a
        x = x + W_down (silu(W_gate x^) * W_up x^)          x^ = norm(x)
    norm(x)

`DecoderConfig` says what a model does beside this, or in its place.
"""

from bridge.runtime.config.decoder_config import DecoderConfig
from bridge.runtime.decoder.machine import Machine, Value
from bridge.runtime.layers.layers import Beside, Experts, Inputs, Laurel, Layer, Streams, Weights

Embedded = tuple[Value, Value | None]


def embed(m: Machine, weights: Weights, c: DecoderConfig) -> Embedded:
    """What the first layer reads, and the tokens' rows of what every layer gets (None where they get nothing)."""
    x = m.look_up(weights.embedding, "x")
    m.scale(x, c.embedding_scale)
    if weights.positions is not None:
        m.add_positions(x, weights.positions)
    if weights.type is not None:
        m.add(x, weights.type)
    if weights.embedding_norm is not None:
        x = m.copy(m.norm(x, weights.embedding_norm, weights.embedding_norm_bias), "x")
    return x, None if weights.inputs is None else m.look_up(weights.inputs.embedding, "inputs")


def walk(m: Machine, weights: Weights, c: DecoderConfig, embedded: Embedded) -> Value:
    """The tokens' normalized states."""
    x, inputs = embedded
    if weights.inputs is not None:
        _make_inputs(m, x, inputs, weights.inputs, c)
    streams = None if weights.streams is None else _begin_streams(m, x, weights.streams)
    added: Value | None = None  # to x, with the next norm
    for index, layer in enumerate(weights.layers):
        if streams is not None and layer.streams is not None:
            m.predict(streams, x, layer.streams)
        read = m.norm(x, layer.attn_norm, layer.attn_norm_bias, added)
        if c.graph.renormed:
            x = m.copy(read, "x")
        if index in c.tapped:
            m.copy(x, tap_name(index))
        if layer.mixes:
            added = _mix(m, read, layer, index, c)
        if layer.mixes and layer.down is not None:
            if c.graph.parallel:
                m.add(x, added)
            elif layer.laurel is not None:
                _add_laurel(m, x, read, added, layer.laurel)
                read = m.norm(x, layer.ffn_norm)
            else:
                read = m.norm(x, layer.ffn_norm, layer.ffn_norm_bias, added)
                if c.graph.renormed:
                    x = m.copy(read, "x")
        if layer.down is not None:
            added = _feed(m, x, read, layer, index)
        if layer.input is not None or layer.scale != 1:
            _finish(m, x, added, streams, inputs, layer, index)
            added = None
    if streams is not None and weights.streams is not None:
        x = _end_streams(m, streams, weights.streams)
    normed = m.norm(x, weights.output_norm, weights.output_norm_bias, added)
    if c.layers in c.tapped:
        m.copy(x, tap_name(c.layers))
    return normed


def tap_name(layer: int) -> str:
    """The value that keeps the states before a layer."""
    return f"tap {layer}"


def _mix(m: Machine, x: Value, layer: Layer, index: int, c: DecoderConfig) -> Value:
    """What attention makes of x, what a layer with a state does, or the sum of the two."""
    added = None
    if layer.recurrent is not None:
        (added,) = m.products(m.recur(layer.recurrent, index, x), added=(layer.recurrent.out, None))
    if layer.o is not None:
        attended = _attend(m, x, layer, index, c)
        if added is None:
            (added,) = m.products(attended, added=(layer.o, layer.o_bias))
        else:
            (other,) = m.products(attended, other=(layer.o, layer.o_bias))
            m.add(added, other)
    return m.normalize(added, layer.attn_post_norm)


def _attend(m: Machine, x: Value, layer: Layer, index: int, c: DecoderConfig) -> Value:
    """What attention makes of x before its output matrix."""
    v = gate = None
    if layer.head_gate is not None:
        (gate,) = m.products(x, head_gate=(layer.head_gate, None))
    if layer.q_a is None:
        q, k, v = m.products(x, q=(layer.q, layer.q_bias), k=(layer.k, layer.k_bias), v=(layer.v, layer.v_bias))
    else:
        q_a, k = m.products(x, q_a=(layer.q_a, None), k=(layer.k, None))
        (q,) = m.products(m.normalize(q_a, layer.q_a_norm), q=(layer.q, None))
    if c.graph.output_gate:
        q, gate = m.split_gate(q)
    if layer.v_norm is not None and k is not None:
        v = m.normalize(k, layer.v_norm, "v") if v is None else m.normalize(v, layer.v_norm)
    if c.graph.normed_together:
        m.normalize(q, layer.q_norm)
        m.normalize(k, layer.k_norm)
    if c.value_dim and v is not None:
        v = m.fit_heads(v, c.heads_of(index).kv, c.head_dim, "values")
    attended = m.attend(layer, index, q, k, v)
    if c.value_dim:
        attended = m.fit_heads(attended, c.heads_of(index).q, c.value_dim, "results")
    m.scale(attended, c.value_scale)
    if gate is not None:
        m.gate_heads(attended, gate)
    return m.normalize(attended, layer.attn_sub_norm)


def _feed(m: Machine, x: Value, read: Value, layer: Layer, index: int) -> Value:
    """What the network makes of what it reads, what experts do, or the sum of the two."""
    if layer.experts is not None and layer.beside is None:
        return m.normalize(m.experts(layer.experts, read, "added"), layer.ffn_post_norm)
    inner = m.gated(read, (layer.gate, layer.gate_bias), (layer.up, layer.up_bias), index)
    (added,) = m.products(m.normalize(inner, layer.ffn_sub_norm), added=(layer.down, layer.down_bias))
    if layer.experts is not None and layer.beside is not None:
        _add_experts(m, x, added, layer.experts, layer.beside)
    return m.normalize(added, layer.ffn_post_norm)


def _add_experts(m: Machine, x: Value, added: Value, experts: Experts, beside: Beside) -> None:
    """What the network made, normalized, plus what experts make of x."""
    m.normalize(added, beside.network)
    routed = m.normalize(x, beside.routed, "routed")
    other = m.experts(experts, m.normalize(x, beside.before, "read"), "other", routed)
    m.add(added, m.normalize(other, beside.after))


def _add_laurel(m: Machine, x: Value, read: Value, added: Value, laurel: Laurel) -> None:
    """x = (x + attention's result + what it read + what two matrices of low rank make of that) / sqrt(2)."""
    (low,) = m.products(read, low=(laurel.left, None))
    (other,) = m.products(low, other=(laurel.right, None))
    for part in (added, read, m.normalize(other, laurel.norm)):
        m.add(x, part)
    m.scale(x, 0.5**0.5)


def _make_inputs(m: Machine, x: Value, inputs: Value, weights: Inputs, c: DecoderConfig) -> None:
    """What each layer gets, of the tokens' rows: (rms(W x / sqrt(hidden)) * norm + sqrt(each) row) / sqrt(2)."""
    (projected,) = m.products(x, projected=(weights.project, None))
    m.scale(projected, c.hidden**-0.5)
    m.normalize(projected, weights.norm)
    m.scale(inputs, c.each_input**0.5)
    m.add(inputs, projected)
    m.scale(inputs, 0.5**0.5)


def _finish(
    m: Machine, x: Value, added: Value, streams: list[Value] | None, inputs: Value | None, layer: Layer, index: int
) -> None:
    """The end of a layer that takes what there is for it of a token's own, or is scaled."""
    m.add(x, added)
    state = x
    if streams is not None and layer.streams is not None:
        state = m.correct(streams, x, layer.streams)
    if layer.input is not None and inputs is not None:
        (gate,) = m.products(state, input=(layer.input.gate, None))
        each = layer.input.gate.shape[0]
        (more,) = m.products(
            m.gelu_times(gate, inputs[:, index * each : (index + 1) * each]), added=(layer.input.project, None)
        )
        m.normalize(more, layer.input.norm)
        for target in [x] if streams is None else streams[1:]:
            m.add(target, more)
    m.scale(x, layer.scale)


def _begin_streams(m: Machine, x: Value, weights: Streams) -> list[Value]:
    """The streams of the embeddings: others are as long as the first."""
    streams = [m.copy(x, "stream0")]
    for number, matrix in enumerate(weights.begin, 1):
        streams += m.products(x, **{f"stream{number}": (matrix, None)})
        m.as_long(streams[-1], streams[0])
    return streams


def _end_streams(m: Machine, streams: list[Value], weights: Streams) -> Value:
    """The mean of all streams, the others as long as the first."""
    x = m.copy(streams[0], "x")
    for stream, matrix in zip(streams[1:], weights.end, strict=True):
        (projected,) = m.products(stream, other=(matrix, None))
        m.as_long(projected, streams[0])
        m.add(x, projected)
    m.scale(x, 1 / len(streams))
    return x
