"""Products of quantized tensors with vectors on the CPU, compiled by numba.

engine.py         which of the engines multiplies a matrix: portable.py, floats.py, tiled.py or prepared.py
rowmajor.py       straight from the file's blocks: portable, needs no preparation
layout.py         the repacked form: 16 (8, 4) rows interleaved, codes and scales as dense bit-planes
activations.py    x rounded to int8 blocks, as ggml does it
superblock.py     the arithmetic of one block of the repacked form, written once for all targets
vectors.py        vector code for numba through llvmlite; intrinsics_*.py: what a target adds
interleaved.py    the kernels made of these three
unpacked.py       kernels of AVX2 for several tokens, which unpack a block before all of them pass over it
"""
