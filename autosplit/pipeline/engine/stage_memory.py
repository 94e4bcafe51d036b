"""Bytes that a stage keeps of one microbatch, from its graphs."""

from __future__ import annotations

from autosplit.passes import Kind
from autosplit.passes.analysis.aliasing import distinct_bytes
from autosplit.passes.analysis.boundary import boundaries, total_bytes
from autosplit.passes.graph import inputs as graph_inputs
from autosplit.pipeline.engine.stage_protocols import TrainableStage
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.stage import Stage


def footprint(stage: TrainableStage) -> tuple[float, float]:
    """Bytes that a stage keeps of one microbatch: from F to the backward, and from I to W.

    A stage without graphs counts as 1 each, so that microbatches are counted.
    """
    if not isinstance(stage, Stage):
        return (1.0, 1.0)
    kept = boundaries(stage.functions.graphs)
    saved, deferred = (total_bytes(kept.get(kind, [])) for kind in (Kind.SAVED, Kind.DEFERRED))
    return float(saved), float(deferred)


def stage_memory(stage: TrainableStage) -> StageMemory:
    """The ``footprint`` of a stage together with the bytes of its inputs."""
    saved, deferred = footprint(stage)
    if not isinstance(stage, Stage) or not stage.functions.has_backward:
        return StageMemory(saved, deferred)
    forward = stage.functions.graphs.forward
    inputs = list(graph_inputs(forward.graph, Kind.INPUT).values())
    return StageMemory(saved, deferred, float(distinct_bytes(inputs)))
