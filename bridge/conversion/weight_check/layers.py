"""Compares a tensor with those of the same kind in other layers: names that differ in numbers alone.

The magnitudes of matrices of a kind lie within a factor of a few in trained models, of ten in rare ones; 32 and more is
told. So is a vector of weights (a norm's, not a bias) that is all zeros where those of most other layers are not.
"""

from dataclasses import dataclass

import numpy as np

from bridge.conversion.weight_check.finding import Finding, kind_of_name

_FACTOR = 32.0
_MEMBERS = 4  # of fewer, nothing is told


@dataclass(frozen=True)
class Magnitude:
    """How large a tensor's weights are.

    form    what must be the same to be compared: how they are stored
    value   0: all are zeros
    matrix  whether it is one
    """

    name: str
    form: str
    value: float
    matrix: bool


def layer_findings(magnitudes: list[Magnitude]) -> list[Finding]:
    """The tensors that are unlike those of their kind."""
    kinds: dict[tuple[str, str], list[Magnitude]] = {}
    for each in magnitudes:
        kinds.setdefault((kind_of_name(each.name), each.form), []).append(each)
    findings = []
    for members in kinds.values():
        values = np.array([each.value for each in members])
        live = values[values > 0]
        if len(members) < _MEMBERS or len(live) < 0.75 * len(members):
            continue
        usual = float(np.median(live))
        for each in members:
            numbers = {"value": each.value, "usual": usual, "members": len(members)}
            if not each.matrix and each.value == 0 and each.name.endswith("weight"):
                text = f"all weights are 0; those of the same kind in {len(live)} other layers are not"
                findings.append(Finding(each.name, "zeros", text, numbers))
            elif each.matrix and each.value and not usual / _FACTOR <= each.value <= usual * _FACTOR:
                ratio = each.value / usual
                than = f"{ratio:.3g} times as large as" if ratio > 1 else f"{1 / ratio:.3g} times smaller than"
                text = f"the weights are {than} those of the same kind in {len(members) - 1} other layers"
                findings.append(Finding(each.name, "magnitude", text, numbers))
    return findings
