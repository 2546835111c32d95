"""The table of docs/both-directions.md on what `repack` carries: small checkpoints of every format that is read, in
each that is written.

    python -m tests.support.repack_table
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import bridge
from bridge.checkpoint.formats.registry import FORMATS
from bridge.conversion.checkpoints.repack import Repacked
from bridge.errors import BridgeError
from tests.checkpoint import (
    test_aqlm,
    test_auto_round,
    test_bitnet,
    test_bitsandbytes,
    test_blackwell,
    test_eetq,
    test_exl2,
    test_fp_quant,
    test_gemma,
    test_higgs,
    test_legacy,
    test_metal,
    test_quanto,
    test_quark,
    test_sinq,
    test_spqr,
    test_torchao,
    test_vptq,
)
from tests.models import test_gpt_oss
from tests.support.encode import awq_tensors, gptq_tensors, pack_stream, quantize, write_folder
from tests.support.encode_compressed import config, float8_tensors, int_tensors, mxfp6_tensors, packed_tensors, scheme
from tests.support.encode_compressed import save_float8 as label_codes
from tests.support.encode_formats import hqq_config, hqq_tensors, marlin_scales, marlin_words, mlx_tensors
from tests.support.encode_fp4 import (
    compressed_mxfp4,
    compressed_tensors,
    fp4_scheme,
    label_scales,
    mlx_fp4_tensors,
    modelopt_tensors,
)
from tests.support.encode_modelopt import int4_tensors, int8_tensors, mxfp8_tensors
from tests.support.encode_trellis import EXL3, QTIP, Coding, exl3_tensors, qtip_tensors
from tests.support.family_models import new_model, randomized
from tests.support.raw import edit_raw

Tensors = dict[str, np.ndarray]
NAME = "model.layers.0.mlp.down_proj"
COLUMNS = 256
PLAIN = ("F16", "BF16", "F32")  # what is no layer of codes
SHOWN = [name for name in FORMATS if name != "gptq"]  # of which the same becomes as of gptq_v2
HEAD = f"| source | {' | '.join(f'`{name}`' for name in SHOWN)} |".replace("`gptq_v2`", "`gptq`, `gptq_v2`")


def weight(out: int = 64) -> np.ndarray:
    """A layer's weights; the first of each group are its least and its greatest, so that no zero point is 0."""
    return np.random.default_rng(0).normal(0, 0.05, (out, COLUMNS)).astype(np.float32)


def save(folder: Path, tensors: Tensors, label: dict[str, Any] | None, **config_json: Any) -> Path:
    """A folder of one layer and a norm; `config_json`: further keys of config.json."""
    write_folder(folder, {**tensors, "model.norm.weight": np.ones(COLUMNS, np.float16)}, label)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config_json}))
    return folder


def _gptq(folder: Path, bits: int, sym: bool, form: str = "gptq_v2", order: bool = False, size: int = 64) -> None:
    q = quantize(weight(), bits, size, sym, order)
    q.zeros[:] = np.maximum(q.zeros, 1)
    label = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": sym, "desc_act": order}
    save(folder, gptq_tensors(NAME, q, bits, form), {**label, "checkpoint_format": form})


def _awq(folder: Path, version: str) -> None:
    q = quantize(weight(), 4, 64, False)
    label = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": version}
    save(folder, awq_tensors(NAME, q, version), label)


def _packed(folder: Path, bits: int, sym: bool, size: int = 64) -> None:
    q = quantize(weight(), bits, size, sym)
    said = scheme(bits, "group", size, symmetric=sym)
    save(folder, packed_tensors(NAME, q, bits, None if sym else "packed"), config(said))


def _int8(folder: Path) -> None:
    q = quantize(weight(), 8, -1, True)
    save(folder, int_tensors(NAME, q, 8), config(scheme(8, "channel", None), form="int-quantized"))


def _mxfp6(folder: Path) -> None:
    random = np.random.default_rng(0)
    codes, exponents = random.integers(0, 64, (64, COLUMNS), np.uint8), random.integers(118, 122, (64, 8), np.uint8)
    said = config(scheme(6, "group", 32, type="float"), form="mxfp6-pack-quantized")
    save(folder, mxfp6_tensors(NAME, codes, exponents)[0], said)


