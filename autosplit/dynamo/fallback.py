"""``Fallback`` runs calls of a split module that cannot be captured in one graph.

capture in one graph ──fails──> split graph by graph ──fails──> plain autograd
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autosplit.autograd.pending import PendingQueue
from autosplit.device import GeneratorStates
from autosplit.errors import AutosplitError, CaptureError, FailingCallError
from autosplit.runtime.options import SplitOptions

if TYPE_CHECKING:
    from .partial_model import PartialModel


class Fallback:
    """Runs calls that cannot be captured in one graph: graph by graph, or by plain autograd.

    Args:
        model: the model.
        options: options for splitting. Graph by graph, only ``memory="balanced"`` is supported.
        fullgraph: whether to raise instead of falling back.
        queue: the queue of pending microbatches.

    Attributes:
        partial: the model split graph by graph; None until a call needs it. From then on all calls
            use it, without another attempt to capture one graph.
    """

    def __init__(
        self,
        model: nn.Module,
        options: SplitOptions,
        fullgraph: bool,
        queue: PendingQueue,
    ) -> None:
        self._model, self._queue = model, queue
        self._options, self._fullgraph = options, fullgraph
        self.partial: PartialModel | None = None
        self._is_first_run = False  # whether the next call by graphs is the first
        self._failure: FailingCallError | None = None  # why calls run unsplit
        self._unsplit: dict[str, int] = {}

    @property
    def is_in_use(self) -> bool:
        """Whether calls run graph by graph, so that reports must describe Dynamo's graphs."""
        return self.partial is not None and self._failure is None

    def split_by_graphs(self, error: AutosplitError) -> PartialModel:
        """Split the model graph by graph from now on.

        Args:
            error: the error that says why the call cannot be captured in one graph.

        Raises:
            AutosplitError: ``error``, if the model requires one graph.
        """
        if self._fullgraph:
            raise error
        memory = self._options.memory
        if memory != "balanced":
            error.add_note(
                f"memory={memory!r} needs one graph; a model with several supports 'balanced' only"
            )
            raise error
        if self.partial is None:
            from .partial_model import PartialModel  # Dynamo takes over a second to import

            because = error.because if isinstance(error, CaptureError) else str(error)
            self.partial = PartialModel(
                self._model, self._options, str(error), because, self._queue
            )
            self._is_first_run = True
        return self.partial

    def run_by_graphs(self, partial: PartialModel, args: Any, kwargs: Any) -> Any:
        """Run a forward graph by graph.

        If the first forward fails graph by graph, it runs again by plain autograd. If it succeeds
        by plain autograd, all later forwards run by plain autograd, too.
        """
        if self._failure is not None:
            return self.run_unsplit(self._failure, args, kwargs)
        if not self._is_first_run:
            return partial(*args, **kwargs)
        restore = snapshot(self._model)
        waiting = self._queue.works()
        failing = None
        try:
            result = partial(*args, **kwargs)
        except AutosplitError:
            self.partial = None
            raise
        except Exception as error:
            failing = FailingCallError(f"{type(error).__name__}, run graph by graph: {error}")
            self._queue.remove([w for w in self._queue.works() if w not in waiting])
        if failing is not None:
            restore()
            self.partial = None
            # Outside of ``except``, so that the user's own error has no context.
            result = self.run_unsplit(failing, args, kwargs)
            self.partial, self._failure = partial, failing
            return result
        self._is_first_run = False
        return result

    def run_unsplit(self, error: FailingCallError, args: Any, kwargs: Any) -> Any:
        """Run the call by plain autograd, and warn the first time.

        If the call fails, the user's own error is raised.
        """
        if self._fullgraph:
            raise error
        result = self._model(*args, **kwargs)
        if not self._unsplit:
            warnings.warn(
                f"{type(self._model).__name__} runs calls like this one unsplit, by plain "
                f"autograd, because they fail while they are traced; report() lists them. {error}",
                stacklevel=3,
            )
        self._unsplit[str(error)] = self._unsplit.get(str(error), 0) + 1
        return result

    def unsplit_calls(self) -> list[str]:
        """Lines for a report: the number of calls that ran unsplit, and the reasons."""
        name = type(self._model).__name__
        return [
            f"{count} call(s) of {name} ran unsplit, by plain autograd: {reason}"
            for reason, count in self._unsplit.items()
        ]


def snapshot(model: nn.Module) -> Callable[[], None]:
    """Return a function that restores the present buffers and states of random generators."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    states = GeneratorStates.of([*model.parameters(), *model.buffers()])

    def restore() -> None:
        with torch.no_grad():
            for buffer, original in buffers:
                buffer.copy_(original)
        states.restore()

    return restore
