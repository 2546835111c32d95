"""What was written: the result of a quantization to a checkpoint."""

from dataclasses import dataclass, field
from pathlib import Path

from bridge.system.report import FolderReport, save_report
from bridge.system.text import note_lines, percent, size_text


@dataclass(repr=False)
class Written(FolderReport):
    """The report of a written checkpoint."""

    modules: int  # quantized layers
    raised: tuple[int, int] = (0, 0)  # zero points of 0 that became 1, and weights that lost a step by it
    left_out: list[str] = field(default_factory=list)  # files with other weights that were not copied
    lost: tuple[float, float] | None = None  # share of the power of layers' outputs on the text: on average, at most

    def save(self, path: Path) -> None:
        """Write the report as JSON; an earlier report is replaced. Raises BridgeError where that fails."""
        save_report(path, {
            "checkpoint": str(self.home), "outputs": [str(self.out)], "format": self.format, "layers": self.modules,
            "output_bytes": self.nbytes,
            "seconds": round(self.seconds, 3), "notes": self.notes, "blocks": self.blocks,
        })  # fmt: skip

    def facts(self) -> list[tuple[str, str]]:
        """What was written, without anything of this machine."""
        facts = [("layers", f"{self.modules} quantized as {self.format}"), ("size", size_text(self.nbytes))]
        if self.lost:
            mean, most = map(percent, self.lost)
            facts.append(("error", f"outputs of layers lost {mean} of their power on average, {most} at most"))
        return facts

    def summary(self) -> str:
        """The report in a few lines; notes alone where layers were stored, see `Calibration.blocks`."""
        if not self.nbytes:
            return "\n".join(note_lines(self.notes))
        facts = clamped_facts(*self.raised)
        if self.left_out:
            facts.append(("left out", f"{', '.join(self.left_out)}: not part of the checkpoint that was read"))
        size = size_text(self.nbytes)
        written = f"{self.modules} layers quantized as {self.format}, {size} written in {self.seconds:.1f} s"
        return self.printed([written], facts)


def clamped_facts(points: int, weights: int) -> list[tuple[str, str]]:
    """What became of zero points of 0, and of the weights that lost a step by it; nothing where there were none."""
    if not points:
        return []
    became = f"{points} zero points of 0, which GPTQ v1 cannot hold, became 1, and their codes rose by 1"
    return [("clamped", f"{became}; {weights} weights with the greatest code lost a step")]
