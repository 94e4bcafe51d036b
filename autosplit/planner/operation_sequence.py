"""The forward of a model as a sequence of operations that can be cut between any two.

Some operations are not in the sequence: what depends on nothing but the batch, buffers and
constants, and is cheap (masks, position ids, rotary tables), is replicated in every stage that
reads it, which costs less than sending it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from autosplit.capture.forward_graph import CapturedForward, Setting, settings
from autosplit.torch_internals.pytree import tree_flatten


class OperationSequence:
    """The operations of a forward in the order in which they run.

    Attributes:
        forward: the captured forward.
        body: the operations in order, without replicated ones.
        position: of each of them.
        settings: grad mode and autocast around every node that a stage may hold.
        replicated: operations that every stage does for itself.
        last_use: of each of them, where in ``body`` it is read last; its length if the
            model returns it.
        writers: storage -> the operations that write into it.
        forbidden: cuts that would divide what belongs together -> why; cut k is before
            ``body[k]``.
    """

    def __init__(self, forward: CapturedForward) -> None:
        self.forward = forward
        self.effects = forward.effects
        graph = forward.module.graph
        self._order = {node: index for index, node in enumerate(graph.nodes)}
        found = settings(graph)
        self.settings: dict[fx.Node, Setting] = {n: s for n, s in found.items() if s is not None}
        calls = [n for n in graph.nodes if n.op.startswith("call_") and n in self.settings]
        calls = _alive(calls, self)
        self.writers = _writers(calls, self)
        self.replicated = _replicated(calls, self)
        self.body = [node for node in calls if node not in self.replicated]
        self.position = {node: index for index, node in enumerate(self.body)}
        self.last_use = self._last_uses()
        self.forbidden = _forbidden(self)

    def value(self, node: fx.Node) -> Any:
        """What the node gives, without data."""
        return self.effects[node].value

    def ordered(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """As they run."""
        return sorted(nodes, key=self._order.__getitem__)

    def needs(self, node: fx.Node) -> list[fx.Node]:
        """Its arguments, and what wrote into them before."""
        touched = frozenset[int]().union(*(self.effects[n].storages for n in node.all_input_nodes))
        before = [w for storage in touched for w in self.writers.get(storage, ())]
        own = self._order[node]
        return [*node.all_input_nodes, *(w for w in before if self._order[w] < own)]

    @property
    def device(self) -> torch.device:
        """Where the forward was captured: where the last operation that makes a tensor was."""
        values = (self.value(node) for node in reversed(self.body))
        return next((v.device for v in values if isinstance(v, Tensor)), torch.device("cpu"))

    @property
    def results(self) -> list[fx.Node]:
        """Nodes that the model returns."""
        return [leaf for leaf in self.forward.leaves if isinstance(leaf, fx.Node)]

    def part(self, first: int, last: int) -> tuple[list[fx.Node], list[fx.Node]]:
        """What a stage holds that runs ``body`` from ``first`` up to but not ``last``, and what it
        reads; the last one has what the model returns as well.

        Returns:
            operations in order, replicated ones included; and the nodes outside of the
            part that they read: operations of the sequence, inputs, state and constants.
        """
        results = self.results if last == len(self.body) else []
        own = {*self.body[first:last], *(n for n in results if n in self.replicated)}
        outside = {n for n in results if n not in own}
        waiting = list(own)
        while waiting:
            node = waiting.pop()
            for needed in self.needs(node):
                if needed in own or needed in outside:
                    continue
                if needed in self.replicated:
                    own.add(needed)
                    waiting.append(needed)
                elif needed in node.all_input_nodes:
                    outside.add(needed)
        return self.ordered(own), self.ordered(outside)

    def layout(self, node: fx.Node) -> tuple[int, ...] | None:
        """The order of dimensions in which what a node gives lies in memory without gaps; None
        where that is their own order, or there is none.

        Messages are contiguous. What crosses a cut goes in this order, so that the stage behind
        has it as the model has: with other strides, other kernels would run, and random numbers
        would fall on other elements.
        """
        value = self.value(node)
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return None
        if value.is_contiguous() or any(isinstance(n, torch.SymInt) for n in value.shape):
            return None
        strides, sizes = tuple(value.stride()), tuple(value.shape)
        order = sorted(range(value.dim()), key=lambda at: (-strides[at], -sizes[at]))
        return tuple(order) if value.permute(order).is_contiguous() else None

    def sent(self, node: fx.Node) -> Any:
        """What crosses a cut for a node, without data."""
        order = self.layout(node)
        return self.value(node) if order is None else self.value(node).permute(order)

    def given_value(self, node: fx.Node) -> Any:
        """What a part is given for a node outside of it: sent, or an input as it is."""
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
    """Those that something reads, or that write or draw. What nobody reads would still have to
    be sent what it reads itself.
    """
    alive = set(line.results)
    for node in reversed(calls):
        effect = line.effects[node]
        lasting = effect.writes or effect.random or not _tensors(effect.value)
        if lasting or node in alive:
            alive.update(node.all_input_nodes, [node])
    return [node for node in calls if node in alive]


def _writers(calls: list[fx.Node], line: OperationSequence) -> dict[int, list[fx.Node]]:
    found: dict[int, list[fx.Node]] = {}
    for node in calls:
        for storage in line.effects[node].writes:
            found.setdefault(storage, []).append(node)
    return found


def _replicated(calls: list[fx.Node], line: OperationSequence) -> set[fx.Node]:
    """Operations that every stage can do for itself, with the same result in each."""
    forward, effects, writers = line.forward, line.effects, line.writers
    sources = [*forward.inputs, *forward.constants]
    sources += [node for node in forward.state if not line.value(node).requires_grad]
    state = {s for node in [*forward.state, *sources] for s in effects[node].storages}
    banned = {storage for storage in state if storage in writers}
    while True:
        found: set[fx.Node] = {n for n in sources if not effects[n].storages & banned}
        for node in calls:
            effect = effects[node]
            shared = (effect.storages | effect.writes) & banned
            if shared or effect.random or effect.costly or not _plain(effect.value):
                continue
            if all(needed in found for needed in line.needs(node)):
                found.add(node)
        # Something is written here and there: then it is one thing, wherever it is read.
        mixed = {s for s, nodes in writers.items() if {n in found for n in nodes} == {True, False}}
        if mixed <= banned:
            return found.difference(sources)
        banned |= mixed


def _plain(value: Any) -> bool:
    return value is None or not any(tensor.requires_grad for tensor in _tensors(value))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def _forbidden(line: OperationSequence) -> dict[int, str]:
    """Cuts inside of what must be in one stage -> why."""
    found: dict[int, str] = {}
    for first, last, why in (*_unsendable(line), *_settings_changed(line), *_writes(line)):
        for cut in range(first + 1, last + 1):
            found.setdefault(cut, why)
    return found


_Together = Iterator[tuple[int, int, str]]
"""The first and the last of operations that must be in one stage, and why."""


def _unsendable(line: OperationSequence) -> _Together:
    """Results that are no message, with what reads them."""
    for index, node in enumerate(line.body):
        value = line.value(node)
        last = min(line.last_use[node], len(line.body) - 1)
        if not isinstance(value, Tensor):
            why = "puts out something besides a tensor, which is read later"
            yield index, last, f"{node.name} {why}"
        elif any(isinstance(size, torch.SymInt) for size in value.shape):
            yield index, last, f"{node.name} puts out as much as the data says, which is read later"


def _settings_changed(line: OperationSequence) -> _Together:
    """From what changes a setting of torch to what changes it back."""

    def changes(node: fx.Node) -> bool:
        effect = line.effects[node]
        return effect.value is None and not effect.writes and not node.all_input_nodes

    found = [index for index, node in enumerate(line.body) if changes(node)]
    if found:
        yield found[0], found[-1], f"{line.body[found[0]].name} changes a setting of torch"


def _writes(line: OperationSequence) -> _Together:
    """Writes in place, with what reads or made the tensor."""
    outer = ("placeholder", "get_attr")
    state = {s for n in line.settings if n.op in outer for s in line.effects[n].storages}
    touched = _touched(line)
    for storage, nodes in line.writers.items():
        writes = [line.position[node] for node in nodes if node in line.position]
        if not writes:
            continue
        first, last = touched[storage][0], touched[storage][-1]
        what = f"{line.body[writes[-1]].name} writes in place into"
        if storage in state:
            yield first, last, f"{what} state of the model or the batch that is read here and there"
        else:
            yield first, writes[-1], f"{what} a tensor that was made before"


def _touched(line: OperationSequence) -> dict[int, list[int]]:
    """Storage -> where in the sequence it is made, read or written."""
    found: dict[int, list[int]] = {}
    for index, node in enumerate(line.body):
        effect = line.effects[node]
        storages = effect.storages | effect.writes
        for storage in storages.union(*(line.effects[n].storages for n in node.all_input_nodes)):
            found.setdefault(storage, []).append(index)
    return found
