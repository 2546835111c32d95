"""Tokens in, hidden states and logits out. Read `decoder` first, then `tables`, the way through the layers.

steps       its calls and products, in two forms: one table for a token, one call after another for many
buffers     the memory that they work on
shared      a decoder that calls take from each other
experts, latent, recurrent, streams, prediction    what some architectures do beside attention and a network
"""
