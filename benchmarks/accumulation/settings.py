"""What is measured, and how often."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..page import option
from ..paper.settings import FAMILIES, SIZES


@dataclasses.dataclass(frozen=True)
class Settings:
    """The command's options."""

    widths: tuple[int, ...] = option((512, 2048), "of layers")
    rows: tuple[int, ...] = option((16, 64, 256, 1024), "of a microbatch of a layer")
    counts: tuple[int, ...] = option((8,), "microbatches")
    families: tuple[str, ...] = option(FAMILIES, "of models", FAMILIES)
    size: str = option("small", "of models", SIZES)
    samples: tuple[int, ...] = option((1, 2, 8), "in a microbatch of a model's stage")
    rounds: int = option(15, "timed steps of each way, at least")
    seconds: float = option(10.0, "of measuring a row, at least; short steps have more rounds")
    width: int = option(1024, "of the pipeline's model")

    def overrides(self, family: str) -> Mapping[str, object]:
        """Settings of a family."""
        return SIZES[self.size][family]


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Settings with another number of samples in a microbatch."""

    settings: Settings
    samples: int

    def overrides(self, family: str) -> Mapping[str, object]:
        """Settings of a family."""
        return {**self.settings.overrides(family), "microbatch_size": self.samples}
