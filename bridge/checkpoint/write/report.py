"""What was written: the result of a quantization to a checkpoint."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge.system.storage.files import write_text
from bridge.system.text import percent, size_text, summarise_notes


@dataclass
class Written:
    """The report of a written checkpoint.

    modules   number of quantized layers
    nbytes    size of all tensors
    raised    number of zero points of 0 that became 1, and of weights that lost a step by it
    left_out  files with other weights that were not copied
    lost      by the layers' outputs on the text, as a share of their power: on average and at most
    notes     for the user
    home      the source's folder, with config.json and README.md
    blocks    that were calibrated, see `block_log`
    """

    out: Path
    format: str
    modules: int
    nbytes: int
    seconds: float
    raised: tuple[int, int] = (0, 0)
    left_out: list[str] = field(default_factory=list)
    lost: tuple[float, float] | None = None
    notes: list[str] = field(default_factory=list)
    home: Path | None = None
    blocks: list[dict[str, Any]] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write the report as JSON. Raises BridgeError where that fails."""
        record = {
            "checkpoint": str(self.home), "outputs": [str(self.out)], "format": self.format, "layers": self.modules,
            "output_bytes": self.nbytes,
            "seconds": round(self.seconds, 3), "notes": self.notes, "blocks": self.blocks,
        }  # fmt: skip
        write_text(path, json.dumps(record, indent=1) + "\n")

    def facts(self) -> list[tuple[str, str]]:
        """What was written, without anything of this machine."""
        facts = [("layers", f"{self.modules} quantized as {self.format}"), ("size", size_text(self.nbytes))]
        if self.lost:
            mean, most = map(percent, self.lost)
            facts.append(("error", f"outputs of layers lost {mean} of their power on average, {most} at most"))
        return facts

    def summary(self) -> str:
        """The report in a few lines."""
        notes = [f"note: {note}" for note in summarise_notes(self.notes)]
        if not self.nbytes:  # layers were stored, see `Calibration.blocks`
            return "\n".join(notes)
        size = size_text(self.nbytes)
        lines = [f"{self.modules} layers quantized as {self.format}, {size} written in {self.seconds:.1f} s"]
        if self.raised[0]:
            lines.append(
                f"clamped     {self.raised[0]} zero points of 0, which GPTQ v1 cannot hold, became 1, and their codes "
                f"rose by 1; {self.raised[1]} weights with the greatest code lost a step"
            )
        if self.left_out:
            lines.append(f"left out    {', '.join(self.left_out)}: not part of the checkpoint that was read")
        return "\n".join([*lines, *notes, f"wrote {self.out}"])
