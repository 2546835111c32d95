"""What a conversion or a verification found, per tensor, and the table that shows it."""

from __future__ import annotations

import html
import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.blocks.ggml import GGMLQuantizationType
from bridge.blocks.tensor_types import FLOAT_TYPES
from bridge.encode.limits import FLOAT_LIMIT, REQUANTIZED_LIMIT
from bridge.errors import parameter
from bridge.system.report import WROTE, CommandReport, save_report
from bridge.system.text import align, note_lines, percent, printable, size_text, took_text

if TYPE_CHECKING:
    from bridge.encode.carrying.carry import Fidelity
    from bridge.models.outline import ModelTensor
    from bridge.runtime.replies.perplexity import Perplexity

CARRIED = "codes carried"
PARTLY = "codes carried in part"
REQUANTIZED = "requantized"
FLOAT = "from float"
CALIBRATED = "calibrated"  # quantized with the Hessian of a text
AS_IS = "kept float"
COPIED = "copied"  # blocks of a GGUF
CODED = (CARRIED, PARTLY, REQUANTIZED)


@dataclass
class Outcome:
    """What became of a tensor."""

    outcome: str  # one of CARRIED, PARTLY, REQUANTIZED, CALIBRATED, FLOAT, AS_IS, COPIED
    fidelity: Fidelity | None = None
    exact_for_free: str | None = None  # a bit-exact type that is no larger, where `type` is not exact
    notes: list[str] = field(default_factory=list)
    codes_missing: int = 0  # found by verify: codes that are not in the file, though its type holds them bit for bit
    stored: str | None = None  # dtype of a tensor of floats in the checkpoint, or type in a GGUF: "BF16"
    largest_difference: float | None = None  # of a weight, found by verify


