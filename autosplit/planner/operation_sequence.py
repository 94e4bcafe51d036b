"""The forward of a model as a sequence of operations that can be cut between any two.

Replicated operations are not in the sequence. They are cheap and depend only on the batch, buffers
and constants: masks, position ids, rotary tables. They run in every stage that reads them, which
costs less than a message. Nodes that compute sizes are not in it either: each stage reads sizes
from its own arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from autosplit.capture.forward_graph import CapturedForward
from autosplit.capture.mode_switches import Setting, settings
from autosplit.torch_internals.pytree import tree_flatten


class OperationSequence:
    """The operations of a forward in the order in which they run.

    Args:
        forward: the captured forward.
        repeated: names of repeated blocks of the model, see ``repeated_blocks``.

    Attributes:
        forward: the captured forward.
        body: the operations in order, without replicated ones.
        position: the position of each operation of ``body``.
        settings: grad mode and autocast around every node that a stage may hold.
        replicated: operations that run in every stage that reads them.
        last_use: for each operation of ``body``, the position of its last reader; the length of
            ``body`` if the model returns it.
        writers: maps a storage to the operations that write into it.
        forbidden: maps an illegal cut to the reason; cut k is before ``body[k]``.
    """

    def __init__(self, forward: CapturedForward, repeated: Collection[str] = ()) -> None:
        self.forward = forward
        self.repeated = frozenset(repeated)
        self.effects = forward.effects
        graph = forward.module.graph
        self._order = {node: index for index, node in enumerate(graph.nodes)}
        node_settings = settings(graph)
        self.settings: dict[fx.Node, Setting] = {
            n: s for n, s in node_settings.items() if s is not None
        }
        calls = [
            n
            for n in graph.nodes
            if n.op.startswith("call_") and n in self.settings and n not in forward.size_nodes
        ]
        calls = _alive(calls, self)
        self.writers = _writers(calls, self)
        self.replicated = _replicated(calls, self) - self.aux_losses
        self.body = [node for node in calls if node not in self.replicated]
        self.position = {node: index for index, node in enumerate(self.body)}
        self.last_use = self._last_uses()
        self.forbidden = _forbidden(self)

    def value(self, node: fx.Node) -> Any:
        """The node's value, without data."""
        return self.effects[node].value

    def ordered(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """The nodes in the order in which they run."""
        return sorted(nodes, key=self._order.__getitem__)

    def needs(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that an operation needs: its arguments, and earlier operations that wrote into
        them.
        """
        touched = frozenset[int]().union(*(self.effects[n].storages for n in node.all_input_nodes))
        writers = [w for storage in touched for w in self.writers.get(storage, ())]
        position = self._order[node]
        return [*node.all_input_nodes, *(w for w in writers if self._order[w] < position)]

    @property
    def device(self) -> torch.device:
        """The device of the capture, which is the device of the last operation with a tensor
        result.
        """
        values = (self.value(node) for node in reversed(self.body))
        return next((v.device for v in values if isinstance(v, Tensor)), torch.device("cpu"))

    @property
    def results(self) -> list[fx.Node]:
        """Nodes that the model returns."""
        return [leaf for leaf in self.forward.leaves if isinstance(leaf, fx.Node)]

    @property
    def aux_losses(self) -> set[fx.Node]:
        """Nodes of auxiliary losses, each of which stays in its stage."""
        return {node for nodes in self.forward.aux_losses.values() for node in nodes}

    def part(self, first: int, last: int) -> tuple[list[fx.Node], list[fx.Node]]:
        """The operations of a stage with ``body[first:last]``, and the nodes that the stage reads.
        The last stage also has the nodes that the model returns, and all writes into them.

        Returns:
            (operations in order, with replicated operations; nodes outside the stage that they
            read: operations of the sequence, inputs, state and constants).
        """
        results = self.results if last == len(self.body) else []
        returned = {n for n in results if n in self.replicated}
        storages = frozenset[int]().union(*(self.effects[n].storages for n in returned))
        writers = {w for storage in storages for w in self.writers.get(storage, ())}
        members = {*self.body[first:last], *returned, *(w for w in writers if w in self.replicated)}
        outside = {n for n in results if n not in members}
        waiting = list(members)
        while waiting:
            node = waiting.pop()
            for needed in self.needs(node):
                if needed in members or needed in outside:
                    continue
                if needed in self.replicated:
                    members.add(needed)
                    waiting.append(needed)
                elif needed in node.all_input_nodes:
                    outside.add(needed)
        return self.ordered(members), self.ordered(outside)

    def layout(self, node: fx.Node) -> tuple[int, ...] | None:
        """The order of dimensions in which a node's value is contiguous; None if the value is
        contiguous, or contiguous in no order.

        Messages are contiguous. A value is sent in this order, so that the next stage gets the
        strides of the uncut model. With other strides, other kernels would run, and random numbers
        would go to other elements.
        """
        value = self.value(node)
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return None
        value = self.forward.concrete(value)
        if value is None or value.is_contiguous():
            return None
        strides, sizes = tuple(value.stride()), tuple(value.shape)
        order = sorted(range(value.dim()), key=lambda at: (-strides[at], -sizes[at]))
        return tuple(order) if value.permute(order).is_contiguous() else None

    def sent(self, node: fx.Node) -> Any:
        """The value that is sent over a cut for a node, as a tensor without data."""
        order = self.layout(node)
        return self.value(node) if order is None else self.value(node).permute(order)

    def given_value(self, node: fx.Node) -> Any:
        """The value that a stage receives for a node of another stage or an input, as a tensor
        without data.
        """
        return self.sent(node) if node in self.position else self.value(node)

    def _last_uses(self) -> dict[fx.Node, int]:
        last = dict.fromkeys(self.body, -1)
        for index, node in enumerate(self.body):
            for needed in node.all_input_nodes:
                if needed in last:
                    last[needed] = index
        for node in self.results:
            if node in last:
                last[node] = len(self.body)
        return last


def _alive(calls: list[fx.Node], line: OperationSequence) -> list[fx.Node]:
    """The operations that write, draw random numbers, or have a result that is used. Other
    operations are dropped, so that stages need not send the inputs of these operations.
    """
    alive = line.aux_losses.union(line.results)
    for node in reversed(calls):
        effect = line.effects[node]
        lasting = effect.writes or effect.random or not _tensors(effect.value)
        if lasting or node in alive:
            alive.update(node.all_input_nodes, [node])
    return [node for node in calls if node in alive]


def _writers(calls: list[fx.Node], line: OperationSequence) -> dict[int, list[fx.Node]]:
    writers: dict[int, list[fx.Node]] = {}
    for node in calls:
        for storage in line.effects[node].writes:
            writers.setdefault(storage, []).append(node)
    return writers


def _replicated(calls: list[fx.Node], line: OperationSequence) -> set[fx.Node]:
    """Operations that every stage can run with the same result."""
    forward, effects, writers = line.forward, line.effects, line.writers
    sources = [*forward.inputs, *forward.constants, *forward.size_nodes]
    sources += [node for node in forward.state if not line.value(node).requires_grad]
    state = {s for node in [*forward.state, *sources] for s in effects[node].storages}
    banned = {storage for storage in state if storage in writers}
    while True:
        replicable: set[fx.Node] = {n for n in sources if not effects[n].storages & banned}
        for node in calls:
            effect = effects[node]
            shared = (effect.storages | effect.writes) & banned
            if shared or effect.random or effect.costly or not _plain(effect.value):
                continue
            if all(needed in replicable for needed in line.needs(node)):
                replicable.add(node)
        # A storage that replicated and other operations write must not be replicated at all.
        mixed = {
            s for s, nodes in writers.items() if {n in replicable for n in nodes} == {True, False}
        }
        if mixed <= banned:
            return replicable.difference(sources)
        banned |= mixed


def _plain(value: Any) -> bool:
    return value is None or not any(tensor.requires_grad for tensor in _tensors(value))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def _forbidden(line: OperationSequence) -> dict[int, str]:
    """Map each position at which a cut is illegal to the reason: it would divide operations that
    must be in one stage.
    """
    reasons: dict[int, str] = {}
    for first, last, why in (*_unsendable(line), *_settings_changed(line), *_writes(line)):
        for cut in range(first + 1, last + 1):
            reasons.setdefault(cut, why)
    return reasons


_Together = Iterator[tuple[int, int, str]]
"""First and last position of operations that must be in one stage, and the reason."""


def _unsendable(line: OperationSequence) -> _Together:
    """Yield, for each result that cannot be sent, the operations from the one that computes it to
    its last reader.
    """
    for index, node in enumerate(line.body):
        value = line.value(node)
        last = min(line.last_use[node], len(line.body) - 1)
        if not isinstance(value, Tensor):
            why = "has a result that is not a tensor and is read later"
            yield index, last, f"{node.name} {why}"
        elif line.forward.concrete(value) is None:
            yield index, last, f"{node.name} has a result whose size depends on the data"


def _settings_changed(line: OperationSequence) -> _Together:
    """Yield the range of operations from the first to the last that changes a setting of torch."""

    def changes(node: fx.Node) -> bool:
        effect = line.effects[node]
        return effect.value is None and not effect.writes and not node.all_input_nodes

    changing = [index for index, node in enumerate(line.body) if changes(node)]
    if changing:
        yield changing[0], changing[-1], f"{line.body[changing[0]].name} changes a setting of torch"


def _writes(line: OperationSequence) -> _Together:
    """Yield, for each in-place write, the operations that compute or read the written tensor."""
    outer = ("placeholder", "get_attr")
    state = {s for n in line.settings if n.op in outer for s in line.effects[n].storages}
    touched = _touched(line)
    for storage, nodes in line.writers.items():
        writes = [line.position[node] for node in nodes if node in line.position]
        if not writes:
            continue
        first, last = touched[storage][0], touched[storage][-1]
        subject = f"{line.body[writes[-1]].name} writes in place into"
        if storage in state:
            yield (
                first,
                last,
                f"{subject} state of the model or the batch that several operations read",
            )
        else:
            yield first, writes[-1], f"{subject} a tensor of an earlier operation"


def _touched(line: OperationSequence) -> dict[int, list[int]]:
    """The positions at which each storage is computed, read or written."""
    places: dict[int, list[int]] = {}
    for index, node in enumerate(line.body):
        effect = line.effects[node]
        storages = effect.storages | effect.writes
        for storage in storages.union(*(line.effects[n].storages for n in node.all_input_nodes)):
            places.setdefault(storage, []).append(index)
    return places
