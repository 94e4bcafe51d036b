"""``Gathering``: gathers sharded parameters where a graph, or the call of a block, reads them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx

from autosplit.passes.graph import SUBGRAPH, placeholders

if TYPE_CHECKING:
    from autosplit.backends.backend import Boxed
    from autosplit.torch_internals.fsdp import ParameterGroup

    from .module import ShardedModule


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
