"""Superblocks of 256: sub-blocks with integer scales under one or two half floats. Read `q4_k` first."""
