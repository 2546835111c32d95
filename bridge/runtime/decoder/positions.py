"""What depends on a token's position: the angles of its rotation, and attention's temperature."""

import numpy as np

from bridge.runtime.config.decoder_config import DecoderConfig
from bridge.system.cpu.memory import zeros_filled_later

_FIRST = 256  # positions that are filled at least


class Positions:
    """Tables whose first rows alone are filled: a long context's take seconds.

    angles        cos and sin, each float32 [context, rotated / 2], zeros beyond the positions that `reach` was given
    local_angles  the same of layers with a window
    temperatures  of attention, float32 [context], or None
    """

    def __init__(self, config: DecoderConfig, context: int, factors: np.ndarray | None):
        self._config, self._factors, self._filled = config, factors, 0
        self.temperatures = config.temperatures(context)
        self.angles = self._zeros(config.angles(0, factors), context)
        self.local_angles = self._zeros(config.local_angles(0, factors), context) if config.windows else self.angles

    @staticmethod
    def _zeros(empty: tuple[np.ndarray, np.ndarray], context: int) -> tuple[np.ndarray, np.ndarray]:
        cos, sin = (zeros_filled_later((context, part.shape[1]), part.dtype) for part in empty)
        return cos, sin

    def reach(self, count: int) -> None:
        """Fill the tables of the first `count` positions at least."""
        if count <= self._filled:
            return
        start, stop = self._filled, min(len(self.angles[0]), max(count, 2 * self._filled, _FIRST))
        of_positions = [(self.angles, self._config.angles(stop, self._factors, start))]
        if self.local_angles is not self.angles:
            of_positions.append((self.local_angles, self._config.local_angles(stop, self._factors, start)))
        for tables, rows in of_positions:
            for table, part in zip(tables, rows, strict=True):
                table[start:stop] = part
        self._filled = stop
