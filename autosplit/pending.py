"""Microbatches between I and W."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence

from torch import Tensor

from .errors import SplitError
from .functions import SplitFunctions
from .guard import StepGuard
from .handover import Handover, State, distinct_bytes
from .reducer import ReducerWatch


@dataclasses.dataclass(slots=True, eq=False)
class Deferred:
    """What one backward through one graph left for W.

    Attributes:
        functions: whose W it is.
        handover: the tensors that W needs.
        early: gradients that I made, in the order of ``functions.early_parameters``.
        state: parameters and buffers as they were in the forward.
        skipped: parameters that get no gradient: no output that they are in took part.
        backward: number of the backward, told by the autograd engine.
        retained: whether that backward has ``retain_graph=True``: parameters that are computed
            (``torch.func.functional_call``) have a graph of their own.
    """

    functions: SplitFunctions
    handover: Handover
    early: Sequence[Tensor]
    state: State
    skipped: frozenset[str]
    backward: int
    retained: bool

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters that get a gradient: those of the forward, wherever they are now."""
        for name in self.functions.parameter_names:
            if name not in self.skipped:
                yield name, self.state[name]


class PendingQueue:
    """Deferred work, oldest backward first; no optimizer may step its parameters meanwhile.

    What one backward left belongs together, also where the module was called several times:
    it is one microbatch. Several threads may add and take.

    Attributes:
        reducer: whether DistributedDataParallel waits for the gradients.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._microbatches: dict[int, list[Deferred]] = {}
        self._guard = StepGuard(self)
        self.reducer = ReducerWatch()

    @property
    def pending(self) -> int:
        """How many microbatches."""
        return len(self._microbatches)

    @property
    def bytes(self) -> int:
        """Bytes of distinct storage that they hold."""
        works = self._works()
        return distinct_bytes(t for each in works for t in (*each.handover.tensors, *each.early))

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters that gradients are pending for."""
        named = {id(p): (name, p) for each in self._works() for name, p in each.named_parameters()}
        yield from named.values()

    def add(self, deferred: Deferred) -> None:
        """Queue it, behind what its own backward has left before."""
        with self._lock:
            self._microbatches.setdefault(deferred.backward, []).append(deferred)
            self._guard.stand()

    def take(self, microbatches: int | None) -> list[list[Deferred]]:
        """The oldest microbatches, all where None; they are not pending any more.

        Returns:
            What to deliver together: each microbatch by itself, or all in one.

        Raises:
            SplitError: nothing, or fewer than asked for, is pending; or a reducer needs more.
        """
        with self._lock:
            keys = list(self._microbatches)
            count = len(keys) if microbatches is None else microbatches
            if not keys:
                raise SplitError(
                    "backward_weight() with nothing pending: call loss.backward() through this "
                    "module first (each backward is one pending microbatch)"
                )
            if not 1 <= count <= len(keys):
                raise SplitError(
                    f"backward_weight(microbatches={count}): {len(keys)} pending; "
                    f"ask for 1 to {len(keys)}"
                )
            together = self.reducer.delivers_together(count, len(keys))
            taken = [self._microbatches.pop(key) for key in keys[:count]]
            return [[each for works in taken for each in works]] if together else taken

    def _works(self) -> list[Deferred]:
        with self._lock:
            return [each for works in self._microbatches.values() for each in works]
