"""Checkpoint in, GGUF out. Read `plan` first, then `planner`, `executor` and `converter`, which puts them together.

in    an opened checkpoint, an outline of its model (`bridge.models`), and `options`
plan  the type of every tensor, and whether its codes are carried, requantized, calibrated or rounded
out   the GGUF (`gguf_writer`) and a `report`; `verify` measures the file against the checkpoint

`size_budget` changes a plan's types to fit a size, `calibrate_plan` quantizes its layers with a text, `to_checkpoint`
writes these layers as a checkpoint instead, `cache` holds the GGUFs that `gguf-bridge run` made.
"""
