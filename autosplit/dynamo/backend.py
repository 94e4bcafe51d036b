"""``torch.compile(model, backend="autosplit")``: every graph that Dynamo finds is split.

The backward of each graph computes the gradients of its inputs; those of its parameters wait
until ``autosplit.backward_weight(model)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from autosplit.autograd.pending_queue import PendingBound
from autosplit.capture.aot_session import traced_modules
from autosplit.errors import SplitError
from autosplit.runtime.split_options import SplitOptions
from autosplit.torch_internals.distributed import refuse_sharded

from .compilation import Compilation
from .compiled_backward import DeferredGraphOwner
from .pending_weights import PendingOnParameters

__all__ = ["SplittingBackend", "backend"]

_OPTIONS = ("backend", "overlap", "max_pending")


class SplittingBackend:
    """A Dynamo backend that splits.

    Args:
        owner: collects what is deferred; where None it waits on the parameters.
        options: how graphs are split and run; of ``memory`` and ``late_input`` nothing is asked.
    """

    def __init__(
        self, owner: DeferredGraphOwner | None = None, options: SplitOptions | None = None
    ) -> None:
        self._owner = owner or PendingOnParameters(PendingBound())
        self._options = options or SplitOptions()

    def __deepcopy__(self, memo: dict[int, Any]) -> SplittingBackend:
        """Itself: it is its owner's. Lightning has ``torch.compile`` copy what it is given, and a
        copy of the owner would compile again, and be copied, without end.
        """
        return self

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph for Dynamo.

        Raises:
            ShardedError: FSDP manages a module that the graph is of.
        """
        for root in traced_modules(module):
            refuse_sharded(root)
        return Compilation(module, example_inputs, self._owner, self._options)


def backend(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend that torch knows as ``"autosplit"``.

    Args:
        module: the graph.
        example_inputs: what Dynamo calls it with.
        options: some of ``{"backend": name, "overlap": what, "max_pending": number}``: how the
            split graphs are run, what weight gradients hide, and how many microbatches of each
            graph may wait for them, see ``autosplit.split``.

    Raises:
        SplitError: an option, a backend or an overlap is unknown; lists the known ones.
    """
    chosen = dict(options or {})
    if unknown := chosen.keys() - set(_OPTIONS):
        known = ", ".join(map(repr, _OPTIONS))
        raise SplitError(f"unknown option {min(unknown)!r}; known options: {known}")
    owner = PendingOnParameters(PendingBound(chosen.pop("max_pending", 1)))
    return SplittingBackend(owner, SplitOptions(**chosen))(module, example_inputs)
