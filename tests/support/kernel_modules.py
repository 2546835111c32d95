"""The modules whose kernels are kept, how to compile one of each, and a program that sees what that imports."""

# module -> code that compiles a kernel of it; `m` is the module
COMPILES = {
    "bridge.checkpoint.formats.bits": "m.unpack_rows(np.zeros((2, 3), np.uint32), 3, 32)",
    "bridge.checkpoint.formats.packing": "m.pack_rows(np.zeros((2, 32), np.uint8), 3)",
    "bridge.encode.block_bytes": "m.unpack_codes(WRITTEN['Q4_K'], np.zeros((1, 144), np.uint8))",
    "bridge.checkpoint.write.block_words": "m.gather_halves(TYPES['Q4_0'], np.zeros((2, 36), np.uint8), 0, "
    "np.zeros((2, 2), np.uint16))",
    "bridge.encode.carrying.carry_candidates": "m.fit_scaled(*np.ones((2, 1, 4, m.BATCH), np.float32), 0, 63)",
    "bridge.encode.carrying.carry_fit": "m.fit_affine(np.ones((5, 1, 8), np.float32), np.array([8]), 15, 63, 63)",
    "bridge.encode.carrying.carry_kernels": "m.shift_codes(np.zeros((1, 32), np.uint8), np.zeros((1, 1)), "
    "np.zeros(1, np.int32), 32, 8, 16, np.zeros((1, 32), np.uint8))",
    "bridge.encode.rounding.round_affine": "m.affine_quantizer('Q4_K')",
    "bridge.encode.rounding.round_groups":
        "m.fit_groups(np.ones((4, 32), np.float32), np.ones(32, np.float32), 4, True)",
    "bridge.encode.rounding.round_loops": "m._rows",
    "bridge.encode.rounding.round_plain": "m.plain_quantizer('Q4_0')(np.ones((1, 1, 32), np.float32), "
    "np.ones((1, 32), np.float32), np.zeros((1, 1, 32), np.uint8), np.ones((1, 1), np.int8), "
    "np.zeros((1, 1), np.uint8), *np.zeros((2, 1, 1), np.float32), np.zeros((1, 3)))",
    "bridge.encode.rounding.round_points": "m.points_quantizer('IQ2_XS', False)",
    "bridge.encode.rounding.round_scaled": "m.scaled_quantizer('Q6_K')",
    "bridge.encode.rounding.round_ternary": "m.ternary_quantizer('TQ2_0')",
    "bridge.quantize.grids.codebook_rounding": "m.rounding('IQ3_S')",
    "bridge.quantize.grids.group": "m._refitter(True)",
    "bridge.quantize.grids.plain": "m._kernels(WRITTEN['Q4_0'])",
    "bridge.quantize.grids.superblock_refit": "m.refitter(TYPES['Q4_K'])",
    "bridge.runtime.cpu.forms.activations": "m.quantize_function('Q4_K', True).address",
    "bridge.runtime.cpu.ops.attention": "m.function('store', 'f16').address",
    "bridge.runtime.cpu.engines.dense": "m.tiles_function().address",
    "bridge.runtime.cpu.ops.sampling_ops": "m.function().address",
    "bridge.runtime.cpu.ops.decoder_ops": "m.function('norm').address",
    "bridge.runtime.cpu.ops.expert_ops": "m.function('choose').address",
    "bridge.runtime.cpu.engines.floats": "m.rows_function('F16').address",
    "bridge.runtime.cpu.engines.interleaved": "m.kernel('Q4_0', target, 1, True).address",
    "bridge.runtime.cpu.ops.latent_attention": "m.function('store', 'q8_0').address",
    "bridge.runtime.cpu.engines.products": "m._product_function().address",
    "bridge.runtime.cpu.ops.passes": "m.function('several').address",
    "bridge.runtime.cpu.engines.readbw": "m._kernel().address",
    "bridge.runtime.cpu.ops.recurrent_ops": "m.function('gates').address",
    "bridge.runtime.cpu.forms.repack": "m.repacker('Q4_0', 8).address; m.repacker('IQ4_XS', 8).address",
    "bridge.runtime.cpu.forms.rowmajor": "m.rows_function('Q8_0').address",
    "bridge.runtime.cpu.ops.stream_ops": "m.function('as_long').address",
    "bridge.runtime.cpu.engines.tiled":
        "m._block_function('Q8_0', target, 8, True).address; m._tile_function().address",
    "bridge.runtime.cpu.engines.unpacked": "m.kernel('Q8_0', target, 4, (), 1).address",
    "bridge.system.kernels.half": "m.half_bits(np.ones(3, np.float32))",
    "bridge.system.threads.pool": "m.function('walk').address",
    "bridge.trellis.butterflies": "m.walsh_hadamard(np.ones(16, np.float32), 16, 1.0)",
    "bridge.cuda.forms.layout": "m.repacker('Q4_0')",
    "bridge.cuda.forms.numbered": "m.putter('IQ4_XS')",
}  # fmt: skip

# prints, for each module, which of this project's modules were loaded that are not among its sources
GUARD = """
import ast, importlib, os, sys, traceback, types
import numba, numpy as np
sources, folders, tools = (ast.literal_eval(text) for text in sys.argv[1:])

def loaded(module, code):
    # packages that import nothing, but for those that are sources themselves
    packages = {name.rpartition(".")[0] for name in [*sources[module], *tools]} | {"bridge"}
    for name in sorted(packages - set(sources[module])):
        stub = types.ModuleType(name)
        stub.__path__ = [os.path.join(folder, *name.split(".")[1:]) for folder in folders]
        sys.modules[name] = stub
    stubs = set(sys.modules)
    m = importlib.import_module(module)
    names = {"m": m, "np": np}
    if "TYPES" in code:
        names["TYPES"] = importlib.import_module("bridge.blocks").TYPES
    if "WRITTEN" in code:
        names["WRITTEN"] = importlib.import_module("bridge.blocks.read").WRITTEN
    if "target" in code:  # avx2 or neon, which have all engines
        names["target"] = importlib.import_module("bridge.system.cpu.targets").available()[-2:][0]
    exec(code, names)
    found = {name for name in sys.modules if name.startswith("bridge.")} - stubs
    return sorted(found - set(sources[module]) - set(tools) - {"bridge.system.kernels.compiler"})

for module, code in COMPILES.items():
    sys.stdout.flush()
    if os.fork() == 0:
        try:
            print((module, loaded(module, code)), flush=True)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    if os.wait()[1]:
        sys.exit(f"{module} cannot be compiled")
""".replace("COMPILES", repr(COMPILES))
