"""The float model, one block in memory at a time, and passes through it. Read `float_model` first.

block_inputs, activations      what blocks are called with, in memory or in files
stages, experts                which layers of a block see the same inputs; mixtures of experts
forward_passes, replay         whole passes with gradients; passes through a part of a block
"""
