"""Lists of microbatches with the lengths of real texts, and what they cost on a pipeline's stages.

Lengths are tokens (words and punctuation marks) of the sections of this repository's documentation.
One in ten is drawn from the tail of the log-normal distribution that is fitted to them instead.
"""

from __future__ import annotations

import functools
import math
import pathlib
import random
import re
import statistics
from collections.abc import Sequence

from autosplit.pipeline.simulation.activation_memory import StageMemory
from autosplit.pipeline.simulation.simulate import Costs

DOCUMENTS = pathlib.Path(__file__).parents[2] / "docs"
CONTEXT = 2048
"""The longest microbatch, in tokens; longer texts are cut there."""
_SHORTEST = 8
_TAIL = 0.1
_WIDTH = 1024
"""Of the model whose attention the quadratic term stands for: at n tokens, a layer's products take
24 n width^2 FLOPs and its attention 4 n^2 width."""
_CALLS = 0.02
"""The overhead of an action, as a part of its time at the mean length."""


@functools.cache
def sections() -> list[int]:
    """The lengths of all sections of the documentation, in tokens."""
    found = []
    for path in sorted(DOCUMENTS.glob("*.md")):
        for section in re.split(r"\n(?=#+ )", path.read_text()):
            found.append(len(re.findall(r"\w+|[^\w\s]", section)))
    return [length for length in found if length >= _SHORTEST]


def draw(source: random.Random, count: int) -> list[int]:
    """The lengths of a list of microbatches."""
    logs = [math.log(length) for length in sections()]
    normal = statistics.NormalDist(statistics.mean(logs), statistics.stdev(logs))
    drawn = []
    for _ in range(count):
        length = source.choice(sections())
        if source.random() < _TAIL:
            length = round(math.exp(normal.inv_cdf(source.uniform(1.0 - _TAIL, 0.9999))))
        drawn.append(min(length, CONTEXT))
    return drawn


def costs_of(lengths: Sequence[int], stages: int, unit: float = 1.0) -> list[Costs]:
    """The costs of microbatches on equal stages, the first of which has no I and a larger W.

    Args:
        lengths: tokens.
        stages: how many.
        unit: seconds of the products of an F at the mean length.
    """
    mean = statistics.mean(sections())

    def costs(length: int) -> Costs:
        products = unit * (length / mean + _CALLS)
        attention = unit * length / mean * length / (6 * _WIDTH)
        forward, inputs, weights = products + attention, products + 2 * attention, products
        memory = StageMemory(float(length), 0.75 * length)
        later = [(forward, inputs, weights)] * (stages - 1)
        return Costs([(forward, 0.0, inputs + weights), *later], [memory] * stages)

    return [costs(length) for length in lengths]
