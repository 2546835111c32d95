"""Floats to the nearest blocks. Read `round_rows` first, which chooses by type, then `round_affine`.

round_affine, round_scaled    superblocks with and without minima
round_plain                   small blocks: Q4_0 to Q8_0
round_table, round_points, round_shifted, round_ternary    tables of values, codebooks, IQ1's shifts, three values
round_groups                  groups of checkpoints
round_loops, round_values, nearest_points   what these share
"""
