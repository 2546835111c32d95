"""A trellis beside a GGUF type: on a Gaussian source as the literature has it, and on a layer of a model."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT, shared


def test_a_trellis_loses_less_than_a_type_of_as_many_bits() -> None:
    text = shared("text/shakespeare_val.txt")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "scripts.quality.bench_codebooks", shared("models/tiny-qwen3")),
            *(f"--calibrate={text}", f"--test={text}", "--samples=8", "--types=IQ3_XXS"),
            "--state-bits=12",  # a sixteenth of the states
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if "|" in line]
    type_alone, trellis_alone = (float(row[2]) for row in rows if len(row) == 5 and row[0].startswith(("IQ3", "tr")))
    assert 4**-3 < trellis_alone < 0.02 < type_alone < 0.0345  # 3 bits: the bound; an optimal scalar quantizer
    layer = {
        (row[0], row[2]): [float(cell) for cell in row[3:9]] for row in rows if len(row) == 10 and row[1][0].isdigit()
    }
    assert len(layer) == 4
    for errors in layer.values():
        alone, solved, refined = errors[:3]
        assert 0 < refined < solved < 0.7 * alone
        assert errors[3:] == errors[:3]  # the same tokens are held out here
    for basis in ("rotated", "rotated, scaled"):
        trellis = layer["trellis, mcg", basis]
        assert all(own < 0.9 * other for own, other in zip(trellis, layer["IQ3_XXS", "weights"], strict=True))
