"""What GGUF types add to the noise of NF4 and FP4: python -m scripts.quality.measure_levels

Gaussian weights in blocks of 64, rounded to bitsandbytes' levels, then requantized; printed is the added squared error
over that of the levels; last, what the best of all lines a * q - b with 32 codes would add, one for each 32 weights,
without rounding a and b: no search for Q5_K can add less. It takes a minute on one CPU. Needs no bitsandbytes.
"""

import numpy as np

from bridge.blocks.read import WRITTEN
from bridge.checkpoint.decoded import DecodedTensor, distortion_of
from bridge.encode.type_choice import requantize

# quantiles of the normal distribution (Dettmers et al. 2023), and the levels of bitsandbytes' FP4
NF4 = (
    -1, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0,
    0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1,
)  # fmt: skip
FP4 = tuple(sign * value for sign in (1, -1) for value in (0, 0.0052083, 1 / 6, 0.25, 1 / 3, 0.5, 2 / 3, 1))
TYPES = ("IQ4_NL", "Q4_K", "Q5_K", "Q6_K")


def main() -> None:
    weights = np.random.default_rng(0).normal(0, 0.05, (64, 1024)).astype(np.float32)
    blocks = weights.reshape(-1, 64)
    absmax = np.abs(blocks).max(1, keepdims=True)
    for name, table in (("NF4", NF4), ("FP4", FP4)):
        levels = np.array(table, np.float32)
        nearest = np.abs((blocks / absmax)[:, :, None] - levels).argmin(2)
        coded = (levels[nearest] * absmax).reshape(weights.shape)
        noise = float(np.square(coded - weights, dtype=np.float64).sum())
        t = DecodedTensor(name, 4, coded, distortion_of(noise, coded), f"{name}'s levels")
        shares = (f"{kind} {requantize(t, WRITTEN[kind]).fidelity.share:.1%}" for kind in TYPES)
        least = best_lines(coded.reshape(-1, 32)[::8]).mean() * coded.size / 32 / t.noise()
        print(f"{name}: {', '.join(shares)}; lines of 32 codes {least:.1%}")


def best_lines(weights: np.ndarray) -> np.ndarray:
    """float64 [n]: the least squared error of weights [n, 32] on a line of 32 codes, by trying 80,000 lines."""
    low, high = np.minimum(weights.min(1), 0)[:, None], weights.max(1)[:, None]
    least = np.full(len(weights), np.inf)
    for width in np.linspace(0.8, 1.3, 400):
        a = (high - low) / 31 * width
        for shift in np.linspace(-2, 2, 200):
            b = np.maximum(a * shift - low, 0)
            codes = np.clip(np.rint((weights + b) / a), 0, 31)
            least = np.minimum(least, np.square(a * codes - b - weights).sum(1))
    return least


if __name__ == "__main__":
    main()
