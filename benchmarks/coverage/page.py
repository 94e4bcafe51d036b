"""The parts, ``results.json`` as a page, and what is compared for each."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..page import Page, Part, option
from ..results import Results, sources
from . import rows, tried
from .examine import examine
from .judge import FACTOR, ROUNDINGS
from .subject import Subject

HERE = pathlib.Path(__file__).parent
RUN = 20  # examples of one run of hypothesis
TEMPLATE = f"""\
# Which modules are split, against plain autograd

Written by `python -m benchmarks.coverage`; do not edit. {{environment}}.

Each case runs twice from the same seed, split and under plain autograd: two microbatches forward
and backward, then `backward_weight()`, a step of gradient descent, and another microbatch.
Compared are every output, every input's gradient, inputs that were written into, every
parameter's gradient, buffers, and the random generator's state.

- *equal*: bit for bit (`torch.equal`).
- *equal within tolerance*: other kernels ran; the error against plain autograd in float64 is at
  most {FACTOR:g} times plain autograd's own, plus {ROUNDINGS:g} roundings of the largest element.
- *partly split*: equal (within tolerance), in more than one graph with ordinary autograd between.
- *refused*: a typed error says why. *CRASHED*: any other error. *WRONG*: anything else.
- *no backward in eager*: plain autograd itself raises or has nothing to differentiate.

{{head}}

What waits of each, and models by name: [docs/tried.md](../../docs/tried.md). Below are groups that
have other cases than equal ones, and all cases that are not equal in one graph.
{{sections}}
## To reproduce

