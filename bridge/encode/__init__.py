"""Weights to blocks of a GGUF type. Read `carrying/` first, then `type_choice`.

carrying/    integer codes stay, scales and zero points are encoded again
rounding/    floats are rounded to the nearest blocks, by kind of type
type_choice  the type of a tensor, and whether a part is carried or requantized; `limits` has the thresholds
block_bytes  the fields of blocks as bytes

in   a CodedTensor or float32 rows, a BlockType       out  uint8 [rows, row bytes] and a Fidelity
"""
