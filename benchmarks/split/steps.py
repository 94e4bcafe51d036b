"""Time of one microbatch: autosplit and torch's eager split, over autograd."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..results import Rows, Target, table, verdicts
from .clock import Durations, interleave, ratio
from .contenders import Contender, compiled, eager, microbatch
from .models import Settings, Subject

Builders = Mapping[str, Callable[[], Contender]]

EAGER_TARGET = Target("(F+I+W) / autograd", at_most=1.03)
INDUCTOR_TARGET = Target("(F+I+W) / torch.compile", at_most=1.02)


def measure_eager(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for each model and number of threads."""
    for model in settings.models:
        subject = settings.subject(model)
        yield from _measure(subject, eager(subject), settings, settings.threads)


def measure_inductor(settings: Settings) -> Iterator[dict[str, Any]]:
    """As ``measure_eager``; kernels are compiled for a number of threads, so for each anew."""
    for model in settings.models:
        for threads in settings.threads:
            torch.set_num_threads(threads)
            torch.compiler.reset()
            subject = settings.subject(model)
            yield from _measure(subject, compiled(subject), settings, (threads,))


def _measure(
    subject: Subject, builders: Builders, settings: Settings, thread_counts: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    contenders, failed, differences = _prepare(subject, builders)
    baseline = next(iter(builders))
    for threads in thread_counts:
        torch.set_num_threads(threads)
        found = interleave(contenders, subject, settings.rounds)
        yield {
            "name": f"{subject.name}, {threads} thread{'s' if threads > 1 else ''}",
            "contenders": {
                name: _row(each, found[baseline]) | {"difference": differences[name]}
                for name, each in found.items()
            },
            "failed": failed,
        }
    gc.collect()


def _prepare(
    subject: Subject, builders: Builders
) -> tuple[dict[str, Contender], dict[str, str], dict[str, float]]:
    """Contenders that ran once, why others did not, and how far gradients are from the first's."""
    contenders: dict[str, Contender] = {}
    failed: dict[str, str] = {}
    differences: dict[str, float] = {}
    expected: dict[str, Tensor] = {}
    for name, make in builders.items():
        try:
            contender = make()
            microbatch(contender, subject)
        except Exception as error:  # whatever a contender cannot do is a result
            if not contenders:
                raise
            cause = error.__cause__ or error
            failed[name] = f"{type(cause).__name__}: {cause}"
            continue
        found = contender.gradients()
        expected = expected or {key: grad.clone() for key, grad in found.items()}
        differences[name] = difference(found, expected)
        contender.clear()
        contenders[name] = contender
    return contenders, failed, differences


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest difference of any gradient, relative to that gradient's largest element.

    Raises:
        ValueError: a gradient is missing.
    """
    missing = expected.keys() - found.keys()
    if missing:
        raise ValueError(f"no gradient of {', '.join(sorted(missing))}")
    return max(
        float((found[key] - grad).abs().max() / grad.abs().max().clamp_min(1e-30))
        for key, grad in expected.items()
    )


def _row(each: Durations, baseline: Durations) -> dict[str, Any]:
    middle, spread = ratio(each, baseline)
    return {"ms": each.medians(), "ratio": middle, "spread": spread}


def render(rows: Rows, target: Target) -> str:
    """A table a model and number of threads in each row, and what was missed or did not run."""
    names = list(dict.fromkeys(name for row in rows for name in row["contenders"]))
    baseline, ours, *others = names
    headers = ["", f"{baseline} ms", "F", "I", "W", target.title, "spread", *others, "gradients"]
    cells = []
    for row in rows:
        found = row["contenders"]
        own = found[ours]
        step = sum(found[baseline]["ms"].values())
        cells.append(
            [
                row["name"],
                f"{step:.1f}",
                *(f"{value:.1f}" for value in own["ms"].values()),
                target.cell(own["ratio"]),
                f"{own['spread']:.3f}",
                *(f"{found[name]['ratio']:.3f}" if name in found else "fails" for name in others),
                "equal" if own["difference"] == 0 else f"within {own['difference']:.0e}",
            ]
        )
    figures = {row["name"]: row["contenders"][ours]["ratio"] for row in rows}
    return "\n\n".join([table(headers, cells), verdicts([(target, figures)]), *_failures(rows)])


def _failures(rows: Rows) -> list[str]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, why in row["failed"].items():
            reasons.setdefault((name, " ".join(why.split())[:300]), []).append(row["name"])
    return [
        f"*{name}* fails on {'; '.join(where)}: `{why}`" for (name, why), where in reasons.items()
    ]
