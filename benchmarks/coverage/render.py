"""``results.json`` as a page."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..results import Results, Rows
from ..results import table as _table
from .examine import Verdict
from .pipelines import render as pipelines
from .results import group

PARTLY = "partly split"
COLUMNS = [
    Verdict.EQUAL.value,
    Verdict.CLOSE.value,
    PARTLY,
    Verdict.REFUSED.value,
    Verdict.WRONG.value,
    Verdict.CRASHED.value,
    Verdict.NO_BACKWARD.value,
]
GOOD = {Verdict.EQUAL.value, Verdict.CLOSE.value, PARTLY}
TEMPLATE = """\
# Which modules are split, against plain autograd

Written by `python -m benchmarks.coverage`; do not edit. {environment}. {sources}.

Each case runs twice from the same seed, split and under plain autograd: two microbatches forward
and backward, then `backward_weight()`, a step of gradient descent, and another microbatch.
Compared are every output, every input's gradient, inputs that were written into, every
parameter's gradient, buffers, and the random generator's state.

- *equal*: bit for bit (`torch.equal`).
- *equal within tolerance*: other kernels ran; the error against plain autograd in float64 is at
  most {factor:g} times plain autograd's own, plus {roundings:g} roundings of the largest element.
- *partly split*: equal (within tolerance), in more than one graph with ordinary autograd between.
- *refused*: a typed error says why. *CRASHED*: any other error. *WRONG*: anything else.
- *no backward in eager*: plain autograd itself raises or has nothing to differentiate.

{summary}

## Kinds of code

Small programs as people write them, in `pieces/`; what each is, and how much of it waits, is in
`docs/tried.md`.

{pieces}

## torch's module database

{modules_head}

{modules}

## torch's operator databases

{operators}

## Hugging Face architectures

{transformers_head}

{transformers}

## Models of other libraries

{libraries}

## Hugging Face architectures in a pipeline

Every architecture in train mode, its dropout on, cut in two by
`autosplit.partition(model, kwargs=microbatch, stages=2, microbatches=4, costs="estimate")` and
trained three steps by `plan.trainer(...)`: 1F1B on two ranks, AdamW, 4 microbatches of two samples,
the loss that the model computes from its labels where there are any. Compared with plain autograd
in one process, by the rule above, are the losses of all microbatches, and after every step all
gradients, parameters and buffers, under each of their names. What the operators of the second stage
draw at random, the one process draws from a generator of its own, as the second rank does. A
parameter that both ranks hold has the sum of two sums of gradients, rounded otherwise than in one
process.

{pipelines}

## Graph breaks, data-dependent branches, Python side effects

{breaks}

## Generated modules

{generated}

## To reproduce

