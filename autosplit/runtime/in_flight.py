"""In-flight microbatches of a stage: between F and I, and between I and W.

What they hold, each alone, can be moved away for a while; of some only F's inputs are kept, until F
runs again."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autosplit.device import GeneratorStates
from autosplit.errors import SplitError
from autosplit.runtime.functions import SplitFunctions
from autosplit.runtime.gradient_accumulation import GradientSums
from autosplit.torch_internals.autograd import without_autocast
from autosplit.torch_internals.dtensor import local_tensor
from autosplit.torch_internals.state import distinct_storage_bytes

from .residuals import (
    BoundaryLayout,
    PlacedStorage,
    Residuals,
    State,
    StorageKey,
    is_plain,
    storage_of,
)


class MicrobatchState(NamedTuple):
    """State of one microbatch between two calls.

    Attributes:
        functions: the graphs that it runs.
        residuals: of the first call.
        state: parameters and buffers of F.
        lent: storages that the caller keeps more in than this microbatch.
        skipped: parameters that get no gradient from it.
    """

    functions: SplitFunctions
    residuals: Residuals
    state: State
    lent: frozenset[StorageKey] = frozenset()
    skipped: frozenset[str] = frozenset()


class InFlightMicrobatches:
    """In-flight microbatches by their numbers.

    Args:
        owner: whose, for messages.
        before: the call that brings a microbatch here.
    """

    def __init__(self, owner: str, before: str) -> None:
        self._owner = owner
        self._before = before
        self._by_number: dict[int, MicrobatchState] = {}

    def __contains__(self, microbatch: int) -> bool:
        return microbatch in self._by_number

    @property
    def waiting(self) -> list[int]:
        """The microbatches' numbers, in ascending order."""
        return sorted(self._by_number)

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that they hold, parameters and buffers left out."""
        return [t for each in self._by_number.values() for t in each.residuals.tensors]

    @property
    def bytes(self) -> int:
        """Bytes of distinct storage that they hold."""
        return distinct_storage_bytes(self.tensors)

    def put(self, microbatch: int, held: MicrobatchState) -> None:
        self._by_number[microbatch] = held

    def take(self, microbatch: int) -> MicrobatchState:
        """Remove and return a microbatch's state.

        Raises:
            SplitError: it is not here, or not with all its tensors.
        """
        held = self._by_number.get(microbatch) or self.get(microbatch)
        if held.residuals.away:
            raise SplitError(
                f"{self._owner}: tensors of microbatch {microbatch} were taken out with "
                "detach_held(); put them back with attach_held() first"
            )
        del self._by_number[microbatch]
        return held

    def get(self, microbatch: int) -> MicrobatchState:
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

    def others(self, microbatch: int) -> list[MicrobatchState]:
        """The states of all microbatches but this one."""
        return [state for number, state in self._by_number.items() if number != microbatch]

    def clear(self) -> None:
        self._by_number.clear()


class StageBackward:
    """Microbatches between I and W, and the sums that their gradients are added to.

    Args:
        owner: whose, for messages.
        dtype: of the sums; None for that of each gradient.

    Attributes:
        in_flight: the microbatches between I and W.
        sums: the gradients so far.
    """

    def __init__(self, owner: str, dtype: torch.dtype | None = None) -> None:
        self.in_flight = InFlightMicrobatches(owner, "backward_input")
        self.sums = GradientSums(dtype)
        self._owner = owner

    def input(
        self, microbatch: int, held: MicrobatchState, grads: list[Tensor | None]
    ) -> list[Tensor | None]:
        """I of a microbatch: gradients of its inputs; empties ``grads``, one for each output."""
        functions, saved, state, lent, _ = held
        functions, (skipped, idle, _) = functions.for_gradients(grads)
        names, sums = functions.early_parameters, self.sums
        into = self.into(names, state, skipped) if names else ()
        found, deferred, early = functions.backward_input(saved, grads, into or None, sums.dtype)
        if names and into is None:
            sums.add(names, early, functions.dependence.borrowed, skipped)
        for at in idle:  # autograd knows no gradient from a gradient of zeros
            found[at] = None
        self.in_flight.put(microbatch, MicrobatchState(functions, deferred, state, lent, skipped))
        return found

    def whole(self, held: MicrobatchState, grads: list[Tensor | None]) -> list[Tensor | None]:
        """B of a microbatch, likewise."""
        functions, saved, state, _, _ = held
        functions, (skipped, idle, _) = functions.for_gradients(grads)
        names, sums = functions.parameter_names, self.sums
        into = self.into(names, state, skipped)
        found, gradients = functions.backward(saved, grads, into, sums.dtype)
        if into is None:
            sums.add(names, gradients, functions.dependence.borrowed, skipped)
        for at in idle:
            found[at] = None
        return found

    def run(self, microbatch: int) -> None:
        """W of a microbatch.

        Raises:
            SplitError: it is not waiting, or ran on other parameters than those before it.
        """
        functions, deferred, state, _, skipped = self.in_flight.take(microbatch)
        if not functions.has_backward:
            return
        names = functions.late_parameters
        sums = self.into(names, state, skipped)
        gradients = functions.backward_weight(deferred, sums, self.sums.dtype)
        if sums is None:
            self.sums.add(names, gradients, functions.dependence.borrowed, skipped)

    def into(
        self, names: Sequence[str], state: State, skipped: Collection[str]
    ) -> list[Tensor] | None:
        """The sums that W or B adds into; None where it makes new gradients.

        Args:
            names: of the parameters.
            state: has them.
            skipped: those that get no gradient, though the graph makes one.

        Raises:
            SplitError: a parameter is not the one whose gradients were added up so far.
        """
        try:
            found = self.sums.into(names, [*map(state.__getitem__, names)])
        except SplitError as error:
            raise SplitError(f"{self._owner}: {error}") from None
        return None if skipped else found

    def publish(self) -> list[Tensor]:
        """Move the sums into the parameters' ``.grad``; see ``GradientSums.publish``.

        Raises:
            SplitError: a microbatch waits for W.
        """
        if pending := self.in_flight.waiting:
            waiting = ", ".join(map(str, pending))
            raise SplitError(
                f"{self._owner}: weight gradients of microbatch {waiting} are pending; "
                "call backward_weight() for each first"
            )
        return self.sums.publish()

    def clear(self) -> None:
        """Forget everything."""
        self.in_flight.clear()
        self.sums.clear()


class KeptInputs:
    """What it takes to run one microbatch's F once more, with the same results bit for bit.

    To be made before that F runs. Buffers that it writes are kept as they were; everything else
    that it reads must be the same when it runs again.

    Args:
        functions: the graphs that F runs.
        state: the module's parameters and buffers.
        inputs: of the microbatch.
    """

    def __init__(self, functions: SplitFunctions, state: State, inputs: list[Tensor]) -> None:
        self.functions = functions
        self.state = state
        self._buffers = {name: state[name].clone() for name in functions.updated_state}
        steady = [name for name in functions.forward_state if name not in self._buffers]
        names = (*functions.capture.inputs, *steady)
        read = tuple([state[name] for name in steady])
        known = BoundaryLayout(names, functions.forward_constants, range(len(inputs)))
        self._inputs = Residuals(known, list(inputs), read)
        self._generators = GeneratorStates.of([*inputs, *state.values()])

    @property
    def inputs(self) -> list[Tensor]:
        """The microbatch's inputs."""
        return [*self._inputs.tensors]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that are kept."""
        return [*self.inputs, *self._buffers.values()]

    def run(self) -> Residuals:
        """F again; what it saves. Its outputs, and what it would write into buffers, are dropped.

        Raises:
            SplitError: something that F reads was written in place since, or exchanged.
        """
        count = len(self.functions.capture.inputs)
        leaves: list[Any] = self._inputs.take()[:count]
        state = {**self.state, **self._buffers}
        with torch.no_grad(), without_autocast(), self._generators.again():
            return self.functions.forward(state, leaves).saved


class HeldStorages:
    """What the in-flight microbatches of a stage hold, each alone.

    Args:
        owner: whose, for messages.
        saved: the microbatches between F and the backward.
        deferred: those between I and W.
    """

    def __init__(
        self, owner: str, saved: InFlightMicrobatches, deferred: InFlightMicrobatches
    ) -> None:
        self._owner = owner
        self._saved = saved
        self._deferred = deferred
        self._state: tuple[Hashable, AbstractSet[StorageKey]] = (), frozenset()

    def of(self, microbatch: int, kept: Iterable[Tensor]) -> list[Tensor]:
        """See ``Stage.held``."""
        own, others = self._find(microbatch)
        found = self._own(own, others, kept)
        return [own.residuals.whole(each.places[0]) for each in found]

    def detach(self, microbatch: int, kept: Iterable[Tensor]) -> list[Tensor]:
        """See ``Stage.detach_held``."""
        own, others = self._find(microbatch)
        if own.residuals.away:
            raise SplitError(
                f"{self._owner}: tensors of microbatch {microbatch} are away already; put them "
                "back with attach_held() first"
            )
        return own.residuals.detach(self._own(own, others, kept))

    def attach(self, microbatch: int, tensors: Sequence[Tensor]) -> None:
        """See ``Stage.attach_held``."""
        own, _ = self._find(microbatch)
        try:
            own.residuals.attach(tensors)
        except SplitError as error:
            raise SplitError(f"{self._owner}: microbatch {microbatch}: {error}") from None

    def _find(self, microbatch: int) -> tuple[MicrobatchState, list[MicrobatchState]]:
        """A microbatch's state and those of all others."""
        here, there = self._saved, self._deferred
        if microbatch not in here:
            here, there = there, here
        if microbatch not in here:
            raise SplitError(
                f"{self._owner}: microbatch {microbatch} holds nothing that could be moved: it is "
                "neither between F and its backward nor between I and W"
            )
        return here.get(microbatch), [*here.others(microbatch), *there.others(microbatch)]

    def _own(
        self,
        microbatch: MicrobatchState,
        others: Iterable[MicrobatchState],
        kept: Iterable[Tensor],
    ) -> Sequence[PlacedStorage]:
        """Storages that could be away for a while.

        Not of parameters, buffers and constants, nor of what several microbatches or the caller
        hold.

        Args:
            microbatch: whose.
            others: the stage's other microbatches.
            kept: tensors of others besides.
        """
        given = {storage_of(each) for each in map(local_tensor, kept) if is_plain(each)}
        shared = (microbatch.lent, given, self._of_state(microbatch))
        found = dict(microbatch.residuals.storages())
        for keys in (*shared, *(other.residuals.storages() for other in others)):
            for key in found.keys() & keys:
                del found[key]
        return tuple(found.values())

    def _of_state(self, microbatch: MicrobatchState) -> AbstractSet[StorageKey]:
        """Storages of what the microbatch reads besides; those of the last one asked for are known
        while they lie where they lay.
        """
        every = (*map(local_tensor, microbatch.state.values()), *microbatch.residuals.fixed)
        tensors = [tensor for tensor in every if is_plain(tensor)]
        places = tuple([(id(tensor), tensor.data_ptr()) for tensor in tensors])
        if places != self._state[0]:
            self._state = places, {storage_of(tensor) for tensor in tensors}
        return self._state[1]


_PLAIN = {Tensor, torch.nn.Parameter}


def lent_storages(tensors: Iterable[Tensor | None]) -> frozenset[StorageKey]:
    """Storages in which tensors that were handed over are only a part, as of a batch."""
    lent: set[StorageKey] = set()
    for each in tensors:  # in line, as every call of a stage asks
        if each is None or type(each) not in _PLAIN or each.layout is not torch.strided:
            continue
        storage = each.untyped_storage()
        if each.nbytes != storage.nbytes():
            lent.add((each.device, storage.data_ptr()))
    return frozenset(lent)
