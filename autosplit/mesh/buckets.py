"""Which gradients are reduced together: buckets of up to so many bytes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

CAP = 25 * 2**20
"""Bytes of a bucket, as DistributedDataParallel has them."""


def fill_buckets(
    gradients: Sequence[tuple[Hashable, int]], cap: int = CAP
) -> tuple[tuple[int, ...], ...]:
    """Put gradients into buckets, in the order in which these are complete.

    Args:
        gradients: kind and bytes of each, in the order in which they are complete. Only those of
            one kind share a bucket.
        cap: bytes of a bucket, but for a gradient that has more, which has one of its own.

    Returns:
        Per bucket the places of its gradients, in their order.
    """
    buckets: list[list[int]] = []
    open_at: dict[Hashable, tuple[int, int]] = {}  # kind -> its last bucket, and the bytes of that
    for place, (kind, size) in enumerate(gradients):
        at, filled = open_at.get(kind, (-1, 0))
        if at < 0 or filled + size > cap:
            at, filled = len(buckets), 0
            buckets.append([])
        buckets[at].append(place)
        open_at[kind] = at, filled + size
    return tuple(map(tuple, sorted(buckets, key=lambda bucket: bucket[-1])))
