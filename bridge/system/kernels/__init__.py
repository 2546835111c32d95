"""Compiled functions: made, kept between runs, loaded. Read `jit` first, which modules with kernels import.

compiler                what Numba makes of them; `worker` and `compile_ahead` run it in processes
object_code, elf        C functions as machine code, loaded without Numba
closure                 what a function's code depends on
compiling               how long it takes, and what a user is told meanwhile
memory, half, ir        what kernels are written with
"""
