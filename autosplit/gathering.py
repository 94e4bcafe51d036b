"""``Gathering`` gathers sharded parameters for the call of each graph or repeated block, and frees
them. ``GatherOrder`` says which groups to gather ahead.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx

from autosplit.passes.graph import SUBGRAPH, placeholders

if TYPE_CHECKING:
    from autosplit.backends.backend import Boxed
    from autosplit.sharded import ShardedModule
    from autosplit.torch_internals.fsdp import ParameterGroup


BlockGathers = list[list[int]]
"""For each call that gathers, in order, the numbers of the parameter groups that it gathers."""


class GatherOrder:
    """Predicts which groups the calls of a step gather, from the calls of the step before.

        call of a block    before    0       between    1       between    2
        all-gather for     0 1                  2                  3
        gathered           (0) (1)   0 (1)   (1) (2)    1 (2)   (2) (3)    2 (3)

    A group in parentheses is being gathered. At any time, the groups that are gathered or being
    gathered are those of two different calls: the running call, if any, and the next ones. A group
    stays gathered between its calls: after the forwards of blocks 2 and 3, their backwards run
    without an all-gather. FSDP2's prefetching has as many groups gathered, but starts the
    all-gather for block 2 only when block 1 has been gathered.

    Attributes:
        ahead: the groups that are gathered, or being gathered, for later calls.
    """

    def __init__(self) -> None:
        self._expected: list[Sequence[ParameterGroup]] = []
        self._calls: list[Sequence[ParameterGroup]] = []
        self._is_as_expected = True
        self.ahead: set[ParameterGroup] = set()

    def begin_order(self) -> None:
        """Begin a step, whose calls are expected in the order of the last step. All groups must
        have been freed.
        """
        if self._calls:
            self._expected, self._calls = self._calls, []
        self._is_as_expected = True
        self.ahead.clear()

    def record(self, groups: Sequence[ParameterGroup]) -> None:
        """Record a call that gathers these groups. If the step's calls now differ from those of the
        last step, free the groups that were gathered for later calls.
        """
        place = len(self._calls)
        self._calls.append(groups)
        self.ahead.difference_update(groups)
        if self._expected[place : place + 1] != [groups]:
            self._is_as_expected = False
            for group in self.ahead:
                group.reshard()
            self.ahead.clear()

    def next_groups(self, *, running: bool = False) -> list[ParameterGroup]:
        """Return the groups of the next two calls that gather different groups; none if this step's
        calls differ from those of the last step.

        Args:
            running: whether the call that was recorded last is one of the two.
        """
        different: list[Sequence[ParameterGroup]] = []
        if self._is_as_expected:
            for groups in self._expected[len(self._calls) - running :]:
                if groups not in different:
                    different.append(groups)
                if len(different) == 2:
                    break
        return [*itertools.chain.from_iterable(different)]


class Gathering:
    """Gathers parameters for the graphs of one module, and frees them by ``fully_shard``'s options.

    A group that only one block reads is gathered for the call of that block, so that a deep model
    has no more parameters gathered at a time than under FSDP2. Other groups are gathered for the
    whole graph. The groups that a call needs are recognized by the memory of its arguments, because
    a tensor that F saves may be a view of a parameter.

    Args:
        sharded: the sharded module.

    Attributes:
        order: the expected order of calls, which several modules may share; None: nothing is
            gathered ahead.
        agree: a function that is called with the gathers of a graph before it runs. If it returns
            False, all groups are gathered for the whole graph. None: no function is called.
    """

    def __init__(self, sharded: ShardedModule) -> None:
        self._sharded = sharded
        self.order: GatherOrder | None = None
        self.agree: Callable[[BlockGathers], bool] | None = None
        self._gathered_by_forward: set[ParameterGroup] = set()

    def graph(self, name: str, module: fx.GraphModule, call: Boxed) -> Boxed:
        """Return a function that gathers a graph's parameters and runs the graph.

        Args:
            name: the graph's name: ``forward``, or one of the backward graphs.
            module: the graph.
            call: the compiled graph, which needs gathered parameters.
        """
        nodes = placeholders(module.graph)
        readers_of_inputs = [_blocks(node) for node in nodes]
        inputs_of_calls = _inputs_of_blocks(module.graph, nodes)

        def run(args: list[Any]) -> list[Any]:
            """Gather the parameters for the graph and for its blocks, and run it."""
            blocks: dict[ParameterGroup, set[fx.Node | None]] = defaultdict(set)
            for value, readers in zip(args, readers_of_inputs, strict=True):
                for group in self._groups((value,)):
                    blocks[group] |= readers
            whole = [group for group, users in blocks.items() if len(users) > 1 or None in users]
            if self.agree is not None:
                calls = [self._groups([args[at] for at in places]) for places in inputs_of_calls]
                if not self.agree(self._numbers(whole, calls)):
                    whole = self._freed_groups
            return self._run_gathered(name, whole, call, args)

        return run

    def gather_all(self, *, is_forward: bool) -> None:
        """Gather all groups and free them, so that ranks which run a graph meanwhile can gather
        theirs.

        Args:
            is_forward: whether the graph is a forward.
        """
        name = "forward" if is_forward else "backward"
        self._run_gathered(name, self._freed_groups, list, [])

    @property
    def _freed_groups(self) -> list[ParameterGroup]:
        return [group for group in self._sharded.groups if group.reshards_after_forward]

    def _numbers(
        self, whole: Sequence[ParameterGroup], calls: Iterable[Sequence[ParameterGroup]]
    ) -> BlockGathers:
        """The gathers of a graph: groups for the whole graph, then other groups by call."""
        numbers = {group: number for number, group in enumerate(self._sharded.groups)}
        freed = {*self._freed_groups}
        gathers = [[numbers[group] for group in whole if group in freed]]
        freed.difference_update(whole)
        gathers += [[numbers[group] for group in groups if group in freed] for groups in calls]
        return [*filter(None, gathers)]

    def block(self, name: str, call: Boxed) -> Boxed:
        """Return a function that gathers the parameters of a repeated block's graph and runs the
        graph.
        """

        def run(args: list[Any]) -> list[Any]:
            return self._run_gathered(name, self._groups(args), call, args)

        return run

    def _groups(self, values: Iterable[Any]) -> list[ParameterGroup]:
        """The groups whose gathered parameters share memory with these values."""
        memory = self._sharded.memory
        groups = (
            memory.get(value.untyped_storage()._cdata)
            for value in values
            if isinstance(value, Tensor)
        )
        return list(dict.fromkeys(group for group in groups if group is not None))

    def _run_gathered(
        self, name: str, groups: Sequence[ParameterGroup], call: Boxed, args: list[Any]
    ) -> list[Any]:
        """Gather the groups that are not gathered, run the call, and free the groups that were
        gathered for it.

        If a forward leaves a group gathered, the backward frees it.
        """
        ahead = set() if self.order is None else self.order.ahead
        missing = [group for group in groups if group in ahead or not group.is_unsharded]
        self._gathered_by_forward.difference_update(missing)
        if self.order is not None and missing:
            self.order.record(missing)
            self.gather_ahead(running=missing)
        self._sharded.gather_groups(missing)
        try:
            results = call(args)
        finally:
            self._free(name, groups, missing)
        if missing:
            self.gather_ahead()
        return results

    def gather_ahead(self, running: Sequence[ParameterGroup] = ()) -> None:
        """Start the all-gathers for the next calls, if they are known from the last step.

        Args:
            running: the groups of a call that begins now.
        """
        if self.order is not None:
            upcoming = self.order.next_groups(running=bool(running))
            ahead = [group for group in upcoming if group not in running]
            self._sharded.start_gather(ahead)
            self.order.ahead.update(ahead)

    def _free(
        self, name: str, groups: Sequence[ParameterGroup], missing: Sequence[ParameterGroup]
    ) -> None:
        """Free the groups that were gathered for a call, except groups that the next calls read."""
        kept = [] if self.order is None else self.order.next_groups()
        gathered = [group for group in missing if group not in kept]
        if name.startswith("forward"):
            for group in gathered:
                group.reshard_after_forward()
            self._gathered_by_forward.update(group for group in gathered if group.is_unsharded)
        else:
            for group in {*gathered, *self._gathered_by_forward.intersection(groups)}:
                if group.reshards_after_backward:
                    group.reshard()


def _blocks(node: fx.Node) -> set[fx.Node | None]:
    """The calls of repeated blocks that read a graph's input. The set contains None if another
    operator reads the input.
    """
    return {user if SUBGRAPH in user.meta else None for user in node.users}


def _inputs_of_blocks(graph: fx.Graph, inputs: Sequence[fx.Node]) -> list[list[int]]:
    """For each call of a repeated block, the places in ``inputs`` of the arguments that are inputs
    of the graph.
    """
    places = {node: place for place, node in enumerate(inputs)}
    return [
        [places[node] for node in call.all_input_nodes if node in places]
        for call in graph.nodes
        if SUBGRAPH in call.meta
    ]
