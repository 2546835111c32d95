"""The instructions that kernels are made of. Read `vectors` first.

emitter, twin   each instruction as LLVM code, and the same in NumPy
intrinsics_*    what a target adds: each has FEATURES, LANES and its multiplication of codes
"""
