"""The numbers in names of a GGUF's tensors."""

from bridge.gguf_file.tensor_names import block_of, without_block


def test_the_block_of_a_tensor():
    names = ("blk.3.attn_q.weight", "blk.12.ffn_gate_exps.weight", "output.weight", "v.blk.3.ln1.weight", "blk.x.w")
    assert [block_of(name) for name in names] == [3, 12, None, None, None]
    assert without_block("blk.12.ffn_gate_exps.weight") == "ffn_gate_exps.weight"
    assert without_block("output.weight") == "output.weight"
