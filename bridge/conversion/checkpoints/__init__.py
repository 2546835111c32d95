"""The way to checkpoints: of a GGUF (`export`), and of float models (`to_checkpoint`).

checkpoint_plan, layer_plan    what becomes of each layer in a format
codes_of_blocks                blocks back to codes in groups
"""
