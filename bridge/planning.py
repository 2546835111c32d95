"""Makes plans: a family's or a template's outline, with the checkpoint's data looked at and every type chosen.

Types are chosen on sampled rows, where that is clear, and confirmed when the whole tensor is converted
(`bridge.execute`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_VERSION, GGUFValueType, LlamaFileType
from gguf.gguf_writer import GGUFValue

from bridge.checkpoint import Checkpoint
from bridge.cpus import usable_cpus
from bridge.errors import BridgeError
from bridge.importance import Importance
from bridge.plan import Outline, Part, Plan, PlannedTensor, number
from bridge.recipe import PRESETS, Recipe, TensorPlace, block_type
from bridge.source import Source

if TYPE_CHECKING:
    from bridge.checkpoint.grouped import GroupedTensor

_ROWS = 1024  # of a matrix, looked at together
_SAMPLED_PARTS = 3  # of a stack: first, middle, last


def outline_of(ckpt: Checkpoint, pre: str | None = None, template: str | Path | None = None) -> Outline:
    """A checkpoint's outline, by its family or a template; folds are carried out, biases of zeros left out.

    pre  overrides the recognition of the pre-tokenizer

    Raises BridgeError where the checkpoint is of no known family, incomplete, or holds a bias that llama.cpp has no
    place for.
    """
    if template is not None:
        from bridge.template import describe_template

        outline = describe_template(ckpt, template)
    else:
        from bridge.models import describe_model

        shapes = {name: info.shape for name, info in ckpt.tensors.items()}
        shapes |= {f"{module}.weight": info.shape for module, info in ckpt.modules.items()}
        config, notes = _mended(ckpt)
        outline = describe_model(config, ckpt.home, shapes, pre)
        outline.notes += notes
    for name in outline.zero_only:
        if ckpt.read_float(name).any():
            arch = outline.metadata["general.architecture"].value
            raise BridgeError(f"{name}: llama.cpp's {arch} has no such tensor, and it is not zero; it cannot be kept")
    left_out = {name for name in outline.optional if not ckpt.read_float(name).any()}
    outline.tensors = [t for t in outline.tensors if t.source not in left_out]
    Source(ckpt).check(outline.tensors)
    outline.tensors = _folded(ckpt, outline)
    return outline


def _mended(ckpt: Checkpoint) -> tuple[dict[str, Any], list[str]]:
    """config.json and notes: a head that differs from the embeddings is not tied to them, whatever it says.

    Values are compared, whether they are stored as floats or as codes, over the rows and columns that both have:
    what one has beyond is padding.
    """
    from bridge.models.wrapper import text_names

    tied = ckpt.config.get("tie_word_embeddings")
    text, _ = text_names([*ckpt.tensors, *(f"{module}.weight" for module in ckpt.modules)])
    stored = (text.get(f"{name}.weight", "").removesuffix(".weight") for name in ("lm_head", "model.embed_tokens"))
    head, embedding = (_weight(ckpt, name) if tied and name else None for name in stored)
    if head is None or embedding is None:
        return ckpt.config, []
    rows, columns = map(min, zip(head.shape, embedding.shape, strict=True))
    for start in range(0, rows, _ROWS):
        stop = min(start + _ROWS, rows)
        if not np.array_equal(head.rows(start, stop)[:, :columns], embedding.rows(start, stop)[:, :columns]):
            note = "config.json ties lm_head to the embeddings, but it is stored with other values; it is kept"
            return {**ckpt.config, "tie_word_embeddings": False}, [note]
    return ckpt.config, []


class _Weight(NamedTuple):
    """A matrix: `rows` gives float32 of the rows start..stop."""

    shape: tuple[int, ...]
    rows: Callable[[int, int], np.ndarray]


def _weight(ckpt: Checkpoint, name: str) -> _Weight | None:
    """A module's matrix, whichever way it is stored; None where there is none."""
    if name in ckpt.modules:
        t = ckpt.read_module(name)
        return _Weight(t.shape, lambda start, stop: t.dequantize(slice(start, stop)))
    info = ckpt.tensors.get(f"{name}.weight")
    if info is None or len(info.shape) != 2:
        return None
    return _Weight(info.shape, lambda start, stop: ckpt.read_float(info.name, (start, stop)))


def _folded(ckpt: Checkpoint, outline: Outline) -> list[PlannedTensor]:
    """The tensors with act-order undone where it can be: a consumer's columns and its producers' rows permuted."""
    widths = {part.module: part.shape[-1] for t in outline.tensors for part in t.parts}
    heights = {part.module: part.shape[0] for t in outline.tensors for part in t.parts}
    rows: dict[str, np.ndarray] = {}
    columns: dict[str, np.ndarray] = {}
    for fold in outline.folds:
        group = ckpt.group_order(fold.consumer) if fold.consumer in ckpt.modules else None
        if group is not None:
            # columns beyond the model's true width are padding, and will be cropped
            order = np.argsort(group[: widths[fold.consumer]], kind="stable")
            columns[fold.consumer] = order
            for producer in fold.producers:  # one that holds gate and up has the rows of both
                starts = np.arange(0, heights[producer], len(order))
                rows[producer] = (starts[:, None] + order).reshape(-1)

    def ordered(part: Part) -> Part:
        """The fold's permutation, then the architecture's; a producer's bias goes with its rows."""
        fold = rows.get(part.source.rpartition(".")[0])
        if fold is not None:
            part = replace(part, rows=fold if part.rows is None else fold[part.rows])
        return replace(part, columns=columns[part.module]) if part.module in columns else part

    return [replace(t, parts=tuple(map(ordered, t.parts))) for t in outline.tensors]


