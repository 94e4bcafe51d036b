"""Interleaved 1F1B: several small stages a rank, dealt out in turns."""

from __future__ import annotations

from collections.abc import Iterator

from autosplit.pipeline.builders.placement.template import (
    Row,
    ScheduleTemplate,
    backward,
    forward,
    most_in_flight,
)


def interleaved(ranks: int, microbatches: int, chunks: int) -> ScheduleTemplate:
    """Rank r of P holds the stages r, P+r, 2P+r, ...; microbatches go round in groups of P.

    Source: Narayanan et al., arXiv 2104.04473, figure 4. Where P does not divide M, the groups are
    larger than P and as even as can be.

    Bubble with full backwards for C like stages a rank and P dividing M: each rank idles
    (P-1)(F+I+W), where F, I and W are those of one stage: 1/C of 1F1B's, whose stages are C times
    as large. Split, if no W is longer than an F or an I: (P-1)(F+I-W).

    Activation memory of rank r, P dividing M > P: (C-1)P + 2(P-1-r) + 1 pairs of a stage and a
    microbatch, so on rank 0 (P-1)/C microbatches more than 1F1B. Split, the same on every rank as
    on rank 0.
    """
    rows = tuple(_row(rank, ranks, microbatches, chunks) for rank in range(ranks))
    return ScheduleTemplate(
        rows,
        tuple(stage % ranks for stage in range(ranks * chunks)),
        budgets=(max(map(most_in_flight, rows)),) * ranks,
    )


def _row(rank: int, ranks: int, microbatches: int, chunks: int) -> Row:
    sizes = _groups(ranks, microbatches)
    places = list(_rounds(sizes, chunks))
    forwards = [forward(chunk * ranks + rank, m) for chunk, m in places]
    backwards = [backward((chunks - 1 - chunk) * ranks + rank, m) for chunk, m in places]
    warm_up = min((chunks - 1) * sizes[0] + 2 * (ranks - 1 - rank), len(forwards))
    order = forwards[:warm_up]
    for pair in zip(forwards[warm_up:], backwards, strict=False):
        order += pair
    return (*order, *backwards[len(backwards) - warm_up :])


def _groups(ranks: int, microbatches: int) -> list[int]:
    """Sizes of the groups, the larger ones first; a group of fewer than P would leave gaps."""
    count = max(microbatches // ranks, 1)
    size, larger = divmod(microbatches, count)
    return [size + 1 if group < larger else size for group in range(count)]


def _rounds(sizes: list[int], chunks: int) -> Iterator[tuple[int, int]]:
    """Chunk and microbatch in the order in which the groups pass a rank."""
    first = 0
    for size in sizes:
        for chunk in range(chunks):
            for microbatch in range(first, first + size):
                yield chunk, microbatch
        first += size
