"""Costs of models that do not exist, and the best cuts by trying all of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from autosplit.pipeline.builders.build import ScheduleRequest, build
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import StageMemory, peak_memory
from autosplit.pipeline.simulation.simulate import simulate
from autosplit.pipeline.simulation.step_graph import Transfer
from autosplit.planner.costs import BlockCost, ModelCosts
from autosplit.planner.cuts import Solution, solve

_small = st.integers(0, 6).map(float)
_time = st.integers(1, 8).map(float)
BLOCKS = st.builds(BlockCost, _time, _time, _time, _small, _small, _small)


@st.composite
def models(draw: st.DrawFn, least: int = 1, most: int = 7) -> ModelCosts:
    """Costs of a model of few blocks, in whole numbers."""
    blocks = draw(st.lists(BLOCKS, min_size=least, max_size=most))
    cuts = len(blocks) - 1
    crossing = draw(st.lists(_small, min_size=cuts, max_size=cuts))
    return ModelCosts(tuple(blocks), tuple(crossing))


def even(blocks: int, *, forward: float = 1.0, parameters: float = 1.0) -> ModelCosts:
    """Blocks that are all alike: F = I = W."""
    block = BlockCost(forward, forward, forward, 4.0, 3.0, parameters)
    return ModelCosts((block,) * blocks, (2.0,) * (blocks - 1))


@dataclass(frozen=True)
class Tried:
    """One way to cut: the bytes over the cap, the seconds of a step, and each rank's bytes."""

    firsts: tuple[int, ...]
    overflow: float
    step: float
    peaks: tuple[float, ...]


def ranges(costs: ModelCosts, firsts: tuple[int, ...]) -> list[tuple[int, int]]:
    """The blocks of each stage: its first, and the one behind its last."""
    return list(itertools.pairwise([0, *firsts, len(costs.blocks)]))


def stage_times(costs: ModelCosts, firsts: tuple[int, ...]) -> list[tuple[float, float, float]]:
    """F, I and W of each stage, by hand."""
    times = []
    for first, last in ranges(costs, firsts):
        piece = costs.blocks[first:last]
        forward = sum(block.forward for block in piece)
        inputs = sum(block.backward_input for block in piece)
        weights = sum(block.backward_weight for block in piece)
        if first == 0:
            inputs, weights = 0.0, inputs + weights
        times.append((forward, inputs, weights))
    return times


def tried(
    costs: ModelCosts,
    firsts: tuple[int, ...],
    schedule: Schedule,
    *,
    cap: float = math.inf,
    links: Transfer | None = None,
    optimizer_state: float = 2.0,
) -> Tried:
    """Simulate one way to cut: its step time and its memory."""
    pieces = [costs.blocks[first:last] for first, last in ranges(costs, firsts)]
    times = stage_times(costs, firsts)
    saved = [sum(block.saved for block in piece) for piece in pieces]
    deferred = [sum(block.deferred for block in piece) for piece in pieces]
    # The first stage's W needs all that F saved, and the gradient of what it put out.
    deferred[0] = saved[0] + (costs.crossing[firsts[0] - 1] if firsts else 0.0)
    kept = [StageMemory(*pair) for pair in zip(saved, deferred, strict=True)]
    transfer = replace(
        links or Transfer(),
        message_bytes={place: costs.crossing[k - 1] for place, k in enumerate(firsts)},
    )

    def seconds(action: Any) -> float:
        forward, inputs, weights = times[action.stage]
        return {"F": forward, "I": inputs, "W": weights, "B": inputs + weights}[action.kind.value]

    timeline = simulate(schedule, seconds, transfer=transfer)
    peaks = peak_memory(schedule, kept)
    for place, rank in enumerate(schedule.placement):
        peaks[rank] += (2.0 + optimizer_state) * sum(block.parameters for block in pieces[place])
    over = sum(max(0.0, peak - cap) for peak in peaks)
    return Tried(firsts, over, timeline.makespan, tuple(peaks))


def all_tried(
    costs: ModelCosts,
    stages: int,
    microbatches: int,
    name: str,
    form: dict[str, Any],
    **memory: Any,
) -> Iterator[Tried]:
    """Every way to cut, under a schedule whose order does not depend on times."""
    schedule = build(name, stages, microbatches, **form)
    for firsts in itertools.combinations(range(1, len(costs.blocks)), stages - 1):
        yield tried(costs, firsts, schedule, **memory)


def solved(
    costs: ModelCosts,
    stages: int,
    microbatches: int,
    schedule: str = "1f1b",
    *,
    refine: bool = True,
    memory: Mapping[str, Any] | None = None,
    **options: Any,
) -> Solution:
    """The stages for a schedule by name and its options."""
    request = ScheduleRequest(schedule, microbatches, **options)
    return solve(costs, stages, request, refine=refine, **(memory or {}))
