"""The table of docs/checkpoints.md on what `convert` makes: small layers of every kind of checkpoint, their types, the
share of their codes that stays, the bit-exact types, and where `export` gives the codes back in as many bits.

    python -m tests.support.convert_table
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.gguf_writer import GGUFValue

from bridge.blocks.ggml import GGML_QUANT_SIZES, GGMLQuantizationType
from bridge.checkpoint import open_checkpoint
from bridge.checkpoint.formats.fp4 import Fp4Tensor
from bridge.checkpoint.formats.registry import EXPORTED, FORMATS
from bridge.conversion.checkpoints.block_layer import BlockLayer
from bridge.conversion.checkpoints.layer_plan import EXACT
from bridge.conversion.gguf_input.gguf_source import SourceTensor
from bridge.conversion.planning.importance import Importance
from bridge.conversion.planning.options import PlanOptions
from bridge.conversion.planning.planner import Planner
from bridge.conversion.writing.executor import Executor, Result
from bridge.gguf_file.reader import read_gguf
from bridge.models.outline import Outline, OutlineTensor, Part
from tests.checkpoint import (
    test_aqlm,
    test_fp_quant,
    test_gemma,
    test_higgs,
    test_hqq,
    test_quanto,
    test_quark,
    test_sinq,
    test_spqr,
    test_vptq,
)
from tests.support.encode import gptq_tensors, pack_stream, quantize
from tests.support.encode_compressed import config, packed_tensors, scheme
from tests.support.encode_formats import hqq_config, hqq_tensors, mlx_tensors
from tests.support.encode_trellis import EXL3, QTIP, Coding, exl3_tensors, qtip_tensors
from tests.support.repack_table import COLUMNS, NAME, SOURCES, save, weight

Write = Callable[[Path], Any]
HEAD = "| checkpoint | codes kept | type (bits a weight) | `--exact` | `export` |"
TENSOR = "blk.0.ffn_down.weight"


def _gptq(folder: Path, bits: int, sym: bool, size: int = 64) -> None:
    form = "gptq_p" if bits in (5, 6, 7) else "gptq_v2"
    label = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": sym, "checkpoint_format": form}
    save(folder, gptq_tensors(NAME, quantize(weight(), bits, size, sym), bits, form), label)


def write_packed(folder: Path, bits: int, sym: bool) -> None:
    tensors = packed_tensors(NAME, quantize(weight(), bits, 64, sym), bits, None if sym else "packed")
    save(folder, tensors, config(scheme(bits, "group", 64, symmetric=sym)))


def _mlx(folder: Path, bits: int) -> None:
    table = {"bits": bits, "group_size": 64, "mode": "affine"}
    means = np.random.default_rng(1).normal(0, 0.03, (64, 1)).astype(np.float32)
    save(folder, mlx_tensors(NAME, weight() + means, bits, 64)[0], table, quantization=table)


def _hqq(folder: Path, bits: int, size: int = 64) -> None:
    save(folder, hqq_tensors(NAME, weight(), bits, size)[0], hqq_config(bits, size))


def _hqq_axis_0(folder: Path, bits: int) -> None:
    save(folder, test_hqq.axis_0(bits, 64)[0], hqq_config(bits))


def _quanto(folder: Path, bits: int) -> None:
    test_quanto.write(folder, test_quanto.quanto(bits, (64, COLUMNS))[0], f"qint{bits}")


def _gemma(folder: Path) -> None:
    random = np.random.default_rng(0)
    parts = {
        "weight": random.integers(0, 256, (64, COLUMNS // 4), np.uint8),
        "weight_scale": random.uniform(0.01, 0.02, (64, 1)).astype(np.float32),
    }
    ones = {f"{part}_activation_scale": np.ones((), np.float32) for part in ("input", "output")}
    save(folder, {f"{NAME}.{part}": values for part, values in {**parts, **ones}.items()}, test_gemma.LABEL)


def _e3m2(folder: Path) -> None:
    """Normal weights at the nearest codes of 6-bit floats, with one scale for all."""
    codes = np.arange(32)
    exponent, mantissa = codes >> 2, codes & 3
    values = np.where(exponent == 0, mantissa / 16, 2.0 ** (exponent - 3) * (1 + mantissa / 4))
    scaled = weight() * 64
    nearest = np.abs(np.abs(scaled)[..., None] - values).argmin(-1)
    signed = np.where(scaled < 0, nearest | 32, nearest).astype(np.uint8)
    tensors = {"weight": pack_stream(signed, 6, "uint8"), "weight_scale": np.full((64, COLUMNS // 32), 121, np.uint8)}
    save(folder, {f"{NAME}.{part}": x for part, x in tensors.items()}, test_quark.label("fp6_e3m2"))


def _fp_quant(folder: Path, kind: str, rotated: bool) -> None:
    tensors = test_fp_quant.fp_quant(kind, (64, COLUMNS), rotated=rotated)[0]
    save(folder, test_fp_quant.named(tensors, NAME), test_fp_quant.label(kind))


def _aqlm(folder: Path, count: int) -> None:
    save(folder, test_aqlm.aqlm(NAME, (64, COLUMNS), count)[0], test_aqlm.label(count))


def _vptq(folder: Path) -> None:
    tensors = test_vptq.named(test_vptq.vptq((64, COLUMNS))[0], NAME)
    save(folder, tensors, test_vptq.label(NAME, shape=(64, COLUMNS)))


def _higgs(folder: Path, bits: int) -> None:
    """With the best points for pairs of normal values, as the tool has, found by Lloyd's algorithm."""
    random = np.random.default_rng(0)
    pairs, points = random.normal(size=(1 << 14, 2)), random.normal(size=(4**bits, 2))
    for _ in range(30):
        nearest = np.square(pairs[:, None] - points).sum(-1).argmin(1)
        count = np.maximum(np.bincount(nearest, minlength=len(points)), 1)[:, None]
        points = np.stack([np.bincount(nearest, x, len(points)) for x in pairs.T], 1) / count
    tensors = test_higgs.higgs(bits, 32, (1024, COLUMNS), NAME)[0]
    grid = points.reshape(1 << bits, 1 << bits, 2).astype(np.float16)
    template = {2: 11, 3: 0, 4: 20}[bits]
    save(folder, {**tensors, f"{NAME}.tables2": grid}, test_higgs.label(NAME, bits=bits, template=template))


