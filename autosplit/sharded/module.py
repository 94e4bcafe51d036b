"""``ShardedModule``: a module of ``fully_shard`` whose forward and backward are graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import Tensor, nn

from autosplit.errors import ShardedError, SplitError
from autosplit.torch_internals.distributed import fsdp_part, is_wrapped_by_fsdp, refuse_sharded
from autosplit.torch_internals.dtensor import local_tensor
from autosplit.torch_internals.fsdp import (
    ParameterGroup,
    PlainView,
    finish_backward,
    is_managed,
    make_ready,
    managed_from_outside,
    root_states,
)
from autosplit.torch_internals.state import allow_other_memory

from .gathering import Gathering

Writes = Sequence[int]
"""How often each sharded parameter was written."""


class ShardedModule:
    """Takes the part of FSDP's hooks for a module whose forward, I and W are graphs.

    A graph reads gathered parameters: ``gathering`` gathers them for it, block by block, and
    reshards them as ``fully_shard`` was told. Weight gradients are accumulated unreduced, in the
    policy's ``reduce_dtype``, and reduced once for each parameter group when ``reduce`` is called,
    into ``.grad`` of the sharded parameters: as with FSDP and
    ``set_requires_gradient_sync(False)`` for all microbatches but the last.

    Args:
        module: what ``fully_shard`` was called with, whole or in parts.

    Attributes:
        groups: its parameter groups.
        gathering: gathers them for graphs.
        memory: where gathered parameters lie, freed or not -> their group.

    Raises:
        ShardedError: it is sharded in a way that cannot be taken apart; says which.
    """

    def __init__(self, module: nn.Module) -> None:
        if is_wrapped_by_fsdp(module) or managed_from_outside(module):
            refuse_sharded(module)
        self._roots = root_states(module)
        self.groups = ParameterGroup.within(module)
        for group in self.groups:
            if group.refusal:
                raise ShardedError(
                    f"fully_shard was called for {group.name} {group.refusal}. Such parameters "
                    "cannot be gathered for one graph: call it without that, or use the model "
                    "unsplit"
                )
        self._views = [PlainView(part) for part in module.modules() if is_managed(part)]
        self._owners: dict[int, Tensor] = {}
        self.memory: dict[int, ParameterGroup] = {}
        self.gathering = Gathering(self)

    @classmethod
    def of(cls, module: nn.Module) -> ShardedModule | None:
        """The module, where ``fully_shard`` manages it or a part of it."""
        return cls(module) if fsdp_part(module) is not None else None

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """The module as if it were not sharded: to be captured, and for guards to be asked."""
        with self.standing_in():
            for view in self._views:
                view.enter()
            try:
                yield
            finally:
                for view in self._views:
                    view.leave()

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """The module holds its gathered parameters, which may be without memory."""
        self._make_ready()
        undo = [group.stand_in() for group in self.groups]
        self._note()
        try:
            yield
        finally:
            for each in undo:
                each()

    @property
    def is_unsharded(self) -> bool:
        """Whether all parameters are gathered."""
        return all(group.is_unsharded for group in self.groups)

    def unshard(self, *, left_by_forward: bool = False) -> bool:
        """Gather parameters that are not: one all-gather a group, all under way at once.

        Args:
            left_by_forward: only those that a forward is to leave gathered.

        Returns:
            whether there were any.
        """
        self._make_ready()
        kept = [group for group in self.groups if not (left_by_forward and group.frees)]
        waiting = [group for group in kept if not group.is_unsharded]
        for group in waiting:
            group.start_unshard()
        for group in waiting:
            group.finish_unshard()
        self._note()
        return bool(waiting)

    def _make_ready(self) -> None:
        for root in self._roots:  # not before parameters have left the meta device
            make_ready(root)

    def _note(self) -> None:
        """Which gathered parameter is whose, and where it lies."""
        found = [(group, *pair) for group in self.groups for pair in group.pairs]
        owners = {id(whole): sharded for _, sharded, whole in found}
        if owners.keys() == self._owners.keys():
            return
        self._owners, self.memory = owners, {}
        for group, _, whole in found:
            local = local_tensor(whole)
            allow_other_memory((whole, local))
            self.memory[local.untyped_storage()._cdata] = group

    def reshard(self) -> None:
        """Free all gathered parameters."""
        for group in self.groups:
            group.reshard()

    def owner(self, parameter: Tensor) -> Tensor:
        """The sharded parameter of a gathered one; another parameter is its own."""
        return self._owners.get(id(parameter), parameter)

    @property
    def parameters(self) -> list[Tensor]:
        """The sharded parameters."""
        return [*self._owners.values()]

    def writes(self) -> Writes:
        """How often each sharded parameter was written by now."""
        return [count for group in self.groups for count in group.writes]

    def check(self, writes: Writes) -> None:
        """Refuse a backward on other parameters than those of the forward.

        Raises:
            SplitError: says which group's were written.
        """
        if writes == self.writes():
            return
        left = list(writes)
        for group in self.groups:
            now = group.writes
            before, left = left[: len(now)], left[len(now) :]
            if before != now:
                raise SplitError(
                    f"sharded parameters of {group.name} were written between the forward and its "
                    "backward (an optimizer's step, load_state_dict): the backward would read the "
                    "new ones. Run the backward before that"
                )

    def accumulate(self) -> None:
        """Take weight gradients of a microbatch from where W has put them."""
        for group in self.groups:
            group.accumulate()

    def reduce(self) -> None:
        """Reduce what was accumulated since the last time: one reduce-scatter for each group that
        has gradients, in the same order on every rank; none where ``set_requires_gradient_sync``
        is off.
        """
        groups = [group for group in self.reduced_groups if group.unreduced]
        for group in groups:
            group.start_reduce()
        if groups:
            self.finish_reduce()

    @property
    def reduced_groups(self) -> list[ParameterGroup]:
        """Those that are to be reduced, in the order of it: the last modules' gradients are there
        first.
        """
        return [group for group in reversed(self.groups) if group.reduces]

    @property
    def blocks(self) -> bool:
        """Whether whoever starts a reduction waits for the other ranks."""
        return any(group.device.type == "cpu" for group in self.groups)

    def finish_reduce(self) -> None:
        """Wait for reductions that were started."""
        for root in self._roots:
            finish_backward(root)

    def lies_in_parameters(self, tensors: Iterable[Tensor | None]) -> bool:
        """Whether one of these is in the memory of a gathered parameter, which comes and goes."""
        return any(t is not None and t.untyped_storage()._cdata in self.memory for t in tensors)

    def forget(self, parameters: Collection[int]) -> None:
        """Drop what was accumulated for some of the sharded parameters (their ``id``)."""
        for key in parameters:
            for group in self.groups:
                group.forget(key)
