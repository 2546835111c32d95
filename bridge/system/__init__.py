"""The machine: CPUs, Numba, threads, files, locks, caches; options, JSON's fields, progress and text for people.

Nothing here knows checkpoints, GGUF or models. Read `kernels/jit` first, where functions are made that Numba compiles.

    kernels/    compiled functions: made, kept between runs, loaded
    cpu/        CPUs, instruction sets, memory, threads that work on rows
    threads/    the pool that runs kernels over chunks of rows
    storage/    files that are written whole, folders that are locked, the cache
    options     dataclasses whose fields are flags of the command line; `fields` reads JSON that others wrote
"""
