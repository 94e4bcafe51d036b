"""The parts, and ``results.json`` as a page."""

from __future__ import annotations

from functools import partial

from ..page import Page, Part
from . import later, restart, second
from .measure import Aim, Settings, measure, render

TEMPLATE = """\
# Seconds to the first step

Written by `python -m benchmarks.startup`; do not edit. {environment}. **Bold** figures miss
their target.

Models of transformers, 64 wide, two samples of 32 tokens (a ViT: 32x32 pixels), each in a fresh
process: from `split` or `torch.compile` to the end of the first backward, weight gradients
included, with empty caches. What is imported before does not count. As after an installation,
Python finds compiled byte code of autosplit, as it does of torch. Medians over processes that take
turns. *blocks* has each block compiled by itself, as accelerate's `compile_regions` does; *held* is
what one microbatch holds between I and W. Later steps take turns in one process, because two
processes that run the same kernels differ by more than the two ways do.
{sections}
## To reproduce

`python -m benchmarks.startup` measures everything; a part alone, also for some models (`--models`),
depths (`--layers`), and into another folder (`--output`):

```sh
{commands}
```
"""

PARTS: dict[str, Part[Settings]] = {
    "eager": Part(
        "Eager kernels",
        'Beside `torch.compile(backend="aot_eager")`, which captures the same graphs.',
        lambda settings: measure(settings, "autosplit", "aot_eager", (2, 8, 32, 80)),
        partial(render, Aim(32, 0.25)),
    ),
    "inductor": Part(
        "Inductor",
        'Beside `torch.compile`. Ours is `split(backend="inductor")`.',
        lambda settings: measure(settings, "autosplit inductor", "inductor", (4, 12)),
        partial(render, Aim(12, 0.4, 0.9)),
    ),
    "later": Part(
        "Later steps with Inductor",
        "Both ways in one process, one step each in turns for ten seconds; medians. Gradients are "
        "added to those of earlier steps. Malloc keeps freed memory.",
        later.measure,
        later.render,
    ),
    "second": Part(
        "A second process",
        "The first process starts with empty caches, the second with what torch kept of the first "
        "in its cache's folder: compiled kernels, but no traces. autosplit keeps nothing of its "
        "own. With eager kernels torch.compile is `aot_eager`.",
        second.measure,
        second.render,
    ),
    "restart": Part(
        "Restarts",
        "A trainer cuts the model into two stages on two ranks, of one thread each: from the model "
        "to the end of the first step. A first start measures the blocks, ten seconds at most. A "
        "restart takes cuts and costs from the checkpoint, with `CheckpointManager.planning`, and "
        "loads it. Captures are those of one rank: the whole model, one block of each kind to be "
        "timed, and the rank's stage.",
        restart.measure,
        restart.render,
    ),
}


PAGE = Page("startup", TEMPLATE, PARTS, Settings)
