"""The five most frequent additions of docs/extending.md, each made in a copy of the packages and tried there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.conftest import ROOT
from tests.support.family_models import TEXT, copy_tokenizer

MOST_FILES = 9  # of bridge/ and cuda/, for the five together, each counted by itself

# path -> a new file's text; or, where the path has "::", what is inserted before the text after it
ADDITIONS = {
    "a model family, both ways": {
        "bridge/models/families/xverse.py": """
from dataclasses import replace
from bridge.models.families.llama import LLAMA

XVERSE = replace(
    LLAMA, titles=("XVERSE",), arch="xverse", architectures=("XverseForCausalLM",), model_type="xverse",
    keys={"max_position_embeddings": 8192}, metadata=(),
)
""",
        "bridge/models/families/__init__.py::ALL = (": "from bridge.models.families.xverse import XVERSE\n",
        "bridge/models/families/__init__.py::LLAMA, LLAMA4,": "XVERSE, ",
    },
    "a checkpoint format that is read": {
        "bridge/checkpoint/formats/octets.py": """
from dataclasses import replace
import numpy as np
from bridge.checkpoint.formats.module_reader import Reader, module_info
from bridge.checkpoint.formats.written import WrittenFormat
from bridge.checkpoint.grouped import GroupedTensor

class OctetsReader(Reader):
    parts = required = "octets", "scales"

    @classmethod
    def complete(cls, quant, label):
        return replace(quant, title="Octets", sym=True)

    @classmethod
    def label_of(cls, parts):
        return "" if "octets" in parts else None

    def describe(self, name, tensors):
        (out, columns), groups = tensors["octets"].shape, tensors["scales"].shape[1]
        return module_info(name, tensors, 8, columns // groups, (out, columns))

    def read_all_rows(self, name):
        scales, size = self.scales(name), self.modules[name].group_size
        return GroupedTensor(name, 8, self.part(name, "octets"), scales, np.full_like(scales, 128), size)
""",
        "bridge/checkpoint/formats/registry.py::# quant_method": "from bridge.checkpoint.formats import octets\n",
        'bridge/checkpoint/formats/registry.py::    "awq": Awq': '    "octets": octets.OctetsReader,\n',
    },
    "a checkpoint format that is also written": {
        "bridge/checkpoint/formats/octets.py::class OctetsReader": """
WRITTEN = WrittenFormat(
    "octets", bits=(8,), rounding="symmetric", by_quantize=True,
    shapes=lambda groups, shape: {"octets": ("U8", shape), "scales": ("F16", (shape[0], groups.count(shape[1])))},
    pack=lambda tensor: {"octets": tensor.codes, "scales": WRITTEN.stored_scales(tensor)},
    labels=lambda layers: {"quantization_config": {"quant_method": "octets", **layers.usual.sizes()}},
)

""",
        "bridge/checkpoint/formats/octets.py::    parts = required": "    written = (WRITTEN,)\n",
    },
    "a block type": {
        "bridge/blocks/integers/q8_9.py": """
from bridge.blocks.base import BlockType, ScaleSearch

def pack(q, sc, mn, d, dmin, out):
    for i in range(32):
        out[i] = q[i]
    out[32] = d & 255
    out[33] = d >> 8

def unpack(raw, q, sc, mn):
    for i in range(32):
        q[i] = raw[i]

Q8_9 = BlockType(
    name="Q8_9", size=32, sub=32, nbytes=34, levels=256, zero=128, d_at=32, pack=pack, unpack=unpack,
    search=ScaleSearch(-1.2, 0.15, 2), noise=5e-4,
)
""",
        'bridge/blocks/tensor_types.py::("MXFP4",': '("Q8_9", 200, 32, 34, "integers", "BLOCKS"),\n        ',
    },
    "an option of calibration": {
        "bridge/quantize/settings.py::    feed: str = option(": (
            '    slack: float = option(0.0, "how much is given away", metavar="X", parse=float)\n'
        ),
        "bridge/quantize/settings.py::self.shrinkage)\n\n\ndef": "slack=self.slack, shrinkage=",
        "bridge/quantize/method.py::    def __post_init__": "    slack: float = 0.0\n\n",
    },
}

TRIED = """
import json, sys
from pathlib import Path
import numpy as np
import bridge
from bridge.blocks.read import WRITTEN
from bridge.checkpoint.formats.registry import QUANTIZED
from bridge.cli.options import calibration
from bridge.cli.program import _parser
from bridge.encode.block_bytes import packer, unpack_codes
from bridge.encode.rounding.round_rows import quantize_rows

folder, out = Path("model"), Path("out")
bridge.convert(folder, "m.gguf", type="Q8_9")
gguf = bridge.open_gguf("m.gguf")
assert {t.type for t in gguf.values() if len(t.shape) == 2} == {"Q8_9"}, gguf

name, x = "blk.0.ffn_up.weight", np.random.default_rng(1).standard_normal((3, 32)).astype(np.float32)
weight = gguf[name].dequantize()
np.testing.assert_allclose(gguf[name].matmul(x), x @ weight.T, rtol=0.1, atol=0.1)  # x is rounded to 8 bits
block, raw = WRITTEN["Q8_9"], gguf[name].raw.reshape(64, -1)
codes = unpack_codes(block, raw)
scales = raw[:, 32:].copy().view(np.float16).astype(np.float32)
np.testing.assert_array_equal((codes.astype(np.float32) - 128) * scales, weight)
packed = np.empty_like(raw)
packer("Q8_9")(codes, np.ones((64, 1), np.int8), np.zeros((64, 1), np.uint8), scales, scales, packed)
np.testing.assert_array_equal(packed, raw)
rounded = quantize_rows(x, block)
assert rounded.error < 1e-4 * rounded.signal

bridge.export("m.gguf", out, "octets")
config, back = (json.loads((f / "config.json").read_text()) for f in (folder, out))
assert back.pop("quantization_config") == {"quant_method": "octets", "bits": 8, "group_size": 32}
assert {key: back[key] for key in config} == config
for labelled in (True, False):
    if not labelled:
        (out / "config.json").write_text(json.dumps(config))
    with bridge.open_checkpoint(out) as checkpoint:
        assert checkpoint.format == "Octets"
        module = checkpoint.read_module("model.layers.0.mlp.up_proj")
        np.testing.assert_array_equal(module.dequantize(), weight)
assert "octets" in QUANTIZED

words = ["quantize", "model", "m.gguf", "--calibrate", "a.txt", "--slack", "0.5"]
asked = calibration(_parser().parse_args(words), None)
assert asked == bridge.Calibration(["a.txt"], slack=0.5)
assert asked.quantizer(None).slack == 0.5
"""


def write_model(folder: Path) -> None:
    """A checkpoint of floats of the new family."""
    folder.mkdir()
    own = {"num_hidden_layers": 1, "pad_token_id": 0, "rms_norm_eps": 2.0**-20}
    names = {"model_type": "xverse", "architectures": ["XverseForCausalLM"]}
    (folder / "config.json").write_text(json.dumps({**TEXT, **own, **names}))
    hidden, inner, kv = TEXT["hidden_size"], TEXT["intermediate_size"], TEXT["hidden_size"] // 2
    shapes = {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    shapes |= {f"self_attn.{m}_proj": (kv if m in "kv" else hidden, hidden) for m in "qkvo"}
    shapes |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    named = {f"model.layers.0.{module}.weight": shape for module, shape in shapes.items()}
    named |= {"model.norm.weight": (hidden,)}
    named |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (TEXT["vocab_size"], hidden))
    rng = np.random.default_rng(0)
    save_file({name: rng.standard_normal(shape).astype(np.float32) for name, shape in named.items()},
              folder / "model.safetensors")  # fmt: skip
    copy_tokenizer(folder)


def test_an_addition_is_made_where_the_docs_say(tmp_path: Path) -> None:
    for package in ("bridge", "cuda"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    touched = []
    for edits in ADDITIONS.values():
        touched += {place.partition("::")[0] for place in edits}
        for place, text in edits.items():
            path, _, anchor = place.partition("::")
            before = (tmp_path / path).read_text() if anchor else ""
            assert before.count(anchor) == 1 or not anchor, place
            (tmp_path / path).write_text(before.replace(anchor, text + anchor) if anchor else text)
    assert len(touched) <= MOST_FILES
    write_model(tmp_path / "model")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", TRIED], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    docs = (ROOT / "docs" / "extending.md").read_text()
    assert [path for path in touched if (ROOT / path).exists() and path not in docs] == []
