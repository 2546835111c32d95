"""Models in files of their own that guess tokens for another one, from what that computes (EAGLE-3, Gemma 4's
assistants, DFlash).

Read `drafter` first: what a drafter does. `draft_file` is the file, `attention` the parts of layers; each kind has a
module. They are a few small layers, so products alone run on kernels and the rest is NumPy.
"""
