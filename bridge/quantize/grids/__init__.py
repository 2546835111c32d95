"""Grids onto which weights are rounded: groups of checkpoints, blocks of GGUF files, and how refinement moves them."""
