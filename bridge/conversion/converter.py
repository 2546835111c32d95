"""Checkpoint in, GGUF out: makes the plan, or reads one, and executes it.

A type that was chosen on sampled rows is confirmed by the whole tensor. Where it does not hold (it adds more than the
plan allows), the type is chosen again on all rows before the tensor is written. Types of a plan that was given, or of a
size budget, are not chosen again; the report tells where they do not hold.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from bridge.checkpoint import Checkpoint
from bridge.checkpoint.adapter import read_adapter
from bridge.conversion.calibrate_plan import measured_importance, quantize_planned
from bridge.conversion.gguf_input.gguf_checkpoint import open_source
from bridge.conversion.merging import merged
from bridge.conversion.paths import default_path, files_of, layers_of, other_outputs, with_checkpoint
from bridge.conversion.planning.checkpoint_outline import outline_of
from bridge.conversion.planning.importance import Importance
from bridge.conversion.planning.matrix_scales import with_scales
from bridge.conversion.planning.mmproj import mmproj_path
from bridge.conversion.planning.options import ConvertKeywords, ConvertOptions, PlanKeywords, PlanOptions
from bridge.conversion.planning.plan import Plan, PlannedTensor, main_type
from bridge.conversion.planning.plan_file import save_plan, save_tensor_types
from bridge.conversion.planning.plan_reader import load_plan
from bridge.conversion.planning.planner import Planner, holds, make_plan, plan_tower
from bridge.conversion.planning.recipe import PRESETS
from bridge.conversion.size_budget import within_budget
from bridge.conversion.writing.executor import Executor
from bridge.conversion.writing.gguf_writer import GGUFOutput
from bridge.conversion.writing.report import Report, TensorReport, beyond_auto, far_off
from bridge.errors import BridgeError
from bridge.quantize.run.calibration_text import with_length
from bridge.quantize.settings import Calibration
from bridge.system.cpu.row_threads import thread_limit
from bridge.system.kernels import compiling
from bridge.system.options import checked
from bridge.system.progress import Progress
from bridge.system.report import check_report
from bridge.system.storage.files import read_json, write_text
from bridge.system.storage.outputs import ProtectedPaths, check_outputs
from bridge.system.text import percent


@checked
def convert(
    checkpoint: str | Path | None = None,
    out: str | Path | None = None,
    *,
    progress: Progress | None = None,
    **options: Unpack[ConvertKeywords],
) -> Report:
    """Convert a quantized checkpoint to a GGUF file, carrying its integer codes, or a GGUF to other types.

    checkpoint  a folder in Hugging Face layout, a Hub id to download (org/name, org/name@branch), a .pt, or a
                GGUF; None: the checkpoint that `plan` names
    out         the GGUF to write; None: the checkpoint's name and the type, in the current folder
    progress    called with the bytes of the checkpoint that are done, with all its bytes, and with the name of the
                tensor that was just written
    options     fields of `bridge.conversion.planning.options.ConvertOptions`, such as type="Q4_K",
                template="model-f16.gguf", calibrate=Calibration("text.txt"),
                budget=Budget(size=4_200_000_000), force=True

    The GGUF appears under its name when the whole file is on disk. With `calibrate`, finished layers are stored in the
    folder `<out>.layers` until then, and a second run continues where an interrupted one stopped.

    Returns a `bridge.conversion.writing.report.Report` with the error of each tensor. Raises BridgeError where the
    checkpoint is missing, damaged or of an unknown kind, where options contradict each other or do not fit it, where
    `out` exists and `force` is not given, and where the disk is full.
    """
    return convert_as(checkpoint, out, ConvertOptions(**options), progress)


@thread_limit()
def convert_as(
    checkpoint: str | Path | None,
    out: str | Path | None,
    options: ConvertOptions,
    progress: Progress | None = None,
    save_as: Path | None = None,
) -> Report:
    """`convert` with its options in one object; `save_as`: where the caller will save the Report, checked first."""
    started, compiled = compiling.clock(), compiling.seconds()
    given_plan: Plan | None = None
    if options.plan is not None:
        given_plan, planned_of = load_plan(Path(options.plan))
        checkpoint = planned_of if checkpoint is None else checkpoint
    if checkpoint is None:
        raise BridgeError("no checkpoint is given")
    path = Path(out) if out is not None else None
    if path is None and options.budget is not None:
        path = default_path(str(checkpoint))
    template = options.template if given_plan is None else given_plan.template
    imatrix = options.imatrix if given_plan is None else given_plan.imatrix
    texts = options.calibrate.files if options.calibrate else []
    adapter = None if options.merge is None else read_adapter(options.merge)
    reads = ProtectedPaths().with_files(files_of(template, imatrix, options.plan, *texts))
    also = other_outputs(path.parent if path is not None else Path(), options)

    def check_all(path: Path | None, protected: ProtectedPaths) -> None:
        check_outputs([path, *also], options.force, protected)
        if save_as is not None:
            check_report(save_as, protected.with_files([*([path] if path is not None else []), *also]))

    check_all(path, reads)
    with open_source(
        checkpoint, options.config, needs_config=template is None,
        detect_lattice=options.detect_lattice if given_plan is None else given_plan.detect_lattice,
        by_family=bool(options.calibrate or adapter) or (given_plan is not None and not given_plan.by_gguf_names),
    ) as ckpt, merged(ckpt, adapter, template) as home:  # fmt: skip
        options = options.for_source(coded=bool(ckpt.modules))
        reads = with_checkpoint(reads, ckpt)
        check_all(path, reads)
        calibrate, importance, notes = _measured(ckpt, options, imatrix, given_plan)
        calibration = calibrate if calibrate is not None and calibrate.chooses_codes else None
        tower, beside = _tower(ckpt, options, given_plan), list[Path]()
        if tower is not None and path is not None:
            beside = [mmproj_path(path)]
            check_outputs(beside, options.force, reads.with_files([path, *also]))
        plan = make_plan(ckpt, options, importance, calibration) if given_plan is None else given_plan
        planner = Planner(ckpt, options, importance, plan, calibration)
        if given_plan is not None:
            planner.reader.check(given_plan.tensors)
            plan = replace(given_plan, tensors=planner.each(planner.completed, given_plan.tensors))
        if path is None:
            path = default_path(str(checkpoint), options.type if options.type in PRESETS else main_type(plan.tensors))
            check_all(path, reads)
            beside = [] if tower is None else [mmproj_path(path)]
        layers = None
        if options.budget is not None:
            assert calibrate is not None
            plan = within_budget(plan, planner, calibrate, options.budget, path)
            if options.budget.plan_out is not None:
                save_plan(plan, str(checkpoint), Path(options.budget.plan_out))
            if options.budget.tensor_types_out is not None:
                save_tensor_types(plan, Path(options.budget.tensor_types_out))
        if calibration is not None:
            optional = options.budget is not None
            plan, layers, more = quantize_planned(
                ckpt, plan, planner.reader, calibration, layers_of(path), options.force, optional
            )
            planner = replace(planner, calibration=None)  # what is chosen again has no layer
            notes += more
            if calibration.blocks is not None:
                seconds = compiling.clock() - started
                return Report([], seconds, str(checkpoint), ckpt.format, [], ckpt.nbytes, notes=notes, home=home)
        executor = Executor(planner.reader, importance, layers.layers if layers else {}, options.threads, path)
        chooses = given_plan is None and options.budget is None
        full_plan = with_scales(ckpt, plan)
        with ExitStack() as stack:
            protected = reads.with_files([*also, *beside])
            output = stack.enter_context(GGUFOutput(path, full_plan, options.force, options.shard, protected))
            outputs, seen = [output], list[TensorReport]()
            if tower is not None:
                protected = reads.with_files([*also, path])
                outputs.append(stack.enter_context(GGUFOutput(beside[0], tower, options.force, None, protected)))
                seen = list(_written(executor, outputs[1], None, None))
            results = list(_written(executor, output, planner if chooses else None, progress))
            files = [file for each in outputs for file in each.finish()]
        if layers:
            layers.remove()
        if options.modelfile:
            _write_modelfile(ckpt, plan, files[0], [file.name for file in beside])
    notes = [*plan.notes, *notes, *(note for t in [*results, *seen] for note in t.notes)]
    if not chooses:
        planned = {t.name: t for t in full_plan.tensors}
        notes += [note for t in results if (note := _beyond_plan(planned[t.name], t))]
    promised = chooses and options.promises_closeness
    notes += [note for t in results if (note := far_off(t, promised))]
    compiled = compiling.seconds() - compiled
    seconds = compiling.clock() - started + compiled
    blocks = layers.blocks if layers else []
    return Report(
        files, seconds, str(checkpoint), ckpt.format, [*results, *seen], ckpt.nbytes,
        compile_seconds=compiled, notes=notes, home=home, blocks=blocks,
    )  # fmt: skip


def _measured(
    ckpt: Checkpoint, options: PlanOptions, imatrix: str | Path | None, given_plan: Plan | None
) -> tuple[Calibration | None, Importance, list[str]]:
    """How to calibrate, the importance of columns, from a file or measured here, and notes."""
    importance = Importance.read(imatrix, ckpt)
    if options.calibrate is None:
        return None, importance, []
    if options.calibrate.files:
        from bridge.quantize.text.texts import check_text

        for text in options.calibrate.files:
            check_text(text)
    calibrate, notes = with_length(ckpt, options.calibrate)
    if calibrate.method == "imatrix":
        outline = given_plan or outline_of(ckpt, options.pre, options.template, options.no_mtp, options.target_model)
        importance = measured_importance(ckpt, outline.tensors, calibrate)
    return calibrate, importance, notes


def _tower(ckpt: Checkpoint, options: ConvertOptions, given_plan: Plan | None) -> Plan | None:
    """What becomes of the vision tower, if this run writes it: of several shards, the one with the first."""
    type = options.mmproj_type if given_plan is None else given_plan.mmproj_type
    if type in (None, "none") or (options.shard is not None and options.shard[0] != 1):
        return None
    return plan_tower(ckpt, str(type), options.threads)


def _written(
    executor: Executor, output: GGUFOutput, planner: Planner | None, progress: Progress | None
) -> Iterator[TensorReport]:
    """Makes and writes an output's tensors; the planner, if there is one, chooses types that do not hold again."""
    done = 0
    total = sum(executor.reader.nbytes(t) for t in output.tensors)
    if progress:
        progress(0, total, "")
    for tensor, result in zip(output.tensors, executor.results(output.tensors), strict=True):
        if planner is not None and not holds(tensor, result.report.fidelity):
            tensor = planner.chosen_again(tensor)
            result = executor.make(tensor)
        if planner is not None and beyond_auto(result.report) and planner.chooses(tensor):
            why = f"values beyond what {tensor.type}'s half-precision scales reach"
            tensor = planner.with_type(tensor, "BF16", why)
            result = executor.make(tensor)
        output.write(result.data, tensor)
        yield result.report
        done += executor.reader.nbytes(tensor)
        if progress:
            progress(done, total, tensor.name)