@dataclass(kw_only=True)
class TensorReport(Outcome):
    """What became of one tensor.

    name            in the GGUF
    source          name in the checkpoint; None: the tensor was generated
    kind            the name without its block and ".weight": "attn_q"
    type            as gguf spells it: "Q4_K"
    shape           slowest dimension first, [out, in]
    nbytes          bytes in the file
    outcome         "codes carried", "codes carried in part", "requantized", "from float", "calibrated", "kept float" or
                    "copied"
    fidelity        the distance from the checkpoint's weights; None: the tensor was stored as it was
    exact_for_free  a bit-exact type that is no larger, where `type` is not exact
    notes           sentences about this tensor
    codes_missing   number of codes that `verify` did not find in the file, though its type holds them bit for bit
    stored          dtype of a tensor of floats in the checkpoint, or type in a GGUF: "BF16"
    largest_difference  of a weight from the reference's, found by `verify`; None: not measured
    """

    name: str
    source: str | None  # name in the checkpoint; None for generated tensors
    kind: str
    type: str
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, tensor: ModelTensor, type: str, nbytes: int, outcome: Outcome) -> TensorReport:
        """The report on a tensor of a plan or an outline that is of a type in the GGUF."""
        return cls(
            **vars(outcome), name=tensor.name, source=tensor.source, kind=tensor.kind, type=type, shape=tensor.shape,
            nbytes=nbytes,
        )  # fmt: skip

    @property
    def weights(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    def as_dict(self) -> dict[str, object]:
        """For JSON: the fields, with what the fidelity's sums amount to."""
        fields = asdict(self)
        row = {key: fields.pop(key) for key in ("name", "source", "kind", "type", "shape", "nbytes")}
        how = fields.pop("outcome")
        row |= {**fields, "bpw": 8 * self.nbytes / self.weights, "how": how}
        if self.fidelity:
            row["fidelity"] = {
                "nmse": self.fidelity.nmse,
                "share_of_noise": self.fidelity.share if self.fidelity.noise else None,
                "codes_kept": self.fidelity.kept / self.fidelity.weights if self.has_codes else None,
                **asdict(self.fidelity),
            }
        return row

    @property
    def has_codes(self) -> bool:
        """Whether the tensor arrived as codes."""
        return self.outcome in CODED


def carried_outcome(fidelity: Fidelity) -> str:
    return CARRIED if fidelity.kept == fidelity.weights else PARTLY if fidelity.kept else REQUANTIZED


def lost_codes(tensor: str, reasons: Sequence[str], fidelity: Fidelity) -> list[str]:
    """Why a tensor could not keep all its codes, a line for each reason; `reasons`: of each part, "" where it did."""
    of = f" of its {len(reasons)} parts: " if len(reasons) > 1 else ""
    codes = f"{percent(fidelity.kept / fidelity.weights, 4)} of its codes kept" if fidelity.kept else "codes not kept"
    adds = f"adds {percent(fidelity.share)} of the checkpoint's noise"
    counts = Counter(filter(None, reasons))
    return [f"{tensor}: {f'{count}{of}' if of else ''}{codes}, {reason}; {adds}" for reason, count in counts.items()]


def zero_notes(tensor: ModelTensor, zeros: int) -> list[str]:
    """A note where all weights of a matrix are zero; `zeros`: the number of a tensor's parts that are so."""
    if not zeros or len(tensor.shape) < 2 or not tensor.name.endswith(".weight"):
        return []
    which = f"{zeros} of its {len(tensor.parts)} matrices are" if len(tensor.parts) > 1 else "is"
    return [f"{tensor.name}: {which} all zeros in the checkpoint; where the model should have values, save it again"]


def beyond_auto(report: TensorReport) -> bool:
    """Whether a tensor is not as close as type auto promises: its scales are out of half precision's range."""
    f = report.fidelity
    if f is None or report.outcome == CALIBRATED or f.nmse <= FLOAT_LIMIT:
        return False
    return not report.has_codes or f.share > REQUANTIZED_LIMIT


def far_off(report: TensorReport, promised: bool) -> str | None:
    """A note on a tensor that a type does not reach; None for others. `promised`: whether types are chosen by error."""
    f = report.fidelity
    if f is None or not (f.nmse > _LOST or (promised and beyond_auto(report))):
        return None
    return (
        f"{report.name}: is far off (NMSE {f.nmse:.2g}): its values are beyond what {report.type}'s half-precision "
        f"scales reach; if the checkpoint is sound, keep it as floats with {parameter('tensor_types')} REGEX=BF16"
    )


_LOST = 0.9  # NMSE: more than any type's rounding costs


@dataclass(repr=False)
class Report(CommandReport):
    """What a conversion wrote, or what `verify` measured, tensor by tensor.

    outputs            the files
    seconds            wall time of the call
    compile_seconds    wall time that compiling kernels took, part of `seconds`
    notes              sentences about what the user should know
    home               the source's folder, with config.json and README.md
    blocks             how each block was calibrated, one dict for each
    checkpoint         the source, as it was given
    checkpoint_format  the source's format: "gptq"
    tensors            a TensorReport for each tensor
    source_bytes       size of all tensors of the source
    output_format      format of `outputs`
    predictions        perplexity and KL divergence in nats a token, where `verify` was given a text
    done               "wrote" or "read"
    """

    checkpoint: str
    checkpoint_format: str
    tensors: list[TensorReport]
    source_bytes: int
    output_format: str = "GGUF"
    predictions: Perplexity | None = None
    done: str = WROTE

    def _about(self) -> str:
        return f"{len(self.tensors)} tensors of {self.checkpoint_format}, {self.bpw():.2f} bits a weight"

    def _repr_html_(self) -> str:
        """What a notebook shows: the table, with notes, under what it is of."""
        text = "\n".join([repr(self), "", *self._lines(), *note_lines(self.notes)])
        return f"<pre>{html.escape(printable(text))}</pre>"

    @property
    def output_bytes(self) -> int:
        """Bytes of `outputs` on disk."""
        return sum(p.stat().st_size for p in self.outputs)

    def total(self, outcomes: Iterable[str] = CODED) -> Fidelity | None:
        """The fidelity of all tensors whose `outcome` is one of `outcomes`, None if there are none.

        By default, these are the tensors that came as codes.
        """
        return _total(t for t in self.tensors if t.outcome in outcomes)

    def bpw(self, outcomes: Iterable[str] | None = None) -> float:
        """Bits per weight over the data of all tensors, or of those whose `outcome` is one of `outcomes`."""
        return _bpw([t for t in self.tensors if outcomes is None or t.outcome in outcomes])

    def as_dict(self) -> dict[str, Any]:
        """Everything that `save` writes."""
        record: dict[str, Any] = {
            "checkpoint": self.checkpoint, "format": self.checkpoint_format, "outputs": [str(p) for p in self.outputs],
            "source_bytes": self.source_bytes, "output_bytes": self.output_bytes, "seconds": round(self.seconds, 3),
            "compile_seconds": round(self.compile_seconds, 3), "notes": self.notes,
            "tensors": [t.as_dict() for t in self.tensors],
        }  # fmt: skip
        if self.predictions:
            record["predictions"] = asdict(self.predictions)
        if self.blocks:
            record["blocks"] = self.blocks
        return record

    def save(self, path: Path) -> None:
        """Write everything as JSON to `path`, which `gguf-bridge plot` draws; an earlier report is replaced.

        Raises BridgeError where another file has that name, or the disk is full.
        """
        save_report(path, self.as_dict())

    def table(self) -> str:
        """The table that the command prints: a row for each kind of tensor, then notes, sizes and the speed.

        Only notes are returned if layers were stored and no file was written.
        """
        if not self.outputs:
            return self.printed([])
        return self.printed(self._lines(), size=self._size(timed=self.done == WROTE), done=self.done)

    def _lines(self) -> list[str]:
        """The rows, and what figures in them mean."""
        lines = align(self.rows(), (True, False, True, False, False, False, False))
        lines.insert(1, "-" * max(map(len, lines)))
        return [*lines, "", *self.legend(), *self._losses()]

    def rows(self) -> list[tuple[str, ...]]:
        """The table's cells; its head first, then a row per kind of tensor."""
        rows: list[tuple[str, ...]] = [("tensors", "", "type", "bpw", "codes kept", "NMSE", "of source noise")]
        groups: dict[tuple[str, str], list[TensorReport]] = {}
        for t in self.tensors:
            kind = t.kind if t.fidelity or t.outcome == COPIED else "norms, biases and other floats"
            groups.setdefault((kind, t.outcome), []).append(t)
        for (kind, _), members in groups.items():
            rows.append(_row(kind, members))
        coded = [t for t in self.tensors if t.has_codes]
        if len({t.kind for t in coded}) > 1:
            rows.append(_row("all that came as codes", coded))
        return rows

    def legend(self) -> list[str]:
        """What figures of the table mean, a line each."""
        lines = []
        if any(t.has_codes for t in self.tensors):
            trellis = self.checkpoint_format.startswith(("QTIP", "EXL3"))
            whose = "coding error on Gaussian weights" if trellis else "rounding error (s^2/12 per weight)"
            lines.append(f"source noise: added error as a share of the checkpoint's own {whose}")
        if self.predictions is not None and (found := self.predictions.divergence) is not None:
            p = self.predictions
            lines.append(
                f"{p.tokens} predictions in {p.windows} windows of {p.window} tokens: KL divergence from the reference "
                f"{found.mean:.6f} +- {found.mean_error:.6f} nats a token, same top token {found.same_top:.3%}, "
                f"perplexity {p.perplexity:.4f}, the reference's {found.reference_perplexity:.4f}"
            )
        if any(t.outcome == CALIBRATED for t in self.tensors):
            lines.append(
                "calibrated: least error in the layers' outputs on the text; the weights' own NMSE rises for that"
            )
        return lines

    def _losses(self) -> list[str]:
        """How many tensors are not exact, and what would help, a line each."""
        lines = []
        exact = parameter("type", "exact")
        for name, count in Counter(t.exact_for_free for t in self.tensors if t.exact_for_free).items():
            lines.append(f"{count} of these tensors would be bit-exact at no extra size as {name}: use {exact}")
        listed = "requantized (the report lists them)"
        if partly := self.total([PARTLY]):
            share, count = percent(partly.kept / partly.weights, 4), sum(t.outcome == PARTLY for t in self.tensors)
            lines.append(f"{count} tensors kept {share} of their codes; the others were {listed}")
        requantized = [t for t in self.tensors if t.outcome == REQUANTIZED and t.type not in FLOAT_TYPES]
        if rounded := sum(t.fidelity is not None and t.fidelity.error > 0 for t in requantized):
            lines.append(f"{rounded} tensors could not keep their codes and were {listed}")
        return lines

    def _size(self, timed: bool) -> str:
        """Sizes of source and outputs; with the speed of writing if `timed`."""
        source = f"{size_text(self.source_bytes)} {self.checkpoint_format}"
        sizes = f"{source} -> {size_text(self.output_bytes)} {self.output_format}"
        if not timed:
            return sizes
        seconds = max(self.seconds - self.compile_seconds, 1e-9)
        speed = size_text(self.source_bytes / seconds)
        return f"{sizes} in {took_text(seconds, self.compile_seconds, f' ({speed}/s)')}"


def _total(tensors: Iterable[TensorReport]) -> Fidelity | None:
    """The sums over those tensors that were compared; None if none was."""
    fidelities = [t.fidelity for t in tensors if t.fidelity]
    return reduce(operator.add, fidelities) if fidelities else None


def _bpw(tensors: Sequence[TensorReport]) -> float:
    weights = sum(t.weights for t in tensors)
    return 8 * sum(t.nbytes for t in tensors) / weights if weights else 0.0


def _row(kind: str, members: list[TensorReport]) -> tuple[str, ...]:
    types = "+".join(sorted({t.type for t in members}))
    head = (kind, str(len(members)), types, f"{_bpw(members):.2f}")
    if (total := _total(members)) is None:
        return (*head, "", "as they were", "")
    kinds = {str(t.stored) for t in members}
    blocks = kinds & GGMLQuantizationType.__members__.keys() - {*FLOAT_TYPES, "F64"}
    came = "+".join(sorted(kinds)) if blocks else "8-bit floats" if min(kinds).startswith("F8") else "floats"
    how = CALIBRATED if members[0].outcome == CALIBRATED else f"came as {came}"
    codes = percent(total.kept / total.weights, 4) if members[0].has_codes else how
    error = "exact" if total.error == 0 else f"{total.nmse:.1e}"
    share = percent(total.share) if total.noise else ""
    return (*head, codes, error, share)
