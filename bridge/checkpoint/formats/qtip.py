"""QTIP: trellis codes between two Hadamard transforms (Tseng et al. 2024).

    trellis        int16 [tiles, td_x * td_y * K / 16], or flattened
    SU, SV         float [in], [out]: signs, possibly tuned, with the weight's scale in one of them
    tlut           float [2^tlut_bits, V], for modes that look up
    rcp, tp_rank   integers: rcp 1 splits the input's transform into tp_rank blocks, 2 the output's, 0 neither
    bias           float [out]

config.json has `quip_params`; packed_for_kernel: false there means that no tiles are swizzled. K follows from the size
of each module's codes. A plain layout without transforms, whose states are not packed, is recognised by its int32
`trellis` or `qweight` [tiles, states], with quantize_config.json.
"""

from dataclasses import replace
from typing import ClassVar

import numpy as np

from bridge.checkpoint.files.store import Store, TensorInfo
from bridge.checkpoint.formats.module_reader import ModuleInfo, module_info
from bridge.checkpoint.formats.trellis_coded import TrellisReader, length
from bridge.checkpoint.labels.quant_config import QuantConfig
from bridge.errors import BridgeError
from bridge.system.fields import whole_number
from bridge.trellis.codebooks import QTIP_MODES, BitshiftCodebook
from bridge.trellis.layer import TrellisLayer
from bridge.trellis.packed import bits_of, is_swizzled, looks_random, plain_layer, qtip_layer

_NUMBERS = {"L": 16, "K": 2, "V": 1, "tlut_bits": 0, "td_x": 16, "td_y": 16}  # with what is usual
_RANKS = 8  # of split_for_tp, if a tuned file lacks tp_rank