def _beyond_plan(tensor: PlannedTensor, report: TensorReport) -> str | None:
    if holds(tensor, report.fidelity):
        return None
    assert tensor.limit is not None
    assert report.fidelity is not None
    share, limit = percent(report.fidelity.share), percent(tensor.limit)
    return f"{tensor.name}: adds {share} of the checkpoint's noise, the plan allows {limit}"


def _write_modelfile(ckpt: Checkpoint, plan: Plan, file: Path, beside: list[str]) -> None:
    """An Ollama Modelfile next to the GGUF."""
    from bridge.models.ollama.modelfile import modelfile

    generation = read_json(ckpt.home / "generation_config.json", optional=True)
    write_text(file.parent / "Modelfile", modelfile(plan.metadata, plan.stop, generation, [file.name, *beside]))


@checked
def plan_checkpoint(
    checkpoint: str | Path,
    *,
    out: str | Path | None = None,
    progress: Progress | None = None,
    **options: Unpack[PlanKeywords],
) -> Plan:
    """What `convert` would do with these options; `out`: also write it there as JSON, for `convert(plan=...)`.

    options   fields of `bridge.conversion.planning.options.PlanOptions`
    progress  called with the number of the checkpoint's matrices that have a type, of how many, and the tensor

    Raises BridgeError as `convert` does.
    """
    return plan_as(checkpoint, out, PlanOptions(**options), progress)


@thread_limit()
def plan_as(
    checkpoint: str | Path, out: str | Path | None, options: PlanOptions, progress: Progress | None = None
) -> Plan:
    """`plan_checkpoint` with its options in one object."""
    path = None if out is None else Path(out)
    texts = options.calibrate.files if options.calibrate else []
    imatrix_out = options.calibrate.imatrix_out if options.calibrate else None
    outputs = [path, None if imatrix_out is None else Path(imatrix_out)]
    reads = ProtectedPaths().with_files(files_of(options.template, options.imatrix, *texts))
    check_outputs(outputs, options.force, reads)
    with open_source(
        checkpoint, options.config, needs_config=options.template is None, detect_lattice=options.detect_lattice,
        by_family=options.calibrate is not None,
    ) as ckpt:  # fmt: skip
        check_outputs(outputs, options.force, with_checkpoint(reads, ckpt))
        options = options.for_source(coded=bool(ckpt.modules))
        calibrate, importance, _ = _measured(ckpt, options, options.imatrix, None)
        calibration = calibrate if calibrate is not None and calibrate.chooses_codes else None
        plan = make_plan(ckpt, options, importance, calibration, progress)
    if path is not None:
        save_plan(plan, str(checkpoint), path)
    return plan
