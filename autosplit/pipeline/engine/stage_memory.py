"""Compute the bytes that a stage keeps for one microbatch, from the stage's graphs."""

from __future__ import annotations

from autosplit.passes import Kind
from autosplit.passes.analysis.aliasing import distinct_bytes
from autosplit.passes.analysis.boundary import boundaries, total_bytes
from autosplit.passes.graph import inputs as graph_inputs
from autosplit.pipeline.engine.stage_protocols import TrainableStage
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.stage import Stage


def footprint(stage: TrainableStage) -> tuple[float, float]:
    """Bytes that a stage keeps for one microbatch: (saved tensors, deferred tensors).

    For a stage without graphs (1, 1), so that microbatches are counted instead of bytes.
    """
    if not isinstance(stage, Stage):
        return (1.0, 1.0)
    kept = boundaries(stage.functions.graphs)
    saved, deferred = (total_bytes(kept.get(kind, [])) for kind in (Kind.SAVED, Kind.DEFERRED))
    return float(saved), float(deferred)


def stage_memory(stage: TrainableStage) -> StageMemory:
    """The ``footprint`` of a stage and the bytes of its inputs, as a ``StageMemory``."""
    saved, deferred = footprint(stage)
    if not isinstance(stage, Stage) or not stage.functions.has_backward:
        return StageMemory(saved, deferred)
    forward = stage.functions.graphs.forward
    inputs = list(graph_inputs(forward.graph, Kind.INPUT).values())
    return StageMemory(saved, deferred, float(distinct_bytes(inputs)))
