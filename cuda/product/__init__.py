"""Products with quantized matrices. Read `matmul` first, which chooses by the number of tokens.

matvec, matvec_*          up to 8 tokens: every weight is read once
mma, mma_int8             more tokens, on tensor cores
activations, halves, token_records    what x becomes before
products, experts, fused  matrices of one input, of chosen experts, of trellis codes
"""
