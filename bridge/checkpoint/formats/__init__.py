"""A reader for each format: packed tensors go in, CodedTensor (or float32, for 8-bit floats) comes out.

Start with `module_reader`, the base class, then `awq` or `gptq`. `bits` unpacks words, `zeros` knows the ways in which
GPTQ's zero points were stored, `layouts` is the other direction. A new format is a class here and a line in
`labels.detect_format`.
"""
