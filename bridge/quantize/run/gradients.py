"""What is gathered before layers are quantized: A of each layer's outputs, and how much each token counts in its H."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from bridge.quantize.layer_store import LayerStore
from bridge.quantize.model.activations import ActivationStore
from bridge.quantize.model.experts import expert_pattern
from bridge.quantize.model.float_model import FloatModel, fast_arithmetic
from bridge.quantize.model.forward_passes import output_hessians, sequences_at_once
from bridge.quantize.model.stored_inputs import StoredInputs
from bridge.quantize.run.cluster import Tasks
from bridge.quantize.run.worker import Worker, task
from bridge.quantize.solve.two_sided import summed
from bridge.quantize.text.mixture import CalibrationSet
from bridge.system.cpu.row_threads import slices
from bridge.system.storage.folder_locks import temporary_beside


def gather_gradients(
    tasks: Tasks, todo: frozenset[str], memory: int | None = None, progress: Callable[[str], None] | None = None
) -> None:
    """Store A of each layer, see `two_sided`, until it is finished, and the norms of the tokens' gradients.

    todo      the layers that are not finished
    memory    bytes of activations in memory; None: none
    progress  of a process alone: called with what is done
    """
    walk, store, tokens = tasks.walk, tasks.walk.store, tasks.walk.tokens
    assert isinstance(tasks.model, FloatModel)
    if store.has_outputs(todo):
        return
    batch = sequences_at_once(tasks.model, tokens.shape[1])
    batches = slices(-(-len(tokens) // batch), tasks.spread.parts)
    cuts = [tokens[part.start * batch : part.stop * batch] for part in batches]
    held = CalibrationSet(tokens, held=walk.held).held_tokens()
    held_cuts = [None] * len(cuts) if held is None else held.split([cut.numel() for cut in cuts])
    started = [
        tasks.start(
            _gathered, number if len(cuts) > 1 else None, cut, held_cuts[number], batches[number].start, todo, memory,
            progress, **tasks.spread.options(number),
        )
        for number, cut in enumerate(cuts)
    ]  # fmt: skip
    list(tasks.results(started))
    if len(cuts) == 1:
        return
    shares = [cut.numel() / tokens.numel() for cut in cuts]
    list(tasks.results([tasks.submit(_sum_outputs, store, name, shares) for name in sorted(todo)]))
    patterns = sorted({expert_pattern(name) for name in todo})
    list(tasks.results([tasks.submit(_join_norms, store, name, len(cuts)) for name in patterns]))
    for name in todo:
        for number in range(len(cuts)):
            store.drop_outputs(name, number)


@task
def _gathered(
    worker: Worker,
    part: int | None,
    tokens: torch.Tensor,
    held: torch.Tensor | None,
    first: int,
    todo: frozenset[str],
    memory: int | None,
    progress: Callable[[str], None] | None,
) -> None:
    """Store A and |g| of a part of the sequences; None: of all. `held`, `first`: see `output_hessians`."""
    walk, store, report = worker.walk, worker.walk.store, progress or (lambda name: None)
    worker.leave()
    report("forward")
    missing = {name for name in todo if part is not None or not store.has_outputs([name])}
    resume = StoredInputs(store.folder, store.job, "gradients") if part is None else None
    part_folder = store.folder.with_name(f"{store.folder.name}-{part or 0}")
    with (
        nullcontext(walk.offload) if worker.alone else temporary_beside(part_folder) as folder,
        torch.enable_grad(),
        ActivationStore(folder, memory, walk.dtype) as activations,
    ):
        model = FloatModel(worker.model.ckpt, fast_arithmetic(worker.model.device), worker.model.device)
        layers_outputs = output_hessians(
            model, tokens, activations, first, resume, held, lambda name, norms: store.save_norms(name, norms, part),
            walk.two_sided,
        )  # fmt: skip
        for name, outputs in layers_outputs:
            report(name)
            if name in missing:
                store.save_outputs(name, outputs if walk.two_sided else None, part)
                missing.remove(name)
            if not missing:
                break
    for name in missing:
        store.save_outputs(name, None, part)
    if resume is not None:
        resume.finish(0)


def _sum_outputs(store: LayerStore, name: str, shares: Sequence[float]) -> None:
    """Store A of a layer, of all parts: the sum of `shares` of those that have it."""
    if not store.has_outputs([name]):
        parts = [(store.outputs(name, part), share) for part, share in enumerate(shares)]
        store.save_outputs(name, summed([(outputs, share) for outputs, share in parts if outputs is not None]))


def _join_norms(store: LayerStore, name: str, parts: int) -> None:
    """Store |g| of all tokens of a layer, where each part of the sequences has it."""
    norms = [part_norms for part in range(parts) if (part_norms := store.norms(name, part)) is not None]
    if len(norms) == parts:
        store.save_norms(name, torch.cat(norms))
