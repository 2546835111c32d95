"""How layers are calibrated: the options that Python, `bridge.conversion` and the command line share.

Importing this needs neither PyTorch nor NumPy; making a `Calibration` says what is missing.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.errors import BridgeError, needs_torch, parameter, refused
from bridge.quantize.text.sources import DEFAULT, Source, sources_of
from bridge.system.options import check_types, count, option, positive, share, size
from bridge.system.progress import Progress

if TYPE_CHECKING:
    from bridge.quantize.method import Method

METHODS = ("two-sided", "gptaq", "gptq", "imatrix", "awq", "rtn")


@dataclass(frozen=True)
class Calibration:
    """The text and the method that layers are quantized with.

    progress  called after each layer with the number done, the number of layers, and the layer's name and error
    spread    the cluster that quantizes, a `bridge.quantize.spread.Spread`; None: this process
    say       called with lines for people: the memory that the run needs, and the result of each block

    Sources: GPTQ (Frantar et al. 2022, arXiv:2210.17323), AWQ (Lin et al. 2023, arXiv:2306.00978), GPTAQ (Li et al.
    2025, arXiv:2504.02692); two-sided uses the output Hessian of YAQA (Tseng et al. 2025, arXiv:2505.22988).
    Raises BridgeError for values out of range, options that contradict each other, and a missing torch or transformers.
    """

    text: Path | str | Iterable[Path | str] | None = option(
        DEFAULT,
        "texts to quantize with: plain, .jsonl, or token ids (.pt, .npy, .safetensors), FILE:0.3 for a share; or "
        "`default`: the model's own samples and texts of this program",
        flag="--calibrate", metavar="FILE", parse=str, several=True, says="", usual=True,
    )  # fmt: skip
    samples: int | None = option(
        None, "maximum number of calibration sequences", metavar="N", parse=positive,
        says="as many as hold 8 tokens for each input of the widest layer; at least 128, or 65,536 tokens; imatrix: "
        "16,384 tokens",
    )  # fmt: skip
    length: int | None = option(
        None, "tokens in each sequence", flag="--sequence-length", metavar="N", parse=positive,
        says="2048, imatrix: 512, or the model's positions where it has fewer",
    )  # fmt: skip
    seed: int | None = option(
        None, "seed for choosing sequences at random", metavar="N", parse=int, says="the first sequences"
    )
    method: str = option(
        "two-sided",
        "from the least time to the most: rtn: round to nearest, without a text; imatrix: round with the mean squares "
        "of each layer's inputs, from one forward pass (GGUF only); gptq: make up for each column's error in the "
        "others; gptaq: for the error of earlier layers too; two-sided: also weigh each layer's outputs by the "
        "gradient of the loss, in over twice gptaq's time. awq: activation-aware scales (checkpoints only)",
        metavar="NAME", choices=METHODS,
    )  # fmt: skip
    act_order: str = option(
        "fixed",
        "order in which columns are rounded; none: from first to last; free: by falling Hessian diagonal, groups cut "
        "from that order; static: the same order, groups fitted beforehand; fixed: group by group",
        metavar="ORDER", parse=str,
    )  # fmt: skip
    damping: float = option(
        0.01, "added to the Hessian's diagonal, as a fraction of its mean", metavar="X", parse=float
    )
    shrinkage: float | None = option(
        None, "share (0-1) of the Hessian's off-diagonals that is taken away", metavar="X", parse=float,
        says="chosen for each layer on tokens that are held back",
    )  # fmt: skip
    alpha: float = option(
        1.0, "upper limit (0-1) on how much earlier error GPTAQ compensates", metavar="X", parse=float
    )
    sweeps: int = option(2, "sweeps of refinement after GPTQ", metavar="N", parse=count)
    feed: str = option(
        "quantized", "layers whose outputs the next layer is calibrated on: quantized or float",
        metavar="WHAT", parse=str,
    )  # fmt: skip
    blocks: tuple[int, int] | None = option(
        None,
        "with --feed float: quantize only part I of N of the model's blocks, so that machines share the work; their "
        "layers are stored, and the same command without this writes the file",
        metavar="I/N", parse=share, says="",
    )  # fmt: skip
    device: str = option(
        "cpu", "device that calibrates the layers: cpu, cuda, or auto, which is cuda where PyTorch sees a GPU",
        metavar="NAME", parse=str, usual=True,
    )  # fmt: skip
    memory: int | None = option(
        None, "the most memory to take, such as 12G; activations beyond it go to disk", metavar="SIZE", parse=size,
        says="nine tenths of what is free", usual=True,
    )  # fmt: skip
    offload: str | Path | None = option(
        None, "folder for activations that do not stay in memory", metavar="DIR", parse=Path,
        says="next to the output",
    )  # fmt: skip
    imatrix_out: str | Path | None = option(
        None, "also write llama.cpp's importance matrix of the same tokens", metavar="FILE", parse=Path, says=""
    )
    progress: Progress | None = field(default=None, compare=False, repr=False)
    spread: Any = field(default=None, compare=False, repr=False)
    say: Callable[[str], None] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_types(self)
        if self.text is not None and not isinstance(self.text, str | os.PathLike):
            object.__setattr__(self, "text", tuple(self.text))
        _ = self.sources
        if self.method not in METHODS:
            raise BridgeError(f"unknown method {self.method!r}: choose {', '.join(METHODS[:-1])} or {METHODS[-1]}")
        if find_spec("torch") is None:
            raise needs_torch("quantizing with a text", gpu=self.device != "cpu")
        if find_spec("transformers") is None:
            raise BridgeError("quantizing with a text needs transformers: pip install 'gguf-bridge[quantize]'")
        if sys.flags.optimize > 1:
            raise BridgeError(
                "quantizing with a text needs transformers, which reads its own docstrings: unset PYTHONOPTIMIZE=2 "
                "(python -OO)"
            )
        least_of = dict.fromkeys(("samples", "length", "memory"), 1)
        least_of |= dict.fromkeys(("damping", "shrinkage", "alpha", "sweeps"), 0)
        for name, least in least_of.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise refused(name, value, f"must be at least {least}")
        if self.shrinkage is not None and self.shrinkage > 1:
            raise refused("shrinkage", self.shrinkage, "must be at most 1")
        if self.method != "rtn":
            object.__setattr__(self, "device", _device(self.device))
        if self.blocks is not None:
            self._check_blocks(self.blocks)
        if self.spread is not None and self.method in ("imatrix", "awq", "rtn"):
            raise refused("method", self.method, "several machines share the work of two-sided, gptaq and gptq only")
        if self.imatrix_out is not None and self.method == "rtn":
            why = f"{parameter('method', 'rtn')} reads no text, so it has no importance matrix"
            raise refused("imatrix_out", self.imatrix_out, why)
        if self.offload is not None and not os.path.isdir(self.offload):
            raise BridgeError(f"{self.offload}: no such folder; make it or give another one")

    def _check_blocks(self, blocks: tuple[int, int]) -> None:
        if not 1 <= blocks[0] <= blocks[1]:
            raise refused("blocks", blocks, f"parts are numbered from 1 to {blocks[1]}")
        if self.feed != "float":
            why = "otherwise a block's inputs come from the quantized blocks before it"
            raise refused("blocks", blocks, f"needs {parameter('feed', 'float')}; {why}")
        if self.method in ("imatrix", "awq", "rtn"):
            raise refused("blocks", blocks, f"is for the methods two-sided, gptaq and gptq, not {self.method}")

    @property
    def sources(self) -> list[Source]:
        """The texts and their shares; none without a text. Raises BridgeError as `sources_of`."""
        if self.text is None:
            return []
        return sources_of([self.text] if isinstance(self.text, str | os.PathLike) else self.text)

    @property
    def files(self) -> list[Path]:
        """The files among them."""
        return [source.file for source in self.sources if source.file is not None]

    def check_gguf(self) -> None:
        """BridgeError where layers cannot be quantized like this for a GGUF."""
        if self.method == "awq":
            raise refused(
                "method", "awq", "AWQ's scales belong to a checkpoint; choose two-sided, gptaq or gptq for a GGUF"
            )
        if self.act_order == "free":
            raise refused("act_order", "free", "a GGUF has no column permutation; choose fixed, static or none")

    def check_checkpoint(self) -> None:
        """BridgeError where layers cannot be quantized like this for a checkpoint."""
        if self.method == "imatrix":
            raise refused("method", "imatrix", "rounds to GGUF's block types; choose gptq, awq or rtn for a checkpoint")
        if self.imatrix_out is not None:
            why = "an importance matrix has the names of a GGUF's tensors, so it is written with a GGUF only"
            raise refused("imatrix_out", self.imatrix_out, why)

    @property
    def chooses_codes(self) -> bool:
        """Whether the text chooses codes; with imatrix, it tells only how much each column counts when rounding."""
        return self.method != "imatrix"

    def reaches(self, kind: str, layer: int | None, type: str) -> bool:
        """Whether codes in this type of block are chosen for the matrices of a GGUF's tensor: for those of decoder
        blocks, and below 8 bits for the output head's; two-sided, for the embeddings' too.

        kind   "output", "token_embd", ...
        layer  the number of its block; None: outside
        """
        outside = ("output", "token_embd") if self.two_sided else ("output",)
        return self.chooses_codes and (layer is not None or (kind in outside and type != "Q8_0"))

    @property
    def cross(self) -> bool:
        """Whether the float model's inputs are needed too."""
        return self.method in ("two-sided", "gptaq") and self.alpha != 0

    @property
    def two_sided(self) -> bool:
        """Whether A of the layers' outputs is gathered, and the embeddings are quantized with theirs."""
        return self.method == "two-sided"

    @property
    def needs_gradients(self) -> bool:
        """Whether gradients are taken, by which tokens count in each layer's Hessian."""
        return self.method in ("two-sided", "gptaq", "gptq")

    def quantizer(self, grid: Callable[[int, int], Any]) -> Method:
        """The method on a grid."""
        from bridge.quantize.method import Method

        if self.method in ("rtn", "awq"):
            return Method(grid, "none", float("inf"), sweeps=0)
        alpha = self.alpha if self.cross else 0.0
        return Method(grid, self.act_order, self.damping, alpha, self.sweeps, self.shrinkage)


def _device(name: str) -> str:
    """A device that PyTorch can use; BridgeError where there is none of this name."""
    if name == "cpu":
        return name
    import torch

    sees = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if sees else "cpu"
    if not re.fullmatch(r"cuda(:\d+)?", name):
        raise BridgeError(f"unknown {parameter('device', name)}: choose cpu, cuda or auto")
    if not sees:
        raise refused("device", name, "this PyTorch sees no GPU; choose cpu, or install one for CUDA")
    return name
