"""Products of quantized tensors with vectors on the CPU, and a decoder's other steps, compiled by Numba.

Read `engines/` first: its table says which engine multiplies a matrix.

    machine/    the instructions that kernels are made of, for each target
    forms/      how weights and activations lie in memory, and how they get there
    engines/    products
    ops/        what a decoder does between them
"""
