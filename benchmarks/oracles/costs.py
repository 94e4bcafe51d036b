"""Costs of stages that differ in what a simulation heeds, in numbers that are easy to read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autosplit.pipeline import Costs, Reductions, StageMemory, Transfer

from .names import find


def costs_of(stages: int) -> Iterator[tuple[str, Costs]]:
    """Each with its name; those with an option that is no more are left out."""
    link = find("Link", "mesh")
    even = [(1.0, 1.0, 1.0)] * stages
    uneven = [(1.0 + s % 3 / 4, 0.0 if s == 0 else 1.25, 0.5 + s % 2 / 2) for s in range(stages)]
    plain = [StageMemory(1.0, 0.75)] * stages
    rich = [
        StageMemory(8.0 + s, 6.0 + 3.0 * (s % 2), 1.0, tensors=4, workspace=(2.0, 1.0, 0.5, 3.0))
        for s in range(stages)
    ]
    slow = Transfer(0.25, 8.0, 2.0, 1.0, pairs={(0, 1): link(0.5, 4.0)}, host=link(0.125, 16.0))
    forms: dict[str, dict[str, Any]] = {
        "even": {"times": even, "memory": plain},
        "links": {"times": uneven, "memory": rich, "transfer": slow},
        "full": {"times": uneven, "memory": rich, "full": [i + 0.75 * w for _, i, w in uneven]},
        "replicas": {
            "times": uneven,
            "memory": rich,
            "reductions": Reductions([4.0 + s for s in range(stages)], link(0.1, 8.0), 3.0),
            "gathers": [0.25 + s / 8 for s in range(stages)],
        },
        "early": {"times": uneven, "memory": rich, "transfer": slow, "early_weights": True},
        "slices": {"times": uneven, "memory": rich, "early_weights": True, "slices": 3},
    }
    for name, given in forms.items():
        if given.keys() <= Costs.__dataclass_fields__.keys():
            yield name, Costs(**given)
    if stages > 1:
        yield "wired", _wired(stages, uneven, rich)


def _wired(stages: int, times: Any, memory: Any) -> Costs:
    """Every stage but the second takes of the first, too."""
    source, wiring = find("Source", "pipeline"), find("Wiring", "pipeline")
    inputs: list[tuple[Any, ...]] = [(source(None, 0),), (source(0, 0),)]
    inputs += [(source(s - 1, 0), source(0, 1)) for s in range(2, stages)]
    outputs = (2, *[1] * (stages - 2))
    sizes = {stage: [2.0] * count for stage, count in enumerate(outputs)}
    return Costs(
        times,
        memory,
        Transfer(0.25, 8.0, sizes, sizes),
        wiring=wiring(tuple(inputs), outputs),
    )
