"""Costs of steps for hypothesis: whatever a trainer can tell of its stages and links."""

from __future__ import annotations

from hypothesis import strategies as st

from autosplit.pipeline.schedule.routes import Source, Wiring
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.step_graph import Transfer

TIMES = st.tuples(st.integers(1, 4), st.integers(0, 4), st.integers(1, 4))


@st.composite
def wirings(draw: st.DrawFn, stages: int) -> tuple[Wiring, Transfer]:
    """Every stage takes of earlier ones, mostly not of the next only."""
    outputs = draw(st.lists(st.integers(1, 2), min_size=stages - 1, max_size=stages - 1))
    inputs: list[tuple[Source, ...]] = [(Source(None, 0),)]
    for stage in range(1, stages):
        earlier = [Source(s, p) for s in range(stage) for p in range(outputs[s])]
        received = draw(st.sets(st.sampled_from(earlier), min_size=1, max_size=3))
        inputs.append(tuple(sorted(received, key=str)))
    sizes = {stage: draw(st.sampled_from([0.0, 0.5, 1.0])) for stage in range(stages - 1)}
    links = Transfer(draw(st.sampled_from([0.0, 0.5])), 2.0, sizes)
    return Wiring(tuple(inputs), tuple(outputs)), links


@st.composite
def costs_of(draw: st.DrawFn, stages: int) -> Costs:
    """Whatever a trainer can tell: uneven stages, links, skip connections."""
    times = draw(st.lists(TIMES, min_size=stages, max_size=stages))
    links = Transfer(draw(st.sampled_from([0.0, 0.5])), 2.0, draw(st.sampled_from([0.0, 1.0])))
    wiring = None
    if draw(st.booleans()):
        wiring, links = draw(wirings(stages))
    return Costs(
        [(float(f), float(i), float(w)) for f, i, w in times],
        [StageMemory(1.0, draw(st.sampled_from([0.75, 1.25])))] * stages,
        links,
        wiring=wiring,
    )
