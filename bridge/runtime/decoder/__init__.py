"""Tokens in, hidden states and logits out. Read `walk` first, the way through the layers, then `decoder`.

machine          the verbs of the walk, which machines implement:
cpu_machine      on the CPU, as a program of calls; numpy_machine  plainly, in NumPy; CUDA's are in cuda/
steps            a program: tables of calls with the products in them, and what Python does in between
shared           a decoder that calls take from each other
positions        what depends on a token's position
experts, recurrent, prediction    what some architectures do beside attention and a network
"""