def _sinq(folder: Path) -> None:
    """Normal weights in 4 bits, with scales of columns."""
    groups = weight().reshape(-1, 64)
    low, high = groups.min(1, keepdims=True), groups.max(1, keepdims=True)
    scales = ((high - low) / 15).astype(np.float16)
    zeros = np.rint(-low / scales).astype(np.float16)
    codes = np.clip(np.rint(groups / scales + zeros), 0, 15).astype(np.uint8)
    half = len(codes) // 2
    columns = np.exp(np.random.default_rng(1).normal(0, 0.2, (1, COLUMNS))).astype(np.float16)
    tensors = {
        "W_q": codes[:half] << 4 | codes[half:], "meta.scale": scales, "meta.zero": zeros, "meta.scale2": columns,
    }  # fmt: skip
    test_sinq.write(folder, tensors, (64, COLUMNS))


def _spqr(folder: Path) -> None:
    save(folder, test_spqr.spqr((64, COLUMNS), NAME)[0], test_spqr.LABEL)


def _exl3(folder: Path, bits: int) -> None:
    coding = Coding("mcg", bits, multiplier=0xCBAC1FED)
    save(folder, exl3_tensors(NAME, weight(128), coding, search=False)[0], None, quantization_config=EXL3)


def _qtip(folder: Path, bits: int) -> None:
    save(folder, qtip_tensors(NAME, weight(128), Coding("1mad", bits), search=False)[0], None, quip_params=QTIP)


def _floats(folder: Path) -> None:
    save(folder, {f"{NAME}.weight": weight()}, None)


def _both(bits: int, sym: bool) -> list[Write]:
    return [partial(_gptq, bits=bits, sym=sym), partial(write_packed, bits=bits, sym=sym)]


def _known(*names: str) -> list[Write]:
    return [SOURCES[name] for name in names]


