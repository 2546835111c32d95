"""Kernels of the CPU runtime as AArch64 machine code, made on any machine: llvmlite compiles for all of LLVM's targets.

A function `rows(weights, halves, x, y, y_stride, blocks)` multiplies one row group as interleaved.py's kernels do;
what it leaves out is their outer loops.
"""

from functools import cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from bridge.blocks.read import READ
from bridge.runtime.cpu.engines.interleaved import arithmetic
from bridge.runtime.cpu.forms.activations import float_record, record_of
from bridge.runtime.cpu.forms.layout import InterleavedLayout
from bridge.runtime.cpu.machine.emitter import Emitter
from bridge.system.cpu import targets

LANES = 4  # rows of a row group
_I64 = ir.IntType(64)


@cache
def _processor() -> llvm.Target:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return llvm.Target.from_triple("aarch64-linux-gnu")


def kernel(name: str, target: str, width: int, integer: bool) -> ir.Module:
    """The code of a type's loop over blocks, for `width` columns of x."""
    block, isa = READ[name], targets.isa(target)
    layout = InterleavedLayout(block, isa.lanes)
    record = record_of(block).nbytes if integer else float_record(block)
    code = ir.Module()
    code.triple = "aarch64-linux-gnu"
    function = ir.Function(code, ir.FunctionType(ir.VoidType(), [_I64] * 6), "rows")
    weights, halves, x, y, y_stride, blocks = function.args
    begin, loop, end = (function.append_basic_block(part) for part in ("begin", "loop", "end"))
    builder = ir.IRBuilder(begin)
    builder.branch(loop)
    builder.position_at_end(loop)
    emitter = Emitter(builder, isa, isa.paired and width > 1 and integer, (), 2)

    def phi(kind: ir.Type, first: ir.Value) -> Any:
        value = builder.phi(kind)
        value.add_incoming(first, begin)
        return value

    left = phi(_I64, blocks)
    places = [(phi(_I64, first), step) for first, step in (
        (weights, layout.block_bytes), (halves, layout.halves_bytes), (x, width * record)
    )]  # fmt: skip
    totals = [phi(emitter.floats, emitter.zero_float()) for _ in range(width)]
    sums = arithmetic(block, integer)(emitter, layout, list(totals), *(address for address, _ in places))
    for address, step in places:
        address.add_incoming(builder.add(address, _I64(step)), loop)
    for total, value in zip(totals, sums, strict=True):
        total.add_incoming(value, loop)
    rest = builder.sub(left, _I64(1))
    left.add_incoming(rest, loop)
    builder.cbranch(builder.icmp_unsigned("!=", rest, _I64(0)), loop, end)
    builder.position_at_end(end)
    emitter.store_all(sums, y, y_stride)
    builder.ret_void()
    return code


def features(target: str) -> str:
    """What a target's machine has, as LLVM takes it."""
    return ",".join(f"+{name}" for name in sorted(targets.FEATURES[target]))


def compiled(code: ir.Module, target: str) -> bytes:
    """The object file of a module, optimized as numba does it."""
    machine = _processor().create_target_machine(cpu="neoverse-n1", features=features(target), opt=3)
    module = llvm.parse_assembly(str(code))
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return bytes(machine.emit_object(module))
