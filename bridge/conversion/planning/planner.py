"""Makes plans: a family's or a template's outline, with the checkpoint's data looked at, every type chosen, and what
happens to every part.

Both are judged by sampled rows where those tell, else by all rows. A type is confirmed when the whole tensor has been
converted (`holds`), and chosen again on all rows where it does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from gguf import GGML_QUANT_VERSION, GGUFValueType, LlamaFileType
from gguf.gguf_writer import GGUFValue

from bridge.blocks import FP4, MATRIX_SCALED, ROUNDED, TYPES, BlockType
from bridge.blocks.integers.q2_0 import Q2_0
from bridge.blocks.read import CALIBRATED, WRITTEN
from bridge.blocks.small.mxfp4 import MXFP4
from bridge.blocks.small.nvfp4 import NVFP4
from bridge.blocks.small.tq2_0 import TQ2_0
from bridge.blocks.tensor_types import FLOAT_TYPES
from bridge.checkpoint import Checkpoint
from bridge.checkpoint.grouped import CodedTensor
from bridge.conversion.gguf_input.gguf_checkpoint import GgufCheckpoint
from bridge.conversion.planning.checkpoint_outline import outline_of
from bridge.conversion.planning.importance import Importance
from bridge.conversion.planning.matrix_scales import is_multiplied
from bridge.conversion.planning.metadata import with_given
from bridge.conversion.planning.mmproj import tower_notes, tower_outline
from bridge.conversion.planning.options import PlanOptions
from bridge.conversion.planning.part_reader import PartReader
from bridge.conversion.planning.plan import QUANTIZED, How, Plan, PlannedTensor, main_type, unmet_notes
from bridge.conversion.planning.recipe import PRESETS, Q2_0_SINCE, Recipe, TensorPlace, Unmet, as_pairs
from bridge.encode.carrying.carry import Fidelity, obstacle
from bridge.encode.type_choice import Choice, carries, choose, must_carry
from bridge.errors import BridgeError, parameter
from bridge.models.outline import ModelTensor, Outline, OutlineTensor, Part, number, tied
from bridge.quantize.settings import Calibration
from bridge.system.cpu.cpus import usable_cpus
from bridge.system.progress import Progress

AnyTensor = TypeVar("AnyTensor", bound=ModelTensor)

_SAMPLED_PARTS = 3  # of a stack: first, middle, last


def make_plan(
    ckpt: Checkpoint,
    options: PlanOptions,
    importance: Importance,
    calibration: Calibration | None = None,
    progress: Progress | None = None,
) -> Plan:
    """What becomes of a checkpoint: every tensor with its type. Raises BridgeError as `bridge.convert` does.

    calibration  how floats and codes that cannot be carried are quantized with a text; None: without
    """
    outline = outline_of(ckpt, options.pre, options.template, options.no_mtp, options.target_model)
    tower = tower_outline(ckpt, options.mmproj_type) if options.mmproj_type != "none" else None
    importance.check(outline.tensors)
    planner = Planner(ckpt, options, importance, outline, calibration)
    options.check([t.name for t in outline.tensors if t.fixed_type is None])
    tensors = planner.each(planner.planned, outline.tensors, progress)
    metadata = _with_types(with_given(outline.metadata, as_pairs(options.metadata)), _file_type(options, tensors))
    asked = None if options.mmproj_type == "none" else options.mmproj_type
    notes = [*ckpt.notes, *tower_notes(outline.others, tower, asked), *outline.notes, *unmet_notes(tensors)]
    if options.output_type and options.token_embd_type and tied(outline.tensors):
        notes.append(
            f"the embeddings are the output head too: {parameter('output_type')} decides on them, as in llama.cpp, and "
            f"{parameter('token_embd_type')} is not used"
        )
    notes += newer_notes(tensors, options)
    hows = {how for t in tensors for how in t.how} - {"as it came"}
    if options.promises_closeness and calibration is None and hows == {"rounded"} and not planner.keeps_types:
        notes.append(
            "all weights came as floats and become Q8_0; for a smaller file, give a text to `gguf-bridge quantize`, or "
            f"{parameter('type', 'Q4_K_M')}"
        )
    if isinstance(ckpt, GgufCheckpoint):
        quantized = [part for t in tensors for part, how in zip(t.parts, t.how, strict=True) if how in QUANTIZED]
        floats = {ckpt.stored_as(part.source) for part in quantized if not planner.reader.coded(part)}
        if lossy := sorted(floats - {*FLOAT_TYPES}):
            notes.append(
                f"the GGUF has {', '.join(lossy)}: what is quantized again is compared with that, not with floats"
            )
    if outline.unused:
        notes.append(f"not needed in GGUF and left out: {', '.join(outline.unused)}")
    return Plan(
        metadata, tensors, outline.stop, notes, None if options.template is None else str(options.template),
        importance.path, options.split_max_size, options.detect_lattice, None if tower is None else asked,
    )  # fmt: skip


def newer_notes(tensors: Sequence[PlannedTensor], options: Recipe) -> list[str]:
    """A note that earlier builds of llama.cpp cannot load the file, where that is so and no build was named."""
    if options.uses_q2_0 is not None or all(t.type != "Q2_0" for t in tensors):
        return []
    return [f"llama.cpp has Q2_0 since build {Q2_0_SINCE} (July 2026): earlier ones cannot load this file"]


def plan_tower(ckpt: Checkpoint, type: str, threads: int | None = None) -> Plan | None:
    """What becomes of a checkpoint's vision tower, its matrices of a type; None where it has none that is known."""
    outline = tower_outline(ckpt, type)
    if outline is None:
        return None
    planner = Planner(ckpt, PlanOptions(threads=threads), Importance({}), outline)
    file_type = LlamaFileType.ALL_F32 if type == "F32" else LlamaFileType[f"MOSTLY_{type}"]
    return Plan(_with_types(outline.metadata, file_type), planner.each(planner.planned, outline.tensors))


