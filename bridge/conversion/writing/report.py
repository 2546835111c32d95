"""What a conversion or a verification found, per tensor, and the table that shows it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.blocks.ggml import GGMLQuantizationType
from bridge.blocks.tensor_types import FLOAT_TYPES
from bridge.encode.limits import FLOAT_LIMIT, REQUANTIZED_LIMIT
from bridge.errors import BridgeError, parameter
from bridge.system.storage.files import write_text
from bridge.system.storage.outputs import NOTHING, Taken, check_outputs
from bridge.system.text import align, compile_text, percent, size_text, summarise_notes

if TYPE_CHECKING:
    from bridge.encode.carrying.carry import Fidelity
    from bridge.models.outline import ModelTensor

CARRIED = "codes carried"
PARTLY = "codes carried in part"
REQUANTIZED = "requantized"
FLOAT = "from float"
CALIBRATED = "calibrated"  # quantized with the Hessian of a text
AS_IS = "kept float"
COPIED = "copied"  # blocks of a GGUF
CODED = (CARRIED, PARTLY, REQUANTIZED)

_START = b'{\n "checkpoint": '  # of a report's file


@dataclass
class Outcome:
    """What became of a tensor: the fields of `TensorReport` that are found when it is made, or compared."""

    outcome: str
    fidelity: Fidelity | None = None
    notes: list[str] = field(default_factory=list)
    stored: str | None = None
    exact_for_free: str | None = None
    codes_missing: int = 0


@dataclass
class TensorReport:
    """One tensor of the GGUF. Fidelity is None for tensors stored as they were."""

    name: str
    source: str | None  # name in the checkpoint; None for generated tensors
    kind: str
    type: str
    shape: tuple[int, ...]
    nbytes: int
    outcome: str  # one of CARRIED, PARTLY, REQUANTIZED, CALIBRATED, FLOAT, AS_IS, COPIED
    fidelity: Fidelity | None = None
    exact_for_free: str | None = None  # a bit-exact type that is no larger, where `type` is not exact
    notes: list[str] = field(default_factory=list)
    codes_missing: int = 0  # found by verify: codes that are not in the file, though its type holds them bit for bit
    stored: str | None = None  # dtype of a tensor of floats in the checkpoint, or type in a GGUF: "BF16"

    @classmethod
    def of(cls, tensor: ModelTensor, type: str, nbytes: int, outcome: Outcome) -> TensorReport:
        """The report on a tensor of a plan or an outline that is of a type in the GGUF."""
        return cls(tensor.name, tensor.source, tensor.kind, type, tensor.shape, nbytes, **vars(outcome))

    @property
    def weights(self) -> int:
        return math.prod(self.shape)

    def as_dict(self) -> dict[str, object]:
        """For JSON: the fields, with what the fidelity's sums amount to."""
        row: dict[str, object] = {**asdict(self), "bpw": 8 * self.nbytes / self.weights}
        row["how"] = row.pop("outcome")
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
    """CARRIED, PARTLY or REQUANTIZED."""
    return CARRIED if fidelity.kept == fidelity.weights else PARTLY if fidelity.kept else REQUANTIZED


def lost_codes(tensor: str, reasons: Sequence[str], fidelity: Fidelity) -> list[str]:
    """Why a tensor could not keep all its codes, a line for each reason; `reasons`: of each part, "" where it did."""
    of = f" of its {len(reasons)} parts: " if len(reasons) > 1 else ""
    kept = f"{percent(fidelity.kept / fidelity.weights, 4)} of its codes kept" if fidelity.kept else "codes not kept"
    adds = f"adds {percent(fidelity.share)} of the checkpoint's noise"
    counts = Counter(filter(None, reasons))
    return [f"{tensor}: {f'{count}{of}' if of else ''}{kept}, {reason}; {adds}" for reason, count in counts.items()]


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
_WROTE = "wrote"


