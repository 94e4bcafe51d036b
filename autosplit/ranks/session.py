"""The session of a trainer's ranks: connects them and watches each; the first error on one rank
ends the session on all.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

import torch
from torch.distributed.device_mesh import DeviceMesh

from autosplit.device import has_streams
from autosplit.errors import AutosplitError, PipelineError
from autosplit.mesh.costs import device_of_group
from autosplit.mesh.dimensions import RankLayout
from autosplit.ranks.fault_store import FaultStore
from autosplit.ranks.first_error import Guard
from autosplit.ranks.groups import Groups
from autosplit.ranks.watch import watch_over


class RankSession:
    """The connections of a rank to the other ranks of its trainer, from the trainer's construction
    until it is closed.

    A fault on any rank closes the connections of all ranks. The next call on each rank raises the
    first cause. Collective: all ranks must construct it together.

    Args:
        layout: the layout of the ranks.
        mesh: the mesh of the ranks; None without one.
        device: the device of this rank.
        timeout: seconds after which a wait for another rank fails.
    """

    def __init__(
        self, layout: RankLayout, mesh: DeviceMesh | None, device: torch.device, timeout: float
    ) -> None:
        self._background_wait: Callable[[], None] | None = None
        # Called before connections are closed, after a fault too.
        self._releases: list[Callable[[], object]] = []
        self._groups = Groups(layout, device, timeout)
        if mesh is not None and layout.inner:
            self._groups.add_external_group(mesh.get_group(layout.inner))
        everybody = self._groups.everybody
        faults = FaultStore(everybody.store) if everybody.ranks > 1 else None
        self._watch = watch_over(self._groups) if everybody.ranks > 1 else None
        if self._watch is not None:
            dropped = weakref.finalize(self, self._watch.leave, "dropped its trainer")
            dropped.atexit = False  # the exit of the process says more
        self._guard = Guard(everybody.rank, faults, self._end, self._groups.activity, self._watch)

    @property
    def rank(self) -> int:
        """This process's rank in its pipeline; with a mesh, its coordinate along "pp"."""
        return self._groups.rank

    @contextlib.contextmanager
    def together(self, phase: str) -> Iterator[Groups]:
        """Context for code that all ranks run between two steps; yields the process groups.

        An error inside ends the trainer on every rank.

        Args:
            phase: what the code does, as text for errors, such as "saving a checkpoint".

        Raises:
            PipelineError: an error on any rank, a lost peer, or a timeout.
        """
        with self._guard.during(phase, announced=True):
            yield self._groups

    def finish(self, wait: Callable[[], None] | None = None) -> None:
        """Wait for background work, such as an asynchronous save, and raise its errors.

        Args:
            wait: a function that waits for new background work; the next ``finish`` calls it.
        """
        earlier, self._background_wait = self._background_wait, None
        if earlier is not None:
            earlier()
        self._background_wait = wait

    def close(self) -> None:
        """Wait for background work, and destroy the process groups. Call it when all ranks have
        finished.

        Raises:
            CheckpointError: an asynchronous save has failed, and its error was not raised yet.
        """
        try:
            self.finish()
        finally:
            if self._watch is not None:
                self._watch.leave("closed its trainer")
            self._release()
            self._groups.destroy()
            self._guard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._guard.left(error)
            with contextlib.suppress(AutosplitError):  # the first cause is raised instead
                self.finish()
        self.close()

    def _end(self) -> None:
        """Close all connections after a fault."""
        if self._watch is not None:
            self._watch.stop()
        self._release()
        self._groups.close()

    def _release(self) -> None:
        for release in self._releases:
            release()


def choose_device(device: torch.device | str | None, layout: RankLayout) -> torch.device:
    """The device of this process's stages.

    Args:
        device: the user's choice; None: the device of the mesh or the process group, or torch's
            default device if there is one rank.
        layout: the layout of the ranks.

    Raises:
        PipelineError: the device cannot hold tensors, or has another type than the mesh.
    """
    if device is not None:
        try:
            chosen = torch.device(device)
            torch.empty(0, device=chosen).cpu()
        except (RuntimeError, AssertionError) as error:
            raise PipelineError(
                f"device={device!r} cannot hold stages here: {error}. "
                "Pass a device that this process can use, such as 'cpu' or 'cuda:0'"
            ) from error
        # Tensors on such a device have its index, and are compared with this device.
        if chosen.index is None and (chosen.type == "cuda" or has_streams(chosen)):
            chosen = torch.device(chosen.type, torch.get_device_module(chosen).current_device())
    elif layout.device_type == "cpu":
        chosen = torch.device("cpu")
    elif len(layout.ranks) > 1:
        chosen = device_of_group()
    else:  # torch's default device is "meta" while a model is built without memory
        chosen = torch.get_default_device()
        chosen = torch.device("cpu") if chosen.type == "meta" else chosen
    if layout.device_type not in ("", chosen.type):
        raise PipelineError(
            f"the mesh has devices of type {layout.device_type!r}, but the stages go to {chosen}: "
            f"use init_device_mesh({chosen.type!r}, ...)"
        )
    return chosen
