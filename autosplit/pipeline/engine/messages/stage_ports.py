"""A stage's inputs and output gradients, assembled from the messages of other stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from autosplit.pipeline.schedule.wiring import Feeds

Receive = Callable[[], "list[Tensor | None]"]
Probe = Callable[[], bool]


def arguments(
    stage: int,
    feeds: Feeds,
    receives: Sequence[Receive],
    batch: Callable[[], Sequence[Tensor | None]],
) -> Callable[[], list[Tensor | None]]:
    """The call that brings the arguments of a stage, in order, in a fresh list.

    Args:
        stage: whose arguments.
        feeds: who feeds whom.
        receives: brings what each of ``feeds.sources(stage)`` gives.
        batch: brings the batch's inputs; those that the stage takes are there.
    """
    if feeds.wiring is None:
        return receives[0] if receives else lambda: [*batch()]
    makers = feeds.sources(stage)
    picks: list[tuple[int, int]] = []  # of which parcel, or of the batch (-1), which tensor
    for source in feeds.wiring.inputs[stage]:
        if source.stage is None:
            picks.append((-1, source.position))
            continue
        positions = feeds.positions(source.stage, stage) or ()
        picks.append((makers.index(source.stage), positions.index(source.position)))
    wants_batch = any(parcel < 0 for parcel, _ in picks)

    def bring() -> list[Tensor | None]:
        parcels: list[Sequence[Tensor | None]] = [receive() for receive in receives]
        # The batch stands last, where -1 finds it.
        parcels.append(batch() if wants_batch else ())
        return [parcels[parcel][place] for parcel, place in picks]

    return bring


def output_gradients(stage: int, feeds: Feeds, receives: Sequence[Receive]) -> Receive:
    """The call that brings the gradients of a stage's outputs, in order, in a fresh list.

    Those of an output that several stages use are added up from the last stage to the first, as
    autograd does in a model that runs as one; an output that none uses has None.

    Args:
        stage: whose outputs.
        feeds: who feeds whom.
        receives: brings what each of ``feeds.targets(stage)`` gives.
    """
    if feeds.wiring is None:
        return receives[0]
    count = feeds.wiring.outputs[stage]
    targets = feeds.targets(stage)
    backwards = [
        (receive, feeds.positions(stage, target) or ())
        for receive, target in reversed(list(zip(receives, targets, strict=True)))
    ]

    def bring() -> list[Tensor | None]:
        totals: list[Tensor | None] = [None] * count
        for receive, positions in backwards:
            for position, gradient in zip(positions, receive(), strict=True):
                totals[position] = added(totals[position], gradient)
        return totals

    return bring


def gradients_for(
    source: int, stage: int, feeds: Feeds
) -> Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]:
    """The function from the gradients of a stage's inputs to those of what ``source`` gave it.

    An output that the stage takes more than once gets the sum.
    """
    if feeds.wiring is None:
        return lambda gradients: gradients
    wanted = feeds.positions(source, stage) or ()
    places = [
        [
            place
            for place, each in enumerate(feeds.wiring.inputs[stage])
            if (each.stage, each.position) == (source, position)
        ]
        for position in wanted
    ]

    def choose(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        chosen: list[Tensor | None] = []
        for first, *others in places:
            total = gradients[first]
            for place in others:
                total = added(total, gradients[place])
            chosen.append(total)
        return chosen

    return choose


def added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Their sum, a new tensor: either may be in use elsewhere. None stands for zeros."""
    if one is None or other is None:
        return other if one is None else one
    return one + other
