"""The parts, and ``results.json`` as a page."""

from __future__ import annotations

from ..page import Page, Part
from . import by_hand, pipeline, weights
from .settings import Settings

TEMPLATE = """\
# How W adds weight gradients

Written by `python -m benchmarks.accumulation`; do not edit. {environment}. The options are those of
[`accumulation=`](../../docs/memory.md#how-gradients-add-up); *joined* joins products of any number
of rows, *auto* those of at most a number a microbatch that this page is the source of.
{sections}
## To reproduce

```sh
{commands}
```
"""

_COLUMNS = """\
All Ws of a step run directly after each other, on one thread, whose CPU time is measured, without
Python's garbage collection. The ways take turns in one run, in another order in each round; ratios
are medians over the rounds. *MiB*: the peak over the Ws above what is allocated when the first
begins; they free what their microbatches hold. *Largest difference*: of gradients from the
exact ones, relative to their largest element, over all ways."""

PARTS: dict[str, Part[Settings]] = {
    "layers": Part("A linear layer", _COLUMNS, weights.measure_layers, weights.render),
    "hand": Part(
        "Beside torch's operators by hand",
        """\
*Exact by hand*: `total.add_(grad.t() @ x)` for each microbatch. *Joined by hand*:
`total.addmm_(torch.cat(grads).t(), torch.cat(xs))`, once. A stage calls the same operators, and
writes the first gradient of a step instead of adding it. What joining saves is what reading and
writing the gradient costs beside the products, on one machine more than on another.""",
        by_hand.measure,
        by_hand.render,
    ),
    "small": Part(
        "Small gradients, and embeddings",
        f"""\
Gradients of at most 1 MiB together are added by one call for all of them, unless products compute
at least half of them, or a quarter can be joined: a call for each takes longer. The rows of an
embedding with padding are copied to mask the padding's, and are added to the table only if they are
at most a quarter of it.

{_COLUMNS}""",
        weights.measure_small,
        weights.render,
    ),
    "models": Part(
        "Stages of models",
        f"""\
The middle one of three stages. Where all ways call the same operators, as where no product and no
convolution has few rows, the ratios show what the measurement can tell apart.

{_COLUMNS}""",
        weights.measure_models,
        weights.render,
    ),
    "pipeline": Part(
        "A step of a pipeline",
        """\
Two processes with one thread each, eight microbatches of one sample of 64 tokens, three residual
blocks of width 1024 a stage. A step is forward, backward and SGD until the later rank is done.""",
        pipeline.measure,
        pipeline.render,
    ),
}

PAGE = Page("accumulation", TEMPLATE, PARTS, Settings, keeping=True)
