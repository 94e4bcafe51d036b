"""``ShardedModule``: a module whose forward and backward are graphs, and which ``fully_shard`` may
have sharded; ``Gathering``: gathers its parameters where a graph, or a block's call, reads them.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn

from autosplit.errors import ShardedError, SplitError
from autosplit.passes.graph import SUBGRAPH, placeholders
from autosplit.torch_internals.distributed import fsdp_part, is_wrapped_by_fsdp, refuse_sharded
from autosplit.torch_internals.dtensor import local_tensor
from autosplit.torch_internals.state import allow_other_memory

if TYPE_CHECKING:
    from autosplit.backends.backend import Boxed
    from autosplit.torch_internals.fsdp import ParameterGroup, PlainView, Root

Writes = Sequence[int]
"""How often each sharded parameter was written."""


class ShardedModule:
    """Takes the part of FSDP's hooks for a module whose forward, I and W are graphs.

    A graph reads gathered parameters: ``gathering`` gathers them for it, block by block, and
    reshards them as ``fully_shard`` was told. Weight gradients are accumulated unreduced, in the
    policy's ``reduce_dtype``, and reduced once for each parameter group when ``reduce`` is called,
    into ``.grad`` of the sharded parameters: as with FSDP and
    ``set_requires_gradient_sync(False)`` for all microbatches but the last.

    ``PipelineTrainer`` gathers parameters before a step and frees them behind it; torch's schedules
    may say when (UNSHARD, RESHARD). Under one that does not, graphs gather those that are to be
    freed after a forward, block by block (ZeRO-3); the others are gathered at the first microbatch
    and freed when gradients are reduced (ZeRO-2).

    Args:
        module: what ``fully_shard`` was called with, whole or in parts, or will be.

    Attributes:
        groups: its parameter groups; none where nothing is sharded, or was when it was looked at.
        gathering: gathers them for graphs; None likewise.
        memory: where gathered parameters lie, freed or not -> their group.

    Raises:
        ShardedError: it is sharded in a way that cannot be taken apart; says which.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.groups: list[ParameterGroup] = []
        self._roots: list[Root] = []
        self._views: list[PlainView] = []
        self._owners: dict[int, Tensor] = {}
        self.memory: dict[int, ParameterGroup] = {}
        self.gathering: Gathering | None = None
        self.look()

    def look(self) -> None:
        """Find out whether the module is sharded by now, before anything is traced."""
        module = self._module
        if self.gathering is not None or fsdp_part(module) is None:
            return
        # Importing autosplit imports nothing distributed.
        from autosplit.torch_internals import fsdp

        if is_wrapped_by_fsdp(module) or fsdp.managed_from_outside(module):
            refuse_sharded(module)
        self._roots = fsdp.roots_of(module)
        self.groups = fsdp.ParameterGroup.within(module)
        for group in self.groups:
            if group.refusal:
                raise ShardedError(
                    f"fully_shard was called for {group.name} {group.refusal}. Such parameters "
                    "cannot be gathered for one graph: call it without that, or use the model "
                    "unsplit"
                )
        self._views = [fsdp.PlainView(part) for part in module.modules() if fsdp.is_managed(part)]
        self.gathering = Gathering(self)

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
        with contextlib.ExitStack() as stack:
            for group in self.groups:
                stack.enter_context(group.standing_in())
            self._note()
            yield

    @property
    def is_unsharded(self) -> bool:
        """Whether all parameters are gathered."""
        return all(group.is_unsharded for group in self.groups)

    def unshard(self, *, whole: bool = False) -> bool:
        """Gather parameters that are not: one all-gather a group, all under way at once.

        Args:
            whole: all, and not only those that a forward leaves gathered.

        Returns:
            whether there were any.
        """
        if not self.groups:
            return False
        self._make_ready()
        kept = [group for group in self.groups if whole or not group.frees]
        waiting = [group for group in kept if not group.is_unsharded]
        for group in waiting:
            group.start_unshard()
        for group in waiting:
            group.finish_unshard()
        self._note()
        return bool(waiting)

    def _make_ready(self) -> None:
        for root in self._roots:  # not before parameters have left the meta device
            root.make_ready()

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

    def reduce(self, divisor: int = 1) -> None:
        """Reduce what was accumulated since the last time: one reduce-scatter for each group that
        has gradients, in the same order on every rank; none where ``set_requires_gradient_sync``
        is off.

        Args:
            divisor: of what is reduced.
        """
        if self.start_reduce(divisor):
            self.finish_reduce()

    def start_reduce(self, divisor: int = 1) -> bool:
        """Start them, last modules first; whether there were any."""
        groups = [each for each in reversed(self.groups) if each.reduces and each.unreduced]
        for group in groups:
            if divisor != 1:
                group.divide(divisor)
            group.start_reduce()
        return bool(groups)

    def finish_reduce(self) -> None:
        """Wait for reductions that were started."""
        for root in self._roots:
            root.finish_backward()

    def lies_in_parameters(self, tensors: Iterable[Tensor | None]) -> bool:
        """Whether one of these is in the memory of a gathered parameter, which comes and goes."""
        return any(t is not None and t.untyped_storage()._cdata in self.memory for t in tensors)

    def forget(self, parameters: Collection[int]) -> None:
        """Drop what was accumulated for some of the sharded parameters (their ``id``)."""
        for key in parameters:
            for group in self.groups:
                group.forget(key)