def make_plan(
    ckpt: Checkpoint,
    recipe: Recipe,
    importance: Importance,
    *,
    pre: str | None = None,
    template: str | Path | None = None,
    split_max_size: int | None = None,
    threads: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Plan:
    """What becomes of a checkpoint: every tensor with its type. Raises BridgeError as `bridge.convert` does."""
    outline = outline_of(ckpt, pre, template)
    importance.check(outline.tensors)
    chooser = _Chooser(Source(ckpt), recipe, importance, outline)
    recipe.check([t.name for t in outline.tensors if t.type is None])
    done, total = 0, sum(len(t.parts) for t in outline.tensors)
    tensors: list[PlannedTensor] = []
    with ThreadPoolExecutor(max_workers=threads or usable_cpus(), thread_name_prefix="plan") as pool:
        try:
            for tensor in pool.map(chooser.chosen, outline.tensors):
                tensors.append(tensor)
                done += len(tensor.parts)
                if progress:
                    progress(done, total, tensor.name)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    metadata = dict(outline.metadata)
    metadata["general.quantization_version"] = GGUFValue(GGML_QUANT_VERSION, GGUFValueType.UINT32)
    metadata["general.file_type"] = GGUFValue(_file_type(recipe, tensors), GGUFValueType.UINT32)
    notes = [*ckpt.notes, *outline.notes]
    if outline.unused:
        notes.append(f"not needed in GGUF and left out: {', '.join(outline.unused)}")
    return Plan(
        metadata, tensors, outline.stop, notes, None if template is None else str(template), importance.path,
        split_max_size,
    )  # fmt: skip


def rechosen(ckpt: Checkpoint, plan: Plan, recipe: Recipe, importance: Importance, name: str) -> Plan:
    """The plan with the type of one tensor chosen on all its rows: what was chosen on a sample did not hold."""
    chooser = _Chooser(Source(ckpt), recipe, importance, plan)
    tensors = [chooser.chosen(t, whole=True) if t.name == name else t for t in plan.tensors]
    return replace(plan, tensors=tensors)


@dataclass
class _Chooser:
    """Chooses types for one checkpoint."""

    source: Source
    recipe: Recipe
    importance: Importance
    outline: Outline | Plan

    def __post_init__(self) -> None:
        metadata = self.outline.metadata
        heads = number(metadata, "attention.head_count", 1)
        self._layers = number(metadata, "block_count")
        self._gqa = heads // max(1, number(metadata, "attention.head_count_kv", heads))
        self._experts = number(metadata, "expert_count")
        self._tied = all(t.name != "output.weight" for t in self.outline.tensors)

    def chosen(self, tensor: PlannedTensor, whole: bool = False) -> PlannedTensor:
        """The tensor with its type; `whole`: all rows are looked at, even where its type was chosen before."""
        if tensor.type is not None and not whole:
            return tensor
        from bridge.mapping.choose import choose

        place = self._place(tensor)
        coded = [part for part in tensor.parts if self.source.coded(part)]
        if not coded:
            return replace(tensor, type=self.recipe.wanted(place, as_codes=False).type, reason="came as floats")
        samples: list[tuple[GroupedTensor, np.ndarray | None]] = []
        wanted = self.recipe.wanted(place, as_codes=True)
        if wanted.mode != "forced" or self.recipe.actorder_type:
            samples += self._look(tensor, sampled=True)
            wanted = self.recipe.wanted(place, as_codes=True, act_order=any(not t.sequential for t, _ in samples))
        if wanted.mode == "forced" and block_type(str(wanted.type)) is None:
            return replace(tensor, type=wanted.type, reason="as floats")
        asked = None if wanted.type is None else block_type(wanted.type)

        def look(sampled: bool) -> Iterator[tuple[GroupedTensor, np.ndarray | None]]:
            return iter(samples) if sampled and not whole else self._look(tensor, sampled=False)

        choice = choose(wanted.mode, asked, look, tensor.shape[-1])
        return replace(tensor, type=choice.type, reason=choice.reason, limit=choice.limit)

    def _look(self, tensor: PlannedTensor, sampled: bool) -> Iterator[tuple[GroupedTensor, np.ndarray | None]]:
        """A tensor's parts that are codes, with the importance of their columns; or some rows of some of them."""
        coded = [i for i, part in enumerate(tensor.parts) if self.source.coded(part)]
        if sampled:
            coded = sorted({coded[0], coded[len(coded) // 2], coded[-1]})[:_SAMPLED_PARTS]
        for i in coded:
            part = tensor.parts[i]
            yield self.source.sample(part) if sampled else self.source.grouped(part), self.importance.of(tensor, i)

    def _place(self, tensor: PlannedTensor) -> TensorPlace:
        """Where a tensor stands in the model."""
        tied = tensor.kind == "token_embd" and self._tied
        return TensorPlace(
            tensor.name, tensor.kind, tensor.layer, self._layers, self._gqa, tensor.shape[-1], tied, self._experts
        )


def _file_type(recipe: Recipe, tensors: Sequence[PlannedTensor]) -> int:
    """general.file_type: the preset, or the type that most weights have."""
    name = recipe.type
    if name not in PRESETS:
        weights: dict[str, int] = {}
        for t in tensors:
            if len(t.shape) > 1 and t.kind not in ("token_embd", "output"):
                weights[str(t.type)] = weights.get(str(t.type), 0) + int(np.prod(t.shape))
        name = max(weights, key=lambda k: weights[k]) if weights else "F32"
    for candidate in (name, f"{name}_M", f"{name}_S"):
        if f"MOSTLY_{candidate}" in LlamaFileType.__members__:
            return int(LlamaFileType[f"MOSTLY_{candidate}"])
    return int(LlamaFileType.ALL_F32)
