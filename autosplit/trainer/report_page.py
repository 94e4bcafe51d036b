"""The report page of a trainer: each rank's stages, bytes and longest wait."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tabulate import tabulate
from torch import nn

from autosplit.passes.analysis.boundary import boundaries
from autosplit.passes.graph import value_text
from autosplit.pipeline.schedule.routes import StageDataflow, needs_of, result_of
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.simulate import Span, Timeline, window_of
from autosplit.runtime.functions import SplitFunctions
from autosplit.text.figures import milliseconds, size_text
from autosplit.torch_internals.dtensor import local_tensor

_LARGEST = 5


class LargeTensor(NamedTuple):
    """A row of the table of largest tensors.

    Attributes:
        owner: ``"parameter"``, ``"saved"`` or ``"deferred"``.
        stage: the stage that has the tensor.
        name: the tensor's name in the stage.
        shape: the tensor's dtype and shape, as text.
        bytes: the bytes of the tensor's storage.
    """

    owner: str
    stage: int
    name: str
    shape: str
    bytes: int


class RankReport(NamedTuple):
    """One rank's part of the page.

    Attributes:
        stages: the rank's stages with the classes of their modules, as text.
        state: bytes of parameters and buffers.
        gradients: bytes of the parameters' gradients.
        optimizer: bytes of the optimizer's state.
        saved: bytes of saved tensors of one microbatch, summed over the rank's stages; kept from F
            to the backward.
        deferred: bytes of deferred tensors of one microbatch, summed over the rank's stages; kept
            from I to W.
        peak: the most bytes that the rank held in the last step; None if its memory was not
            recorded.
        largest: the rank's largest tensors.
        spans: the recorded actions of the last step.
    """

    stages: str
    state: int
    gradients: int
    optimizer: int
    saved: int
    deferred: int
    peak: int | None
    largest: Sequence[LargeTensor]
    spans: Sequence[Span]


def stages_text(modules: Iterable[tuple[int, nn.Module]]) -> str:
    """The rank's stages as text: ``0 Decoder, 2 Decoder``. Stages that were cut from a model are
    named by the first block after a cut: ``0 before layers.2, 1 from layers.2``.
    """
    return ", ".join(f"{stage} {_stage_name(stage, module)}" for stage, module in modules)


def _stage_name(stage: int, module: nn.Module) -> str:
    cuts: Sequence[str] = getattr(module, "cuts", ())
    if not cuts:
        return type(module).__name__
    return f"from {cuts[stage - 1]}" if stage else f"before {cuts[0]}"


def parameter_rows(stage: int, module: nn.Module) -> Iterator[LargeTensor]:
    """Yield a row for each parameter of a stage; for a DTensor, of this rank's part."""
    for name, parameter in module.named_parameters():
        local = local_tensor(parameter)
        yield LargeTensor("parameter", stage, name, value_text(local), local.nbytes)


def boundary_rows(stage: int, functions: SplitFunctions) -> Iterator[LargeTensor]:
    """Yield a row for each tensor that a stage keeps for one microbatch: saved and deferred
    tensors.
    """
    for kind, rows in boundaries(functions.graphs).items():
        for row in rows:
            yield LargeTensor(kind.value, stage, row.name, row.shape, row.bytes)


def largest(tensors: Iterable[LargeTensor]) -> list[LargeTensor]:
    """Return the few largest tensors, the largest first."""
    return heapq.nlargest(_LARGEST, tensors, key=lambda tensor: tensor.bytes)


def page(
    schedule: Schedule,
    dataflow: StageDataflow,
    rows: Sequence[RankReport],
    limits: Sequence[int] = (),
) -> str:
    """Return the report page, with tables of all ranks of a pipeline."""
    form = "split backward" if schedule.split_backward else "fused backward"
    title = (
        f"{schedule.stages} stages on {len(rows)} rank{'s' * (len(rows) > 1)}, "
        f"schedule {schedule.name!r}, {schedule.microbatches} microbatches, {form}"
    )
    parts = [title, _bytes_table(rows), _largest_table(rows)]
    if limits and all(row.peak is not None for row in rows):
        above = [rank for rank, row in enumerate(rows) if (row.peak or 0) > limits[rank]]
        parts.insert(2, f"memory_limit: {f'exceeded by rank {above[0]}' if above else 'kept'}")
    if all(row.spans for row in rows):
        spans = tuple(span for row in rows for span in row.spans)
        parts.append(_waits_table(Timeline(len(rows), spans), dataflow))
    else:
        parts.append("Waits are known after a step with trainer.record = True.")
    return "\n\n".join(parts)


def _bytes_table(rows: Sequence[RankReport]) -> str:
    table = [
        [str(rank), row.stages]
        + [
            size_text(count)
            for count in (row.state, row.gradients, row.optimizer, row.saved, row.deferred)
        ]
        + ["" if row.peak is None else size_text(row.peak)]
        for rank, row in enumerate(rows)
    ]
    headers = [
        "rank",
        "stages",
        "parameters",
        "gradients",
        "optimizer",
        "saved",
        "deferred",
        "peak",
    ]
    text = tabulate(
        table, headers, colalign=("right", "left", *["right"] * 6), disable_numparse=True
    )
    notes = [
        "parameters  with buffers",
        "saved       of one microbatch, from F to its backward",
        "deferred    of one microbatch, from I to W",
        "peak        of the last step, everything included; known with trainer.record = 'memory'",
    ]
    return "\n".join([text, "", *notes])


def _largest_table(rows: Sequence[RankReport]) -> str:
    tensors = [(rank, tensor) for rank, row in enumerate(rows) for tensor in row.largest]
    tensors = heapq.nlargest(_LARGEST, tensors, key=lambda pair: pair[1].bytes)
    table = [
        [
            size_text(tensor.bytes),
            tensor.owner,
            str(rank),
            str(tensor.stage),
            tensor.name,
            tensor.shape,
        ]
        for rank, tensor in tensors
    ]
    headers = ["bytes", "largest tensors", "rank", "stage", "name", "shape"]
    align = ("right", "left", "right", "right", "left", "left")
    return tabulate(table, headers, colalign=align, disable_numparse=True)


def _waits_table(timeline: Timeline, dataflow: StageDataflow) -> str:
    """Table with one row per rank: its longest wait, and the action whose result ended the wait."""
    # Needs are named by results: I stands for the gradient of a B.
    ends = {result_of(s.action): (s.end, str(s.action)) for s in timeline.spans}
    first, _ = window_of(timeline.spans)
    table = []
    for rank in range(timeline.ranks):
        spans = [s for s in timeline.spans if s.rank == rank and s.action.kind.is_compute]
        gaps = [
            (span.start - end, span)
            for span, end in zip(spans, [first, *(span.end for span in spans)], strict=False)
        ]
        wait, span = max(gaps, key=lambda gap: gap[0])
        needs = [ends[need] for need in needs_of(span.action, dataflow) if need in ends]
        table.append(
            [
                str(rank),
                milliseconds(timeline.busy(rank)),
                f"{timeline.bubble_ratio(rank):.1%}",
                milliseconds(wait),
                str(span.action),
                max(needs)[1] if needs else "the batch",
            ]
        )
    headers = ["rank", "busy ms", "idle", "longest wait ms", "before", "which needs"]
    align = ("right", "right", "right", "right", "left", "left")
    return tabulate(table, headers, colalign=align, disable_numparse=True)