class Gathering:
    """Gathers parameters for the graphs of one module, and frees them as ``fully_shard`` was told.

    A group that one block alone reads is gathered for the call of that block, so that a deep model
    has no more of its parameters at a time than under FSDP2 itself; what else a graph reads, for
    the whole graph. Groups are found by the memory of what a graph is given: what F saves for the
    backward may be a view of a parameter.

    Args:
        sharded: the module.
    """

    def __init__(self, sharded: ShardedModule) -> None:
        self._sharded = sharded
        self._left: set[ParameterGroup] = set()

    def graph(self, name: str, module: fx.GraphModule, call: Boxed) -> Boxed:
        """A graph of the module, with its parameters gathered around it.

        Args:
            name: of the graph: ``forward``, or one of the backward's.
            module: the graph.
            call: runs it.
        """
        users = [_blocks(node) for node in placeholders(module.graph)]

        def run(args: list[Any]) -> list[Any]:
            blocks: dict[ParameterGroup, set[fx.Node | None]] = defaultdict(set)
            for value, readers in zip(args, users, strict=True):
                for group in self._groups((value,)):
                    blocks[group] |= readers
            whole = [group for group, found in blocks.items() if len(found) > 1 or None in found]
            return self._around(name, whole, call, args)

        return run

    def block(self, name: str, call: Boxed) -> Boxed:
        """A graph that those of the module call, likewise."""

        def run(args: list[Any]) -> list[Any]:
            return self._around(name, self._groups(args), call, args)

        return run

    def _groups(self, values: Iterable[Any]) -> list[ParameterGroup]:
        """The groups in whose gathered memory some of these are."""
        known = self._sharded.memory
        found = (
            known.get(value.untyped_storage()._cdata)
            for value in values
            if isinstance(value, Tensor)
        )
        return list(dict.fromkeys(group for group in found if group is not None))

    def _around(
        self, name: str, groups: Sequence[ParameterGroup], call: Boxed, args: list[Any]
    ) -> list[Any]:
        """A call between gathering and freeing; who else has gathered a group also frees it."""
        missing = [group for group in groups if not group.is_unsharded]
        self._left.difference_update(missing)
        for group in missing:
            group.start_unshard()
        for group in missing:
            group.finish_unshard()
        try:
            return call(args)
        finally:
            if name.startswith("forward"):
                for group in missing:
                    group.reshard_after_forward()
                self._left.update(group for group in missing if group.is_unsharded)
            else:
                for group in {*missing, *self._left.intersection(groups)}:
                    if group.reshards_after_backward:
                        group.reshard()


def _blocks(node: fx.Node) -> set[fx.Node | None]:
    """The calls of blocks that read an input; None stands for what else does."""
    return {user if SUBGRAPH in user.meta else None for user in node.users}
