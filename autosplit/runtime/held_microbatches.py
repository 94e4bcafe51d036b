"""``HeldMicrobatches``: the tensors that a stage holds between its calls."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Self

import torch
from torch import Tensor, nn

from autosplit.errors import SplitError
from autosplit.torch_internals.dtensor import local_tensor
from autosplit.torch_internals.state import distinct_storage_bytes

from .in_flight import InFlightMicrobatches, MicrobatchState, RecomputableState, StageBackward
from .residuals import Residuals
from .storages import PlacedStorage, StorageKey, is_plain, storage_of


class HeldMicrobatches:
    """The tensors that a stage holds of its microbatches between two calls.

    Args:
        owner: the stage's name, for messages.
        module: the module of the stage.
        dtype: the dtype of the sums of weight gradients; None for the dtype of each gradient.
    """

    def __init__(self, owner: str, module: nn.Module, dtype: torch.dtype | None) -> None:
        self._owner = owner
        self.module = module
        self._inputs: dict[int, RecomputableState] = {}
        self._saved = InFlightMicrobatches(owner, "forward")
        self._weights = StageBackward(owner, dtype)
        self._module_memory: tuple[Hashable, AbstractSet[StorageKey]] = (), frozenset()

    @property
    def saved_tensors(self) -> list[Tensor]:
        """The tensors that the stage holds between F and I, of all microbatches. Several may share
        one storage.
        """
        inputs = [tensor for state in self._inputs.values() for tensor in state.tensors]
        return [*self._saved.tensors, *inputs]

    @property
    def deferred_tensors(self) -> list[Tensor]:
        """The tensors that the stage holds between I and W, of all microbatches."""
        return self._weights.in_flight.tensors

    @property
    def saved_bytes(self) -> int:
        """Bytes of distinct storage of ``saved_tensors``."""
        return distinct_storage_bytes(self.saved_tensors)

    @property
    def deferred_bytes(self) -> int:
        """Bytes of distinct storage of ``deferred_tensors``."""
        return distinct_storage_bytes(self.deferred_tensors)

    def residuals_of(self, microbatch: int) -> list[Residuals]:
        """The residuals of a microbatch between two calls; none if the stage holds none."""
        return [phase[microbatch].residuals for phase in self._phases if microbatch in phase]

    @property
    def _phases(self) -> tuple[InFlightMicrobatches, InFlightMicrobatches]:
        return self._saved, self._weights.in_flight

    def held(self, microbatch: int, kept: Iterable[Tensor] = ()) -> list[Tensor]:
        """The storages of a microbatch that can be offloaded, each as ``torch.uint8`` [bytes].

        Such a storage is held by this microbatch between two calls. No other microbatch, the module
        or the caller holds it.

        Args:
            microbatch: the microbatch's number.
            kept: tensors that the caller holds; their storages are left out.

        Raises:
            SplitError: the microbatch is neither between F and its backward nor between I and W.
        """
        state = self._state_of(microbatch)
        storages = self._exclusive(microbatch, state, kept)
        return [state.residuals.storage_bytes(storage.places[0]) for storage in storages]

    def detach_held(self, microbatch: int, kept: Iterable[Tensor] = ()) -> list[Tensor]:
        """Remove the tensors that ``held`` returns from the microbatch, and return them.

        Until ``attach_held`` puts them back, no call can run the microbatch.

        Args:
            microbatch: the microbatch's number.
            kept: as for ``held``.

        Raises:
            SplitError: as for ``held``; or storages are detached already; or a tensor was written
                in place.
        """
        state = self._state_of(microbatch)
        if state.residuals.detached:
            raise SplitError(
                f"{self._owner}: tensors of microbatch {microbatch} are detached already; call "
                "attach_held() with the list that the first detach_held() returned"
            )
        return state.residuals.detach(self._exclusive(microbatch, state, kept))

    def attach_held(self, microbatch: int, tensors: Sequence[Tensor]) -> None:
        """Give the tensors that ``detach_held`` returned, or copies of them, back to the
        microbatch.

        Args:
            microbatch: the microbatch's number.
            tensors: the same bytes in the same order, on the same device.

        Raises:
            SplitError: the sizes or devices differ, or nothing is detached.
        """
        try:
            self._state_of(microbatch).residuals.attach(tensors)
        except SplitError as error:
            raise SplitError(f"{self._owner}: microbatch {microbatch}: {error}") from None

    def copy_of(self, microbatch: int) -> Self:
        """Return a stage of the same module and graphs that holds only this microbatch's state. The
        two stages share its tensors, except those that a graph may overwrite, which are copied.
        """
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        twin._saved = InFlightMicrobatches(self._owner, "forward")
        twin._weights = StageBackward(self._owner, self._weights.sums.dtype)
        for phase, copy in zip(self._phases, twin._phases, strict=True):
            if microbatch in phase:
                state = phase[microbatch]
                copy[microbatch] = state._replace(residuals=state.residuals.duplicate())
        return twin

    def take_from(self, twin: Self, microbatch: int) -> None:
        """Take the microbatch's state and the weight gradients of ``twin``, a copy of this stage,
        after it has run an action.
        """
        for phase, copy in zip(self._phases, twin._phases, strict=True):
            if microbatch in phase:
                phase.remove_state(microbatch)
            if microbatch in copy:
                phase[microbatch] = copy[microbatch]
        gradients, sums = twin._weights.sums.tensors, self._weights.sums
        sums.set_parameters([*gradients], [*map(self.module.get_parameter, gradients)])
        # The twin may share a gradient with an audit, which another run must find unchanged.
        sums.add_gradients([*gradients], [*gradients.values()], borrowed=gradients)
        if not self.residuals_of(microbatch):
            self._weights.report_end(microbatch)

    def _state_of(self, microbatch: int) -> MicrobatchState:
        phase = next((phase for phase in self._phases if microbatch in phase), None)
        if phase is None:
            raise SplitError(
                f"{self._owner}: microbatch {microbatch} holds nothing that could be moved: it is "
                "neither between F and its backward nor between I and W. Call held() after "
                "forward() or backward_input()"
            )
        return phase[microbatch]

    def _exclusive(
        self, microbatch: int, state: MicrobatchState, kept: Iterable[Tensor]
    ) -> Sequence[PlacedStorage]:
        """The storages that only this microbatch holds.

        Storages of parameters, buffers and constants, of other microbatches, and of the caller are
        left out.
        """
        exclusive = dict(state.residuals.storages())
        outside = {storage_of(tensor) for tensor in map(local_tensor, kept) if is_plain(tensor)}
        other_storages = [
            other.residuals.storages()
            for phase in self._phases
            for number, other in phase.items()
            if number != microbatch
        ]
        shared = (state.residuals.batch_storages(), outside, self._module_storages(state))
        for keys in (*shared, *other_storages):
            for key in exclusive.keys() & keys:
                del exclusive[key]
        return tuple(exclusive.values())

    def _module_storages(self, state: MicrobatchState) -> AbstractSet[StorageKey]:
        """Keys of the storages of the parameters, buffers and constants that a microbatch reads.
        The last result is cached. It is valid while the parameters, buffers and constants and their
        addresses stay the same.
        """
        values = (*map(local_tensor, state.module_state.values()), *state.residuals.fixed)
        tensors = [tensor for tensor in values if is_plain(tensor)]
        identity = tuple([(id(tensor), tensor.data_ptr()) for tensor in tensors])
        if identity != self._module_memory[0]:
            self._module_memory = identity, {storage_of(tensor) for tensor in tensors}
        return self._module_memory[1]
