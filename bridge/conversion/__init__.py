"""Checkpoint in, GGUF out. Read `planning/` first, then `writing/` and `converter`, which puts them together.

in    an opened checkpoint, an outline of its model (`bridge.models`), and `planning.options`
plan  the type of every tensor, and whether its codes are carried, requantized, calibrated or rounded
out   the GGUF (`writing.gguf_writer`) and a `report`; `verify` measures the file against the checkpoint

    calibrate_plan, size_budget  layers quantized with a text; types that fit a size
    gguf_input/                  a GGUF in the place of a checkpoint
    checkpoints/                 the way back: a GGUF, or a float model, to a checkpoint
    edit, lora, publish/, cache  other work on files; the GGUFs that `gguf-bridge run` made
"""
