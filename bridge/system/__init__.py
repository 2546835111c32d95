"""The machine: CPUs, Numba, threads, files, locks, caches, progress, text for people.

Every package may use these modules, which know nothing of models. Read `pool.py` for the threads that kernels run on,
`targets.py` for the instruction sets they are compiled for, and `files.py` for how files are written.
"""
