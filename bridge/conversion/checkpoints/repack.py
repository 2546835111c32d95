"""A quantized checkpoint in another checkpoint format, with its codes where that holds them.

    bridge.repack("Qwen3-8B-AWQ", "Qwen3-8B-W4A16", "compressed-tensors")

`codes_in_format` says which codes are carried, `layer_plan` what becomes of the others, and the folder is written as
`export` writes one of a GGUF. Memory holds a layer, and the next.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bridge.checkpoint import Checkpoint
from bridge.checkpoint.files.folder import check_folder
from bridge.checkpoint.files.hub import open_by_name
from bridge.checkpoint.formats.registry import FORMATS
from bridge.checkpoint.formats.written import WrittenFormat
from bridge.checkpoint.labels.hosts import HOSTS, check_for_host, for_host
from bridge.checkpoint.repack import FORMATS as ZERO_POINT_FORMATS
from bridge.checkpoint.repack import Rewritten, is_rewritten, rewrite_zero_points
from bridge.checkpoint.write.report import clamped_facts
from bridge.checkpoint.write.writer import CheckpointWriter
from bridge.conversion.checkpoints.checkpoint_plan import CheckpointPlan
from bridge.conversion.checkpoints.cluster_layers import Cluster, Request
from bridge.conversion.checkpoints.layer_plan import AS_FLOATS, ROUNDED
from bridge.conversion.checkpoints.repack_notes import notes_on_layers, notes_on_left_out_scales
from bridge.conversion.checkpoints.write_layers import Exported, ExportedTensor, calibrated, write_layers
from bridge.conversion.paths import files_of
from bridge.errors import BridgeError, parameter, refused
from bridge.quantize.settings import Calibration
from bridge.system.cpu.row_threads import thread_limit
from bridge.system.kernels import compiling
from bridge.system.options import checked
from bridge.system.progress import Progress
from bridge.system.storage.files import expanded

DTYPES = ("F16", "BF16", "F32")


@dataclass(repr=False)
class Repacked(Exported):
    """The report of a checkpoint in another format."""

    source: str
    left_out: list[str]  # files with other weights than those of the checkpoint, which were not copied
    raised: tuple[int, int]  # zero points of 0 that became 1, and weights that lost a step by it

    def facts(self) -> list[tuple[str, str]]:
        """What became of the layers, without anything of this machine."""
        layers = [t for t in self.tensors if t.how != AS_FLOATS]
        counts = Counter(t.how for t in layers)
        facts = [("layers", ", ".join(f"{count} {how}" for how, count in counts.items()) or "floats")]
        facts += clamped_facts(*self.raised)
        if self.left_out:
            facts.append(("left out", f"{', '.join(self.left_out)}: not part of the checkpoint"))
        return facts

    def summary(self) -> str:
        """The lines that the command prints."""
        return self.printed(self.table(), self.facts()[1:], self.size_and_time())


@checked
@thread_limit()
def repack(
    source: str | Path,
    out: str | Path,
    format: str | None = None,
    *,
    host: str | None = None,
    bits: int | None = None,
    config: str | Path | None = None,
    dtype: str | None = None,
    calibrate: Calibration | None = None,
    clamp: bool = False,
    force: bool = False,
    cluster: Any = None,
    progress: Progress | None = None,
) -> Repacked | Rewritten:
    """Write a quantized checkpoint in another format.

    source    a folder in Hugging Face layout, a Hub id (org/name) to download, or a .pt file
    out       the folder to write
    format    a format of `export`; None: GPTQ's v1 or v2, as the source has it, with correct labels. From GPTQ to
              "gptq" or "gptq_v2", only zero points are rewritten, and everything else is copied byte for byte
    host      the program that will load the checkpoint: "transformers", "vllm", "sglang" or "mlx". The checkpoint then
              has only what that program reads
    bits      the most bits that a layer may have, as in `export`; 8-bit floats that the format cannot hold are rounded
              to them
    config    folder with config.json and tokenizer, if the source has none
    dtype     dtype of floats: "F16", "BF16" or "F32"; None: as in the source. MLX has F16 instead of BF16
    calibrate  quantizes layers with a text that would be rounded otherwise, as in `export`
    clamp     for "gptq": change zero points of 0, which v1 cannot hold, to 1
    force     replace an existing checkpoint
    cluster   a `distributed.Client`, whose workers plan and write the layers; they need this program, and the source
              and the new folder under the same paths
    progress  called with the bytes done, all bytes, and the tensor's name

    Returns a report with `summary()`, the lines that the command prints. Raises BridgeError for a source that is
    damaged or not quantized, where no layer has codes that the format holds, and where `out` exists without `force`.
    """
    started, compiled = compiling.clock(), compiling.seconds()
    if format not in (None, "floats", *FORMATS):
        raise BridgeError(f"unknown {parameter('format', format)}: choose floats, {', '.join(FORMATS)}")
    if dtype not in (None, *DTYPES):
        raise BridgeError(f"unknown {parameter('dtype', dtype)}: choose {', '.join(DTYPES)}")
    if host is not None and host not in HOSTS:
        raise BridgeError(f"unknown {parameter('host', host)}: choose {', '.join(HOSTS)}")
    if host is not None and format is None:
        raise refused("host", host, f"give {parameter('format')} too")
    written = for_host(FORMATS.get(format or ""), host)
    if format is None and (bits, dtype, calibrate) != (None, None, None):
        raise BridgeError(f"give {parameter('format')}: without it, zero points and labels alone are rewritten")
    if bits is not None and (written is None or bits not in written.bits):
        known = ", ".join(map(str, written.bits if written else ()))
        raise refused("bits", bits, f"{format} has {known or 'no codes that are rounded to'}")
    if calibrate is not None and written is None:
        raise refused("calibrate", None, f"floats are not rounded; choose another {parameter('format')}")
    if clamp and (format == "floats" or (written is not None and written.holds_zero)):
        why = "has none of 0" if written and written.zeros == "middle" else "holds every zero point"
        raise BridgeError(f"{format} {why}; leave out {parameter('clamp', True)}, which is for v1")
    with open_by_name(source, config) as ckpt:
        if ckpt.reader is None:
            raise BridgeError(f"{ckpt.path}: is not quantized; `quantize` with {parameter('format')} does that")
        unchanged = (bits, dtype, calibrate, host) == (None, None, None, None)
        if format is None or (unchanged and format in ZERO_POINT_FORMATS and is_rewritten(ckpt)):
            return rewrite_zero_points(ckpt, expanded(out), format, clamp=clamp, force=force, progress=progress)
        path = expanded(out)
        check_folder(ckpt, path, force, files_of(*(calibrate.files if calibrate else [])))
        request = Request(str(format), host, bits, dtype, clamp)
        floats = request.source(ckpt)
        reports = {name: ExportedTensor(name, floats.type_of(name), AS_FLOATS) for name in floats.tensors}
        notes = [*(note for note in ckpt.notes if note not in ckpt.on_activations), *floats.notes]
        stored, plan = None, None
        workers = None if cluster is None else Cluster(cluster, ckpt.path, ckpt.home, request)
        if written is None and host is not None:
            floats.config = HOSTS[host].config(floats.config)
        if written is not None:
            model_type, joins = str(ckpt.config.get("model_type")), host is not None and HOSTS[host].joins
            layers = [*floats.layers()]
            plans = workers.plans(layers) if workers else {layer.module: layer.plan(bits) for layer in layers}
            plan = CheckpointPlan(layers, plans, written, bits, model_type, floats.stacks, joins=joins)
            floats.config = written.config(floats.config)
            if not plan.layers:
                widest = None if bits else next(reversed(written.bits), None)
                raise _no_layers(ckpt, written, widest if any(layer.plan(widest) for layer in layers) else None)
            if calibrate is not None:
                in_order = frozenset(module for module, layer in plan.layers.items() if layer.how == ROUNDED)
                floats.keep_order(in_order)
                if workers is not None:
                    workers = replace(workers, request=replace(request, in_order=in_order))
                stored, more = calibrated(ckpt, path, plan, calibrate, force)
                notes += more
            if host is not None:
                groups = {module: layer.groups for module, layer in plan.layers.items()}
                modules = {name.removesuffix(".weight") for name in floats.tensors}
                check_for_host(groups, modules - groups.keys(), written.name, host)
            notes += [*plan.notes(), *notes_on_layers(ckpt, plan, host)]
        notes += notes_on_left_out_scales(ckpt, plan)
        with CheckpointWriter(
            floats, path, format if plan else None,
            {module: layer.groups for module, layer in plan.layers.items()} if plan else {},
            stacks=plan.stacks if plan else {}, clamp=clamp or stored is not None, force=force, progress=progress,
        ) as writer:  # fmt: skip
            if plan is not None:
                written_layers = write_layers(writer.layers, plan, stored, workers, rows=floats.rows)
                reports |= {report.name: report for report in written_layers}
            done = writer.finish()
        home = ckpt.home
    if stored is not None:
        stored.remove()
    compiled = compiling.seconds() - compiled
    return Repacked(
        done.outputs, compiling.clock() - started, done.format, done.nbytes, [*reports.values()], str(source),
        done.left_out, done.raised, compile_seconds=compiled, notes=notes, home=home,
    )  # fmt: skip


def _no_layers(ckpt: Checkpoint, written: WrittenFormat, widest: int | None) -> BridgeError:
    """`widest`: bits that layers can be rounded to."""
    rounds = f", or {parameter('bits', widest)}, which rounds them" if widest else ""
    floats = parameter("format", "floats")
    return BridgeError(f"{ckpt.path}: has no layer that {written.name} holds; choose {floats}{rounds}")
