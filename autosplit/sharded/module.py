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

Writes = Sequence[int]
"""How often each sharded parameter was written."""


class ShardedModule:
    """Takes the part of FSDP's hooks for a module whose forward, I and W are graphs.

    A graph reads gathered parameters, all of them: they are gathered before it and resharded after
    it as ``fully_shard`` was told. Weight gradients are accumulated unreduced, in the policy's
    ``reduce_dtype``, and reduced once for each parameter group when ``reduce`` is called, into
    ``.grad`` of the sharded parameters: as with FSDP and ``set_requires_gradient_sync(False)`` for
    all microbatches but the last.

    Args:
        module: what ``fully_shard`` was called with, whole or in parts.

    Attributes:
        groups: its parameter groups.

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

    @classmethod
    def of(cls, module: nn.Module) -> ShardedModule | None:
        """The module, where ``fully_shard`` manages it or a part of it."""
        return cls(module) if fsdp_part(module) is not None else None

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """The module as if it were not sharded: to be captured, and for guards to be asked."""
        for view in self._views:
            view.enter()
        try:
            yield
        finally:
            for view in self._views:
                view.leave()

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Parameters are gathered, and afterwards as ``reshard_after_forward`` says."""
        self.unshard()
        try:
            yield
        finally:
            for group in self.groups:
                group.reshard_after_forward()

    @contextlib.contextmanager
    def backward(self, writes: Writes) -> Iterator[None]:
        """Parameters are gathered, and afterwards as ``set_reshard_after_backward`` says.

        Args:
            writes: what ``writes`` gave at the forward.

        Raises:
            SplitError: parameters were written in between: the gathered ones would be others.
        """
        self.check(writes)
        self.unshard()
        try:
            yield
        finally:
            for group in self.groups:
                if group.reshards_after_backward:
                    group.reshard()

    @property
    def is_unsharded(self) -> bool:
        """Whether all parameters are gathered."""
        return all(group.is_unsharded for group in self.groups)

    def unshard(self) -> None:
        """Gather all parameters: one all-gather a group, all under way at once."""
        waiting = [group for group in self.groups if not group.is_unsharded]
        if not waiting and self._owners:
            return
        for root in self._roots:  # not before parameters have left the meta device
            make_ready(root)
        for group in waiting:
            group.start_unshard()
        for group in waiting:
            group.finish_unshard()
        pairs = [pair for group in self.groups for pair in group.pairs]
        self._owners = {id(whole): sharded for sharded, whole in pairs}
        for _, whole in pairs:
            allow_other_memory((whole, local_tensor(whole)))

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
        every = (local_tensor(p) for group in self.groups for _, p in group.pairs)
        memory = {each.untyped_storage()._cdata for each in every}
        return any(t is not None and t.untyped_storage()._cdata in memory for t in tensors)

    def forget(self, parameters: Collection[int]) -> None:
        """Drop what was accumulated for some of the sharded parameters (their ``id``)."""
        for key in parameters:
            for group in self.groups:
                group.forget(key)
