"""The pipeline schedules by name, and the options that each admits.

| name | order |
|---|---|
| naive | one microbatch at a time |
| gpipe | all forwards, then all backwards |
| 1f1b | one forward, one backward: few microbatches in flight |
| interleaved | 1F1B with several small stages a rank, assigned round-robin |
| zb-h1 | 1F1B with the weight gradients in its gaps |
| zb-h2 | a deeper warm-up, and steps that overlap: hardly a gap |

V-shaped schedules are in ``v_shape.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from .placement import WEIGHTS, Row, ScheduleTemplate, backward, forward, most_in_flight
from .v_shape import dual_pipe_v, v_half, v_min, zb_v


def interleaved(ranks: int, microbatches: int, chunks: int) -> ScheduleTemplate:
    """Rank r of P holds the stages r, P+r, 2P+r, ...; microbatches run in groups of P.

    Source: Narayanan et al., arXiv 2104.04473, figure 4. If P does not divide M, the groups are
    larger than P and as even as possible.

    Bubble with full backwards for C equal stages a rank and P dividing M: each rank idles
    (P-1)(F+I+W), with F, I and W of one stage. That is 1/C of 1F1B's bubble, whose stages are C
    times as large. With a split backward, if no W is longer than an F or an I: (P-1)(F+I-W).

    Activation memory of rank r, P dividing M > P: (C-1)P + 2(P-1-r) + 1 pairs of a stage and a
    microbatch. On rank 0 that is (P-1)/C microbatches more than 1F1B. With a split backward, every
    rank has as much as rank 0.
    """
    between_chunks = (chunks - 1) * _groups(ranks, microbatches)[0]
    return _in_turn(ranks, microbatches, lambda later: between_chunks + 2 * later, chunks)


def _in_turn(
    ranks: int, microbatches: int, warm_up: Callable[[int], int], chunks: int = 1
) -> ScheduleTemplate:
    """Warm-up forwards, then one forward and one backward in turn, then the remaining backwards.

    Args:
        ranks: P.
        microbatches: M.
        warm_up: maps the number of later ranks to a rank's number of warm-up forwards.
        chunks: stages per rank, assigned round-robin.
    """
    rows = tuple(
        _row(rank, ranks, microbatches, warm_up(ranks - 1 - rank), chunks) for rank in range(ranks)
    )
    placement = tuple(stage % ranks for stage in range(ranks * chunks))
    return ScheduleTemplate(rows, placement, max(map(most_in_flight, rows)))


def _row(rank: int, ranks: int, microbatches: int, warm_up: int, chunks: int) -> Row:
    places = list(_rounds(_groups(ranks, microbatches), chunks))
    forwards = [forward(chunk * ranks + rank, m) for chunk, m in places]
    backwards = [backward((chunks - 1 - chunk) * ranks + rank, m) for chunk, m in places]
    warm_up = min(warm_up, len(forwards))
    order = forwards[:warm_up]
    for pair in zip(forwards[warm_up:], backwards, strict=False):
        order += pair
    return (*order, *backwards[len(backwards) - warm_up :])


def _groups(ranks: int, microbatches: int) -> list[int]:
    """Sizes of the groups of microbatches, the larger ones first. A group smaller than P would
    leave gaps.
    """
    return even_sizes(microbatches, max(microbatches // ranks, 1))


def even_sizes(total: int, parts: int) -> list[int]:
    """The sizes of ``total`` things in parts; the first ``total % parts`` parts have one more."""
    size, larger = divmod(total, parts)
    return [size + 1 if part < larger else size for part in range(parts)]


def _rounds(sizes: list[int], chunks: int) -> Iterator[tuple[int, int]]:
    """Yield (chunk, microbatch) in the order in which the groups of microbatches pass a rank."""
    first = 0
    for size in sizes:
        for chunk in range(chunks):
            for microbatch in range(first, first + size):
                yield chunk, microbatch
        first += size


def one_f_one_b(ranks: int, microbatches: int) -> ScheduleTemplate:
    """Stage r runs N-1-r forwards to warm up, then one forward and one backward in turn.

    Source: PipeDream-Flush (Narayanan et al., arXiv 2006.09503). ``weights="2bp"`` is the
    placement of 2BP (Rae, Lee and Richings, arXiv 2405.18047): one W after each of the last N-r
    Is of stage r. ``"fill"`` is ZB-H1, see ``zb_h1``.

    Bubble ratio for F = I = W, N stages: (N-1)/(M+N-1) with full backwards. With a split backward
    and M >= N it is (N-1)/(3M+N-1): (N-1)/(4N-1) for M = N and (N-1)/(7N-1) for M = 2N. With a
    split backward, equal stages and either placement, each rank idles (N-1)(F+I-min(F,I,W)) for M
    >= N. That is ZB-H1's (N-1)(F+I-W) unless a W is longer than an F or I. For M < N a step takes
    (M+N-1)(F+I) + W.

    Activation memory of stage r: min(N-r, M) microbatches with full backwards. With a split
    backward, a microbatch counts until its W: with ``"fill"`` at most min(N, M) on every stage,
    which is 1F1B's maximum over the stages; with ``"2bp"`` up to M.
    """
    template = _in_turn(ranks, microbatches, lambda later: later)
    return replace(template, weights_in_cooldown=tuple(ranks - stage for stage in range(ranks)))


def naive(ranks: int, microbatches: int) -> ScheduleTemplate:
    """Each microbatch goes forward and backward through all stages before the next one starts.

    Source: the baseline of 2BP (Rae, Lee and Richings, arXiv 2405.18047); with one microbatch it
    is plain model parallelism.

    Bubble ratio for F = I = W, N stages, any M: (N-1)/N with full backwards, 2(N-1)/(2N+1) with
    ``weights="2bp"``. ``"fill"`` runs the Ws of all but the last microbatch while other stages
    work: a step takes 2NM + 1 units of time for N >= 2, and 2NM + M with ``"2bp"``.

    Activation memory per stage: one microbatch with full backwards. With a split backward, a
    microbatch counts until its W: all M with ``"2bp"``, at most two with ``"fill"`` for F = I = W
    and N >= 2.
    """
    template = _in_turn(ranks, microbatches, lambda _: 0)
    return replace(template, budget=microbatches, weights_in_cooldown=(0,) * ranks)


def zb_h2(ranks: int, microbatches: int) -> ScheduleTemplate:
    """Stage r warms up with 2(N-r)-1 forwards. A rank that has finished starts the next step.

    Source: ZB-H2 of Zero Bubble (Qi et al., arXiv 2401.10241). Steps overlap only if the optimizer
    does not wait for all ranks: it steps at once, and is rolled back if a later check of the whole
    gradient fails (the paper's post-validation).

    Bubble for equal stages and M >= 2N-1: each rank idles (N-1)(F+I-2W) between its first and last
    action, if no W is longer than an F or an I. For F = I = W no rank idles.

    Activation memory: at most min(2N-1, M) microbatches between F and W on every stage.
    """
    return replace(_in_turn(ranks, microbatches, lambda later: 2 * later), crosses_step=True)


def gpipe(ranks: int, microbatches: int) -> ScheduleTemplate:
    """Every microbatch goes forward before the first one goes backward.

    Source: GPipe (Huang et al., arXiv 1811.06965), with the backwards oldest microbatch first.
    The placement of W at the end is that of 2BP (Rae, Lee and Richings, arXiv 2405.18047).

    Bubble ratio for F = I = W, N stages: (N-1)/(M+N-1) with full backwards, 2(N-1)/(3M+2(N-1)) with
    a split backward; for M = N that is (N-1)/(2N-1) and 2(N-1)/(5N-2). If all stages are equal,
    ``"2bp"`` and ``"fill"`` give the same order, because the Is arrive without a gap.

    Activation memory per stage: all M microbatches. With a split backward, deferred tensors stay
    until the end.
    """
    return replace(
        _in_turn(ranks, microbatches, lambda _: microbatches), weights_in_cooldown=(0,) * ranks
    )


def zb_h1(ranks: int, microbatches: int) -> ScheduleTemplate:
    """F and I in the order of 1F1B, and a W wherever a rank would wait.

    Source: ZB-H1 of Zero Bubble (Qi et al., arXiv 2401.10241), which is 1F1B with
    ``weights="fill"``.

    Bubble for equal stages and M >= N: each rank idles (N-1)(F+I-W), if no W is longer than an F or
    an I. For F = I = W that is a third of 1F1B's (N-1)(F+I+W).

    Activation memory: at most min(N, M) microbatches between F and W on every stage, the maximum
    of 1F1B over its stages.
    """
    return one_f_one_b(ranks, microbatches)


@dataclass(frozen=True)
class Family:
    """A named kind of schedule, and the options that it admits.

    Attributes:
        make: ``make(ranks, microbatches)`` returns the order of F and B; if ``chunks`` is None,
            ``make(ranks, microbatches, chunks)``.
        chunks: number of separate stages on each rank; None: any number from 2 on.
        weights: the placements of W that it admits, the default last; () if the schedule itself
            places W.
        fused: whether it can also run with full backwards.
    """

    make: Callable[..., ScheduleTemplate]
    chunks: int | None = 1
    weights: tuple[str, ...] = WEIGHTS
    fused: bool = True


SCHEDULES: Mapping[str, Family] = MappingProxyType(
    {
        "naive": Family(naive),
        "gpipe": Family(gpipe),
        "1f1b": Family(one_f_one_b),
        "interleaved": Family(interleaved, chunks=None, weights=("fill",)),
        "zb-h1": Family(zb_h1, weights=("fill",), fused=False),
        "zb-h2": Family(zb_h2, weights=("fill",), fused=False),
        "zb-v": Family(zb_v, chunks=2, weights=("fill",), fused=False),
        "v-half": Family(v_half, chunks=2, weights=("fill",), fused=False),
        "v-min": Family(v_min, chunks=2, weights=("fill",), fused=False),
        "dualpipe-v": Family(dual_pipe_v, chunks=2, weights=(), fused=False),
    }
)
"""Every known schedule by name."""
