"""Build a pipeline schedule by name: a pure function from counts to a ``Schedule``.

With more stages than a schedule needs, each contiguous block of stages runs as one large stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice
from typing import cast

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.schedule import (
    Action,
    ActionKind,
    Schedule,
    check_counts,
    check_size,
)
from autosplit.text.figures import nearest

from .families import SCHEDULES, Family, even_sizes
from .placement import WEIGHTS, StageTimes, place_weights

__all__ = ["SCHEDULES", "WEIGHTS", "Family", "build"]

Times = StageTimes | Sequence[StageTimes]
"""Assumed durations of F, I and W: one triple for every stage, or one triple per stage."""


def build(
    name: str,
    stages: int,
    microbatches: int,
    *,
    split_backward: bool = True,
    weights: str | None = None,
    times: Times | None = None,
    ranks: int | None = None,
) -> Schedule:
    """Build a schedule by name.

    Args:
        name: a key of ``SCHEDULES``.
        stages: number of stages N >= 1.
        microbatches: number of microbatches M >= 1.
        split_backward: False for full backwards (B).
        weights: the placement of the Ws, one of ``WEIGHTS``. ``"2bp"`` runs them at the end, except
            a few in the cool-down. ``"fill"`` runs a W wherever a rank would wait, and keeps the
            order of F and I. None: the schedule's default.
        times: durations (F, I, W) for which ``"fill"`` places the Ws, one triple for all stages or
            one per stage, in any unit. The first stage often has no input gradient: I = 0, and W is
            the whole backward. None means F = I = W.
        ranks: number of processes P from 1 to N. None: as many as the schedule can use, which is N,
            or N/2 for schedules with two stages on each rank. With fewer ranks, each contiguous
            block of stages runs as one large stage, so bubble and activations are those of a
            pipeline of blocks. If the stages do not divide evenly, the first blocks hold one stage
            more.

    Raises:
        ScheduleError: an unknown name or placement, a bad count, a step of more than
            ``schedule.LARGEST`` actions, or an option without an effect.
    """
    if name not in SCHEDULES:
        raise unknown_schedule(name)
    check_counts(stages=stages, microbatches=microbatches)
    check_size(stages, microbatches)
    family = SCHEDULES[name]
    ranks, chunks = _layout(name, family, stages, ranks)
    weights = _check_weights(name, family, split_backward, weights, times)
    options = {} if family.chunks else {"chunks": chunks}
    template = family.make(ranks, microbatches, **options)
    sizes = even_sizes(stages, ranks * chunks)
    summed = None if times is None else block_times(times, sizes)
    schedule = place_weights(name, template, weights, summed)
    return schedule if len(sizes) == stages else expand(schedule, sizes)


_OF_TORCH = {
    "GPipe": "gpipe",
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved",
    "InterleavedZeroBubble": "interleaved",
    "ZBVZeroBubble": "zb-v",
    "DualPipeV": "dualpipe-v",
}
"""Schedules of torch.distributed.pipelining, without ``Schedule`` in front, and our names for them.
All of ours have weight gradients as separate actions."""


def unknown_schedule(schedule: object, *further: str) -> ScheduleError:
    """The error for an unknown schedule. It lists the known names, and translates torch's.

    Args:
        schedule: a name, or a schedule class of torch's.
        further: known names that are not in ``SCHEDULES``.
    """
    name = schedule if isinstance(schedule, str) else getattr(schedule, "__name__", repr(schedule))
    ours = _OF_TORCH.get(name.removeprefix("Schedule"))
    hint = nearest(name, (*SCHEDULES, *further))
    if ours is not None:
        hint = f"; torch's {name} is {ours!r} here"
    elif "chimera" in name.lower():
        hint = "; two copies of a model are not run, and 'zb-v' fills as much with one"
    return ScheduleError(
        f"unknown schedule {name!r}; known: {', '.join((*SCHEDULES, *further))}{hint}"
    )


def _layout(name: str, family: Family, stages: int, ranks: int | None) -> tuple[int, int]:
    """Return (number of ranks, number of blocks of stages on each rank)."""
    if ranks is None:
        ranks = max(stages // (family.chunks or 2), 1)
    check_counts(ranks=ranks)
    least = family.chunks or 2
    if ranks * least > stages:
        need = "one stage" if least == 1 else f"{least} stages"
        raise ScheduleError(
            f"{stages} stages cannot fill {ranks} ranks: each rank needs at least {need} in "
            f"{name!r}; cut the model into at least {ranks * least} stages, or use fewer ranks"
        )
    if family.chunks is None and stages % ranks:
        raise ScheduleError(
            f"{name!r} assigns stages to ranks round-robin: expected a multiple of {ranks} stages "
            f"for {ranks} ranks, got {stages}"
        )
    return ranks, family.chunks or stages // ranks


def _check_weights(
    name: str, family: Family, split_backward: bool, weights: str | None, times: Times | None
) -> str | None:
    """The placement of W to use; None to keep the rows of the template."""
    if weights is not None and weights not in WEIGHTS:
        raise ScheduleError(f"unknown weights {weights!r}; known: {', '.join(WEIGHTS)}")
    if not split_backward:
        _refuse_without_split(name, family, weights, times)
        return None
    if weights is not None and weights not in family.weights:
        choices = ", ".join(map(repr, family.weights)) or "none, because it places its own"
        raise ScheduleError(f"{name!r} has no weights={weights!r}; known: {choices}")
    if times is not None and (weights == "2bp" or not family.weights):
        subject = "weights='2bp'" if weights else repr(name)
        raise ScheduleError(
            f"times has no meaning with {subject}, a fixed placement: leave times out or use "
            "weights='fill'"
        )
    return weights or (family.weights[-1] if family.weights else None)


def _refuse_without_split(
    name: str, family: Family, weights: str | None, times: Times | None
) -> None:
    if not family.fused:
        raise ScheduleError(
            f"{name!r} exists only with a split backward: leave split_backward=False out, or use "
            "one of "
            + ", ".join(repr(fused) for fused, family in SCHEDULES.items() if family.fused)
        )
    for option, value in (("weights", weights), ("times", times)):
        if value is not None:
            raise ScheduleError(
                f"{option}={value!r} has no meaning with split_backward=False, where no W "
                f"exists: leave {option} out or split the backward"
            )


def block_times(times: Times, sizes: Sequence[int]) -> list[StageTimes]:
    """The times of each block: the sums over its stages.

    Raises:
        ScheduleError: ``times`` is neither one triple of finite numbers >= 0, nor one for each
            stage.
    """
    rest = iter(_per_stage(times, sum(sizes)))
    sums = []
    for size in sizes:
        forward, backward_input, backward_weight = zip(*islice(rest, size), strict=True)
        sums.append((sum(forward), sum(backward_input), sum(backward_weight)))
    return sums


def _per_stage(times: Times, stages: int) -> list[StageTimes]:
    """``times`` as one triple per stage.

    Raises:
        ScheduleError: ``times`` is neither one triple of finite numbers >= 0, nor one for each
            stage.
    """
    rows: list[object] = list(times) if isinstance(times, Sequence) else []
    triples = rows if all(isinstance(row, Sequence) for row in rows) else [times] * stages
    if len(triples) != stages or not all(_is_triple(row) for row in triples):
        raise ScheduleError(
            "times must be (F, I, W), or one such triple for each of the "
            f"{stages} stages, all finite and >= 0; got {times!r}"
        )
    return cast("list[StageTimes]", triples)


def _is_triple(row: object) -> bool:
    return (
        isinstance(row, Sequence)
        and len(row) == 3
        and all(
            isinstance(number, (int, float)) and math.isfinite(number) and number >= 0
            for number in row
        )
    )


def expand(schedule: Schedule, sizes: Sequence[int]) -> Schedule:
    """Replace each stage by a contiguous block of stages on the same rank.

    An F becomes the Fs of the block's stages, first stage first. An I, W or B becomes the Is, Ws or
    Bs of the block's stages, last stage first. So the schedule stays legal, with the same messages,
    and every stage of a block has as many microbatches in flight as the one large stage had.

    Args:
        schedule: a schedule whose stages are the blocks.
        sizes: stages in each block, each >= 1.
    """
    ends = [0, *accumulate(sizes)]

    def members(action: Action) -> list[Action]:
        block = range(ends[action.stage], ends[action.stage + 1])
        order = block if action.kind is ActionKind.FORWARD else reversed(block)
        return [Action(stage, action.kind, action.microbatch) for stage in order]

    rows = tuple(tuple(chain.from_iterable(map(members, row))) for row in schedule.ranks)
    blocks = zip(schedule.placement, sizes, strict=True)
    placement = tuple(rank for rank, size in blocks for _ in range(size))
    return replace(schedule, stages=len(placement), ranks=rows, placement=placement)


# --- requests -------------------------------------------------------------------------------------


AUTO = "auto"
"""The name of the schedule that is found by a search over the stages' times."""


