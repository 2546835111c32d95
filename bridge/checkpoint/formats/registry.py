"""READERS: by quantization method. FORMATS: all that are written; EXPORTED: those that hold codes of a GGUF;
QUANTIZED: those that `quantize --format` writes."""

from collections.abc import Sequence

from bridge.checkpoint.formats.aqlm import AqlmReader
from bridge.checkpoint.formats.auto_round import AutoRoundReader
from bridge.checkpoint.formats.awq import AwqReader
from bridge.checkpoint.formats.bitnet import BitnetReader
from bridge.checkpoint.formats.bitsandbytes import BitsAndBytesReader
from bridge.checkpoint.formats.blackwell import FourOverSixReader, Nvfp4Reader
from bridge.checkpoint.formats.compressed import CompressedReader
from bridge.checkpoint.formats.eetq import EetqReader
from bridge.checkpoint.formats.exl2 import Exl2Reader
from bridge.checkpoint.formats.exl3 import Exl3Reader
from bridge.checkpoint.formats.fp4_experts import GptOssReader
from bridge.checkpoint.formats.fp8 import Fp8Reader
from bridge.checkpoint.formats.fp_quant import FpQuantReader
from bridge.checkpoint.formats.gemma import GemmaReader
from bridge.checkpoint.formats.gptq import GptqReader
from bridge.checkpoint.formats.higgs import HiggsReader
from bridge.checkpoint.formats.hqq import HqqReader
from bridge.checkpoint.formats.legacy import FloatZerosReader
from bridge.checkpoint.formats.marlin import MarlinReader
from bridge.checkpoint.formats.metal import MetalReader
from bridge.checkpoint.formats.mlx import MlxReader
from bridge.checkpoint.formats.modelopt import ModelOptReader
from bridge.checkpoint.formats.module_reader import Reader
from bridge.checkpoint.formats.qtip import QtipReader
from bridge.checkpoint.formats.quanto import QuantoReader
from bridge.checkpoint.formats.quark import QuarkReader
from bridge.checkpoint.formats.sinq import SinqReader
from bridge.checkpoint.formats.spqr import SpqrReader
from bridge.checkpoint.formats.torchao import TorchaoReader
from bridge.checkpoint.formats.vptq import VptqReader
from bridge.checkpoint.formats.written import WrittenFormat

# quant_method -> its reader; auto-round mostly packs as another of them
READERS: dict[str, type[Reader]] = {
    "gptq": GptqReader, "gptq-float-zeros": FloatZerosReader,  # recognized by its tensors, never by a config
    "awq": AwqReader, "compressed-tensors": CompressedReader, "fp8": Fp8Reader, "fbgemm_fp8": Fp8Reader,
    "mxfp8": Fp8Reader, "mxfp4": GptOssReader, "mlx": MlxReader, "bitnet": BitnetReader,
    "bitsandbytes": BitsAndBytesReader, "hqq": HqqReader, "modelopt": ModelOptReader, "marlin": MarlinReader,
    "qtip": QtipReader, "exl2": Exl2Reader, "exl3": Exl3Reader, "torchao": TorchaoReader, "quark": QuarkReader,
    "quanto": QuantoReader, "aqlm": AqlmReader, "vptq": VptqReader, "eetq": EetqReader, "higgs": HiggsReader,
    "spqr": SpqrReader, "sinq": SinqReader, "fp_quant": FpQuantReader, "metal": MetalReader, "nvfp4": Nvfp4Reader,
    "fouroversix": FourOverSixReader, "gemma": GemmaReader, "auto-round": AutoRoundReader,
}  # fmt: skip
FORMATS: dict[str, WrittenFormat] = {written.name: written for reader in READERS.values() for written in reader.written}
EXPORTED = [name for name, written in FORMATS.items() if written.bits or written.fp4]
QUANTIZED = [name for name, written in FORMATS.items() if written.by_quantize]


def in_words(names: Sequence[str]) -> str:
    """Formats by name, and "floats", with their hints: for help texts."""
    hints = {name: f" ({written.hint})" for name, written in FORMATS.items() if written.hint}
    *first, last = (f"{name}{hints.get(name, '')}" for name in names)
    return f"{', '.join(first)} or {last}"
