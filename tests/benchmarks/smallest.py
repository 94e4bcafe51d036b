"""The smallest model of a family that has a middle one of three stages."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.paper.settings import Settings


class Smallest(Settings):
    """Of one layer, which is the middle stage."""

    def overrides(self, family: str) -> Mapping[str, object]:
        return {**super().overrides(family), "layers": 1}


SMALLEST = Smallest(
    size="tiny",
    families=("bert",),  # traced in half the time of the others
    schedules=("1F1B-1",),
    steps=2,
    rounds=1,
    scaling_steps=1,
    ranks=(2,),
    unit=0.004,
    profiling=0.2,
)
