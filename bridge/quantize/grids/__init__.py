"""Grids that codes are rounded onto: `group` for checkpoints, `superblock` for K-quants, each with its refit of scales.

`try_lines` is the inner loop of both refits: many scales and offsets tried at once.
"""
