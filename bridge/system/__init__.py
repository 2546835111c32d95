"""The machine: CPUs, Numba, threads, files, locks, caches, progress, options, and text for people.

Nothing here knows checkpoints, GGUF or models. `jit` is where Numba is configured, `pool` runs kernels on threads,
`files` and `folder_locks` make sure that nothing half-written is left, `options` ties dataclasses to flags.
"""
