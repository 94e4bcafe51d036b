"""The pipeline schedules by name. Each is a pure function from counts to a Schedule.

With more stages than a schedule needs, a contiguous block of stages runs as one large stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from autosplit.errors import ScheduleError
from autosplit.pipeline.schedule.schedule import (
    Action,
    ActionKind,
    Schedule,
    check_counts,
    check_size,
)
from autosplit.pipeline.validation.validate import validate
from autosplit.text.figures import nearest

from .families import SCHEDULES, Family
from .placement import WEIGHTS, StageTimes, Times, per_stage, placed

__all__ = ["SCHEDULES", "WEIGHTS", "Family", "build"]


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
        weights: where the Ws go, one of ``WEIGHTS``. ``"2bp"`` runs them at the end, but for a few
            that fill the cool-down; ``"fill"`` runs one wherever a rank would wait, with F and I
            in the order they had. None takes what suits the schedule.
        times: durations of (F, I, W) that ``"fill"`` is to suit, or one triple per stage (the first
            stage often has no input gradient: I = 0, and W is the whole backward); any unit. None
            means F = I = W.
        ranks: number of processes P from 1 to N. None means as many as the schedule can use: N, or
            half of that where each rank holds two stages apart. With fewer, contiguous blocks of
            stages run as one large stage, so bubble and activations (per stage) are those of a
            pipeline of blocks. The first blocks hold one stage more where N is no multiple.

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
    given = {} if family.chunks else {"chunks": chunks}
    template = family.make(ranks, microbatches, **given)
    if ranks * chunks == stages:
        return placed(name, template, weights, times)
    sizes = block_sizes(stages, ranks * chunks)
    summed = None if times is None else block_times(times, sizes)
    return expand(placed(name, template, weights, summed), sizes)


_OF_TORCH = {
    "GPipe": "gpipe",
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved",
    "InterleavedZeroBubble": "interleaved",
    "ZBVZeroBubble": "zb-v",
    "DualPipeV": "dualpipe-v",
}
"""What torch.distributed.pipelining calls a schedule, without ``Schedule`` in front, and what it is
here; weight gradients are separate actions of all of ours."""


def unknown_schedule(given: object, *others: str) -> ScheduleError:
    """The error for what is no schedule of ours: the known names, and which is torch's.

    Args:
        given: a name, or a class of torch's.
        others: names that are known beside those of ``SCHEDULES``.
    """
    name = given if isinstance(given, str) else getattr(given, "__name__", repr(given))
    ours = _OF_TORCH.get(name.removeprefix("Schedule"))
    hint = nearest(name, (*SCHEDULES, *others))
    if ours is not None:
        hint = f"; what torch calls {name} is {ours!r}"
    return ScheduleError(
        f"unknown schedule {name!r}; known: {', '.join((*SCHEDULES, *others))}{hint}"
    )


def _layout(name: str, family: Family, stages: int, ranks: int | None) -> tuple[int, int]:
    """How many ranks there are and how many blocks of stages each holds."""
    if ranks is None:
        ranks = max(stages // (family.chunks or 2), 1)
    check_counts(ranks=ranks)
    least = family.chunks or 2
    if ranks * least > stages:
        each = "one stage" if least == 1 else f"{least} stages"
        raise ScheduleError(
            f"{stages} stages cannot fill {ranks} ranks: each rank needs at least {each} in "
            f"{name!r}; use at most {stages // least} ranks or cut the model into more stages"
        )
    if family.chunks is None and stages % ranks:
        raise ScheduleError(
            f"{name!r} deals its stages out in turns: expected a multiple of {ranks} stages for "
            f"{ranks} ranks, got {stages}"
        )
    return ranks, family.chunks or stages // ranks


def _check_weights(
    name: str, family: Family, split_backward: bool, weights: str | None, times: Times | None
) -> str | None:
    """The placement to use, or None to leave the rows as they are."""
    if weights is not None and weights not in WEIGHTS:
        raise ScheduleError(f"unknown weights {weights!r}; known: {', '.join(WEIGHTS)}")
    if not split_backward:
        _refuse_without_split(name, family, weights, times)
        return None
    if weights is not None and weights not in family.weights:
        known = ", ".join(map(repr, family.weights)) or "none, for it places its own"
        raise ScheduleError(f"{name!r} has no weights={weights!r}; it knows: {known}")
    if times is not None and (weights == "2bp" or not family.weights):
        what = "weights='2bp'" if weights else repr(name)
        raise ScheduleError(
            f"times has no meaning with {what}, a fixed placement: leave times out or use "
            "weights='fill'"
        )
    return weights or (family.weights[-1] if family.weights else None)


def _refuse_without_split(
    name: str, family: Family, weights: str | None, times: Times | None
) -> None:
    if not family.fused:
        raise ScheduleError(
            f"{name!r} exists only with a split backward: leave split_backward=False out, or use "
            "one of " + ", ".join(repr(each) for each, family in SCHEDULES.items() if family.fused)
        )
    for option, value in (("weights", weights), ("times", times)):
        if value is not None:
            raise ScheduleError(
                f"{option}={value!r} has no meaning with split_backward=False, where no W "
                f"exists: leave {option} out or split the backward"
            )


def block_sizes(stages: int, blocks: int) -> list[int]:
    """How many stages each block holds; the first ``stages % blocks`` hold one more."""
    size, larger = divmod(stages, blocks)
    return [size + 1 if block < larger else size for block in range(blocks)]


def block_times(times: Times, sizes: Sequence[int]) -> list[StageTimes]:
    """The times of each block: the sums over its stages.

    Raises:
        ScheduleError: not triples of finite numbers >= 0, or not one for each stage.
    """
    rest = iter(per_stage(times, sum(sizes)))
    sums = []
    for size in sizes:
        forward, backward_input, backward_weight = zip(*islice(rest, size), strict=True)
        sums.append((sum(forward), sum(backward_input), sum(backward_weight)))
    return sums


def expand(schedule: Schedule, sizes: Sequence[int]) -> Schedule:
    """Replace each stage by a contiguous block of stages on the same rank.

    An F becomes the block's Fs, first stage first; an I, W or B becomes those of the block, last
    stage first. So the step keeps the shape it has with one stage a rank: as legal, with the same
    messages, and with as many microbatches in flight on every stage of a block.

    Args:
        schedule: of as many stages as there are blocks.
        sizes: stages in each block, each >= 1.
    """
    first = [sum(sizes[:rank]) for rank in range(len(sizes))]

    def members(action: Action) -> list[Action]:
        block = range(first[action.stage], first[action.stage] + sizes[action.stage])
        order = block if action.kind is ActionKind.FORWARD else reversed(block)
        return [Action(stage, action.kind, action.microbatch) for stage in order]

    return replace(
        schedule,
        stages=sum(sizes),
        ranks=tuple(
            tuple(each for action in row for each in members(action)) for row in schedule.ranks
        ),
        placement=spread(schedule.placement, sizes),
    )


def spread(placement: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """The rank of every stage, where blocks of stages lie on these ranks."""
    return tuple(rank for rank, size in zip(placement, sizes, strict=True) for _ in range(size))


# --- asked for ------------------------------------------------------------------------------------


AUTO = "auto"
"""The name for a schedule that is searched for the times of the stages."""


@dataclass(frozen=True)
class ScheduleRequest:
    """A schedule and its options; ``pipeline.build`` says what each means.

    Attributes:
        schedule: a name, or a schedule that is to be run as it is.
        microbatches: M.
        ranks: processes; None: as many as it has, or can use.
        split_backward: False for full backwards.
        weights: where the weight gradients go.

    Raises:
        ScheduleError: options without effect, or a schedule for another number of ranks.
    """

    schedule: str | Schedule
    microbatches: int
    ranks: int | None = None
    split_backward: bool = True
    weights: str | None = None

    def __post_init__(self) -> None:
        given: object = self.schedule
        if not isinstance(given, Schedule) and given != AUTO:
            if given not in SCHEDULES:
                raise unknown_schedule(given, AUTO)
            return
        if self.weights is not None or not self.split_backward:
            beside = f"schedule={AUTO!r}"
            if isinstance(given, Schedule):
                beside = f"the schedule {given.name!r}, which places every action itself"
            raise ScheduleError(f"weights and split_backward have no effect beside {beside}")
        if isinstance(given, Schedule) and self.ranks not in (None, len(given.ranks)):
            raise ScheduleError(
                f"the schedule {given.name!r} has {len(given.ranks)} ranks, but ranks={self.ranks}"
            )

    @property
    def name(self) -> str:
        """What the schedule is called."""
        return self.schedule if isinstance(self.schedule, str) else self.schedule.name

    def build(self, stages: int, times: Sequence[StageTimes]) -> Schedule:
        """The schedule for ``stages`` stages, which take ``times`` where it heeds them.

        Raises:
            ScheduleError: what ``pipeline.build`` refuses; or a schedule that is there is illegal,
                or for other counts.
        """
        if isinstance(self.schedule, str):
            return build(
                self.schedule,
                stages,
                self.microbatches,
                ranks=self.ranks,
                split_backward=self.split_backward,
                weights=self.weights,
                times=times if self._heeds_times else None,
            )
        self.check_fits(stages)
        validate(self.schedule)
        return self.schedule

    def check_fits(self, stages: int) -> None:
        """Refuse a schedule that is there and is for other counts.

        Raises:
            ScheduleError: says for which.
        """
        given = self.schedule
        if isinstance(given, str):
            return
        has, asked = (given.stages, given.microbatches), (stages, self.microbatches)
        if has != asked:
            raise ScheduleError(
                f"the schedule {given.name!r} is for (stages, microbatches) = {has}, but {asked} "
                "are asked for"
            )

    @property
    def _heeds_times(self) -> bool:
        known = SCHEDULES[self.name].weights if self.name in SCHEDULES else ()
        return self.split_backward and "fill" in known and self.weights in (None, "fill")
