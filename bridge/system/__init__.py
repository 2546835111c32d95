"""The machine: CPUs, Numba, threads, files, locks, caches, progress, text for people."""
