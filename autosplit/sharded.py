"""``ShardedModule`` does FSDP2's work for a module whose forward, I and W are graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from autosplit.errors import ShardedError, SplitError
from autosplit.gathering import Gathering
from autosplit.torch_internals.distributed import fsdp_part, is_wrapped_by_fsdp, refuse_sharded
from autosplit.torch_internals.dtensor import local_tensor
from autosplit.torch_internals.state import allow_other_memory

if TYPE_CHECKING:
    from autosplit.torch_internals.fsdp import ParameterGroup, Root
    from autosplit.torch_internals.fsdp_view import PlainView

Writes = Sequence[int]
"""The version counter of each sharded parameter."""


class ShardedModule:
    """Does for graphs what FSDP2's hooks do for modules: gathers, reshards and reduces.

    A graph reads gathered parameters. ``gathering`` gathers them before the call, block by block,
    and reshards them as the options of ``fully_shard`` say. Weight gradients are accumulated
    unreduced, in the policy's ``reduce_dtype``. ``reduce`` reduces the sums once for each parameter
    group, into ``.grad`` of the sharded parameters. FSDP2 does the same if
    ``set_requires_gradient_sync(False)`` was called for all microbatches except the last.

    When parameters are gathered and freed:

    - with ``reshard_after_forward`` (ZeRO-3), they are gathered for each block's call;
    - without it (ZeRO-2), they are gathered and freed at the schedule's actions UNSHARD and
      RESHARD. If the schedule has none, they are gathered at the first microbatch and freed when
      gradients are reduced.

    Args:
        module: the module; ``fully_shard`` was or will be called for it or for parts of it.

    Attributes:
        groups: the parameter groups; empty if nothing was sharded at the last ``find_groups``.
        gathering: gathers parameters for graphs; None if there are no parameter groups.
        memory: maps the storage of a gathered parameter, freed or not, to the parameter's group.
        waiting: a function that returns a context. The context is entered around each wait for
            other ranks.

    Raises:
        ShardedError: the module is sharded in a way that graphs cannot reproduce; says how.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.groups: list[ParameterGroup] = []
        self._roots: list[Root] = []
        self._views: list[PlainView] = []
        self._owners: dict[int, Tensor] = {}
        self.memory: dict[int, ParameterGroup] = {}
        self.gathering: Gathering | None = None
        self.waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self.find_groups()

    def find_groups(self) -> None:
        """Set ``groups`` if the module was sharded since the last call. Call it before each
        capture.

        Raises:
            ShardedError: see the class.
        """
        module = self._module
        if self.gathering is not None or fsdp_part(module) is None:
            return
        # Importing autosplit imports nothing distributed.
        from autosplit.torch_internals import fsdp, fsdp_view

        if is_wrapped_by_fsdp(module) or fsdp.managed_from_outside(module):
            refuse_sharded(module)
        self._roots = fsdp.roots_of(module)
        self.groups = fsdp.ParameterGroup.within(module)
        for group in self.groups:
            if group.refusal:
                raise ShardedError(
                    f"fully_shard was called for {group.name} {group.refusal}. Such parameters "
                    "cannot be gathered for one graph: change that call of fully_shard, or use "
                    "the unsplit model"
                )
        managed = filter(fsdp_view.is_managed, module.modules())
        self._views = [*map(fsdp_view.PlainView, managed)]
        self.gathering = Gathering(self)

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """Context in which captures and guards see an unsharded module: DTensor parameters are
        replaced by their local tensors.
        """
        with self.with_gathered_parameters():
            for view in self._views:
                view.enter()
            try:
                yield
            finally:
                for view in self._views:
                    view.leave()

    @contextlib.contextmanager
    def with_gathered_parameters(self) -> Iterator[None]:
        """A context in which the module has its gathered parameters, possibly without memory."""
        self._make_ready()
        with contextlib.ExitStack() as stack:
            for group in self.groups:
                stack.enter_context(group.with_gathered_parameters())
            self._index_parameters()
            yield

    @property
    def is_unsharded(self) -> bool:
        """Whether all parameters are gathered."""
        return all(group.is_unsharded for group in self.groups)

    def unshard(self, *, whole: bool = False) -> bool:
        """Gather parameters that are not gathered: one all-gather per group, all started at once.

        Args:
            whole: whether to gather all groups. False: only the groups that stay gathered after a
                forward.

        Returns:
            whether any group was gathered.
        """
        if not self.groups:
            return False
        self._make_ready()
        kept = [group for group in self.groups if whole or not group.reshards_after_forward]
        missing = [group for group in kept if not group.is_unsharded]
        self.gather_groups(missing)
        self._index_parameters()
        return bool(missing)

    def start_unshard(self) -> None:
        """Start the all-gathers of groups that stay gathered after a forward. ``unshard`` waits for
        them.
        """
        self._make_ready()
        self.start_gather([group for group in self.groups if not group.reshards_after_forward])

    def start_gather(self, groups: Iterable[ParameterGroup]) -> None:
        """Start the all-gathers of groups that are not gathered."""
        missing = [group for group in groups if not group.is_unsharded]
        with self.waiting() if missing else contextlib.nullcontext():
            for group in missing:
                group.start_unshard()

    def gather_groups(self, groups: Sequence[ParameterGroup]) -> None:
        """Gather these groups: one all-gather per group, all started at once."""
        self.start_gather(groups)
        with self.waiting() if groups else contextlib.nullcontext():
            for group in groups:
                group.finish_unshard()

    def _make_ready(self) -> None:
        """Run FSDP2's lazy initialization. No parameter may be on the meta device."""
        for root in self._roots:
            root.make_ready()

    def _index_parameters(self) -> None:
        """Record to which sharded parameter and which group each gathered parameter belongs."""
        parameters = [(group, *pair) for group in self.groups for pair in group.pairs]
        owners = {id(whole): sharded for _, sharded, whole in parameters}
        if owners.keys() == self._owners.keys():
            return
        self._owners, self.memory = owners, {}
        for group, _, whole in parameters:
            local = local_tensor(whole)
            allow_other_memory((whole, local))
            self.memory[local.untyped_storage()._cdata] = group

    def reshard(self) -> None:
        """Free all gathered parameters."""
        for group in self.groups:
            group.reshard()

    @property
    def gathered_ids(self) -> Collection[int]:
        """The ``id`` of each gathered parameter."""
        return self._owners.keys()

    def owner(self, parameter: Tensor) -> Tensor:
        """The sharded parameter for a gathered parameter; other parameters are returned
        unchanged.
        """
        return self._owners.get(id(parameter), parameter)

    @property
    def parameters(self) -> list[Tensor]:
        """The sharded parameters."""
        return [*self._owners.values()]

    def writes(self) -> Writes:
        """The present version counter of each sharded parameter."""
        return [count for group in self.groups for count in group.writes]

    def check_writes(self, writes: Writes) -> None:
        """Refuse a backward if sharded parameters were written since the forward.

        Args:
            writes: the result of ``writes`` at the forward.

        Raises:
            SplitError: names the group.
        """
        if writes == self.writes():
            return
        remaining = list(writes)
        for group in self.groups:
            now = group.writes
            at_forward, remaining = remaining[: len(now)], remaining[len(now) :]
            if at_forward != now:
                raise SplitError(
                    f"sharded parameters of {group.name} were written between the forward and its "
                    "backward (an optimizer's step, load_state_dict): the backward would read the "
                    "new values. Run the backward first, then write the parameters"
                )

    def accumulate(self) -> None:
        """Add a microbatch's weight gradients, which W left in ``.grad`` of the gathered
        parameters, to the unreduced sums.
        """
        for group in self.groups:
            group.accumulate()

    def reduce(self, divisor: int = 1) -> None:
        """Reduce the gradients that were accumulated since the last call.

        Collective: one reduce-scatter for each group with gradients, in the same order on every
        rank. Groups with ``set_requires_gradient_sync(False)`` are not reduced.

        Args:
            divisor: the number by which gradients are divided before the reduction.
        """
        if self.start_reduce(divisor):
            self.finish_reduce()

    def start_reduce(self, divisor: int = 1) -> bool:
        """Start the reductions, from the last module to the first.

        Args:
            divisor: as for ``reduce``.

        Returns:
            whether a reduction was started.
        """
        groups = [group for group in reversed(self.groups) if group.reduces and group.has_unreduced]
        with self.waiting() if groups else contextlib.nullcontext():
            for group in groups:
                if divisor != 1:
                    group.divide(divisor)
                group.start_reduce()
        return bool(groups)

    def finish_reduce(self) -> None:
        """Wait for the reductions that ``start_reduce`` started."""
        with self.waiting():
            for root in self._roots:
                root.finish_backward()

    def shares_parameter_memory(self, tensors: Iterable[Tensor | None]) -> bool:
        """Whether a tensor shares memory with a gathered parameter, so that resharding would free
        the tensor's memory.
        """
        return any(t is not None and t.untyped_storage()._cdata in self.memory for t in tensors)

    def forget(self, parameters: Collection[int]) -> None:
        """Drop the unreduced gradients of sharded parameters, passed as their ``id``."""
        for group in self.groups:
            group.forget(parameters)
