"""``Fallback``: how a split module runs calls that cannot be captured in one graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autosplit.autograd.pending import PendingQueue
from autosplit.device import GeneratorStates
from autosplit.errors import AutosplitError, CaptureError, FailingCallError
from autosplit.runtime.build import SplitOptions

if TYPE_CHECKING:
    from .partial_model import PartialModel


class Fallback:
    """Runs calls that cannot be captured in one graph, and tells which later ones to capture.

    Args:
        model: the model.
        options: how it is split; models split graph by graph have no memory setting.
        fullgraph: whether to raise instead.
        queue: of the microbatches that wait for W.

    Attributes:
        partial: the model split graph by graph; None until it is needed. From then on calls go to
            it without a try to capture them.
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
        self._is_first_run = False  # whether no call by graphs has run yet
        self._failure: FailingCallError | None = None  # why no graph is tried any more
        self._unsplit: dict[str, int] = {}

    @property
    def is_in_use(self) -> bool:
        """Whether reports are to be about the model split graph by graph."""
        return self.partial is not None and self._failure is None

    def split_by_graphs(self, error: AutosplitError) -> PartialModel:
        """Split graph by graph from now on.

        Raises:
            AutosplitError: ``error``, where one graph is insisted on.
        """
        if self._fullgraph:
            raise error
        memory = self._options.memory
        if memory != "balanced":
            error.add_note(
                f"memory={memory!r} needs one graph; in parts a model is split as 'balanced'"
            )
            raise error
        if self.partial is None:
            because = error.because if isinstance(error, CaptureError) else str(error)
            self.partial = self._by_graphs(str(error), because)
            self._is_first_run = True
        return self.partial

    def run_by_graphs(self, partial: PartialModel, args: Any, kwargs: Any) -> Any:
        """The forward graph by graph. If a first one fails, it is run by plain autograd, and so are
        later ones unless that fails, too.
        """
        if self._failure is not None:
            return self.run_unsplit(self._failure, args, kwargs)
        if not self._is_first_run:
            return partial(*args, **kwargs)
        restore = _snapshot(self._model)
        waiting = self._queue.works()
        failing = None
        try:
            result = partial(*args, **kwargs)
        except AutosplitError:
            self.partial = None
            raise
        except Exception as error:
            failing = FailingCallError(f"{type(error).__name__} in parts: {error}")
            self._queue.forget([w for w in self._queue.works() if w not in waiting])
        if failing is not None:
            restore()
            self.partial = None
            result = self.run_unsplit(failing, args, kwargs)  # here, for the user's own error alone
            self.partial, self._failure = partial, failing
            return result
        self._is_first_run = False
        return result

    def run_unsplit(self, error: FailingCallError, args: Any, kwargs: Any) -> Any:
        """The call by plain autograd: where that fails too, with the user's own error."""
        if self._fullgraph:
            raise error
        result = self._model(*args, **kwargs)
        if not self._unsplit:
            warnings.warn(
                f"{type(self._model).__name__} runs calls like this one unsplit, by plain "
                f"autograd, as they fail where they are traced. report() says so too. {error}",
                stacklevel=3,
            )
        self._unsplit[str(error)] = self._unsplit.get(str(error), 0) + 1
        return result

    def unsplit_calls(self) -> list[str]:
        """For a report: how many calls ran unsplit, and why."""
        name = type(self._model).__name__
        return [
            f"{count} call(s) of {name} ran unsplit, by plain autograd: {reason}"
            for reason, count in self._unsplit.items()
        ]

    def _by_graphs(self, reason: str, because: str = "") -> PartialModel:
        from .partial_model import PartialModel  # Dynamo takes over a second to import

        return PartialModel(self._model, self._options, reason, because, self._queue)


def _snapshot(model: nn.Module) -> Callable[[], None]:
    """Puts buffers and generators of random numbers back as they are now."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    states = GeneratorStates.of([*model.parameters(), *model.buffers()])

    def restore() -> None:
        with torch.no_grad():
            for buffer, original in buffers:
                buffer.copy_(original)
        states.restore()

    return restore
