"""What is pending for parameters of compiled models: ``autosplit.backward_weight(model)``.

``torch.compile(model, backend="autosplit")`` leaves no object of ours in the user's hands, so
deferred work waits on the parameters that it is for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ..compat import data_parallel
from ..errors import SplitError
from ..guard import StepGuard
from ..reducer import ReducerWatch, Ticket, refuse_sharded
from .work import Work, deliver, how_many, total_bytes

if TYPE_CHECKING:
    from .part import Part

_QUEUE = "_autosplit_pending"
_REDUCER = "_autosplit_reducer"


class OnParameters:
    """The owner of work that no model collects: it queues on the parameters themselves."""

    def name_of(self, parameter: nn.Parameter) -> None:
        """Known only by where Dynamo found it."""

    def compiled(self, part: Part) -> None:
        """Nobody asks for a report."""

    def entered(self, part: Part) -> _Entry | None:
        """Microbatches are told apart by their backward alone."""
        wrapper = data_parallel() if torch.is_grad_enabled() else None
        if wrapper is None:
            return None
        reducer = wrapper.__dict__.setdefault(_REDUCER, ReducerWatch())
        return _Entry(reducer, reducer.forward())

    def deferred(self, work: Work, token: _Entry | None) -> None:
        if token is not None:
            token.reducer.backward(token.ticket)
        _Queued(work, None if token is None else token.reducer).wait()


class _Entry(NamedTuple):
    """A graph called inside DistributedDataParallel."""

    reducer: ReducerWatch
    ticket: Ticket | None


class _Queued:
    """Work in the queues of its parameters; while it waits, no optimizer may step them."""

    def __init__(self, work: Work, reducer: ReducerWatch | None) -> None:
        self.work = work
        self.reducer = reducer
        self.pending = 1
        self._guard = StepGuard(self, advice="autosplit.backward_weight(model)")

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.work.named_parameters()

    def wait(self) -> None:
        self._guard.stand()
        for _, parameter in self.named_parameters():
            parameter.__dict__.setdefault(_QUEUE, []).append(self)

    def leave(self) -> None:
        self.pending = 0
        for _, parameter in self.named_parameters():
            rest = [each for each in parameter.__dict__.pop(_QUEUE, []) if each is not self]
            if rest:
                parameter.__dict__[_QUEUE] = rest


class Deferral:
    """Weight gradients that ``torch.compile(model, backend="autosplit")`` has deferred.

    The face is that of ``SplitModule``. One microbatch is what one ``backward()`` left.

    Args:
        model_or_parameters: the model, compiled or not, or some of its parameters.

    Raises:
        SplitError: it is something else.
        ShardedError: FSDP manages the model or a part of it.
    """

    def __init__(self, model_or_parameters: nn.Module | Tensor | Iterable[Tensor]) -> None:
        given = model_or_parameters
        if isinstance(given, Tensor):
            given = [given]
        if isinstance(given, nn.Module):
            refuse_sharded(given)  # some of its graphs never came to us
        self._parameters = list(given.parameters() if isinstance(given, nn.Module) else given)
        for each in self._parameters:
            if not isinstance(each, Tensor):
                raise SplitError(f"expected a module or parameters, got a {type(each).__name__}")

    @property
    def pending(self) -> int:
        """Microbatches whose weight gradients have not been computed."""
        return len(self._microbatches())

    @property
    def pending_bytes(self) -> int:
        """Bytes of distinct storage that pending microbatches hold."""
        return total_bytes(each.work for queued in self._microbatches() for each in queued)

    def backward_weight(self, microbatches: int | None = None) -> None:
        """Compute pending weight gradients and accumulate them into ``.grad``.

        They arrive through autograd: tensor hooks and post-accumulate hooks of the parameters
        fire. The weight gradients of one graph are computed together: asked for some
        parameters, this also delivers those of others that share a graph with them.

        Args:
            microbatches: how many, the oldest ``backward()`` first; all where None.

        Raises:
            SplitError: nothing, or fewer than asked for, is pending; or
                DistributedDataParallel would average only a part.
        """
        waiting = self._microbatches()
        taken = waiting[: how_many(len(waiting), microbatches)]
        reducers = {each.reducer for queued in waiting for each in queued} - {None}
        together = [r.delivers_together(len(taken), len(waiting)) for r in reducers if r]
        for queued in [list(chain(*taken))] if any(together) else taken:
            deliver([each.work for each in queued])
            for each in queued:
                each.leave()

    def _microbatches(self) -> list[list[_Queued]]:
        """What one backward left together, oldest backward first."""
        queues = [getattr(parameter, _QUEUE, ()) for parameter in self._parameters]
        found: dict[_Queued, None] = dict.fromkeys(each for queue in queues for each in queue)
        ordered = sorted(found, key=lambda each: (each.work.backward, -each.work.sequence))
        return [list(group) for _, group in groupby(ordered, lambda each: each.work.backward)]


def backward_weight(
    model_or_parameters: nn.Module | Tensor | Iterable[Tensor], microbatches: int | None = None
) -> None:
    """Compute the weight gradients that a model compiled with ``backend="autosplit"`` has
    deferred: ``Deferral(model_or_parameters).backward_weight(microbatches)``.

    Raises:
        SplitError: nothing, or fewer microbatches than asked for, is pending.
    """
    Deferral(model_or_parameters).backward_weight(microbatches)
