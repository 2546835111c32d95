"""Converts GPTQ checkpoints between v1 and v2: zero points are rewritten, all else is copied byte for byte.

    rewrite_zero_points(ckpt, Path("model-gptq-v2"), "gptq_v2")

v2 stores a zero point, v1 the zero point minus 1 (see `bridge.checkpoint.formats.zeros`). v1 to v2 is lossless. v2
to v1 requires that no zero point is 0: GPTQModel's v1 lets a 0 borrow from its neighbour and reads it
back, but AutoGPTQ, the kernels in vLLM and transformers, and llama.cpp's converter subtract 1 from each code
separately, so they read other values from the same words.

Programs that read the v1 written here: without a zero point of 0, subtracting 1 from each code and subtracting
a constant from the whole word are the same, so AutoGPTQ, vLLM, llama.cpp and GPTQModel agree on it, with one
exception. In a module whose bits are not the checkpoint's default (`dynamic`), GPTQModel until 7.3.1 adds the
default bits' constant; since 7.3.2 it adds that of the module's own bits, like all other programs, and this
form is written here. 3-bit modules are written as AutoGPTQ and GPTQModel from 7.0 on read them; files of
GPTQModel before 7.0 are corrected.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from bridge.checkpoint import Checkpoint
from bridge.checkpoint.formats.gptq import GptqReader
from bridge.checkpoint.repack.folder_output import FolderOutput
from bridge.checkpoint.repack.labels import Labels
from bridge.checkpoint.repack.zero_points import BITS, Clamped, ZeroPointPlan
from bridge.errors import BridgeError, parameter
from bridge.system.progress import Progress
from bridge.system.report import FolderReport

FORMATS = ("gptq", "gptq_v2")


@dataclass(repr=False)
class Rewritten(FolderReport):
    """The result of `rewrite_zero_points`; its format is gptq or gptq_v2."""

    source: str
    modules: int  # quantized modules in all
    rewritten: dict[str, int]  # those whose qzeros changed, by how they were stored: {"v1": 28}
    clamped: Clamped | None  # what `clamp` changed
    labels: list[str]  # the changes of the configs
    left_out: list[str]  # weights in the folder that are not part of the checkpoint and were not copied
    pickled: bool  # whether the source was .bin or .pt

    def facts(self) -> list[tuple[str, str]]:
        """What changed and what did not."""
        changed, new = sum(self.rewritten.values()), "v2" if self.format == "gptq_v2" else "v1"
        how = ", ".join(f"{count} from {dialect}" for dialect, count in self.rewritten.items())
        facts = [("qzeros", f"{changed} of {self.modules} modules rewritten as {new}" + (f": {how}" if how else ""))]
        facts += [("clamped", str(self.clamped))] if self.clamped else []
        facts += [("labels", change) for change in self.labels or ["unchanged"]]
        facts.append(("the rest", "the same tensors, as safetensors" if self.pickled else "copied byte for byte"))
        if self.left_out:
            facts.append(("left out", f"{', '.join(self.left_out)}: not part of the checkpoint"))
        return facts

    def summary(self) -> str:
        """The facts in a few lines, notes, size and time."""
        return self.printed([], self.facts(), self.size_and_time())


def rewrite_zero_points(
    ckpt: Checkpoint, out: Path, format: str | None, *, clamp: bool = False, force: bool = False,
    progress: Progress | None = None,
) -> Rewritten:  # fmt: skip
    """Rewrite a GPTQ checkpoint with its zero points stored as v1 or v2, and correct its labels.

    out       the folder to write; .bin and .pt become safetensors
    format    "gptq" (v1) or "gptq_v2"; None: that of the data (v2 if modules differ)
    clamp     to v1: change zero points of 0, which v1 cannot hold, to 1
    force     replace an existing checkpoint
    progress  called with (bytes done, all bytes, tensor)

    Raises BridgeError for anything but GPTQ v1 and v2, and for v1 without `clamp` if a zero point is 0.
    The folder gets its final name when everything is on disk.
    """
    started = time.perf_counter()
    reader = _reader(ckpt)
    with FolderOutput(ckpt, out, force) as output:
        plan = ZeroPointPlan(reader, format, clamp)
        labels = Labels(ckpt, plan)
        output.write(plan.changes, labels.files, progress)
        output.finish()
    seconds, pickled = time.perf_counter() - started, ckpt.files[0].suffix != ".safetensors"
    return Rewritten(
        [output.path], seconds, plan.format, ckpt.nbytes, str(ckpt.path), len(reader.modules), plan.rewritten,
        plan.clamped, labels.changes, output.left_out, pickled, notes=[*ckpt.notes, *plan.notes], home=ckpt.home,
    )  # fmt: skip


def is_rewritten(ckpt: Checkpoint) -> bool:
    """Whether a checkpoint has words of GPTQ v1 or v2, whose zero points can be rewritten."""
    if ckpt.quant.method != "gptq" or type(ckpt.reader) is not GptqReader:
        return False
    return ckpt.quant.checkpoint_format != "gptq_p" and all(info.bits in BITS for info in ckpt.modules.values())


def _reader(ckpt: Checkpoint) -> GptqReader:
    """The checkpoint's reader, if there is something to rewrite."""
    if ckpt.quant.checkpoint_format == "gptq_p":
        raise BridgeError(
            f"{ckpt.path}: is planar gptq_p, which stores true zero points already; {parameter('format')} repacks it"
        )
    if not isinstance(ckpt.reader, GptqReader) or not is_rewritten(ckpt):
        raise BridgeError(f"{ckpt.path}: is {ckpt.format}; give the {parameter('format')} that it is to have")
    return ckpt.reader
