"""A reader for each format, which turns packed tensors into a CodedTensor (or float32, for 8-bit floats).

Start with `module_reader`, the base class, then `awq` or `gptq`. `bits` unpacks words, `zeros` handles the ways in
which GPTQ's zero points were stored, `packing` packs words. A new format needs a class here and a line in
`registry`; one that is also written has a record (`written`) after its reader.
"""
