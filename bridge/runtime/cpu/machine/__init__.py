"""The instructions that kernels are made of. Read `vectors` first.

emitter         each instruction as LLVM code
intrinsics_*    what a target adds: each has its sizes, such as LANES, and its multiplication of codes
"""
