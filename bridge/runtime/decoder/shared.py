"""One decoder for all calls on a model: each call takes the context from the one before."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError, parameter
from bridge.runtime.config.decoder_config import DecoderConfig
from bridge.runtime.decoder.decoder import Decoder
from bridge.runtime.decoder.prediction import PredictionHead, read_prediction
from bridge.runtime.reader import GGUFFile
from bridge.system.cpu.fork_locks import ForkLock
from bridge.system.devices import choose, cpu_note, cuda


class SharedDecoder:
    """The decoder of a file on a device, its lock, and the number of the call that has its context.

    device  as in `Model.load`; `note` says why "auto" is the CPU

    Raises BridgeError for a device that is missing, or a context that takes more memory than there is.
    """

    decoder: Any  # the CPU's or CUDA's; of a closed model, what raises BridgeError

    def __init__(self, file: GGUFFile, config: DecoderConfig, context: int, kv: str, precision: str, device: str):
        self.lock = ForkLock()  # held while something is computed
        self._file, self._config = file, config
        self._call = 0  # number of the last call
        self._head: PredictionHead | None = None
        chosen, self.note = choose(device)
        if chosen != "cpu":
            try:
                self.decoder = cuda("decoder").Decoder(file, config, context, kv, precision, chosen)
                return
            except BridgeError as problem:
                if device != "auto":
                    raise
                self.note = cpu_note(problem)
        try:
            self.decoder = Decoder(file, config, context, kv, precision)
        except MemoryError as problem:
            raise BridgeError(
                f"{parameter('context', context)}: takes more memory than there is; choose a shorter one"
            ) from problem

    @property
    def device(self) -> str:
        """Where it runs: "cpu" or, for instance, "cuda:0"."""
        return "cpu" if isinstance(self.decoder, Decoder) else str(self.decoder.device)

    def prepare(self) -> None:
        """Repack the weights now, or on a GPU upload and compile; those of the prediction head where it is in use."""
        with self.lock:
            self.decoder.prepare()
            if self._head is not None:
                self._head.decoder.prepare()

    def close(self) -> None:
        """Release the file and the memory; every later use raises BridgeError."""
        with self.lock:
            self._call += 1
            self._file.close()
            self.decoder, self._head = _Closed(self._file.path), None

    @contextmanager
    def taken(self) -> Iterator[Any]:
        """Lock the decoder. An unfinished generation of another caller loses its context."""
        with self.lock:
            self._call += 1
            self.decoder.begin()
            yield self.decoder

    def prediction_head(self) -> PredictionHead:
        """The layer that predicts a token further (MTP); BridgeError where the file has none."""
        with self.lock:
            if self._head is None:
                self._head = PredictionHead(self.decoder.beside(*read_prediction(self._file, self._config)))
            return self._head

    def in_turn(self, drawn: Iterator[int]) -> Iterator[int]:
        """The tokens drawn, each under the lock; BridgeError once a call after this one has taken the context."""
        return self._in_turn(drawn, self._call)

    def _in_turn(self, drawn: Iterator[int], call: int) -> Iterator[int]:
        while True:
            with self.lock:
                if isinstance(self.decoder, _Closed):
                    raise _closed(self._file.path)
                if self._call != call:
                    raise BridgeError(
                        f"{self._file.path}: another call on this model has taken its context; finish one before the "
                        "next, or load the model once for each"
                    )
                token = next(drawn, None)
            if token is None:
                return
            yield token


class _Closed:
    """Takes the place of a closed model's decoder."""

    def __init__(self, path: Path):
        self._path = path

    def __getattr__(self, name: str) -> Any:
        raise _closed(self._path)


def _closed(path: Path) -> BridgeError:
    return BridgeError(f"{path}: this model was closed; load it again")
