"""What attention needs of positions, on the device: twin of runtime/decoder/positions.py."""

from typing import Any

import numpy as np
from bridge.cuda.toolchain.device import Device, upload

from bridge.runtime.config.decoder_config import DecoderConfig


def position_bytes(config: DecoderConfig, rows: int) -> int:
    """Bytes of a `Positions`, at most."""
    rotated = max((config.heads_of(layer).rotated for layer in config.attending), default=0)
    return 4 * rows * (rotated * (2 if config.windows else 1) + (1 if config.temperature else 0))


class Positions:
    """Rotary angles and temperatures of the first `rows` positions.

    angles        cos and sin, each f32 [rows, rotated / 2]
    local_angles  the same of layers with a window
    temperatures  f32 [rows], or None
    """

    def __init__(self, config: DecoderConfig, rows: int, factors: np.ndarray | None, device: Device):
        def uploaded(angles: tuple[np.ndarray, np.ndarray]) -> tuple[Any, ...]:
            return tuple(upload(part, device) for part in angles)

        self._config = config
        self.angles = uploaded(config.angles(rows, factors))
        self.local_angles = uploaded(config.local_angles(rows, factors)) if config.windows else self.angles
        temperatures = config.temperatures(rows)
        self.temperatures = None if temperatures is None else upload(temperatures, device)

    def of(self, layer: int) -> tuple[Any, Any, Any]:
        """A layer's cos and sin, each f32 [rows * rotated / 2] or None, and temperatures or None."""
        c = self._config
        cos, sin = self.local_angles if c.windowed(layer) else self.angles
        angles = (cos.reshape(-1), sin.reshape(-1)) if c.heads_of(layer).rotated else (None, None)
        return *angles, self.temperatures if c.tempered(layer) else None
