"""W of several microbatches: one by one, added in the graph, or concatenated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...results import Rows
from ...split import ablation
from ..settings import Settings
from ..stages import middle

COUNTS = (2, 4)


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each family and number of microbatches, one thread."""
    torch.set_num_threads(1)
    for family in settings.families:
        yield from ablation.measure_subject(middle(family, settings), settings.rounds, COUNTS)


def render(rows: Mapping[str, Rows]) -> str:
    """Time over that of one by one, and memory on top."""
    return ablation.render(rows["concatenation"])
