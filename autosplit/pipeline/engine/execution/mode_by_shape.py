"""One mode of running for each shape of batch that comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from autosplit.errors import BatchError
from autosplit.pipeline.engine.messages.process_groups import Groups
from autosplit.pipeline.engine.messages.shape_negotiation import TensorMeta
from autosplit.pipeline.schedule.schedule import Schedule

from .microbatch import Batch
from .mode import Mode

_KEPT = 64  # modes: each has buffers of its own for messages


class Modes:
    """Finds the mode that fits a batch, on every rank the same.

    With one shape nothing needs to be said. With more, the rank of the first stage that takes
    any of the batch tells the others its shape.

    Args:
        limit: how many shapes the first stage's inputs may have, 1 or more; None for any number,
            of which those that were used last are kept.
        groups: the trainer's process groups.
        source: the rank of the first stage that takes inputs of the batch; passes all of them.
        make: makes the mode of a name that tells it apart.
    """

    def __init__(
        self, limit: int | None, groups: Groups, source: int, make: Callable[[str], Mode]
    ) -> None:
        self._limit = limit
        self._groups = groups
        self._source = source
        self._make = make
        self._known: dict[str, Mode] = {}

    def of(self, batch: Batch | None) -> Mode:
        """The mode for ``batch``; collective unless there is only one.

        Raises:
            BatchError: one shape more than the limit, or replicas were given different ones.
            LostPeerError: the first stage's rank did not say.
        """
        shape = ""
        if self._limit != 1:
            own = _shape(batch) if self._groups.rank == self._source else None
            shape = self._agreed(own)
        if shape in self._known:
            self._known[shape] = self._known.pop(shape)  # used last
        else:
            if self._limit is None and len(self._known) == _KEPT:  # all ranks drop the same
                del self._known[next(iter(self._known))]
            if len(self._known) == self._limit:
                raise BatchError(
                    f"the batch's inputs are {shape}: another shape than the {self._limit} of "
                    f"shapes={self._limit} ({'; '.join(self._known)}); allow more, or pad the batch"
                )
            self._known[shape] = self._make(shape)
        return self._known[shape]

    def _agreed(self, own: str | None) -> str:
        """The shape that the first stage's rank says, and that of every replica of the pipeline."""
        layout = self._groups.layout
        if len(layout.pipelines) == 1:
            return self._groups.announce(own, self._source)
        heard = self._groups.everybody.gather(own)
        sources = layout.columns[self._source]
        first, shape = sources[0], heard[sources[0]] or ""
        for rank in sources:
            if heard[rank] != shape:
                raise BatchError(
                    f"the replicas were given batches of different shapes: the inputs are {shape} "
                    f"on rank {first} and {heard[rank]} on rank {rank}; give each replica as many "
                    "samples of one shape, as a DistributedSampler and a DataLoader with "
                    "drop_last=True do"
                )
        return shape

    def drop_unbuilt(self) -> None:
        """Forget the modes that have run nothing, as if their batches had not come."""
        self._known = {
            shape: mode for shape, mode in self._known.items() if mode.executor is not None
        }

    def reschedule(self, schedule: Schedule, make: Callable[[str], Mode]) -> None:
        """Go on under another schedule, also with shapes to come, which ``make`` makes."""
        self._make = make
        for mode in self._known.values():
            mode.reschedule(schedule)


def _shape(batch: Batch | None) -> str:
    part = batch[0] if isinstance(batch, tuple | list) and batch else None
    if isinstance(part, Mapping):
        part = [part[name] for name in sorted(part)]
    tensors = part if isinstance(part, tuple | list) else [part]
    return ", ".join(str(TensorMeta.of(each)) for each in tensors if isinstance(each, Tensor))
