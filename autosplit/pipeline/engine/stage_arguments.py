"""Put together a stage's arguments, and the gradients of its outputs, from the messages of other
stages.

    messages of earlier stages, batch  ──bind_arguments──►  F
    messages of later stages         ──output_gradients──►  I  ──gradients_for──►  messages
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from autosplit.pipeline.schedule.routes import StageDataflow

T = TypeVar("T")
Receive = Callable[[], "list[Tensor | None]"]
"""Waits for a message, and returns its tensors in a new list; None for a gradient that is not
sent.
"""


def bind_arguments(
    stage: int,
    dataflow: StageDataflow,
    receives: Sequence[Callable[[], list[T]]],
    batch: Callable[[], list[T]],
) -> Callable[[], list[T]]:
    """Return a function that returns the arguments of a stage, in order, in a new list: tensors, or
    values in their place, such as sizes.

    Args:
        stage: the stage.
        dataflow: the dataflow between stages.
        receives: for each stage of ``dataflow.sources(stage)``, a function that returns the tensors
            that it sent.
        batch: a function that returns a new list of the batch's inputs; inputs that the stage does
            not read may be missing.
    """
    if dataflow.wiring is None:
        return receives[0] if receives else batch
    makers = dataflow.sources(stage)
    picks: list[tuple[int, int]] = []  # number of the maker (-1: the batch), number of its tensor
    for source in dataflow.wiring.inputs[stage]:
        if source.stage is None:
            picks.append((-1, source.position))
            continue
        positions = dataflow.positions(source.stage, stage) or ()
        picks.append((makers.index(source.stage), positions.index(source.position)))
    wants_batch = any(maker < 0 for maker, _ in picks)

    def bring() -> list[T]:
        parts: list[Sequence[T]] = [receive() for receive in receives]
        # The batch is the last part, at index -1.
        parts.append(batch() if wants_batch else ())
        return [parts[maker][place] for maker, place in picks]

    return bring


def output_gradients(stage: int, dataflow: StageDataflow, receives: Sequence[Receive]) -> Receive:
    """Return a function that returns the gradients of a stage's outputs, in order, in a new list.

    Gradients of an output that several stages read are added from the last stage to the first, as
    autograd does in the whole model. The entry of an output that no stage reads is None.

    Args:
        stage: the stage.
        dataflow: the dataflow between stages.
        receives: for each stage of ``dataflow.targets(stage)``, a function that returns the
            gradients that it sent.
    """
    if dataflow.wiring is None:
        return receives[0]
    count, targets = dataflow.wiring.outputs[stage], dataflow.targets(stage)
    backwards = [
        (receive, dataflow.positions(stage, target) or ())
        for receive, target in reversed(list(zip(receives, targets, strict=True)))
    ]

    def bring() -> list[Tensor | None]:
        totals: list[Tensor | None] = [None] * count
        for receive, positions in backwards:
            for position, gradient in zip(positions, receive(), strict=True):
                totals[position] = sum_gradients(totals[position], gradient)
        return totals

    return bring


def gradients_for(
    source: int, stage: int, dataflow: StageDataflow
) -> Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]] | None:
    """Return a function that chooses, from the gradients of a stage's inputs, the gradients of the
    outputs of ``source``.

    An output that the stage reads more than once gets the sum. Return None if the gradients are
    passed unchanged.
    """
    places = dataflow.places(source, stage)
    if places is None:
        return None

    def choose(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        chosen: list[Tensor | None] = []
        for first, *repeats in places:
            total = gradients[first]
            for place in repeats:
                total = sum_gradients(total, gradients[place])
            chosen.append(total)
        return chosen

    return choose


def sum_gradients(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum of two gradients. It is a new tensor, because each gradient may be in use elsewhere.
    None stands for zeros.
    """
    if one is None or other is None:
        return other if one is None else one
    return one + other
