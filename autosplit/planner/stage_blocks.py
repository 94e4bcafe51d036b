"""The calls of repeated blocks in a stage, such as the layers of a transformer.

A stage calls equal blocks as modules, so that its capture traces one block of each kind::

    operations   embed  norm mm mm  norm mm mm  norm mm mm  head
    stage graph  embed  block(0)    block(1)    block(2)    head
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor, fx

from autosplit.capture.module_paths import stack
from autosplit.planner.blocks import signature_of
from autosplit.planner.operation_sequence import OperationSequence


@dataclass(frozen=True, eq=False)
class BlockCall:
    """The operations of one call of a repeated block.

    Attributes:
        name: the name of the block's module in the model.
        nodes: the operations, in order.
        inputs: the values that they read from the rest of the stage, in the order in which the
            block reads them.
        results: the operations whose values the rest of the stage reads, in order.
        kind: a key; equal for calls that one graph can run.
    """

    name: str
    nodes: Sequence[fx.Node]
    inputs: Sequence[fx.Node]
    results: Sequence[fx.Node]
    kind: str


def block_calls(
    line: OperationSequence, nodes: Sequence[fx.Node], returned: Collection[fx.Node]
) -> list[BlockCall]:
    """The calls in a stage whose kind occurs there at least twice.

    Args:
        line: the operations of the model.
        nodes: the operations of the stage, in order.
        returned: the operations whose values the stage returns.
    """
    calls = [*_calls(line, nodes, {*returned})]
    counts = Counter(call.kind for call in calls)
    return [call for call in calls if counts[call.kind] > 1]


def _calls(
    line: OperationSequence, nodes: Sequence[fx.Node], returned: set[fx.Node]
) -> Iterator[BlockCall]:
    """Yield the calls of blocks that run without a gap, and alone read their state."""
    runs: dict[str, list[list[fx.Node]]] = {}
    for name, group in groupby(nodes, lambda node: _block_of(line, node)):
        runs.setdefault(name, []).append([*group])
    runs.pop("", None)
    readers: dict[fx.Node, set[fx.Node]] = {}
    for node in nodes:
        for needed in node.all_input_nodes:
            readers.setdefault(needed, set()).add(node)
    for name, parts in runs.items():
        call = _call(line, name, parts[0], readers, returned) if len(parts) == 1 else None
        if call is not None:
            yield call


def _block_of(line: OperationSequence, node: fx.Node) -> str:
    return next((name for name in stack(node) if name in line.repeated), "")


def _call(
    line: OperationSequence,
    name: str,
    nodes: Sequence[fx.Node],
    readers: dict[fx.Node, set[fx.Node]],
    returned: set[fx.Node],
) -> BlockCall | None:
    """The call of a block that has these operations; None if they cannot be a module's."""
    members = {*nodes}
    state_names = line.forward.state
    read = dict.fromkeys(needed for node in nodes for needed in node.all_input_nodes)
    # In the order of the block, which reads sizes from its own inputs.
    outside = [n for n in read if n not in members and n not in line.forward.size_nodes]
    state = [node for node in outside if node in state_names]
    constants = [n for n in outside if n in line.forward.constants or n.op == "get_attr"]
    inputs = [node for node in outside if node not in state and node not in constants]
    results = [n for n in nodes if n in returned or readers.get(n, members) - members]
    prefix = f"{name}."
    reads_own_state = all(
        state_names[node].startswith(prefix) and readers[node] <= members and node not in returned
        for node in state
    )
    tensors = all(isinstance(line.value(node), Tensor) for node in (*inputs, *results))
    if not (state and reads_own_state and tensors and results):
        return None
    names = [state_names[node].removeprefix(prefix) for node in state]
    kind = signature_of(line, nodes, [*inputs, *state, *constants], results, names)
    return BlockCall(name, nodes, inputs, results, kind)
