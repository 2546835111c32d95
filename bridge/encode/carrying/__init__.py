"""Integer codes onto blocks, unchanged: only scales and minima are encoded again. Read `carry` first.

carry_candidates    the integer scales that a superblock could have
carry_fit           the best of them by the error of the weights
carry_kernels       the loops of both
"""
