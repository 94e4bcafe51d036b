"""``ShardedModule`` does FSDP2's work for a module whose forward, I and W are graphs.

``Gathering`` gathers parameters for the call of each graph or repeated block.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
"""The version counter of each sharded parameter."""
BlockGathers = list[list[int]]
"""For each call that gathers, in order, the numbers of the parameter groups that it gathers."""


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
        from autosplit.torch_internals import fsdp

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
        self._views = [fsdp.PlainView(part) for part in module.modules() if fsdp.is_managed(part)]
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
        """Gather all groups and free them, as ranks do that run a graph meanwhile.

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
    """For each call of a repeated block, the places of those of its arguments that are inputs of
    the graph.
    """
    places = {node: place for place, node in enumerate(inputs)}
    return [
        [places[node] for node in call.all_input_nodes if node in places]
        for call in graph.nodes
        if SUBGRAPH in call.meta
    ]
