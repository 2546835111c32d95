"""Layers with a state, token by token: `layer` says what a layer launches, in order; the kernels are one file each.

convolve    the convolution over the last tokens, its tail, and the norms of a delta net's keys and queries
recur       the states: of the delta net, of Mamba-2, of Mamba
norms       what ends a layer, and what Mamba's second matrices are multiplied by
"""
