"""In-flight microbatch state of a stage: between F and I, and between I and W."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import Tensor

from autosplit.errors import SplitError
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.gradient_accumulation import Accumulation, GradientSums
from autosplit.torch_internals.autograd import has_tensor_hooks
from autosplit.torch_internals.state import distinct_storage_bytes

from .detached_storages import StorageKey
from .saved_tensors import Residuals, State


class InFlightMicrobatch(NamedTuple):
    """State of one microbatch between two calls.

    Attributes:
        functions: the graphs that it runs.
        residuals: of the first call.
        state: parameters and buffers of F.
        lent: storages that the caller keeps more in than this microbatch.
    """

    functions: SplitFunctions
    residuals: Residuals
    state: State
    lent: frozenset[StorageKey] = frozenset()


class InFlightMicrobatches:
    """In-flight microbatches by their numbers.

    Args:
        owner: whose, for messages.
        before: the call that brings a microbatch here.
    """

    def __init__(self, owner: str, before: str) -> None:
        self._owner = owner
        self._before = before
        self._by_number: dict[int, InFlightMicrobatch] = {}

    def __contains__(self, microbatch: int) -> bool:
        return microbatch in self._by_number

    @property
    def waiting(self) -> list[int]:
        """The microbatches' numbers, in ascending order."""
        return sorted(self._by_number)

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that they hold, parameters and buffers left out."""
        return [
            t
            for microbatch_state in self._by_number.values()
            for t in microbatch_state.residuals.tensors
        ]

    @property
    def bytes(self) -> int:
        """Bytes of distinct storage that they hold."""
        return distinct_storage_bytes(self.tensors)

    def put(self, microbatch: int, microbatch_state: InFlightMicrobatch) -> None:
        self._by_number[microbatch] = microbatch_state

    def take(self, microbatch: int) -> InFlightMicrobatch:
        """Remove and return a microbatch's state.

        Raises:
            SplitError: it is not here, or not with all its tensors.
        """
        microbatch_state = self.get(microbatch)
        if microbatch_state.residuals.is_away:
            raise SplitError(
                f"{self._owner}: tensors of microbatch {microbatch} were taken out with "
                "detach_held(); put them back with attach_held() first"
            )
        del self._by_number[microbatch]
        return microbatch_state

    def get(self, microbatch: int) -> InFlightMicrobatch:
        """A microbatch's state.

        Raises:
            SplitError: it is not here.
        """
        if microbatch not in self._by_number:
            raise SplitError(
                f"{self._owner}: microbatch {microbatch} has not run {self._before}, or its "
                "result was used already"
            )
        return self._by_number[microbatch]

    def others(self, microbatch: int) -> list[InFlightMicrobatch]:
        """The states of all microbatches but this one."""
        return [state for number, state in self._by_number.items() if number != microbatch]

    def clear(self) -> None:
        self._by_number.clear()


class PendingWeightGradients:
    """Microbatches between I and W, and the sums that their gradients are added to.

    Args:
        owner: whose, for messages.
        accumulation: how gradients are added.
        slices: how many slices W can be run in.

    Attributes:
        in_flight: the microbatches between I and W.
        sums: the gradients so far.
        slices: how many slices W can be run in.
    """

    def __init__(self, owner: str, accumulation: Accumulation, slices: int) -> None:
        self.in_flight = InFlightMicrobatches(owner, "backward_input")
        self.sums = GradientSums(accumulation)
        self.slices = slices
        self._owner = owner
        self._begun: dict[int, int] = {}  # microbatch -> slices that have run

    def run(self, microbatch: int) -> None:
        """All of W.

        Raises:
            SplitError: this microbatch is not waiting, slices of it have run, or it ran on
                other parameters than those before it.
        """
        if microbatch in self._begun:
            raise SplitError(
                f"{self._owner}: {self._begun[microbatch]} of {self.slices} slices of W of "
                f"microbatch {microbatch} have run; run the others one by one"
            )
        functions, deferred, state, _ = self.in_flight.take(microbatch)
        names = functions.late_parameters
        sums = self.into(names, state)
        gradients = functions.backward_weight(deferred, sums, self.sums.accumulation)
        if sums is None:
            self.sums.add(names, gradients, functions.dependence.borrowed)

    def run_all(self, microbatches: Sequence[int]) -> None:
        """Run W of several microbatches, in this order. With concatenated accumulation, those that
        ran the same graph on the same parameters run as one.

        Raises:
            SplitError: as ``run``; a microbatch is named twice.
        """
        for together in self.calls(microbatches):
            self._run_together(together)

    def calls(self, microbatches: Sequence[int]) -> list[list[int]]:
        """The microbatches of each call that ``run_all`` makes of these, in order.

        Raises:
            SplitError: as ``run_all``.
        """
        repeated = [m for at, m in enumerate(microbatches) if m in microbatches[:at]]
        if repeated:
            raise SplitError(f"{self._owner}: W of microbatch {repeated[0]} is asked for twice")
        found: list[list[int]] = []
        for microbatch in microbatches:
            if found and self._fit(found[-1][0], microbatch):
                found[-1].append(microbatch)
            else:
                found.append([microbatch])
        return found

    def _fit(self, first: int, second: int) -> bool:
        """Whether W of two microbatches can run in one call."""
        one, other = self.in_flight.get(first), self.in_flight.get(second)
        names = one.functions.late_parameters
        return (
            self.sums.accumulation.concatenated
            and one.functions is other.functions
            and all(one.state[name] is other.state[name] for name in names)
            and self._begun.keys().isdisjoint((first, second))
            and one.functions.concatenates(one.residuals, other.residuals)
            and not has_tensor_hooks(one.state[name] for name in names)
        )

    def _run_together(self, microbatches: list[int]) -> None:
        if len(microbatches) == 1:
            self.run(microbatches[0])
            return
        in_flight = [self.in_flight.take(microbatch) for microbatch in microbatches]
        functions, _, state, _ = in_flight[0]
        deferred = [microbatch_state.residuals for microbatch_state in in_flight]
        names, accumulation = functions.late_parameters, self.sums.accumulation
        sums = self.into(names, state)
        gradients = functions.backward_weight_together(deferred, sums, accumulation)
        if sums is None:
            self.sums.add(names, gradients, functions.dependence.borrowed)

    def run_slice(self, microbatch: int, index: int) -> None:
        """One slice of W.

        Raises:
            SplitError: as ``run``, or it is not this slice's turn.
        """
        turn = self._begun.get(microbatch, 0)
        if index != turn:
            raise SplitError(
                f"{self._owner}: W of microbatch {microbatch} runs in {self.slices} slice(s), in "
                f"order; it is the turn of slice {turn}, got {index}"
            )
        functions, deferred, state, lent = self.in_flight.take(microbatch)
        weight = functions.sliced(self.slices)
        names = weight.parameter_names[index]
        sums = self.into(names, state)
        accumulation = self.sums.accumulation
        gradients, left = functions.weight_slice(self.slices, index, deferred, sums, accumulation)
        if sums is None:
            self.sums.add(names, gradients, weight.borrowed(index))
        if index + 1 == self.slices:
            self._begun.pop(microbatch, None)
            return
        self._begun[microbatch] = index + 1
        self.in_flight.put(microbatch, InFlightMicrobatch(functions, left, state, lent))

    def into(self, names: Sequence[str], state: State) -> list[Tensor] | None:
        """The sums that W or B adds into; None where it makes new gradients.

        Raises:
            SplitError: a parameter is not the one whose gradients were added up so far.
        """
        try:
            return self.sums.into(names, [state[name] for name in names])
        except SplitError as error:
            raise SplitError(f"{self._owner}: {error}") from None

    def publish(self, names: Collection[str] | None = None) -> None:
        """Move the sums into the parameters' ``.grad``.

        Args:
            names: of the parameters whose sums to move; None for all.

        Raises:
            SplitError: a microbatch waits for W, or for a slice that adds to one of these.
        """
        pending = [each for each in self.in_flight.waiting if self._adds(each, names)]
        if pending:
            waiting = ", ".join(map(str, pending))
            raise SplitError(
                f"{self._owner}: weight gradients of microbatch {waiting} are pending; "
                "call backward_weight() for each first"
            )
        self.sums.publish(names)

    def _adds(self, microbatch: int, names: Collection[str] | None) -> bool:
        """Whether what is left of a microbatch's W adds to some of these."""
        if names is None:
            return True
        functions = self.in_flight.get(microbatch).functions
        begun = self._begun.get(microbatch, 0)
        left = functions.sliced(self.slices).parameter_names[begun:]
        return any(name in names for each in left for name in each)

    def clear(self) -> None:
        """Forget everything."""
        self.in_flight.clear()
        self._begun.clear()
        self.sums.clear()