@dataclass(frozen=True)
class ScheduleRequest:
    """A schedule and its options, as for ``pipeline.build``.

    Attributes:
        schedule: a name, or a ``Schedule`` to run unchanged.
        microbatches: M.
        ranks: processes; None: as many as the schedule has, or can use.
        split_backward: False for full backwards.
        weights: the placement of weight gradients.

    Raises:
        ScheduleError: options without effect, or a ``Schedule`` for another number of ranks.
    """

    schedule: str | Schedule
    microbatches: int
    ranks: int | None = None
    split_backward: bool = True
    weights: str | None = None

    def __post_init__(self) -> None:
        schedule: object = self.schedule
        if not isinstance(schedule, Schedule) and schedule != AUTO:
            if schedule not in SCHEDULES:
                raise unknown_schedule(schedule, AUTO)
            return
        if self.weights is not None or not self.split_backward:
            beside = f"schedule={AUTO!r}"
            if isinstance(schedule, Schedule):
                beside = f"the schedule {schedule.name!r}, which places every action itself"
            raise ScheduleError(
                f"weights= and split_backward= have no effect beside {beside}: leave them out"
            )
        if isinstance(schedule, Schedule) and self.ranks not in (None, len(schedule.ranks)):
            raise ScheduleError(
                f"the schedule {schedule.name!r} has {len(schedule.ranks)} ranks, "
                f"but ranks={self.ranks}: leave ranks out"
            )

    @property
    def name(self) -> str:
        """The schedule's name."""
        return self.schedule if isinstance(self.schedule, str) else self.schedule.name

    @property
    def searches(self) -> bool:
        """Whether a search finds the schedule. A found ``Schedule`` is named ``"auto"``, too, but
        runs unchanged.
        """
        return self.schedule == AUTO

    def build(self, stages: int, times: Sequence[StageTimes] | None) -> Schedule:
        """Build the schedule; ``prepare_schedule`` also checks it.

        Args:
            stages: number of stages.
            times: (F, I, W) of each stage; used by schedules that fill waits with Ws. None: F = I =
                W.

        Raises:
            ScheduleError: ``pipeline.build`` refuses the options; or the given ``Schedule`` is for
                other counts.
        """
        if isinstance(self.schedule, str):
            return build(
                self.schedule,
                stages,
                self.microbatches,
                ranks=self.ranks,
                split_backward=self.split_backward,
                weights=self.weights,
                times=times if self._uses_times else None,
            )
        self.check_fits(stages)
        return self.schedule

    def check_fits(self, stages: int) -> None:
        """Refuse a ``Schedule`` that was built for another number of stages, microbatches or ranks.

        Raises:
            ScheduleError: says both counts.
        """
        schedule = self.schedule
        if isinstance(schedule, str):
            return
        has, requested = (schedule.stages, schedule.microbatches), (stages, self.microbatches)
        if has != requested:
            raise ScheduleError(
                f"the schedule {schedule.name!r} is for (stages, microbatches) = {has}, "
                f"but the request is for {requested}"
            )

    @property
    def _uses_times(self) -> bool:
        placements = SCHEDULES[self.name].weights if self.name in SCHEDULES else ()
        return self.split_backward and "fill" in placements and self.weights in (None, "fill")