class QtipReader(TrellisReader):
    """Reads QTIP's own layout, and plain states."""

    parts: ClassVar = ("trellis", "qweight", "SU", "SV", "tlut", "bias", "rcp", "tp_rank")
    plain: ClassVar = frozenset({"bias"})

    @classmethod
    def complete(cls, quant: QuantConfig, label: str) -> QuantConfig:
        raw, source = quant.raw, quant.source
        codebook = raw.get("codebook")
        if codebook is None and "decode_mode" in raw:  # as the reference writes it by default
            codebook = "bitshift"
        if codebook != "bitshift":
            raise BridgeError(
                f"{source}: codebook {codebook!r} is QuIP#'s or another's, not QTIP's bitshift trellis, and is not "
                "supported; convert the unquantized model instead"
            )
        settings = {}
        for key, usual in _NUMBERS.items():
            value = whole_number(raw.get(key, usual))
            if value is None:
                raise BridgeError(f"{source}: {key} is {raw[key]!r}, not a whole number; take the model's own config")
            settings[key] = value
        if not isinstance(raw.get("packed_for_kernel"), bool | None):
            raise BridgeError(
                f"{source}: packed_for_kernel is {raw['packed_for_kernel']!r:.80}, must be true or false; take the "
                "model's own config"
            )
        mode = str(raw.get("decode_mode", "(none)")).lower()
        if mode not in (*QTIP_MODES, "hyb"):
            raise BridgeError(f"{source}: unknown decode_mode {mode!r}; QTIP has {', '.join(QTIP_MODES)}")
        claims = (f"{settings['K']} bits", mode, f"L {settings['L']}, V {settings['V']}")
        return replace(
            quant, title="QTIP", claims=claims, bits=settings["K"], raw={**raw, **settings, "decode_mode": mode}
        )

    def __init__(self, store: Store, quant: QuantConfig) -> None:
        super().__init__(store, quant)
        self.format = f"QTIP {quant.raw['decode_mode']}"
        if quant.raw.get("split_for_tp") and (lost := [n for n, m in self.modules.items() if "rcp" not in m.tensors]):
            self.notes.append(
                f"{lost[0]}: rcp is missing here and in {len(lost) - 1} more; as split_for_tp says, the transforms of "
                f"o_proj's and down_proj's inputs and of the others' outputs are taken to be of {_RANKS} blocks"
            )

    def claimed_bits(self, module: str) -> int | None:
        bits = whole_number(self.quant.raw.get(f"K_{module.rpartition('.')[2]}"))
        return bits or self.quant.bits

    def required_parts(self, tensors: dict[str, TensorInfo]) -> tuple[str, ...]:
        return "qweight" if "qweight" in tensors else "trellis", "SU", "SV"

    def describe(self, name: str, tensors: dict[str, TensorInfo]) -> ModuleInfo:
        codes = tensors[self.required_parts(tensors)[0]]
        out, columns = length(name, tensors, "SV"), length(name, tensors, "SU")
        where = f"{codes.file}: {name}"
        raw = self.quant.raw
        if codes.dtype == "I16":
            count = int(np.prod(codes.shape))
            bits = bits_of(where, count, out, columns, (raw["td_x"], raw["td_y"]), raw["V"])
        elif codes.dtype in ("I32", "I64") and len(codes.shape) == 2:
            bits = raw["K"]
        else:
            raise BridgeError(
                f"{where}: {codes.name.rpartition('.')[2]} is {codes.dtype} {list(codes.shape)}; it must be int16 "
                "streams or int32 states; the checkpoint is damaged"
            )
        self._book(where, bits, tensors.get("tlut"))
        return module_info(name, tensors, bits, 0, (out, columns))

    def _book(self, where: str, bits: int, tlut: TensorInfo | None, read: bool = False) -> BitshiftCodebook:
        """The codebook; unless `read`, with a table of zeros, which is enough to check shapes."""
        raw = self.quant.raw
        table = None
        if tlut is not None:
            table = self.store.read_float(tlut.name) if read else np.zeros(tlut.shape, np.float32)
        return BitshiftCodebook(raw["L"], bits, raw["V"], raw["tlut_bits"], raw["decode_mode"], table, name=where)

    def layer(self, name: str) -> TrellisLayer:
        tensors, where, raw = self.modules[name].tensors, self.label(name), self.quant.raw
        book = self._book(where, self.modules[name].bits, tensors.get("tlut"), read=True)
        part = self.required_parts(tensors)[0]
        codes, tile = self.part(name, part), (raw["td_x"], raw["td_y"])
        su, sv, bias = self.vector(name, "SU"), self.vector(name, "SV"), self.bias(name)
        if codes.dtype == np.int16:
            packed = raw.get("packed_for_kernel")
            return qtip_layer(where, codes, book, tile, su, sv, self._blocks(name), bias, packed)
        scale = raw.get("scale", 32.0)
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not np.isfinite(scale):
            raise BridgeError(f"{self.quant.source}: scale is {scale!r}, not a number; take the model's own config")
        return plain_layer(where, codes, book, tile, su, sv, float(scale), bias)

    def doubts(self, layer: TrellisLayer) -> tuple[str, ...]:
        book = layer.book
        swizzled = layer.step == book.K * book.V and is_swizzled(book, layer.tile)  # states of the plain layout are not
        told = self.quant.raw.get("packed_for_kernel") is False
        if told or not swizzled or not looks_random(book, layer.words):
            return ()
        return (
            f"{layer.name}: its codes look random; QTIP's first release packed tiles of 2 bits in an order that is not "
            "supported: compare some replies with those of the original model",
        )

    def _blocks(self, name: str) -> tuple[int, int]:
        """Blocks of the transforms on the input and the output side."""
        tensors = self.modules[name].tensors
        side, ranks = 0, _RANKS
        if "rcp" in tensors:
            side = self.scalar(name, "rcp")
        elif self.quant.raw.get("split_for_tp"):
            side = 1 if name.endswith(("o_proj", "down_proj")) else 2
        if side and "tp_rank" in tensors:
            ranks = self.scalar(name, "tp_rank")
        if side not in (0, 1, 2):
            raise BridgeError(f"{self.label(name)}: rcp is {side}, which must be 0, 1 or 2; the checkpoint is damaged")
        return ranks if side == 1 else 1, ranks if side == 2 else 1
