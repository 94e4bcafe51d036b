"""Refuse calls in which an input shares memory with a tensor that the module writes into.

A graph is captured for inputs, parameters and buffers in separate memory. If they overlap, the
module would read a value after a write, and the graph the value before the write. Parameters and
buffers that overlap already at a capture belong to its graphs, see ``aliases``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from autosplit.errors import SplitError
from autosplit.runtime.residuals import State
from autosplit.runtime.storages import is_plain
from autosplit.torch_internals.memory_overlap import overlaps, spanned_bytes

if TYPE_CHECKING:
    from .functions import SplitFunctions


def refuse_overlap(functions: SplitFunctions, leaves: Sequence[Any], state: State) -> None:
    """Refuse a call in which an input that the module writes into shares memory with another
    tensor.

    Args:
        functions: the graphs of the call.
        leaves: the flattened inputs.
        state: parameters and buffers by name.

    Raises:
        SplitError: names the input and the tensors that share its memory.
    """
    inputs = functions.capture.inputs
    written = {inputs.index(name) for name in functions.updated_inputs}
    _refuse([*inputs, *state], [*leaves, *state.values()], written)


def _refuse(names: Sequence[str], values: Sequence[Any], written: Collection[int]) -> None:
    """Refuse values if one at a ``written`` position shares memory with another value.

    A tensor that has several names was captured as one tensor, and is accepted.

    Args:
        names: the name of each value, for the error.
        values: inputs, parameters and buffers.
        written: positions in ``values`` that the graphs write into.
    """
    tensors = [*{id(value): value for value in values if is_plain(value)}.values()]
    for group in overlaps(tensors):
        members = {id(tensors[at]) for at in group}
        sharing = [at for at, value in enumerate(values) if id(value) in members]
        target = next((at for at in sharing if at in written), None)
        if target is not None:
            raise _shared(names[target], ", ".join(names[at] for at in sharing if at != target))


def refuse_state_overlap(
    functions: SplitFunctions, leaves: Sequence[Any], written: Sequence[Tensor]
) -> None:
    """Refuse a call in which an input shares memory with a buffer that the module writes into.

    Element addresses are compared only if the input and the buffer have one storage.

    Args:
        functions: the graphs of the call, which write into buffers.
        leaves: the flattened inputs.
        written: the buffers, in the order of ``updated_state``.

    Raises:
        SplitError: names the buffer and the input.
    """
    addresses = sorted(map(Tensor.data_ptr, written))
    for input_name, leaf in zip(functions.capture.inputs, leaves, strict=True):
        if not is_plain(leaf):
            continue
        storage = leaf.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
        if not start or bisect_left(addresses, start) == bisect_left(addresses, start + size):
            continue
        for name, buffer in zip(functions.updated_state, written, strict=True):
            if buffer is leaf or (is_plain(buffer) and any(overlaps([buffer, leaf]))):
                raise _shared(name, input_name)


def aliases(state: State, *, in_memory: bool) -> frozenset[tuple[str, ...]]:
    """Return the names under which a module has one tensor.

    Args:
        state: parameters and buffers by name.
        in_memory: whether names of different tensors that share memory count, too.
    """
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    groups = [tuple(group) for group in names.values() if len(group) > 1]
    if in_memory:
        placed = {name: t for name, t in state.items() if is_plain(t) and t.data_ptr()}
        placed_names = [*placed]
        sharing = overlaps([*placed.values()])
        groups += [tuple([placed_names[at] for at in group]) for group in sharing]
    return frozenset(groups)


def _shared(written: str, sharers: str) -> SplitError:
    return SplitError(
        f"the module writes into {written}, which shares its memory with {sharers}; pass a clone"
    )


class OverlapCheck:
    """Refuses calls of one of Dynamo's graphs in which a written input shares memory with another
    input.

    Parameters and buffers are inputs of such a graph, hundreds in some models. Every call compares
    parameters and buffers with the other inputs. It compares them with each other only if one has
    moved in memory since the last call.

    Args:
        names: names of the graph's inputs, for messages.
        examples: inputs with which the graph was captured.
        written: positions of the inputs that the graph writes into.
        state: positions of the module's parameters and buffers.
    """

    def __init__(
        self,
        names: Sequence[str],
        examples: Sequence[Any],
        written: Collection[int],
        state: Collection[int],
    ) -> None:
        self._names, self._written = names, written
        tensors = [at for at, value in enumerate(examples) if is_plain(value)]
        self._state = [at for at in tensors if at in state]
        self._inputs = [at for at in tensors if at not in state]
        self._addresses: list[int] = []
        self._longest = 0  # bytes of the longest tensor of the state

    def check(self, values: Sequence[Any]) -> None:
        """Refuse these inputs if the graph writes into one that shares memory with another.

        Raises:
            SplitError: names the input and the tensors that share its memory.
        """
        state: list[Tensor] = [values[at] for at in self._state]
        addresses = [tensor.data_ptr() for tensor in state]
        if addresses != self._addresses:
            _refuse(self._names, values, self._written)
            self._addresses = addresses
            self._longest = max(map(spanned_bytes, state), default=0)
            return
        compared = [*self._inputs]
        for at in self._inputs:
            start = values[at].data_ptr()
            first, end = start - self._longest, start + spanned_bytes(values[at])
            compared += [
                at
                for at, address in zip(self._state, addresses, strict=True)
                if first < address < end
            ]
        if len(compared) > 1:
            compared = sorted({*compared})
            written = [place for place, at in enumerate(compared) if at in self._written]
            names = [self._names[at] for at in compared]
            _refuse(names, [values[at] for at in compared], written)