```sh
{commands}
```
"""


def render(results: Results, factor: float, roundings: float) -> str:
    modules, models = results.rows("modules"), results.rows("transformers")
    parts = results.parts.values()
    environment = next((part["environment"] for part in parts), "")
    return TEMPLATE.format(
        environment=environment,
        sources=code_states(results),
        factor=factor,
        roundings=roundings,
        summary=_summary(results),
        pieces=_listing(results.rows("pieces")),
        modules_head=_modules_head(modules),
        modules=_exceptions(modules),
        operators=_operators(results.rows("opinfo")),
        transformers_head=_models_head(models),
        transformers=_models(models),
        libraries=_listing(results.rows("libraries")),
        pipelines=pipelines.render(results.rows("pipelines")),
        breaks=_listing(results.rows("breaks")),
        generated=_generated(results),
        commands="\n".join(line for part in parts for line in part["commands"]),
    )


def code_states(results: Results) -> str:
    """Whether all rows were found with the same code."""
    found = sorted({row["sources"] for part in results.parts for row in results.rows(part)})
    states = "one state" if len(found) == 1 else f"{len(found)} states"
    return f"All rows are from {states} of autosplit's sources (digest {', '.join(found)})"


def category(row: dict[str, Any]) -> str:
    """The column a row counts in."""
    found = str(row["verdict"])
    split = found in (Verdict.EQUAL.value, Verdict.CLOSE.value)
    return PARTLY if split and row.get("in_parts") else found


def _counts(rows: Rows) -> Counter[str]:
    return Counter(category(row) for row in rows)


def _summary(results: Results) -> str:
    names = {
        "pieces": "kinds of code",
        "modules": "module database",
        "transformers": "Hugging Face",
        "libraries": "other libraries",
        "breaks": "graph breaks",
    }
    table = [
        [title, len(rows), *(_counts(rows)[column] or "" for column in COLUMNS)]
        for part, title in names.items()
        if (rows := results.rows(part))
    ]
    for part, title in {"opinfo": "operators", "generated": "generated modules"}.items():
        if rows := results.rows(part):
            verdicts = _total(rows, "verdicts")
            counts = [verdicts[column] or "" for column in COLUMNS]
            table.append([title, verdicts.total(), *counts])
    return _table(["cases", "in all", *COLUMNS], table)


def _modules_head(rows: Rows) -> str:
    backward = [row for row in rows if category(row) != Verdict.NO_BACKWARD.value]
    entries = group(backward)
    whole = [name for name, each in entries.items() if all(category(row) in GOOD for row in each)]
    cases = sum(category(row) in GOOD for row in backward)
    return (
        f"{len(group(rows))} entries, of which {len(entries)} have a backward in eager: "
        f"{len(whole)} of these ({_share(len(whole), len(entries))}) come out equal in every case "
        f"(inputs, float32 and float64, train and eval), and {cases} of {len(backward)} cases "
        f"({_share(cases, len(backward))}). Entries with any other case than *equal*:"
    )


def _exceptions(rows: Rows) -> str:
    table = []
    for entry, each in group(rows).items():
        counts = _counts(each)
        if counts[Verdict.EQUAL.value] < len(each):
            reasons = [row.get("detail", "") for row in each if category(row) not in GOOD]
            cells = [counts[column] or "" for column in COLUMNS]
            table.append([entry, *cells, _brief(reasons[0] if reasons else "")])
    return _table(["entry", *COLUMNS, "why"], table)


def _models_head(rows: Rows) -> str:
    models = {row["name"].split()[0] for row in rows}
    one = sum(category(row) in GOOD and not row.get("in_parts") for row in rows)
    good = sum(category(row) in GOOD for row in rows)
    return (
        f"{len(models)} architectures in {len(rows)} cases (train and eval, tied and untied "
        f"embeddings where both exist): {good} ({_share(good, len(rows))}) equal, {one} "
        f"({_share(one, len(rows))}) in one graph. Those in one graph by family, and the others "
        "one by one:"
    )


def _models(rows: Rows) -> str:
    table = []
    for family, each in group(rows).items():
        names = dict.fromkeys(row["name"].split()[0] for row in each)
        one = sum(category(row) in GOOD and not row.get("in_parts") for row in each)
        table.append([family, f"{one} of {len(each)}", ", ".join(names)])
    others = [row for row in rows if category(row) not in GOOD or row.get("in_parts")]
    listing = _table(["family", "equal in one graph", "architectures"], table)
    return f"{listing}\n\n{_listing(others)}" if others else listing


def _listing(rows: Rows) -> str:
    table = [[row["name"], category(row), _brief(row.get("detail", ""))] for row in rows]
    return _table(["case", "result", "why"], table)


def _generated(results: Results) -> str:
    rows = results.rows("generated")
    if not rows:
        return "Not run."
    verdicts, refusals = _total(rows, "verdicts"), _total(rows, "refusals")
    parts = sum(row["in_parts"] for row in rows)
    backward = verdicts.total() - verdicts[Verdict.NO_BACKWARD.value]
    lines = [
        f"{verdicts.total()} modules made by hypothesis from {len(rows)} seeds: random graphs of "
        "layers and functions with shared and frozen layers, views, in-place operators, dropout "
        f"and tied weights. {backward} have a backward in eager; {parts} of these are in parts. A "
        "failing module is shrunk to the smallest that fails."
    ]
    if refusals:
        table = [[count, _brief(reason)] for reason, count in refusals.most_common()]
        lines.append(_table(["examples", "refused because"], table))
    failures = {plan: why for row in rows for plan, why in row["failures"].items()}
    lines += [f"{why}\n\n```python\n{plan}\n```" for plan, why in failures.items()]
    return "\n\n".join(lines)


def _operators(rows: Rows) -> str:
    if not rows:
        return "Not run."
    verdicts = _total(rows, "verdicts")
    parts = sum(row["in_parts"] for row in rows)
    lines = [
        f"Every differentiable entry of `op_db`, `custom_op_db` and `autograd_function_db` "
        f"({len(rows)}), each with samples from end to end of its list, as `op(x, ...)` and as "
        f"`op(x * p, ...)` with a parameter `p`: {verdicts.total()} cases, {parts} of them in "
        "parts."
    ]
    for key, title in {"refusals": "refused because", "no_backward": "no backward"}.items():
        if reasons := _total(rows, key):
            table = [[count, _brief(reason)] for reason, count in reasons.most_common()]
            lines.append(_table(["cases", title], table))
    failures = [[case, _brief(why)] for row in rows for case, why in row["failures"].items()]
    if failures:
        lines.append(_table(["case", "what is wrong"], failures))
    return "\n\n".join(lines)


def _total(rows: Rows, key: str) -> Counter[str]:
    """Counts of the rows, added."""
    return sum((Counter(row[key]) for row in rows), Counter())


def _brief(detail: str) -> str:
    text = detail.replace("|", "/").replace("\n", " ")
    return text if len(text) < 200 else text[:200] + " ..."


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"