def _nvfp4(folder: Path, layer: Callable[[str, np.ndarray], tuple[Tensors, Any]], label: dict[str, Any]) -> None:
    save(folder, layer(NAME, weight())[0], label)
    label_scales(folder)


def _float8(folder: Path, block: tuple[int, int], label: dict[str, Any], scale: str = "weight_scale") -> None:
    save(folder, float8_tensors(NAME, weight(128), block, scale)[0], label)
    label_codes(folder)


def _mxfp8(folder: Path) -> None:
    save(folder, mxfp8_tensors(NAME, weight())[0], {"quant_method": "modelopt", "quant_algo": "MXFP8"})
    edit_raw(folder / "model.safetensors", lambda raw: raw[f"{NAME}.weight"][0].update(dtype="F8_E4M3"))


def _mlx(folder: Path, tensors: Tensors, bits: int, size: int, mode: str = "affine") -> None:
    table = {"bits": bits, "group_size": size, "mode": mode}
    save(folder, tensors, table, quantization=table)


def _mlx_mxfp8(folder: Path) -> None:
    tensors = mxfp8_tensors(NAME, weight())[0]
    words, scales = tensors[f"{NAME}.weight"].view(np.uint32), tensors[f"{NAME}.weight_scale"]
    _mlx(folder, {f"{NAME}.weight": words, f"{NAME}.scales": scales}, 8, 32, "mxfp8")


def _hqq(folder: Path, bits: int) -> None:
    save(folder, hqq_tensors(NAME, weight(), bits, 64)[0], hqq_config(bits, 64))


def _marlin(folder: Path) -> None:
    q = quantize(weight(), 4, 64, True)
    tensors = {f"{NAME}.B": marlin_words(q.codes, 4), f"{NAME}.s": marlin_scales(q.scales)}
    save(folder, tensors, {"quant_method": "gptq", "bits": 4, "group_size": 64, "is_marlin_format": True})


def _bitnet(folder: Path) -> None:
    tensors = {"weight": test_bitnet.packed(test_bitnet.ternary(64)), "weight_scale": test_bitnet.half(12.5)}
    save(folder, {f"{NAME}.{part}": x for part, x in tensors.items()}, test_bitnet.label())


def _bitsandbytes(folder: Path, bits: int) -> None:
    save(folder / "floats", {f"{NAME}.weight": weight()}, None)
    test_bitsandbytes.quantized(folder, folder / "floats", bits)


def _quark(folder: Path, dtype: str) -> None:
    save(folder, test_quark.module(dtype, "per_group", "reorder", NAME, (64, COLUMNS))[0], test_quark.label(dtype))


def _quark_fp6(folder: Path, dtype: str) -> None:
    random = np.random.default_rng(0)
    codes, exponents = random.integers(0, 64, (64, COLUMNS)), random.integers(118, 122, (64, 8)).astype(np.uint8)
    tensors = {f"{NAME}.weight": pack_stream(codes.astype(np.uint8), 6, "uint8"), f"{NAME}.weight_scale": exponents}
    save(folder, tensors, test_quark.label(dtype))


def _four_over_six(folder: Path) -> None:
    tensors = {
        "scale_factors": np.random.default_rng(0).integers(0x30, 0x40, 128 * 16, np.uint8),
        "values": np.random.default_rng(1).integers(0, 256, (128, 128), np.uint8),
        "amax": np.array([1344], np.float32), "metadata": np.array([128, COLUMNS, 128, COLUMNS, 1, 1], np.int32),
    }  # fmt: skip
    stored = {f"{NAME}.quantized_weight_{part}": values for part, values in tensors.items()}
    save(folder, stored, test_blackwell.FOUR)


def _gemma(folder: Path) -> None:
    tensors = test_gemma.tensors(rows=64)
    save(folder, {n: x for n, x in tensors.items() if not n.startswith(test_gemma.WORDS)}, test_gemma.LABEL)


def _eetq(folder: Path) -> None:
    save(folder, test_eetq.parts(*test_eetq.quantized(weight()), "turing", NAME), test_eetq.LABEL)


