"""How kernels are written, compiled and launched. Read `launch` first.

intrinsics, unroll, last_block    what kernels are written with
compiler, compile_pool, device    machine code for any GPU; the GPUs of this machine
"""
