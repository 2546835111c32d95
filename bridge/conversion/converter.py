"""Checkpoint in, GGUF out: makes the plan, or reads one, and executes it.

A type that was chosen on sampled rows is confirmed by the whole tensor. Where it does not hold (it adds more than the
plan allows), the type is chosen again on all rows and the file is begun anew; a plan that was given is executed as
it stands, and the report says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.checkpoint import Checkpoint
from bridge.checkpoint.by_name import open_by_name
from bridge.conversion.calibrate_plan import quantize_planned
from bridge.conversion.executor import Executor
from bridge.conversion.gguf_writer import GGUFOutput
from bridge.conversion.importance import Importance
from bridge.conversion.part_reader import Source
from bridge.conversion.paths import default_name, layers_of
from bridge.conversion.plan import Plan
from bridge.conversion.plan_file import load_plan, save_plan
from bridge.conversion.planner import make_plan, rechosen, with_factors
from bridge.conversion.recipe import Recipe
from bridge.conversion.report import CALIBRATED, PARTLY, REQUANTIZED, Report, TensorReport, beyond_auto
from bridge.conversion.size_budget import Budget, within_budget
from bridge.errors import BridgeError
from bridge.gguf_file.shards import shards
from bridge.models.outline import PlannedTensor
from bridge.quantize.settings import Calibration
from bridge.system.files import check_target, read_json, write_text
from bridge.system.text import percent

if TYPE_CHECKING:
    from bridge.quantize.layer_store import LayerStore

Progress = Callable[[int, int, str], None]  # (bytes of checkpoint done, of all, tensor just written: at first none)


class _Unconfirmed(Exception):
    """A tensor adds more than its type was chosen for."""

    def __init__(self, name: str) -> None:
        self.name = name


def convert(
    checkpoint: str | Path | None = None,
    out: str | Path | None = None,
    *,
    config: str | Path | None = None,
    type: str = "auto",
    output_type: str | None = None,
    token_embd_type: str | None = None,
    actorder_type: str | None = None,
    tensor_types: Sequence[tuple[str, str]] = (),
    target: str | None = None,
    detect_lattice: bool = False,
    imatrix: str | Path | None = None,
    pre: str | None = None,
    template: str | Path | None = None,
    plan: str | Path | None = None,
    shard: tuple[int, int] | None = None,
    split_max_size: int | None = None,
    calibrate: Calibration | None = None,
    budget: Budget | None = None,
    modelfile: bool = False,
    force: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Convert a GPTQ or AWQ checkpoint to a GGUF file, keeping its integer codes.

    checkpoint      a folder in Hugging Face layout, a Hub id to download (org/name, org/name@branch), or a .pt
    config          folder with config.json and tokenizer, where the checkpoint has none of its own
    out             the GGUF to write; default: the checkpoint's name and the type, in the current folder
    type            "auto", "exact", a block type ("Q4_K") or a llama.cpp preset ("Q4_K_M"); see `recipe`
    output_type, token_embd_type, actorder_type, tensor_types
                    types for the head, the embeddings, act-order tensors, and (regex, type) pairs by GGUF name
    target          "llama.cpp@11549": what must load the file; see bridge.conversion.recipe
    detect_lattice  take floats that lie on a hidden grid for the codes they were dequantized from
    imatrix         llama.cpp's GGUF importance matrix, for tensors that are quantized from floats
    pre             tokenizer.ggml.pre, where it cannot be recognised
    template        a GGUF that llama.cpp's converter made of the same model, for any architecture: names, metadata
                    and tokenizer are taken from it, and tensors that are not in the checkpoint. Or a repository on the
                    Hub that has some, org/model-GGUF: the smallest file that will do is taken
    plan            a file of `save_plan`, instead of all of the above but out; `checkpoint` is the plan's if not given
    shard           (3, 12): with a plan, the third of its twelve shards alone, as a run of the whole would write it
    split_max_size  bytes in a shard
    calibrate       quantize layers that came as floats, or cannot keep their codes, with a text (needs PyTorch and
                    transformers). Finished layers are kept in the folder `<out>.layers` until the GGUF is written:
                    a second run goes on where a killed one stopped
    budget          choose the types of tensors that are not carried so that the file fits a size; needs `calibrate`
    modelfile       also write an Ollama Modelfile beside the GGUF
    force           replace existing files
    threads         worker threads; default: the CPUs this process may use
    progress        called after each tensor

    Returns the Report; raises BridgeError for anything wrong with the input. Nothing appears under the
    final name before the whole file is on disk.
    """
    started = time.perf_counter()
    for name, count in (("threads", threads), ("split_max_size", split_max_size)):
        if count is not None and count < 1:
            raise BridgeError(f"{name} {count}: at least 1 is needed")
    recipe = Recipe(type, output_type, token_embd_type, actorder_type, tuple(tensor_types), target)
    given: Plan | None = None
    if plan is not None:
        if recipe != Recipe() or imatrix or pre or template or split_max_size or detect_lattice:
            raise BridgeError("a plan says all about types, tokenizer, template and shards; give it alone or edit it")
        given, of = load_plan(Path(plan))
        detect_lattice = given.detect_lattice
        checkpoint = of if checkpoint is None else checkpoint
    elif shard is not None:
        raise BridgeError("--shard needs --plan: what is in a shard is for the plan to say")
    if checkpoint is None:
        raise BridgeError("no checkpoint is given")
    if budget is not None:
        _check_budget(budget, recipe, given, calibrate, force)
    path = Path(out) if out is not None else Path(default_name(str(checkpoint), recipe))
    if modelfile:
        check_target(path.parent / "Modelfile", force)
    if template is not None and pre is not None:
        raise BridgeError("--pre and --template: the tokenizer is the template's; give one of the two")
    shape = template or (given.template if given else None)
    with open_by_name(checkpoint, config, needs_config=shape is None, detect_lattice=detect_lattice) as ckpt:
        source = Source(ckpt)
        inputs = _inputs(ckpt, [template, imatrix, plan] if given is None else [given.template, given.imatrix, plan])
        check_target(path, force, inputs)
        if given is not None:
            source.check(given.tensors)
        if given is not None:  # types in it may have been edited
            given.tensors = with_factors(ckpt, given.tensors)
        importance = Importance.read(given.imatrix if given else imatrix)
        chosen = given or make_plan(
            ckpt, recipe, importance, pre=pre, template=template, split_max_size=split_max_size, threads=threads
        )
        if budget is not None:
            assert calibrate is not None
            chosen = within_budget(ckpt, chosen, recipe, source, importance, calibrate, budget)
            chosen.detect_lattice = detect_lattice
            if budget.plan_out is not None:
                save_plan(chosen, str(checkpoint), budget.plan_out)
        kept: LayerStore | None = None
        calibrated: list[str] = []
        if calibrate is not None:
            kept, calibrated = quantize_planned(
                ckpt, chosen, source, importance, calibrate, layers_of(path), force, optional=budget is not None
            )
        executor = Executor(source, importance, kept.layers if kept else {}, threads)
        results: list[TensorReport] = []
        final = given is not None or budget is not None  # its types are not to be chosen again
        settled = {t.name for t in chosen.tensors} if final else set()
        while True:
            try:
                with GGUFOutput(path, chosen, force, shard, inputs) as output:
                    results = list(_written(executor, output, settled, progress))
                    files = output.finish()
                break
            except _Unconfirmed as missed:
                chosen = rechosen(ckpt, chosen, recipe, importance, missed.name)
                settled.add(missed.name)
        if kept:
            kept.remove()
        if modelfile:
            from bridge.models.modelfile import modelfile as modelfile_text

            generation = read_json(ckpt.home / "generation_config.json", optional=True)
            text = modelfile_text(chosen.metadata, chosen.stop, generation, files[0].name)
            write_text(path.parent / "Modelfile", text)
    notes = [*chosen.notes, *calibrated, *(note for t in results for note in t.notes)]
    if final:
        planned = {t.name: t for t in chosen.tensors}
        notes += [note for t in results if (note := _beyond_plan(planned[t.name], t))]
    elif recipe.promises_closeness:
        notes += [note for t in results if (note := beyond_auto(t))]
    seconds = time.perf_counter() - started
    return Report(str(checkpoint), ckpt.format, files, results, ckpt.nbytes, seconds, notes)