def _exl2(folder: Path) -> None:
    save(folder, test_exl2.exl2_tensors(NAME, weight(), [(5, 64), (4, 64), (3, 128)])[0], test_exl2.label())


def _legacy(folder: Path) -> None:
    folder.mkdir()
    q = test_legacy.quantized(4, "float-zeros")
    tensors = test_legacy.legacy_tensors(NAME, q, 4, "float-zeros")
    write_folder(folder, tensors, {"quant_method": "gptq", "bits": 4, "group_size": -1})


_MCG, _QTIP = Coding("mcg", 2, multiplier=0xCBAC1FED), Coding("1mad", 2)
_CHANNEL = scheme(8, "channel", None, type="float")
_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
SOURCES: dict[str, Callable[[Path], Any]] = {
    "GPTQ, 4 bits": partial(_gptq, bits=4, sym=True),
    "GPTQ, 4 bits, asymmetric": partial(_gptq, bits=4, sym=False),
    "GPTQ, 4 bits, act-order": partial(_gptq, bits=4, sym=False, order=True),
    "GPTQ, 2 bits, asymmetric": partial(_gptq, bits=2, sym=False),
    "GPTQ, 3 bits": partial(_gptq, bits=3, sym=True),
    "GPTQ, 8 bits": partial(_gptq, bits=8, sym=True),
    "GPTQ, planar, 5 bits": partial(_gptq, bits=5, sym=True, form="gptq_p"),
    "AWQ": partial(_awq, version="gemm"),
    "AWQ, gemv": partial(_awq, version="gemv"),
    "Marlin": _marlin,
    "compressed-tensors, 4 bits": partial(_packed, bits=4, sym=True),
    "compressed-tensors, 4 bits, asymmetric": partial(_packed, bits=4, sym=False),
    "compressed-tensors, 6 bits": partial(_packed, bits=6, sym=True),
    "compressed-tensors, int-quantized": _int8,
    "compressed-tensors, MXFP6": _mxfp6,
    "NVFP4 (compressed-tensors)": lambda to: _nvfp4(to, compressed_tensors, config(fp4_scheme("nvfp4"))),
    "NVFP4 (ModelOpt)": lambda to: _nvfp4(to, modelopt_tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "NVFP4 (transformers)": lambda to: save(to, test_blackwell.layer(weight(128), NAME)[0], test_blackwell.LABEL),
    "NVFP4 (Four Over Six)": _four_over_six,
    "NVFP4, scales of 8 bits E5M3 (auto-round)": lambda to: test_auto_round.e5m3(
        to, np.random.default_rng(1).integers(9, 109, (64, 16)).astype(np.uint8), 16
    ),
    "MXFP4 (compressed-tensors)": lambda to: save(to, compressed_mxfp4(NAME, weight())[0], config(fp4_scheme("mxfp4"))),
    "MXFP4 (gpt-oss)": lambda to: test_gpt_oss.write_mxfp4(randomized(new_model("gpt-oss")), to),
    "FP8, one scale": partial(_float8, block=(128, COLUMNS), label=config(_CHANNEL, form="float-quantized")),
    "FP8, one scale a row": partial(_float8, block=(1, COLUMNS), label=config(_CHANNEL, form="float-quantized")),
    "FP8, blocks (DeepSeek)": partial(_float8, block=(128, 128), label=_BLOCKS, scale="weight_scale_inv"),
    "MXFP8 (ModelOpt)": _mxfp8,
    "MLX, 4 bits": lambda to: _mlx(to, mlx_tensors(NAME, weight(), 4, 64)[0], 4, 64),
    "MLX, mxfp4": lambda to: _mlx(to, mlx_fp4_tensors(NAME, weight(), "mxfp4")[0], 4, 32, "mxfp4"),
    "MLX, nvfp4": lambda to: _mlx(to, mlx_fp4_tensors(NAME, weight(), "nvfp4")[0], 4, 16, "nvfp4"),
    "MLX, mxfp8": _mlx_mxfp8,
    "Metal (transformers)": lambda to: save(to, test_metal.layer(weight(), NAME), test_metal.label()),
    "HQQ, 4 bits": partial(_hqq, bits=4),
    "HQQ, 2 bits": partial(_hqq, bits=2),
    "ModelOpt, 4-bit integers": lambda to: save(
        to, int4_tensors(NAME, weight())[0], {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 128}
    ),
    "ModelOpt, 8-bit integers": lambda to: save(
        to, int8_tensors(NAME, weight())[0], {"quant_method": "modelopt", "quant_algo": "INT8"}
    ),
    "torchao, 4 bits": lambda to: save(to, test_torchao.int4(weight(), NAME)[0], test_torchao.LABEL),
    "bitsandbytes, 4 bits": partial(_bitsandbytes, bits=4),
    "bitsandbytes, LLM.int8": partial(_bitsandbytes, bits=8),
    "quanto, 4 bits": lambda to: test_quanto.write(to, test_quanto.quanto(4, (64, COLUMNS))[0]),
    "Quark, 4 bits": partial(_quark, dtype="uint4"),
    "Quark, 8 bits": partial(_quark, dtype="int8"),
    "Quark, FP6 E2M3": partial(_quark_fp6, dtype="fp6_e2m3"),
    "Quark, FP6 E3M2": partial(_quark_fp6, dtype="fp6_e3m2"),
    "EETQ": _eetq,
    "SINQ": lambda to: test_sinq.write(to, test_sinq.sinq((64, 128))[0], (64, 128)),
    "Gemma QAT (transformers)": _gemma,
    "BitNet": _bitnet,
    "float zero points (old GPTQ)": _legacy,
    "EXL2": _exl2,
    "SpQR": lambda to: save(to, test_spqr.spqr(name=NAME)[0], test_spqr.LABEL),
    "FP-Quant, rotated": lambda to: save(
        to, test_fp_quant.named(test_fp_quant.fp_quant("mxfp4", (64, 128))[0], NAME), test_fp_quant.label("mxfp4")
    ),
    "HIGGS": lambda to: save(to, test_higgs.higgs(4, 32, (1024, 128), NAME)[0], test_higgs.label(NAME)),
    "AQLM": lambda to: save(to, test_aqlm.aqlm(NAME, (64, 64))[0], test_aqlm.label()),
    "VPTQ": lambda to: save(
        to, test_vptq.named(test_vptq.vptq((64, 128))[0], NAME), test_vptq.label(NAME, shape=(64, 128))
    ),
    "QTIP": lambda to: save(to, qtip_tensors(NAME, weight(128), _QTIP, search=False)[0], None, quip_params=QTIP),
    "EXL3": lambda to: save(to, exl3_tensors(NAME, weight(128), _MCG, search=False)[0], None, quantization_config=EXL3),
}


def outcomes(source: Path, folder: Path) -> dict[str, Repacked | None]:
    """What becomes of a source in each format, in folders of these names; None: it is refused."""
    done: dict[str, Repacked | None] = {}
    for name in FORMATS:
        try:
            result = bridge.repack(source, folder / name, name, dtype="F32" if name != "mlx" else None)
        except BridgeError as error:
            if "has no layer that" not in str(error):
                raise
            done[name] = None
            continue
        assert isinstance(result, Repacked)
        done[name] = result
    return done


def words(done: Repacked | None) -> str:
    """What became of the layers: a cell of the table."""
    if done is None:
        return "-"
    return ", ".join(dict.fromkeys(t.how for t in done.tensors if t.type not in PLAIN))


def rows() -> list[str]:
    """A row for all sources of which the same becomes."""
    names: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, write) in enumerate(SOURCES.items()):
            source = Path(scratch) / str(number)
            write(source)
            done = outcomes(source, Path(scratch) / f"{number} in")
            cells = {format: words(became).replace("all codes", "codes") for format, became in done.items()}
            assert cells["gptq"] == cells["gptq_v2"]
            names.setdefault(" | ".join(cells[format] for format in SHOWN), []).append(name)
    return [f"| {'; '.join(alike)} | {cells} |" for cells, alike in names.items()]


if __name__ == "__main__":
    print(HEAD, "|---" * (1 + len(SHOWN)) + "|", *rows(), sep="\n")