```sh
{{commands}}
```
"""

Examination = Callable[[], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is compared."""

    select: str = option("", "only cases whose name matches this pattern")
    samples: int = option(6, "inputs for each module at most")
    op_samples: int = option(3, "inputs for each operator")
    examples: int = option(3000, "generated modules")
    shard: str = option("1/1", "2/3: the second of every three cases, for several processes")
    resume: bool = option(False, "skip what came out well with the same sources")
    stages: int = option(2, "of pipelines, on as many ranks")
    limit: float = option(180.0, "seconds of one training in a pipeline")

    def chosen(self, part: str, cases: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        """Those cases, by name, that are to be run."""
        known = Results.read(HERE / "results.json").rows(part) if self.resume else []
        done = {e["name"] for e in known if e["sources"] == sources() and rows.is_good(e)}
        first, step = map(int, self.shard.split("/"))
        return {
            name: each
            for name, each in [*cases][first - 1 :: step]
            if re.search(self.select, name) and name not in done
        }


def _part(
    name: str,
    title: str,
    about: str,
    cases: Callable[[Settings], Iterable[tuple[str, Examination]]],
    render: Callable[[Any], str] = rows.by_group,
) -> Part[Settings]:
    def measure(settings: Settings) -> Iterator[dict[str, Any]]:
        for each in settings.chosen(name, cases(settings)).values():
            yield each()

    return Part(title, about, measure, render)


def _examined(found: Iterable[tuple[str, Subject]], library: str = "") -> Iterator[Any]:
    said = f"{library} {importlib.metadata.version(library)}" if library else ""
    for group, subject in found:
        yield subject.name, functools.partial(_row, subject, group, said)


def _row(subject: Subject, group: str, library: str) -> dict[str, Any]:
    return rows.row(examine(subject), group, library)


# Each part needs packages that the others do not.


def _pieces(settings: Settings) -> Iterator[Any]:
    from . import pieces

    return _examined(("pieces", each) for each in pieces.subjects())


def _breaks(settings: Settings) -> Iterator[Any]:
    from . import breaks

    return _examined(("breaks", each) for each in breaks.subjects())


def _modules(settings: Settings) -> Iterator[Any]:
    from . import module_database

    found = module_database.subjects(settings.samples)
    return _examined((each.name.split()[0], each) for each in found)


def _operators(settings: Settings) -> Iterator[tuple[str, Examination]]:
    from . import operator_database

    for name, subjects in operator_database.entries(settings.op_samples):
        yield name, functools.partial(_tallied, name, subjects)


def _tallied(name: str, subjects: Iterable[Subject]) -> dict[str, Any]:
    return rows.tally(name, map(examine, subjects))


def _transformers(settings: Settings) -> Iterator[Any]:
    import transformers

    from . import architectures

    transformers.logging.set_verbosity_error()
    return _examined(architectures.subjects(), "transformers")


def _libraries(settings: Settings) -> Iterator[Any]:
    from . import libraries

    for library, group, subject in libraries.subjects():
        yield from _examined([(group, subject)], library)


def _generated(settings: Settings) -> Iterator[tuple[str, Examination]]:
    for seed in range(math.ceil(settings.examples / RUN)):
        examples = min(RUN, settings.examples - seed * RUN)
        yield f"seed {seed}", functools.partial(_swept, seed, examples)


def _swept(seed: int, examples: int) -> dict[str, Any]:
    from .generated.sweep import sweep

    found = sweep(examples, seed=seed)
    return {
        "name": f"seed {seed}",
        "verdicts": {verdict.value: count for verdict, count in found.verdicts.items()},
        "in_parts": found.in_parts,
        "refusals": dict(found.refusals),
        "failures": found.failures,
    }


def _pipelines(settings: Settings) -> Iterator[dict[str, Any]]:
    import transformers

    from .pipelines import lesson
    from .pipelines.measure import measure

    transformers.logging.set_verbosity_error()
    chosen = settings.chosen("pipelines", lesson.subjects().items())
    return measure([*chosen], settings.stages, settings.limit)


PARTS: dict[str, Part[Settings]] = {
    "pieces": _part(
        "pieces", "Kinds of code", "Small programs as people write them, in `pieces/`.", _pieces
    ),
    "modules": _part(
        "modules",
        "torch's module database",
        "Every entry with inputs in float32 and float64, in train and in eval mode.",
        _modules,
    ),
    "opinfo": _part(
        "opinfo",
        "torch's operator databases",
        "Every differentiable entry of `op_db`, `custom_op_db` and `autograd_function_db`, each "
        "with samples\nfrom end to end of its list, as `op(x, ...)` and as `op(x * p, ...)` with a "
        "parameter `p`.",
        _operators,
        rows.in_all,
    ),
    "transformers": _part(
        "transformers",
        "Hugging Face architectures",
        "In train and in eval mode, with tied and untied embeddings where both exist.",
        _transformers,
    ),
    "libraries": _part(
        "libraries", "Models of other libraries", "Small, with random weights.", _libraries
    ),
    "breaks": _part(
        "breaks",
        "Graph breaks, data-dependent branches, Python side effects",
        "No single graph holds these.",
        _breaks,
    ),
    "generated": _part(
        "generated",
        "Generated modules",
        "Made by hypothesis from seeds: random graphs of layers and functions with shared and "
        "frozen layers,\nviews, in-place operators, dropout and tied weights. A failing module is "
        "shrunk to the smallest.",
        _generated,
        rows.in_all,
    ),
    "pipelines": Part(
        "Hugging Face architectures in a pipeline",
        """\
Every architecture in train mode, its dropout on, cut in two by
`autosplit.partition(model, kwargs=microbatch, stages=2, microbatches=4, costs="estimate")` and
trained three steps by `plan.trainer(...)`: 1F1B on two ranks, AdamW, 4 microbatches of two samples,
the loss that the model computes from its labels where there are any. Compared with plain autograd
in one process, by the rule above, are the losses of all microbatches, and after every step all
gradients, parameters and buffers, under each of their names. What the operators of the second stage
draw at random, the one process draws from a generator of its own, as the second rank does. A
parameter that both ranks hold has the sum of two sums of gradients, rounded otherwise than in one
process.""",
        _pipelines,
        rows.by_group,
    ),
}


def _summary(results: Results) -> str:
    return rows.counted(
        {
            each.title: rows.counts(found)
            for name, each in PARTS.items()
            if (found := results.rows(name))
        }
    )


PAGE = Page(
    "coverage",
    TEMPLATE,
    PARTS,
    Settings,
    head=_summary,
    also={HERE.parents[1] / "docs" / "tried.md": tried.render},
)