@dataclass
class Report:
    """The whole file. `seconds` is all of the time that it took, `compile_seconds` what of it went into kernels."""

    checkpoint: str
    checkpoint_format: str
    outputs: list[Path]
    tensors: list[TensorReport]
    source_bytes: int
    seconds: float
    notes: list[str] = field(default_factory=list)
    compile_seconds: float = 0.0
    home: Path | None = None  # the checkpoint's folder, with config.json and README.md
    blocks: list[dict[str, Any]] = field(default_factory=list)  # that were calibrated, see `quantize.block_log`

    @property
    def output_bytes(self) -> int:
        """Size of the GGUF's files on disk."""
        return sum(p.stat().st_size for p in self.outputs)

    def total(self, outcomes: Iterable[str] = CODED) -> Fidelity | None:
        """The sums over all tensors that were handled in one of these ways."""
        total = None
        for t in self.tensors:
            if t.outcome in outcomes and t.fidelity:
                total = t.fidelity if total is None else total + t.fidelity
        return total

    def bpw(self, outcomes: Iterable[str] | None = None) -> float:
        """Bits per weight over all tensors' data, or over those that were handled in one of these ways."""
        chosen = [t for t in self.tensors if outcomes is None or t.outcome in outcomes]
        weights = sum(t.weights for t in chosen)
        return 8 * sum(t.nbytes for t in chosen) / weights if weights else 0.0

    def save(self, path: Path) -> None:
        """Write everything as JSON; an earlier report is replaced. Raises BridgeError where that fails."""
        check_report(path)
        record = {
            "checkpoint": self.checkpoint,
            "format": self.checkpoint_format,
            "outputs": [str(p) for p in self.outputs],
            "source_bytes": self.source_bytes,
            "output_bytes": self.output_bytes,
            "seconds": round(self.seconds, 3),
            "compile_seconds": round(self.compile_seconds, 3),
            "notes": self.notes,
            "tensors": [t.as_dict() for t in self.tensors],
        }
        if self.blocks:
            record["blocks"] = self.blocks
        write_text(path, json.dumps(record, indent=1) + "\n")

    def table(self, done: str = _WROTE) -> str:
        """The closing table: a row per kind of tensor, then notes, sizes and what was `done`; the speed of writing.

        Notes alone where nothing was written, but layers stored.
        """
        if not self.outputs:
            return "\n".join(f"note: {note}" for note in summarise_notes(self.notes))
        lines = align(self.rows(), (True, False, True, False, False, False, False))
        lines.insert(1, "-" * max(map(len, lines)))
        lines += ["", *self._closing(done)]
        return "\n".join(lines)

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
        if any(t.outcome == CALIBRATED for t in self.tensors):
            lines.append(
                "calibrated: least error in the layers' outputs on the text; the weights' own NMSE rises for that"
            )
        return lines

    def _closing(self, done: str) -> list[str]:
        lines = self.legend()
        exact = parameter("type", "exact")
        free = Counter(t.exact_for_free for t in self.tensors if t.exact_for_free)
        for name, count in free.items():
            lines.append(f"{count} of these tensors would be bit-exact at no extra size as {name}: use {exact}")
        partly = self.total([PARTLY])
        if partly:
            kept = percent(partly.kept / partly.weights, 4)
            count = sum(t.outcome == PARTLY for t in self.tensors)
            lines.append(
                f"{count} tensors kept {kept} of their codes; the others were requantized (the report lists them)"
            )
        rounded = sum(
            t.outcome == REQUANTIZED and t.fidelity is not None and t.fidelity.error > 0 for t in self.tensors
        )
        if rounded:
            lines.append(f"{rounded} tensors could not keep their codes and were requantized (the report lists them)")
        lines += [f"note: {note}" for note in summarise_notes(self.notes)]
        size_in, size_out = self.source_bytes, self.output_bytes
        sizes = f"{size_text(size_in)} {self.checkpoint_format} -> {size_text(size_out)} GGUF"
        if done == _WROTE:
            seconds = max(self.seconds - self.compile_seconds, 1e-9)
            sizes += f" in {seconds:.1f} s ({size_text(size_in / seconds)}/s)"
            sizes += compile_text(self.compile_seconds)
        lines.append(sizes)
        lines += [f"{done} {path}" for path in self.outputs]
        return lines


def check_report(path: Path, taken: Taken = NOTHING) -> None:
    """BridgeError unless a report of that name can be made; of files that exist only earlier reports are replaced."""
    check_outputs([path], True, taken)
    try:
        with open(path, "rb") as file:
            start = file.read(len(_START))
    except FileNotFoundError:
        return
    except OSError as problem:
        raise BridgeError(f"{path}: cannot be read ({problem.strerror}); give the report another name") from None
    if start not in (b"", _START):
        raise BridgeError(f"{path}: exists and is not a report; give the report another name")


def _row(kind: str, members: list[TensorReport]) -> tuple[str, ...]:
    types = "+".join(sorted({t.type for t in members}))
    bpw = 8 * sum(t.nbytes for t in members) / sum(t.weights for t in members)
    fidelities = [t.fidelity for t in members if t.fidelity]
    head = (kind, str(len(members)), types, f"{bpw:.2f}")
    if not fidelities:
        return (*head, "", "as they were", "")
    total = fidelities[0]
    for f in fidelities[1:]:
        total = total + f
    kinds = {str(t.stored) for t in members}
    blocks = kinds & GGMLQuantizationType.__members__.keys() - {*FLOAT_TYPES, "F64"}
    came = "+".join(sorted(kinds)) if blocks else "8-bit floats" if min(kinds).startswith("F8") else "floats"
    how = CALIBRATED if members[0].outcome == CALIBRATED else f"came as {came}"
    kept = percent(total.kept / total.weights, 4) if members[0].has_codes else how
    error = "exact" if total.error == 0 else f"{total.nmse:.1e}"
    share = percent(total.share) if total.noise else ""
    return (*head, kept, error, share)
