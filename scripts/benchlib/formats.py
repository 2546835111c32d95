"""One model as a GGUF in every format, and how close each is to the F16 file."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf

import bridge
from bridge.conversion.checkpoints.to_checkpoint import quantize_checkpoint
from bridge.conversion.planning.options import Budget
from bridge.quantize.settings import Calibration
from bridge.runtime.replies.perplexity import perplexity
from bridge.system.progress import Bar
from scripts.peers.llama import llama_quantizer

PRESETS = ("Q8_0", "Q5_K_M", "Q4_K_M", "Q3_K_M", "Q2_K")
GRIDS = ("Q4_K", "Q3_K", "Q2_K")
BITS = 4.0  # a weight, of the size budget
LLAMA_CPP = "llama.cpp's quantizer, imatrix"
OWN = "gguf-bridge quantize"

Make = Callable[[Path], str | None] | Path  # writes the file or returns why it cannot; or a checkpoint to convert


class Formats:
    """The GGUFs of one model in the work folder.

    model      a float model's folder
    text       quantizers see `samples` sequences of `length` tokens of it
    """

    def __init__(self, model: Path, work: Path, text: Path, samples: int, length: int, threads: int) -> None:
        self.model, self.work, self.threads = model, work, threads
        self._calibration = {"text": text, "samples": samples, "length": length}
        self.needed = ("F16",)  # for other rows

    def makers(self) -> dict[str, tuple[str, Make]]:
        """Every row: who makes it, and what writes its file."""
        rows: dict[str, tuple[str, Make]] = {"F16": ("float", self._f16)}
        for name in PRESETS:
            rows[name] = (LLAMA_CPP, partial(self._preset, name))
        carried = "GPTQ and AWQ, carried"
        rows["GPTQ 4-bit g128"] = (carried, lambda out: self._groups(out, "gptq_v2"))
        rows["GPTQ 4-bit g128, act-order"] = (carried, lambda out: self._groups(out, "gptq_v2", act_order="free"))
        rows["AWQ 4-bit g128"] = (carried, lambda out: self._groups(out, "awq", method="awq"))
        for name in GRIDS:
            rows[f"{name}, GPTQ on the grid"] = (OWN, partial(self._grid, name))
        rows[f"size budget, {BITS} bits a weight"] = (OWN, self._budget)
        return rows

    def path(self, name: str) -> Path:
        """The path of a row's GGUF."""
        return self.work / f"{name.replace(' ', '-').replace(',', '').replace('/', '-')}.gguf"

    def file(self, name: str, make: Make) -> Path | str:
        """A row's GGUF, made if it does not exist yet; or why it cannot be made."""
        path = self.path(name)
        if not path.exists():
            if isinstance(make, Path):
                bridge.convert(make, path)
            elif why := make(path):
                return why
        return path

    def quality(self, path: Path, text: str, length: int, windows: int) -> dict[str, Any]:
        """Perplexity, and the divergence from F16 (except for F16 itself)."""
        how: dict[str, Any] = {"threads": self.threads, "context": length, "precision": "f32", "kv": "f32"}
        with bridge.Model.load(path, **how) as model:
            if path == self.path("F16"):
                result = perplexity(model, text, length, windows)
            else:
                with bridge.Model.load(self._f16_file(), **how) as reference:
                    result = perplexity(model, text, length, windows, reference)
        measured: dict[str, Any] = {"perplexity": result.perplexity, "perplexity_error": result.error}
        if (d := result.divergence) is not None:
            measured |= {"kl": d.mean, "kl_error": d.mean_error, "same_top": d.same_top}
        return measured

    def checkpoint_kl(self, name: str, make: Make, text: str, length: int, windows: int) -> dict[str, float]:
        """The divergence of the checkpoint that a file was carried from, itself; nothing for other rows."""
        folder = make if isinstance(make, Path) else self.path(name).with_suffix("")
        if not folder.is_dir():
            return {}
        path = self.work / "checkpoint.gguf"
        bridge.convert(folder, path, tensor_types=[("", "F32")], force=True)  # every weight as it is
        figures = self.quality(path, text, length, windows)
        path.unlink()
        return {"checkpoint_kl": figures["kl"]}

    def _f16(self, out: Path) -> None:
        bridge.convert(self.model, out, tensor_types=[("", "F16")])

    def _f16_file(self) -> Path:
        path = self.path("F16")
        if not path.exists():
            self._f16(path)
        return path

    def _imatrix(self) -> Path:
        """llama.cpp's importance matrix, from the tokens that all quantizers see."""
        path = self.work / "imatrix.gguf"
        if not path.exists():
            self._grid("Q4_K", self.path("Q4_K, GPTQ on the grid"), imatrix_out=path)
        return path

    def _preset(self, name: str, out: Path) -> str | None:
        if find_spec("xllamacpp") is None:
            return "no llama.cpp quantizer here: pip install xllamacpp"
        llama_quantizer.quantize(self._f16_file(), out, name, self._imatrix(), self.threads)
        return None

    def _grid(self, name: str, out: Path, **more: Any) -> None:
        with Bar(name, unit=" layers") as bar:
            calibration = Calibration(**self._calibration, progress=bar, **more)  # type: ignore[arg-type]
            bridge.convert(self.model, out, type=name, output_type="Q6_K", calibrate=calibration, force=True)

    def _budget(self, out: Path) -> None:
        with Bar(out.stem, unit=" steps") as bar:
            calibration = Calibration(**self._calibration)  # type: ignore[arg-type]
            bridge.convert(self.model, out, budget=Budget(bpw=BITS, progress=bar), calibrate=calibration)

    def _groups(self, out: Path, format: str, **more: Any) -> None:
        folder = out.with_suffix("")
        with Bar(out.stem, unit=" layers") as bar:
            calibration = Calibration(**self._calibration, progress=bar, **more)  # type: ignore[arg-type]
            if not folder.exists():
                quantize_checkpoint(self.model, folder, format, calibrate=calibration)
        bridge.convert(folder, out)


def summary(path: Path) -> dict[str, Any]:
    """Bits a weight over all tensors of a GGUF, its bytes, and the type of each tensor."""
    tensors = gguf.GGUFReader(str(path)).tensors
    bits = 8 * sum(int(t.n_bytes) for t in tensors) / sum(int(t.n_elements) for t in tensors)
    types = {tensor.name: tensor.tensor_type.name for tensor in tensors}
    return {"bpw": bits, "bytes": path.stat().st_size, "types": types}
