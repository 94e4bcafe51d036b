"""Costs with which the passes of memory have something to do."""

from __future__ import annotations

from autosplit.mesh.costs import Link
from autosplit.pipeline.builders.build import SCHEDULES, build
from autosplit.pipeline.schedule.schedule import Schedule
from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.pipeline.simulation.simulate import Costs
from autosplit.pipeline.simulation.transfer import Transfer

FORMS = [
    ("1f1b", {"split_backward": False}),
    ("1f1b", {"weights": "2bp"}),
    ("gpipe", {}),
    ("zb-h1", {}),
    ("interleaved", {}),
    ("zb-v", {}),
]
"""Schedules by name and options."""


def schedule_of(form: int, ranks: int, microbatches: int) -> Schedule:
    """One of the ``FORMS``."""
    name, options = FORMS[form]
    return build(name, ranks * (SCHEDULES[name].chunks or 2), microbatches, ranks=ranks, **options)


def costs_of(stages: int, *, took: float = 0.25, deferred: float = 0.8, tensors: int = 16) -> Costs:
    """Like stages; what one holds takes so many seconds to a partner, and twice that to a host."""
    memory = StageMemory(1e6, deferred * 1e6, 1e5, tensors=tensors)
    links = Transfer(0.01, 1e6 / took, host=Link(0.01, 0.5e6 / took))
    return Costs([(1.0, 1.0, 1.0)] * stages, [memory] * stages, links)