def _check_budget(
    budget: Budget, recipe: Recipe, given: Plan | None, calibrate: Calibration | None, force: bool
) -> None:
    """BridgeError where a budget does not go with the other options."""
    if given is not None:
        raise BridgeError("a plan says every type; give a size budget without --plan, or the plan alone")
    if recipe.type != "auto":
        raise BridgeError(f"a size budget chooses the types, and {recipe.type} is one; --tensor-type gives single ones")
    if calibrate is None or calibrate.text is None or calibrate.method not in ("gptaq", "gptq"):
        raise BridgeError("a size budget is measured with a text and gptaq or gptq: give --calibrate FILE")
    if budget.plan_out is not None:
        check_target(budget.plan_out, force)


def _written(
    executor: Executor, output: GGUFOutput, settled: Collection[str], progress: Progress | None
) -> Iterator[TensorReport]:
    """Makes and writes an output's tensors; raises _Unconfirmed where one that is not settled is beyond its limit."""
    done = 0
    total = sum(executor.source.nbytes(t) for t in output.tensors)
    if progress:
        progress(0, total, "")
    for tensor, result in zip(output.tensors, executor.results(output.tensors), strict=True):
        if tensor.name not in settled and _beyond(tensor, result.report):
            raise _Unconfirmed(tensor.name)
        output.write(result.data)
        yield result.report
        done += executor.source.nbytes(tensor)
        if progress:
            progress(done, total, tensor.name)


