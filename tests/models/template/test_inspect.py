"""What inspect says of a checkpoint with a template."""

from __future__ import annotations

import numpy as np
import pytest

import bridge
from bridge.cli import main
from bridge.errors import BridgeError
from tests.support.described import describe
from tests.support.encode import write_gptq
from tests.support.template import (
    LLAMA,
    gemma,
    interleave,
    write_template,
)

pytest.importorskip("transformers")


def test_inspect_says_what_convert_would_make_with_the_template(model, tmp_path, capsys):
    floats = model("GemmaConfig", head_dim=64, tie_word_embeddings=True)
    write_gptq(tmp_path / "gptq", floats)
    assert main(["inspect", str(tmp_path / "gptq")]) == 0
    assert "convert would stop: " in capsys.readouterr().out

    template = gemma(floats, tmp_path / "t.gguf")
    assert main(["inspect", str(tmp_path / "gptq"), "--template", str(template)]) == 0
    said = capsys.readouterr().out
    assert f"architecture    gemma, 2 layers, as {template} has them" in said
    assert "blk.0.attn_norm.weight and 1 more: taken from the template as F32" in said
    report = bridge.convert(tmp_path / "gptq", tmp_path / "m.gguf", template=template)
    rows = {line.split()[0]: line for line in said.splitlines() if "codes carried" in line}
    assert rows.keys() == {t.kind for t in report.tensors if t.outcome == "codes carried"}
    assert all(t.type in rows[t.kind].split() for t in report.tensors if t.outcome == "codes carried")


def test_inspect_says_which_matrices_would_stay_the_templates(model, tmp_path):
    floats = model("LlamaConfig")

    def change(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
        return interleave(4, 2)(name, values[::-1] ** 3 if name == "blk.0.ffn_up.weight" else values)

    template = write_template(tmp_path / "t.gguf", floats, "llama", change, **LLAMA)
    write_gptq(tmp_path / "gptq", floats)
    row = next(line for line in describe(tmp_path / "gptq", template=template).splitlines() if line[:6] == "ffn_up")
    assert "taken from the template / 4 bits, groups of 128" in row
    assert "F16 / Q4_K" in row


def test_inspect_wants_a_checkpoint_beside_a_template(model, tmp_path):
    template = write_template(tmp_path / "t.gguf", model("LlamaConfig"), "llama", interleave(4, 2), **LLAMA)
    with pytest.raises(BridgeError, match="is a GGUF; template is for checkpoints"):
        describe(template, template=template)
