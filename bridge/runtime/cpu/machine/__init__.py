"""The instructions that kernels are made of. Read `vectors` first.

emitter         each instruction as LLVM code
instruction_set what differs between targets; each has its own in intrinsics_*
"""
