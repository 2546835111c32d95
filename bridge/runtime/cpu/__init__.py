"""Products of quantized tensors with vectors on the CPU, compiled by numba.

engine.py         which of the engines multiplies a matrix: portable.py, floats.py, tiled.py or prepared.py
rowmajor.py       straight from the file's blocks: portable, needs no preparation
layout.py         the repacked form: 16 (8, 4) rows interleaved, codes and scales as dense bit-planes
activations.py    x rounded to int8 blocks, as ggml does it
superblock.py     the arithmetic of one block of the repacked form, written once for all targets
emitter.py        vector instructions by llvmlite, twin.py the same in numpy; intrinsics_*.py: what a target adds
vectors.py        numba's intrinsics made of them
interleaved.py    the kernels made of these three
columns.py        which bits of the file's blocks those of a vector are, and how they get there
filerows.py       kernels of one vector and the file's own rows
unpacked.py       kernels of AVX2 for several tokens, which unpack a block before all of them pass over it
"""
