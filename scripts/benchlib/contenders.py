"""Programs that make GGUFs of one float model from the same tokens, and what each costs: CPU time and peak memory.

All of them run in processes of their own. What they make is kept in a work folder, and made once.
"""

import hashlib
import json
import os
import re
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bridge.checkpoint import open_checkpoint
from bridge.quantize.model.float_model import FloatModel, arithmetic
from bridge.quantize.run.calibration_text import calibration_set, with_length
from bridge.quantize.settings import Calibration
from bridge.quantize.text.mixture import calibration_sequences
from bridge.quantize.text.sources import sources_of

from . import cost_of

PLAIN, WEIGHTED, CONVERT = "llama-quantize", "llama-quantize, imatrix", "convert --imatrix"
LLAMA_CPP, OWN = "llama.cpp's quantizer", "gguf-bridge"  # as plots name makers
_BRIDGE = (sys.executable, "-m", "bridge.cli")


class Tokens:
    """The tokens that all contenders see, in a folder: those of `quantize` with these settings.

    The model's own samples can differ from run to run, so they are drawn once. Token files are kinds of text to
    `quantize` as others are, so those that it holds back are in a file of their own.

    sequences  int64 [sequences, length], those that are held back last
    digest     names them and how many are held back
    """

    def __init__(self, folder: Path, floats: Path, settings: Calibration) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        record = folder / "tokens.json"
        if not record.exists():
            record.write_text(json.dumps(self._drawn(floats, settings)) + "\n")
        self.record: dict[str, Any] = json.loads(record.read_text())
        self.sequences = np.concatenate([np.load(file) for file in self._files()])  # int64 [sequences, length]
        self.digest = hashlib.sha256(self.sequences.tobytes() + b"%d" % self.record["held"]).hexdigest()[:12]
        again = calibration_sequences(sources_of(self._sources()), None, *self.sequences.shape)
        if again.held != self.record["held"] or not np.array_equal(again.tokens.numpy(), self.sequences):
            raise SystemExit(
                f"{folder}: `quantize` holds other tokens of these files back than of the texts they are of"
            )

    def _drawn(self, floats: Path, settings: Calibration) -> dict[str, Any]:
        begun = time.process_time()
        with open_checkpoint(floats) as checkpoint:
            settings, _ = with_length(checkpoint, settings)
            model = FloatModel(checkpoint, arithmetic(checkpoint))
            calibration = calibration_set(model, settings, model.linears())
        fitted = len(calibration.tokens) - calibration.held
        for file, part in zip(self._files(), (calibration.tokens[:fitted], calibration.tokens[fitted:]), strict=True):
            np.save(file, part.numpy())
        return {"own": calibration.drawn, "held": calibration.held, "cpu_seconds": time.process_time() - begun}

    def _files(self) -> tuple[Path, Path]:
        return self.folder / "fitted.npy", self.folder / "held-back.npy"

    def _sources(self) -> list[str]:
        """The files that are not empty, and their shares, as `quantize` takes them."""
        held, total = self.record["held"], len(self.sequences)
        fitted, held_back = self._files()
        if not held:
            return [str(fitted)]
        return [f"{fitted}:{(total - held) / total!r}", f"{held_back}:{held / total!r}"]

    def options(self) -> list[str]:
        """The arguments of `quantize` that give it these tokens."""
        count, length = self.sequences.shape
        return ["--calibrate", *self._sources(), "--samples", str(count), "--sequence-length", str(length)]

    @property
    def about(self) -> str:
        """How many, and of what: "16 sequences of 512 tokens, 8 of them the model's own samples"."""
        text = "{} sequences of {} tokens".format(*self.sequences.shape)
        if self.record["own"]:
            text += f", {self.record['own']} of them the model's own samples"
        held = f"{self.record['held']} of other kinds" if self.record["held"] else "spans of all"
        return f"{text}; {held} held back; {self.record['cpu_seconds']:.0f} CPU seconds to draw them"


@dataclass(frozen=True, eq=False)
class Contender:
    """What makes one file.

    name     of the program and its options
    maker    as plots name it
    format   a type or preset, or a size such as 70M
    sized    whether it is a size
    command  up to the path of the file to be written, and what follows it
    """

    name: str
    maker: str
    format: str
    command: tuple[list[str], list[str]]
    sized: bool = False

    @property
    def stem(self) -> str:
        """How the names of its files begin."""
        return re.sub(r"[^\w.-]+", "-", f"{self.format} {self.name}").strip("-")


def contenders_of(
    floats: Path, source: Path, tokens: Tokens, libraries: Path | None, runs: dict[str, list[str]], types: list[str],
    sizes: list[str], threads: int,
) -> list[Contender]:  # fmt: skip
    """The contenders of a comparison, type by type, then size by size.

    source     the float model as a GGUF
    libraries  llama.cpp's, see `scripts.peers.llama.llama_quantize`; None: it does not compete
    runs       name -> options of `quantize`
    """
    imatrix = str(tokens.folder / "imatrix.gguf")
    contenders = []
    for type in types:
        if libraries is not None:
            peer = [sys.executable, "-m", "scripts.peers.llama.llama_quantize", str(libraries), str(source)]
            after = [type, "--threads", str(threads)]
            contenders.append(Contender(PLAIN, LLAMA_CPP, type, (peer, after)))
            weighted = [*after, "--imatrix", imatrix]
            contenders.append(Contender(WEIGHTED, f"{LLAMA_CPP}, imatrix", type, (peer, weighted)))
        after = ["--type", type, "--imatrix", imatrix, "--threads", str(threads), "--force"]
        contenders.append(Contender(CONVERT, f"{OWN} {CONVERT}", type, ([*_BRIDGE, "convert", str(floats)], after)))
    for format, size in [(type, False) for type in types] + [(size, True) for size in sizes]:
        for name, options in runs.items():
            after = ["--size" if size else "--type", format, *options, *tokens.options()]
            after += ["--threads", str(threads), "--force"]
            command = [*_BRIDGE, "quantize", str(floats)], after
            contenders.append(Contender(f"quantize {name}", f"{OWN} quantize {name}", format, command, size))
    return sorted(contenders, key=lambda c: [*types, *sizes].index(c.format))


class ModelFiles:
    """The files in a folder, and what each took."""

    def __init__(self, folder: Path, threads: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._threads = folder, threads

    def path(self, contender: Contender) -> Path:
        return self.folder / f"{contender.stem}.gguf"

    def forget(self, contender: Contender) -> None:
        """Make the contender's file again when its cost is next asked for."""
        self._record(contender).unlink(missing_ok=True)

    def cost(self, contender: Contender) -> dict[str, Any] | str:
        """CPU seconds and peak bytes of making its file, now if its command has not made it yet; or why that failed."""
        before, after = contender.command
        command = [*before, str(self.path(contender)), *after]
        record = self._record(contender)
        known = json.loads(record.read_text()) if record.exists() else {}
        if known.get("command") != shlex.join(command):
            print(f"{contender.format} {contender.name}: made ...", file=sys.stderr, flush=True)
            log, threads = self.folder / f"{contender.stem}.log", str(self._threads)
            environment = os.environ | {"OMP_NUM_THREADS": threads, "NUMBA_NUM_THREADS": threads}
            cost = cost_of(command, log, environment)
            if cost.pop("code"):
                lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
                return lines[-1][-200:] if lines else "no reason given"
            known = {**cost, "command": shlex.join(command)}
            record.write_text(json.dumps(known) + "\n")
        return {name: known[name] for name in ("cpu_seconds", "peak_bytes")}

    def _record(self, contender: Contender) -> Path:
        return self.folder / f"{contender.stem}.json"
