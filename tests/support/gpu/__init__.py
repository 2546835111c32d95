"""A GPU in NumPy: PTX is parsed, executed on arrays of lanes, as the device of `bridge.cuda` in tests.

    parse.py           the text of a kernel -> basic blocks
    operands.py        registers and numbers, seen as types
    arithmetic.py      what instructions compute
    moves.py           what they move, load, store and exchange
    tensor_cores.py    mma.sync, and asynchronous copies
    instructions.py    the table of them
    memory.py          global and shared memory, with bounds, alignment and races checked
    order.py           releases and acquires between blocks
    machine.py         a launch: who runs when
    device.py          `bridge.cuda` and torch.cuda on top of it

What runs on a GPU's driver rather than as PTX, PyTorch's CUDA build for instance, meets a stand-in for that library:

    stand_in.py        stand_in_driver.c and stand_in_runtime.c, compiled: memory and copies work, kernels do nothing
    rehearsal.py       a command for a machine with a GPU, run on them in a copy of the tracked files

The machine supports the instructions of our kernels and names any other. Its source is NVIDIA's PTX ISA. Memory is
sequentially consistent here, and warps run in lockstep wherever they can; what a GPU would not promise is refused:
races between barriers, and what blocks read of each other without release and acquire.
"""
