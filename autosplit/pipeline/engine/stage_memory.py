"""Bytes that a stage keeps of one microbatch, from its graphs."""

from __future__ import annotations

from autosplit.passes import Kind
from autosplit.passes.analysis.aliasing import distinct_bytes
from autosplit.passes.analysis.boundary import boundary_tensors, total_bytes
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
    graphs = stage.functions.graphs
    if graphs.backward is None or graphs.backward_input is None or graphs.backward_weight is None:
        return (0.0, 0.0)
    saved = boundary_tensors(graphs.forward, graphs.backward, Kind.SAVED)
    deferred = boundary_tensors(graphs.backward_input, graphs.backward_weight, Kind.DEFERRED)
    return float(total_bytes(saved)), float(total_bytes(deferred))


def stage_memory(stage: TrainableStage) -> StageMemory:
    """The ``footprint`` of a stage together with the bytes of its inputs."""
    saved, deferred = footprint(stage)
    if not isinstance(stage, Stage) or not stage.functions.has_backward:
        return StageMemory(saved, deferred)
    forward = stage.functions.graphs.forward
    inputs = list(graph_inputs(forward.graph, Kind.INPUT).values())
    return StageMemory(saved, deferred, float(distinct_bytes(inputs)))
