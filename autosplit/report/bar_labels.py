"""Labels of the bars of a drawn timeline, by the room that the bars leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autosplit.pipeline.schedule.action import Action, ActionKind, numbered
from autosplit.pipeline.simulation.timeline import Timeline


@dataclass(frozen=True)
class BarLabels:
    """One kind of text and font size for all bars of a panel: labels that come and go read badly.

    Attributes:
        text: of an action.
        size: of the font, in points.
        least: width in points of the narrowest bar that is labelled.
    """

    text: Callable[[Action], str]
    size: float
    least: float


def choose_labels(timeline: Timeline, points_per_second: float) -> BarLabels:
    """The most telling form that fits the usual bar of every kind, else the smallest form.

    Kind and microbatch ("F0"), or only the microbatch where bars are narrow; the whole action
    ("2F0") where a rank holds several stages.
    """
    spans = [span for span in timeline.spans if span.action.kind.is_compute]
    # The bar of several W in one call is as long as they are, and so has room for its text.
    single = [span for span in spans if len(span.action.microbatches) == 1]
    usual = points_per_second * _usual_duration(timeline)
    choices: list[tuple[Callable[[Action], str], float]]
    if _several_stages_on_a_rank(timeline):
        choices = [(str, 8.0), (str, 6.5), (str, 5.5)]
    else:
        choices = [(_kind_and_microbatch, 8.0), (_kind_and_microbatch, 6.5)]
        choices += [(_microbatch, 8.0), (_microbatch, 6.5), (_microbatch, 5.5)]
    for form, size in choices:
        least = 2.0 + size * max(_ems(form(span.action)) for span in single or spans)
        if least <= usual:
            break
    return BarLabels(form, size, 0.95 * least)


def _usual_duration(timeline: Timeline) -> float:
    """Seconds: the upper median of each kind of action, the least of these.

    Upper, because the I of a first stage takes no time and must not silence the others.
    """
    durations: dict[ActionKind, list[float]] = {}
    for span in timeline.spans:
        if span.action.kind.is_compute:
            durations.setdefault(span.action.kind, []).append(span.end - span.start)
    return min(sorted(each)[len(each) // 2] for each in durations.values())


def _several_stages_on_a_rank(timeline: Timeline) -> bool:
    held = {(span.rank, span.action.stage) for span in timeline.spans}
    return len(held) > len({rank for rank, _ in held})


def _ems(text: str) -> float:
    """Width in units of the font size: a digit of the default font takes 0.64, a W 0.99."""
    return 0.64 * len(text) + 0.35 * text.count(ActionKind.BACKWARD_WEIGHT.value)


def _kind_and_microbatch(action: Action) -> str:
    return f"{action.kind.value}{_microbatch(action)}"


def _microbatch(action: Action) -> str:
    return numbered(action.microbatches)
