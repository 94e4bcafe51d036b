"""Read the private pending work of a split module."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from autosplit.dynamo.pending_weights import pending_queues


def works(module: Any) -> list[Any]:
    """The pending work of each call, oldest first."""
    result: list[Any] = module._queue.works()
    return result


def deferred_tensors(module: Any) -> list[Tensor]:
    """The tensors that ``backward()`` left for W, of all pending calls."""
    return [tensor for work in works(module) for tensor in work.deferred.tensors]


def pending_of_compiled(model: nn.Module) -> int:
    """The number of pending microbatches of a model that torch.compile has split."""
    return len({number for queue in pending_queues(model) for number in queue.microbatches})