_NVFP4 = ("compressed-tensors", "ModelOpt", "transformers", "Four Over Six")
ROWS: dict[str, list[Write]] = {
    "integers¹, 2 bits, symmetric; asymmetric": [*_both(2, True), *_both(2, False)],
    "integers¹, 3 bits, symmetric; asymmetric": [*_both(3, True), *_both(3, False)],
    "integers¹, 4 bits, symmetric; asymmetric": [
        *_both(4, True), *_known("Marlin"), *_both(4, False), *_known("AWQ", "AWQ, gemv", "Quark, 4 bits"),
    ],
    "integers¹, 5; 6 bits, symmetric": [*_both(5, True), *_both(6, True)],
    "integers¹, 7, 8 bits, symmetric; W8A8; EETQ": [
        *_both(7, True), *_both(8, True), *_known("compressed-tensors, int-quantized", "EETQ"),
    ],
    "integers¹, 8 bits, asymmetric; MLX, 8 bits": [*_both(8, False), partial(_mlx, bits=8)],
    "integers¹, 4 bits, groups of 16": [partial(_gptq, bits=4, sym=False, size=16)],
    "integers¹, 2; 3; 4 bits, groups of 256": [
        partial(_gptq, bits=bits, sym=bits == 3, size=256) for bits in (2, 3, 4)
    ],
    "GPTQ, act-order²": _known("GPTQ, 4 bits, act-order"),
    "Gemma QAT, 2 bits; ModelOpt, 4 bits": [_gemma, *_known("ModelOpt, 4-bit integers")],
    "quanto, 2; 4 bits": [partial(_quanto, bits=bits) for bits in (2, 4)],
    "torchao, Metal, 4 bits": _known("torchao, 4 bits", "Metal (transformers)"),
    "ModelOpt, 8 bits; LLM.int8": _known("ModelOpt, 8-bit integers", "bitsandbytes, LLM.int8"),
    "MLX, 2; 3, 4; 5; 6 bits": [partial(_mlx, bits=bits) for bits in (2, 3, 4, 5, 6)],
    "HQQ, 2; 3, 4; 5 bits": [partial(_hqq, bits=bits) for bits in (2, 3, 4, 5)],
    "HQQ, 6, 8 bits; groups of 16, 3; 4 bits": [
        *(partial(_hqq, bits=bits) for bits in (6, 8)), *(partial(_hqq, bits=bits, size=16) for bits in (3, 4)),
    ],
    "HQQ, axis 0, 2, 3; 4; 8 bits": [partial(_hqq_axis_0, bits=bits) for bits in (2, 3, 4, 8)],
    "BitNet": _known("BitNet"),
    "NVFP4; MXFP4": [
        *_known(*(f"NVFP4 ({tool})" for tool in _NVFP4), "NVFP4, scales of 8 bits E5M3 (auto-round)", "MLX, nvfp4"),
        partial(_fp_quant, kind="nvfp4", rotated=False),
        *_known("MXFP4 (compressed-tensors)", "MLX, mxfp4"), partial(_fp_quant, kind="mxfp4", rotated=False),
    ],
    "MXFP6, E2M3": _known("compressed-tensors, MXFP6", "Quark, FP6 E2M3"),
    "MXFP6, E3M2": [_e3m2],
    "FP8, MXFP8, floats": [
        *_known("FP8, one scale", "FP8, one scale a row", "FP8, blocks (DeepSeek)", "MXFP8 (ModelOpt)", "MLX, mxfp8"),
        _floats,
    ],
    "NF4; FP-Quant, rotated; SpQR": [
        *_known("bitsandbytes, 4 bits"), *(partial(_fp_quant, kind=kind, rotated=True) for kind in ("mxfp4", "nvfp4")),
        _spqr,
    ],
    "AQLM, VPTQ, QTIP, EXL3, 2; 3; 4 bits": [
        partial(_aqlm, count=2), _vptq, partial(_qtip, bits=2), partial(_exl3, bits=2),
        partial(_aqlm, count=3), partial(_qtip, bits=3), partial(_exl3, bits=3),
        partial(_aqlm, count=4), partial(_qtip, bits=4), partial(_exl3, bits=4),
    ],
    "HIGGS, 2; 3, 4 bits": [partial(_higgs, bits=bits) for bits in (2, 3, 4)],
    "EXL2², 3 to 5 bits; SINQ², 4 bits": [*_known("EXL2"), _sinq],
}  # fmt: skip


