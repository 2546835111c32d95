"""Weights to blocks of a GGUF type. Read `carry` first, then `type_choice`.

carry        integer codes stay, scales and zero points are re-encoded (`carry_candidates`, `carry_fit`,
             `carry_kernels`)
round_rows   floats are quantized to nearest (`round_affine`, `round_scaled`, `round_plain`, `round_values` by kind of
             type)
type_choice  the type of a tensor, and whether a part is carried or requantized; `limits` has the thresholds

in   a CodedTensor or float32 rows, a BlockType       out  uint8 [rows, row bytes] and a Fidelity
"""
