"""The parts, and ``results.json`` as a page."""

from __future__ import annotations

from ..page import Page, Part
from . import (
    autograd_overhead,
    checks,
    memory,
    steps,
)
from .models import Settings

TEMPLATE = """\
# What splitting costs

Written by `python -m benchmarks.split`; do not edit. {environment}.

Llama, BERT, Mamba and ResNet from transformers' configurations with random weights, each as a
stage in the middle of a pipeline: hidden states in and out, training mode, no dropout
([models.py](models.py) has the sizes). One microbatch is F, I and W; its input and the gradient
of its output are made inside, as if just received. **Bold** figures miss their target.

- *autograd*: plain forward and `backward()`.
- *torch split*: `stage_backward_input` and `stage_backward_weight`, which
  `torch.distributed.pipelining`'s zero-bubble schedules call.

On the CPU, processes keep what was freed (`MALLOC_TRIM_THRESHOLD_` and its like, see
[page.py](../page.py)), as allocators made for training do.
{sections}
## To reproduce

`python -m benchmarks.split` measures everything; a part alone, also for some models only
(`--models`) and into another folder (`--output`):

```sh
{commands}
```
"""


PARTS: dict[str, Part[Settings]] = {
    "eager": Part(
        "Time, eager",
        """\
Contenders take turns, microbatch by microbatch. Times are medians; a ratio is the median over
the rounds of that round's ratio, and the spread its interquartile range. *gradients*: against
the first contender's, relative to each gradient's largest element.""",
        steps.measure_eager,
        lambda rows: steps.render(rows, steps.EAGER_TARGET),
    ),
    "inductor": Part(
        "Time, compiled by Inductor",
        """\
As above, against the same module under `torch.compile`. Of Mamba's scan transformers has two
forms: `torch.compile` takes the one for compilers (`associative_scan`), autosplit the loop over
the sequence, as eager mode does. They compute the same function by different algorithms.""",
        steps.measure_inductor,
        lambda rows: steps.render(rows, steps.INDUCTOR_TARGET),
    ),
    "memory": Part(
        "Memory",
        """\
What the allocator had handed out, over what autograd saves: distinct storage that
`saved_tensors_hooks` sees in F, parameters and buffers excluded. The *floor* is X and dY, each
storage once, of the matrix products and convolutions that yield weight gradients. *Held* leaves
gradients of parameters out, *peak* counts everything above what was alive before F.""",
        memory.measure,
        memory.render,
    ),
    "face": Part(
        "The autograd face",
        """\
Microseconds of a microbatch of four rows through layers of eight features, where next to
nothing is computed; contenders take turns of several microbatches, of which the fastest counts;
medians over the turns, and of the difference in each turn. `SplitModule` is called and goes back
through autograd's engine, `Stage` is called action by action; *bare Function* calls the same stage
from an `autograd.Function` that does nothing else, the least that any autograd face costs. All ask
their guards at every forward, which *guards* shows alone.""",
        autograd_overhead.measure,
        autograd_overhead.render,
    ),
    "check": Part(
        "AUTOSPLIT_CHECK=1",
        """\
A stage with [the checks](../../docs/debugging.md#check-every-gradient) over the same stage without
them, microbatch by microbatch in turn. The first microbatch, which is compared with plain autograd,
is left out of the time; its peak also has the module's own forward and backward, on a copy of its
parameters.""",
        checks.measure,
        checks.render,
    ),
}


PAGE = Page("split", TEMPLATE, PARTS, Settings, keeping=True)
