"""How kernels are written, compiled and launched. Read `launch` first.

intrinsics, twins, unroll, last_block    what kernels are written with, and its twins in Python
compiler, compile_pool, device           machine code for any GPU; the GPUs of this machine
"""
