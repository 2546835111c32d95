"""What becomes of each tensor, decided before anything is written. Read `plan`, the result, then `planner`.

options, recipe, metadata            what the user asks for
checkpoint_outline, part_reader      the model, and its data in the GGUF's order
importance, matrix_scales, mmproj    an imatrix, scales of whole matrices, a vision tower
plan_file, plan_reader               a plan as JSON, and back
"""