def converted(folder: Path, options: PlanOptions) -> tuple[Result, SourceTensor, int | str | None]:
    """The first layer of a checkpoint as `convert` makes it, as it is in a GGUF, and the bits or the kind of its codes;
    None: it is of floats."""
    with open_checkpoint(folder) as ckpt:
        module = next(iter(ckpt.modules), NAME)
        info = ckpt.modules.get(module)
        shape = tuple(info.shape if info else ckpt.tensors[f"{module}.weight"].shape)
        part = Part(f"{module}.weight", shape)
        tensor = OutlineTensor(TENSOR, shape, (part,))
        metadata = {
            "general.architecture": GGUFValue("llama", gguf.GGUFValueType.STRING),
            "llama.block_count": GGUFValue(1, gguf.GGUFValueType.UINT32),
        }
        planner = Planner(ckpt, options, Importance({}), Outline(metadata, [tensor]))
        executor = Executor(planner.reader, Importance({}), threads=1)
        [result] = executor.results([planner.planned(tensor)])
        codes = ckpt.read_module(module) if info else None
        kind = codes.kind if isinstance(codes, Fp4Tensor) else codes.bits if codes else None
    return result, in_gguf(folder, part, result.report.type, result.data), kind


def in_gguf(folder: Path, part: Part, type: str, blocks: np.ndarray) -> SourceTensor:
    """A layer in a GGUF of its own."""
    file = folder / "layer.gguf"
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_tensor(TENSOR, blocks, raw_dtype=GGMLQuantizationType[type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return SourceTensor(OutlineTensor(TENSOR, part.shape, (part,)), part, read_gguf(file).tensors[TENSOR], 0)


def given_back(source: SourceTensor, kind: int | str) -> str:
    """Which of the formats that have room for such codes `export` writes them in again: "any", their names, or "not"
    the names of the others, whichever is shorter."""
    able = [
        name
        for name in EXPORTED
        if (kind in FORMATS[name].fp4 if isinstance(kind, str) else max(FORMATS[name].bits, default=0) >= kind)
    ]
    plans = {name: BlockLayer.of(source, FORMATS[name]).plan() for name in able}
    back = [f"`{name}`" for name, plan in plans.items() if plan and plan.how == EXACT]
    others = [f"`{name}`" for name in able if f"`{name}`" not in back]
    return "-" if not back else "any" if not others else min(", ".join(back), f"not {', '.join(others)}", key=len)


def bits_a_weight(type: str) -> str:
    """Bits a weight of a type, at most two decimals."""
    size, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[type]]
    return f"{8 * nbytes / size + 1e-9:.2f}".rstrip("0").rstrip(".")


def cells(write: Write) -> tuple[str, str, str, str]:
    """What becomes of one layer: the cells of a row."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "checkpoint"
        write(folder)
        result, source, kind = converted(folder, PlanOptions())
        report, fidelity = result.report, result.report.fidelity
        assert fidelity is not None
        kept = {fidelity.weights: "all", 0: "none"}.get(fidelity.kept, "some") if report.has_codes else "floats"
        back = given_back(source, kind) if kind is not None and kept != "none" else "-"
        exact = converted(folder, PlanOptions(type="exact"))[0].report
        assert exact.fidelity is not None
        return kept, f"{report.type} ({bits_a_weight(report.type)})", "-" if exact.fidelity.error else exact.type, back


def rows(names: Iterable[str] = ROWS) -> Iterator[str]:
    """A row for each kind of codes; where they differ, what becomes of each of its layers, in their order."""
    for name in names:
        columns = zip(*map(cells, ROWS[name]), strict=True)
        yield f"| {name} | {' | '.join('; '.join(dict.fromkeys(column)) for column in columns)} |"


if __name__ == "__main__":
    print(HEAD, "|---" * 5 + "|", *rows(), sep="\n")