def _beyond(tensor: PlannedTensor, report: TensorReport) -> bool:
    """Whether a tensor adds more than the plan lets it, or lost codes that it was to carry."""
    from bridge.encode.type_choice import must_keep  # loads Numba

    if tensor.limit is None or report.fidelity is None or report.how == CALIBRATED:
        return False
    lost = report.how == REQUANTIZED or (report.how == PARTLY and report.type != "Q8_0")
    return report.fidelity.share > tensor.limit or (lost and must_keep(tensor.limit))


def _beyond_plan(tensor: PlannedTensor, report: TensorReport) -> str | None:
    if not _beyond(tensor, report):
        return None
    assert tensor.limit is not None
    assert report.fidelity is not None
    share, limit = percent(report.fidelity.share), percent(tensor.limit)
    return f"{tensor.name}: adds {share} of the checkpoint's noise, the plan meant at most {limit}"


def plan_checkpoint(
    checkpoint: str | Path,
    *,
    config: str | Path | None = None,
    out: str | Path | None = None,
    type: str = "auto",
    output_type: str | None = None,
    token_embd_type: str | None = None,
    actorder_type: str | None = None,
    tensor_types: Sequence[tuple[str, str]] = (),
    target: str | None = None,
    detect_lattice: bool = False,
    imatrix: str | Path | None = None,
    pre: str | None = None,
    template: str | Path | None = None,
    split_max_size: int | None = None,
    force: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Plan:
    """What `convert` would do with these arguments; `out`: also write it there as JSON, for `convert(plan=...)`.

    Raises BridgeError as `convert` does.
    """
    if out is not None:
        check_target(Path(out), force)
    recipe = Recipe(type, output_type, token_embd_type, actorder_type, tuple(tensor_types), target)
    if template is not None and pre is not None:
        raise BridgeError("--pre and --template: the tokenizer is the template's; give one of the two")
    with open_by_name(checkpoint, config, needs_config=template is None, detect_lattice=detect_lattice) as ckpt:
        plan = make_plan(
            ckpt, recipe, Importance.read(imatrix), pre=pre, template=template, split_max_size=split_max_size,
            threads=threads, progress=progress,
        )  # fmt: skip
        plan.detect_lattice = detect_lattice
    if out is not None:
        save_plan(plan, str(checkpoint), Path(out))
    return plan


def _inputs(ckpt: Checkpoint, others: Sequence[str | Path | None]) -> list[Path]:
    """The files that a conversion reads: whatever --force may replace, these must stay."""
    files = [*ckpt.files, *ckpt.home.glob("*.json")]
    for path in (Path(other) for other in others if other is not None):
        files += shards(path) if path.suffix == ".gguf" else [path]
    return files
