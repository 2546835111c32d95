"""The inputs of the block that a run has come to, kept beside its finished layers: a killed run goes on from there.

    inputs-00003-00000.safetensors         of block 3, batch 0
    inputs-00003-00000-float.safetensors   the float model's
    inputs.json                            which block's are complete

The gradients at a block's inputs are kept likewise, as gradients-00003-00000.safetensors and gradients.json.

The next block's files are written before `inputs.json` says so; then the last one's are removed. Each has a digest.
"""

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from bridge.errors import BridgeError
from bridge.quantize.layer_store import read_tensors, write_tensors
from bridge.system.storage.files import read_json, write_text

_FILE = re.compile(r"(inputs|gradients)-(\d{5})-\d{5}(-float)?\.safetensors")


@dataclass(frozen=True)
class StoredInputs:
    """In a `LayerStore`'s folder.

    job   the digest of what the run depends on
    what  is kept: "inputs", or "gradients"
    """

    folder: Path
    job: str
    what: str = "inputs"

    def block(self, batches: int, floats: bool) -> int:
        """The number of the block whose inputs are all there, as they were written; 0: there is none."""
        try:
            record = read_json(self._record())
        except BridgeError:
            return 0
        if not isinstance(record, dict) or record.get("job") != self.job or not isinstance(record.get("block"), int):
            return 0
        block: int = record["block"]
        wanted = [self._file(block, b, f) for b in range(batches) for f in (False, True)[: 1 + floats]]
        return block if all(self._read(file) is not None for file in wanted) else 0

    def read(self, block: int, batch: int, floats: bool) -> torch.Tensor:
        """A batch's inputs of a block that `block` has named."""
        inputs = self._read(self._file(block, batch, floats))
        if inputs is None:
            raise BridgeError(f"{self._file(block, batch, floats)}: has changed while it was read; run again")
        return inputs

    def write(self, block: int, batch: int, floats: bool, x: torch.Tensor) -> None:
        """Keep a batch's inputs of a block. Raises BridgeError if the disk is full."""
        dtype = str(x.dtype).removeprefix("torch.")
        raw = x.detach().cpu().contiguous().view(torch.uint8).numpy()
        file = self._file(block, batch, floats)
        write_tensors(file, f"the {self.what} of block {block}", {"x": raw}, {"job": self.job, "dtype": dtype})

    def finish(self, block: int) -> None:
        """Say that all inputs of a block are there, and remove those of others."""
        write_text(self._record(), json.dumps({"job": self.job, "block": block}) + "\n")
        for file in self.folder.iterdir():
            if (match := _FILE.fullmatch(file.name)) and match[1] == self.what and int(match[2]) != block:
                with suppress(OSError):
                    file.unlink()

    def _record(self) -> Path:
        return self.folder / f"{self.what}.json"

    def _file(self, block: int, batch: int, floats: bool) -> Path:
        return self.folder / f"{self.what}-{block:05}-{batch:05}{'-float' if floats else ''}.safetensors"

    def _read(self, file: Path) -> torch.Tensor | None:
        contents = read_tensors(file)
        if contents is None or contents[1].get("job") != self.job:
            return None
        # a BLAS may sum in another order where memory is aligned otherwise, as NumPy's is: cloned into PyTorch's
        return torch.from_numpy(contents[0]["x"]).view(getattr(torch, contents[1]["dtype"])).clone()
