"""The way back: a GGUF becomes a checkpoint folder, with its codes where the format holds them.

    bridge.export("model.gguf", "folder", "gptq_v2")

Names and row orders are the family's (`gguf_source`), codes and groups come from the blocks (`block_layer`), and the
folder is written as `quantize --format` writes one. Memory holds some rows of a layer: the headers tell bits and
groups, for which layers are read once before.
"""

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from bridge.checkpoint.files.folder import check_folder
from bridge.checkpoint.files.hub import resolve_gguf
from bridge.checkpoint.formats.registry import EXPORTED, FORMATS
from bridge.checkpoint.formats.written import WrittenFormat
from bridge.checkpoint.labels.hosts import for_host
from bridge.checkpoint.write.writer import CheckpointWriter
from bridge.conversion.checkpoints.block_layer import BlockLayer
from bridge.conversion.checkpoints.checkpoint_plan import CheckpointPlan
from bridge.conversion.checkpoints.layer_plan import AS_FLOATS
from bridge.conversion.checkpoints.write_layers import Exported, ExportedTensor, calibrated, write_layers
from bridge.conversion.gguf_input.gguf_checkpoint import open_source
from bridge.conversion.gguf_input.gguf_config import checked_source, write_config
from bridge.conversion.gguf_input.gguf_source import AssembledTensor, GgufSource, SourceTensor
from bridge.conversion.paths import files_of
from bridge.errors import BridgeError, parameter, refused
from bridge.gguf_file.reader import StoredModel, expect_model, read_gguf
from bridge.quantize.settings import Calibration
from bridge.system.cpu.row_threads import thread_limit
from bridge.system.kernels import compiling
from bridge.system.options import checked
from bridge.system.progress import Progress
from bridge.system.storage.files import expanded

DTYPES = ("F16", "BF16", "F32")