def _with_types(metadata: Mapping[str, GGUFValue], file_type: int) -> dict[str, GGUFValue]:
    """The metadata with what says how tensors are quantized; the file's type is one of LlamaFileType."""
    types = {"general.quantization_version": GGML_QUANT_VERSION, "general.file_type": int(file_type)}
    return {**metadata, **{key: GGUFValue(number, GGUFValueType.UINT32) for key, number in types.items()}}


def holds(tensor: PlannedTensor, fidelity: Fidelity | None) -> bool:
    """Whether a converted tensor adds no more than the plan lets it, and has kept the codes that it was to carry."""
    if tensor.limit is None or fidelity is None or "calibrated" in tensor.how:
        return True
    lost = (
        must_carry(tensor.limit)
        and fidelity.kept < fidelity.weights
        and not (fidelity.kept and WRITTEN[tensor.type].clips)
    )
    return fidelity.share <= tensor.limit and not lost


@dataclass
class Planner:
    """Chooses types for one checkpoint, and what happens to each part.

    model        the outline or plan whose metadata and tensors describe the model
    calibration  see `make_plan`
    keeps_types  whether tensors keep their types: those of a quantized GGUF, where none is asked for
    """

    ckpt: Checkpoint
    options: PlanOptions
    importance: Importance
    model: Outline | Plan
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        metadata = self.model.metadata
        heads = number(metadata, "attention.head_count", 1)
        self.reader = PartReader(self.ckpt)
        self._layers = number(metadata, "block_count")
        self._gqa = heads // max(1, number(metadata, "attention.head_count_kv", heads))
        self._experts = number(metadata, "expert_count")
        self._tied = tied(self.model.tensors)
        gguf = isinstance(self.ckpt, GgufCheckpoint) and self.ckpt.quantized
        self.keeps_types = gguf and self.options.type in ("auto", "exact")

    def each(
        self, work: Callable[[AnyTensor], PlannedTensor], tensors: Sequence[AnyTensor], progress: Progress | None = None
    ) -> list[PlannedTensor]:
        """`work` of every tensor, several at a time."""
        done, total = 0, sum(len(t.parts) for t in tensors)
        results: list[PlannedTensor] = []
        workers = self.options.threads or usable_cpus()
        if progress:
            progress(0, total, "")
        with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="plan") as pool:
            try:
                for tensor in pool.map(work, tensors):
                    results.append(tensor)
                    done += len(tensor.parts)
                    if progress:
                        progress(done, total, tensor.name)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return results

    def planned(self, tensor: OutlineTensor) -> PlannedTensor:
        if tensor.fixed_type is not None:
            reasons = {"config": "made from the config", "template": "the template's"}
            reason = reasons.get(tensor.origin, "as it is")
            return self._with(tensor, Choice(tensor.fixed_type, reason), quantizable=False)
        return self._with(tensor, *self._choice(tensor, all_rows=False))

    def chosen_again(self, tensor: PlannedTensor) -> PlannedTensor:
        """The tensor with a type chosen on all its rows: the one that sampled rows suggested did not hold."""
        return self._with(tensor, *self._choice(tensor, all_rows=True))

    def with_type(self, tensor: PlannedTensor, type: str, reason: str, limit: float | None = None) -> PlannedTensor:
        return self._with(tensor, Choice(type, reason, limit), quantizable=tensor.quantizable)

    def completed(self, tensor: PlannedTensor) -> PlannedTensor:
        """A tensor of a plan that was read, with `how` where its type was edited; BridgeError where `how` cannot be.

        What is not carried is calibrated if this run has a text, whether or not the plan was made with one.
        """
        if len(tensor.how) != len(tensor.parts):
            return self.with_type(tensor, tensor.type, tensor.reason, tensor.limit)
        hows: list[How] = []
        for part, how in zip(tensor.parts, tensor.how, strict=True):
            ways = self._ways(part, tensor.type)
            without_text = ways[-1] if how == "calibrated" and ways[-1] in QUANTIZED else how
            if without_text not in ways:
                raise BridgeError(
                    f"{tensor.name}: {part.source} cannot become {tensor.type} {how!r}; choose {' or '.join(ways)}"
                )
            hows.append(self._with_text(tensor, part, tensor.type, without_text, tensor.quantizable))
        self._check(tensor, tensor.type, hows)
        return replace(tensor, how=tuple(hows))

    def chooses(self, tensor: PlannedTensor) -> bool:
        """Whether the tensor's type was chosen by the error it adds, and not by the user or the model's family."""
        place = self._place(tensor)
        asked = self.options.explicit(place.name, place.kind, place.tied) or self.options.actorder_type
        free = asked is None and not self.keeps_types
        return tensor.quantizable and self.options.type in ("auto", "exact") and free

    def retyped(self, plan: Plan, types: Mapping[str, tuple[str, str]]) -> Plan:
        """The plan with other types for some tensors: by name, the type and the reason."""
        tensors = [self.with_type(t, *types[t.name]) if t.name in types else t for t in plan.tensors]
        file_type = GGUFValue(_file_type(self.options, tensors), GGUFValueType.UINT32)
        return replace(plan, tensors=tensors, metadata={**plan.metadata, "general.file_type": file_type})

    def carries(self, tensor: ModelTensor, number: int, type: str) -> bool:
        """Whether one of a tensor's parts keeps its codes in a type."""
        part, block = tensor.parts[number], WRITTEN.get(type)
        if block is None or not self.reader.coded(part):
            return False
        return carries(
            lambda sampled: self.reader.sample(part) if sampled else self.reader.grouped(part),
            block,
            self.importance.of(tensor, number),
        )

    def calibrates(self, tensor: ModelTensor, part: Part, type: str) -> bool:
        """Whether a text chooses the codes of a part in a type, if it does not keep those that it has."""
        if self.calibration is None or part.layer is None or type not in TYPES | CALIBRATED:
            return False
        if type in FP4 and tensor.kind == "token_embd":
            return False
        # rtn: matrices of 3-D tensors are rounded when they are written
        matrix = part.layer in self.ckpt.modules or f"{part.layer}.weight" in self.ckpt.tensors
        if self.calibration.method == "rtn" and not matrix:
            return False
        return self.calibration.reaches(tensor.kind, tensor.layer, type)

    def _with(
        self, tensor: ModelTensor, choice: Choice, unmet: Unmet | None = None, quantizable: bool = True
    ) -> PlannedTensor:
        how = tuple(self._how(tensor, i, choice, quantizable) for i in range(len(tensor.parts)))
        self._check(tensor, choice.type, how)
        return PlannedTensor(
            tensor.name, tensor.shape, tensor.parts, tensor.data, tensor.origin, type=choice.type, how=how,
            reason=choice.reason, limit=choice.limit, quantizable=quantizable, unmet=unmet,
        )  # fmt: skip

    def _check(self, tensor: ModelTensor, type: str, how: Sequence[How]) -> None:
        """Raise BridgeError if a tensor cannot be rounded to the type: some types need a calibration text, some cannot
        use one, some need an imatrix."""
        floats = {way for part, way in zip(tensor.parts, how, strict=True) if not self.reader.coded(part)}
        mixed = len(tensor.shape) == 2 and "carried" in how  # one scale for both
        if type in FP4 and ("rounded" in floats or (mixed and "calibrated" in floats)):
            raise BridgeError(
                f"{tensor.name}: floats are rounded to {type} in whole matrices of layers and in the output head, with "
                f"a calibration text; give {parameter('calibrate')}, or choose another type, such as Q4_0"
            )
        rounded = [i for i, way in enumerate(how) if way not in ("carried", "calibrated")]
        if not rounded or type not in ROUNDED or tensor.kind == "token_embd":
            return
        if self.calibration is not None and self.calibration.reaches(tensor.kind, tensor.layer, type):
            if type in CALIBRATED:
                return
            raise BridgeError(
                f"{tensor.name}: no text can choose codes of {type}; choose another type, such as Q4_K or Q2_K, or "
                f"leave out {parameter('calibrate')} and round to it with {parameter('imatrix')}"
            )
        if not WRITTEN[type].needs_imatrix or tensor.kind == "output":
            return
        if any(self.importance.of(tensor, i) is None for i in rounded):
            missing = "the imatrix does not have it" if self.importance.by_name else "there is none"
            raise BridgeError(
                f"{tensor.name}: weights are rounded to {type} with an imatrix only, as in llama.cpp, and {missing}; "
                f"give {parameter('imatrix')} (`gguf-bridge quantize --imatrix-out` writes one), or choose IQ3_S, "
                "IQ4_XS or a K-quant"
            )

    def _how(self, tensor: ModelTensor, number: int, choice: Choice, quantizable: bool) -> How:
        """What happens to a part."""
        part = tensor.parts[number]
        ways = self._ways(part, choice.type)
        carried = len(ways) > 1 and (must_carry(choice.limit) or self.carries(tensor, number, choice.type))
        return self._with_text(tensor, part, choice.type, ways[0] if carried else ways[-1], quantizable)

    def _with_text(self, tensor: ModelTensor, part: Part, type: str, how: How, quantizable: bool) -> How:
        """What happens to a part, given what would happen without a text."""
        return "calibrated" if how in QUANTIZED and quantizable and self.calibrates(tensor, part, type) else how

    def _ways(self, part: Part, type: str) -> tuple[How, ...]:
        """What can happen to a part on its way to a type, without a text."""
        block = type in WRITTEN
        if not self.reader.coded(part):
            return ("rounded",) if block and type != self.reader.stored_as(part) else ("as it came",)
        return ("carried", "requantized") if block else ("requantized",)

    def _choice(self, tensor: ModelTensor, all_rows: bool) -> tuple[Choice, Unmet | None]:
        """The type of a tensor, and see `PlannedTensor.unmet`; `all_rows`: judged by them, not by samples."""
        place = self._place(tensor)
        coded = [part for part in tensor.parts if self.reader.coded(part)]
        if not coded:
            if self.keeps_types and self.options.explicit(place.name, place.kind, place.tied) is None:
                if any(part.source in self.ckpt.merged for part in tensor.parts):
                    stored_type = self.ckpt.store.tensors[tensor.parts[0].source].dtype
                    merged = stored_type if stored_type in (*WRITTEN, *FLOAT_TYPES) else "Q8_0"
                    return Choice(merged, "merged with the adapter"), None
                return Choice(self.reader.stored_as(tensor.parts[0]), "as it is"), None
            calibrated, imatrix = self.calibration is not None, bool(self.importance.by_name)
            wanted = self.options.wanted(place, as_codes=False, calibrated=calibrated, imatrix=imatrix)
            return Choice(str(wanted.type), "came as floats"), wanted.unmet
        samples: list[tuple[CodedTensor, np.ndarray | None]] = []
        wanted = self.options.wanted(place, as_codes=True)
        if wanted.mode != "forced" or self.options.actorder_type:
            samples += self._read_parts(tensor, sampled=True)
            wanted = self.options.wanted(place, as_codes=True, act_order=any(not t.sequential for t, _ in samples))
        asked = WRITTEN.get(str(wanted.type))
        if wanted.mode == "forced" and asked is None:
            return Choice(str(wanted.type), "as floats"), wanted.unmet

        def read_parts(sampled: bool) -> Iterator[tuple[CodedTensor, np.ndarray | None]]:
            return iter(samples) if sampled and not all_rows else self._read_parts(tensor, sampled=False)

        if asked is not None and wanted.mode == "forced" and asked.name in FP4:
            self._check_fp4(tensor, asked.name, [t for t, _ in samples or self._read_parts(tensor, sampled=True)])
        choice = choose(wanted.mode, asked, read_parts, tensor.shape[-1], self._extra_types(tensor, wanted.mode))
        smaller = wanted.unmet is not None and WRITTEN[choice.type].bpw <= WRITTEN[wanted.unmet.type].bpw
        return choice, None if smaller else wanted.unmet

    def _read_parts(self, tensor: ModelTensor, sampled: bool) -> Iterator[tuple[CodedTensor, np.ndarray | None]]:
        """A tensor's parts that are codes, with the importance of their columns; or some rows of some of them."""
        coded = [i for i, part in enumerate(tensor.parts) if self.reader.coded(part)]
        if sampled:
            coded = sorted({coded[0], coded[len(coded) // 2], coded[-1]})[:_SAMPLED_PARTS]
        for i in coded:
            part = tensor.parts[i]
            yield self.reader.sample(part) if sampled else self.reader.grouped(part), self.importance.of(tensor, i)

    def _extra_types(self, tensor: ModelTensor, mode: str) -> list[BlockType]:
        """The types beyond BLOCKS that the tensor may become, the smallest first."""
        known = self.options.uses_q2_0
        q2_0 = [Q2_0] if known or (known is None and mode == "exact") else []
        if not all(map(self.reader.coded, tensor.parts)):
            return [TQ2_0, *q2_0]
        return [TQ2_0, *q2_0, MXFP4, *([NVFP4] if self._holds_nvfp4(tensor) else [])]

    def _holds_nvfp4(self, tensor: ModelTensor) -> bool:
        """Whether llama.cpp has a place for the scales of all parts and computes with them: one for a matrix, one an
        expert, none for an embedding."""
        factors = [self.ckpt.tensor_scales(part.module) for part in tensor.parts if self.reader.coded(part)]
        scales = [f.get("scale", 1.0) for f in factors]
        if all(scale == 1 for scale in scales):
            return True
        if not is_multiplied(self.model.metadata, tensor):
            return False
        return len(set(scales)) == 1 or (len(tensor.shape) == 3 and len(tensor.parts) == tensor.shape[0])

    def _check_fp4(self, tensor: ModelTensor, asked: str, samples: Sequence[CodedTensor]) -> None:
        """BridgeError where a tensor cannot become the type of 4-bit floats that is asked for."""
        reason = next((why for t in samples if (why := obstacle(t, FP4[asked]))), None)
        if reason is None and asked in MATRIX_SCALED and not self._holds_nvfp4(tensor):
            reason = "llama.cpp does not compute with its scale"
        if reason is not None:
            raise BridgeError(f"{tensor.name}: cannot become {asked}, {reason}; choose another type for it")

    def _place(self, tensor: ModelTensor) -> TensorPlace:
        """Where a tensor is in the model."""
        tied = tensor.kind == "token_embd" and self._tied
        return TensorPlace(
            tensor.name, tensor.kind, tensor.layer, self._layers, self._gqa, tensor.shape[-1], tied, self._experts,
            str(self.model.metadata["general.architecture"].value),
        )  # fmt: skip


def _file_type(recipe: Recipe, tensors: Sequence[PlannedTensor]) -> int:
    """general.file_type: the preset, or the type that most weights have."""
    name = recipe.type if recipe.type in PRESETS else main_type(tensors)
    if name == "Q2_0":  # which the gguf package does not know yet
        return 41
    for candidate in (name, f"{name}_M", f"{name}_S", f"{name}_MOE"):
        if f"MOSTLY_{candidate}" in LlamaFileType.__members__:
            return int(LlamaFileType[f"MOSTLY_{candidate}"])
    return int(LlamaFileType.ALL_F32)
