"""A save that goes on beside the steps of a trainer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autosplit.errors import CheckpointError


class PendingSave:
    """A save under way: what is saved was copied, and a thread writes it.

    Args:
        work: writes it.
        where: it is written to, for errors.
    """

    def __init__(self, work: Callable[[], None], where: object) -> None:
        self._work = work
        self._where = where
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="autosplit-save", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended on this rank, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is there.

        Raises:
            CheckpointError: it is not, and what was at its path is as before. Raised once.
        """
        self._thread.join()
        error, self._error = self._error, None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(f"the save to {self._where} was cut off: {error}") from error

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error


@torch.no_grad()
def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same with all tensors copied to the host, which no later step changes."""
    return {name: _copy(value) for name, value in state.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        there = value.detach()
        return there.clone() if there.device.type == "cpu" else there.cpu()
    return copied(value) if isinstance(value, Mapping) else value