@checked
@thread_limit()
def export(
    model: str | Path,
    out: str | Path,
    format: str = "floats",
    *,
    bits: int | None = None,
    config: str | Path | None = None,
    dtype: str | None = None,
    calibrate: Calibration | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write a GGUF as a checkpoint folder.

    model     a GGUF, or any of its shards
    out       the folder to write
    format    "floats", "gptq" (v1), "gptq_v2", "gptq_p" (planar, of GPTQModel: 5 to 7 bits too), "awq" (gemm),
              "compressed-tensors" (pack-quantized, MXFP4, NVFP4), "mlx" (affine, mxfp4, nvfp4), "hqq" or "modelopt"
              (NVFP4). The linear layers of the decoder's blocks keep their codes where the format holds them; the
              others are rounded, or become floats where the format has too few bits. Routers stay floats
    bits      the most bits that a layer may have: layers with more, and floats, are rounded to them; None: layers have
              the bits of their codes, or the fewest that add under 15% of the type's own noise, or 8 where that noise
              is not known
    config    folder with config.json and tokenizer of the model, which are copied; None: they are made of the GGUF's
              metadata. The weights of other parts of the model, such as a vision tower, are copied from this folder
    dtype     dtype of floats: "F16", "BF16" or "F32"; None: BF16 if the GGUF has tensors of that type, else F16. MLX
              has F16 instead of BF16
    calibrate  quantizes layers with a text that would be rounded otherwise; not with method "awq". Finished layers are
              stored in the folder `<out>.layers` until all is written, and a second run continues there
    force     replace an existing checkpoint
    progress  called with the bytes done, all bytes, and the tensor's name

    Returns a `bridge.conversion.checkpoints.write_layers.Exported`. Raises BridgeError for a damaged GGUF, one whose
    architecture is unknown or not that of the config, metadata that transformers does not convert, a tensor that cannot
    be separated from others again, and a value that the dtype cannot hold.
    """
    started, compiled = compiling.clock(), compiling.seconds()
    if format not in ("floats", *EXPORTED):
        raise BridgeError(f"unknown {parameter('format', format)}: choose floats, {', '.join(EXPORTED)}")
    written = for_host(FORMATS.get(format), None)
    if bits is not None and (written is None or bits not in written.bits):
        known = ", ".join(map(str, written.bits if written else ()))
        raise refused("bits", bits, f"{format} has {known or 'no codes that are rounded to'}")
    if dtype not in (None, *DTYPES):
        raise BridgeError(f"unknown {parameter('dtype', dtype)}: choose {', '.join(DTYPES)}")
    if calibrate is not None and written is None:
        raise refused("calibrate", None, f"floats are not rounded; choose another {parameter('format')}")
    gguf = read_gguf(resolve_gguf(model))
    expect_model(gguf.metadata, gguf.files[0])
    if dtype is None:
        dtype = "BF16" if any(tensor.type == "BF16" for tensor in gguf.tensors.values()) else "F16"
        dtype = (written and written.dtype) or dtype
    path, home = expanded(out), None if config is None else expanded(config)
    with ExitStack() as stack:
        if home is None:
            temporary = Path(stack.enter_context(TemporaryDirectory()))
            write_config(gguf, temporary)
            source = checked_source(gguf, temporary, dtype, quantized=written is not None)
        else:
            source = GgufSource(gguf, home, dtype, quantized=written is not None)
        check_folder(source, path, force, [*gguf.files, *files_of(*(calibrate.files if calibrate else []))])
        reports = {name: ExportedTensor(name, tensor.stored.type, AS_FLOATS) for name, tensor in source.sources.items()}
        notes, stored, plan = [*source.notes], None, None
        if written is not None:
            plan = _planned(gguf, source, written, bits)
            if calibrate is not None:
                with open_source(gguf.files[0], home, by_family=True) as ckpt:
                    stored, more = calibrated(ckpt, path, plan, calibrate, force)
                notes += more
            notes += plan.notes()
        with CheckpointWriter(
            source,
            path,
            format if plan else None,
            {module: layer.groups for module, layer in plan.layers.items()} if plan else {},
            stacks=plan.stacks if plan else {},
            clamp=stored is not None,  # GPTQ v1: a calibrated zero point of 0
            force=force,
            progress=progress,
        ) as writer:
            if plan is not None:
                reports |= {report.name: report for report in write_layers(writer.layers, plan, stored)}
            done = writer.finish()
    if stored is not None:
        stored.remove()
    compiled, seconds, tensors = compiling.seconds() - compiled, compiling.clock() - started, list(reports.values())
    return Exported(done.outputs, seconds, done.format, done.nbytes, tensors, compile_seconds=compiled, notes=notes)


def _planned(gguf: StoredModel, source: GgufSource, written: WrittenFormat, bits: int | None) -> CheckpointPlan:
    """What becomes of the layers; the config of `source` becomes the format's. Raises BridgeError if all are floats."""
    layers, float_stacks = [], 0
    for tensor in source.sources.values():
        outlined = tensor.tensor if isinstance(tensor, SourceTensor) else tensor.sources[0].tensor
        if not outlined.in_block:
            continue
        if isinstance(tensor, SourceTensor) and len(tensor.part.shape) == 2:
            layers.append(BlockLayer.of(tensor, written))
        elif isinstance(tensor, AssembledTensor) and tensor.sources[0].part.matrix is not None:
            float_stacks += 1
    plans = {layer.module: layer.plan(bits) for layer in layers}
    plan = CheckpointPlan(layers, plans, written, bits, str(source.config.get("model_type")), float_stacks)
    source.config = written.config(source.config)
    if not plan.layers:
        widest = f", or {parameter('bits', written.bits[-1])}, which rounds them" if written.bits and not bits else ""
        floats = parameter("format", "floats")
        raise BridgeError(f"{gguf.files[0]}: has no layer that {written.name} holds; choose {floats}{widest}")
    return plan
