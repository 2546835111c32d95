"""An array in a file without a name, of which memory holds little: the file is gone when the array is."""

import mmap
import os
import tempfile
from pathlib import Path
from typing import Any, Self

import numpy as np

_CHUNK = 64 << 20  # bytes written at a time


class FiledArray(np.memmap):
    """See above; `release` it where a part has been filled."""

    @classmethod
    def create(cls, folder: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Self:
        """An array to be filled; OSError where the folder has no room for it."""
        with tempfile.TemporaryFile(dir=folder) as file:
            if hasattr(os, "posix_fallocate"):  # a full disk shows now, not as a signal while the array is filled
                os.posix_fallocate(file.fileno(), 0, int(np.prod(shape)) * dtype.itemsize)
            return cls(file, dtype, "w+", shape=shape)

    def release(self) -> None:
        """Give the memory of its pages back; what they hold stays in the file."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]

    def tofile(self, fid: Any, sep: str = "", format: str = "%s") -> None:
        """As `np.ndarray.tofile`, a chunk at a time."""
        raw = self.reshape(-1).view(np.uint8)
        for start in range(0, raw.size, _CHUNK):
            np.asarray(raw[start : start + _CHUNK]).tofile(fid, sep, format)
            self.release()
