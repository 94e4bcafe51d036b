"""The parts, and ``results.json`` as a page."""

from __future__ import annotations

from ..page import Page, Part
from . import (
    balance,
    budgets,
    limit,
    offload,
    prediction,
    standin,
)
from .settings import Settings

TEMPLATE = """\
# What ranks hold, and what holding less costs

Written by `python -m benchmarks.memory`; do not edit. {environment}. **Bold** figures miss their
target.
{sections}
## To reproduce

`python -m benchmarks.memory` measures everything; each part alone:

```sh
{commands}
```
"""

PARTS: dict[str, Part[Settings]] = {
    "prediction": Part(
        "Predicted peaks",
        """\
The families train in two stages on two ranks. *Activations*: the most that a rank holds beside
parameters, gradients and optimizer state at any time of a step, from the allocator
(`record="memory"`). *Predicted*: the same from graphs, messages and schedule
(`trainer.predict_memory(batch)`), before anything runs.""",
        prediction.measure,
        prediction.render,
    ),
    "budgets": Part(
        "Checkpointing of intermediate derivatives",
        """\
2BP's first open question: what does it cost to keep fewer derivatives until W? The middle one of
three stages of each family by itself, one thread: *budget* is `memory=`, by name or in bytes as a
share of what `"balanced"` holds between I and W. Bytes are over what autograd saves of the same
stage; *peak* is the most alive in any action. What is not kept is recomputed, or its part of W is
done in I.""",
        budgets.measure,
        budgets.render,
    ),
    "balance": Part(
        "Balance",
        f"""\
BPipe's evictions over stand-in stages, M = 2N: the real engine, messages and moves over stages that
hold {standin.LAYERS} layers' tensors of {standin.ROWS} x {standin.WIDTH}, send each other
{standin.NARROW} columns, and take F = I = W as given, so that 4 and 8 ranks run on any two cores.
*Activations* as in the first table, without the batch. *The paper's bound*: ceil((N+2)/2) of the N
microbatches that 1F1B's first rank holds; whole ones travel, so that none is lower. Losses are the
same, bit for bit.""",
        balance.measure_all,
        balance.render,
    ),
    "offload": Part(
        "Offload",
        f"""\
The same stages on two ranks with one thread each, M = {offload.MICROBATCHES}, into a
memory-mapped file; the limit is as low as the schedule can keep it by its own times and the store's
bandwidth, which is measured first. Losses are the same, bit for bit.""",
        offload.measure_all,
        offload.render,
    ),
    "limit": Part(
        "A limit",
        f"""\
`memory_limit=` of what the plain schedule's fixed bytes and {limit.SHARE:.0%} of its activations
take, the families in two stages on two ranks with one thread each, once it has settled on a
schedule: the most that a rank holds, as measured; the prediction for that schedule; the step beside
the simulated one, which goes by the measured times of its actions, links and stores. Two ranks are
the hardest case: with one microbatch running and one arriving, 1F1B's first rank holds two whatever
is moved.""",
        limit.measure,
        limit.render,
    ),
}


PAGE = Page("memory", TEMPLATE, PARTS, Settings)
