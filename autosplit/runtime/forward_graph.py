"""F of one traced module: the compiled forward graph and its results by role."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from autosplit.backends.compiled_graph import Backend, compile_graph, hand_over, positions
from autosplit.passes import Kind, Role, SplitGraphs
from autosplit.passes.graph import STATE
from autosplit.passes.lowering.donation import donatable, donate
from autosplit.runtime.activations.saved_tensors import State


class ForwardValues(NamedTuple):
    """Results of F by kind.

    Attributes:
        outputs: the module's result leaves, then new values of mutated inputs.
        updates: new values of mutated buffers.
        saved: tensors and numbers for the backward.
    """

    outputs: list[Any]
    updates: list[Tensor]
    saved: list[Any]


class ForwardGraph:
    """The compiled forward graph.

    Args:
        graphs: of the module; the backward graphs are told how what F saves lies in memory.
        inputs: paths of the module's input leaves.
        backend: how graphs are compiled.

    Attributes:
        output_names: paths of the outputs, in order.
        updated_inputs: paths of inputs that the module writes into.
        updated_state: names of buffers that the module writes into.
        saved: roles of what F saves, in order.
        read: names of the parameters and buffers that F reads.
        donated: places of saved tensors that the backward may write over.
    """

    def __init__(self, graphs: SplitGraphs, inputs: Sequence[str], backend: Backend) -> None:
        compiled = compile_graph("forward", graphs.forward, backend)
        hand_over(compiled.strides, graphs.backward, graphs.backward_input)
        donated = donatable(graphs.forward.graph) if backend.reuses_memory else set()
        donate(donated, graphs.backward, graphs.backward_input)
        read = [role for role in compiled.inputs if role.kind in STATE]
        self._call = compiled.taking([*_roles(Kind.INPUT, inputs), *read])
        self.read = [role.name for role in read]
        self._place_results(compiled.outputs, set(inputs))
        self.donated = [at for at, role in enumerate(self.saved) if role in donated]

    def _place_results(self, returned: Sequence[Role], taken: set[str]) -> None:
        """Find the positions of outputs, updates and saved tensors among the results."""
        updated = [role for role in returned if role.kind is Kind.UPDATE]
        self.updated_inputs = [role.name for role in updated if role.name in taken]
        self.updated_state = [role.name for role in updated if role.name not in taken]
        results = [role for role in returned if role.kind is Kind.OUTPUT]
        results += _roles(Kind.UPDATE, self.updated_inputs)
        self.output_names = [role.name for role in results]
        self.saved = [role for role in returned if role.kind is Kind.SAVED]
        self._outputs_at = positions(results, returned)
        self._updates_at = positions(_roles(Kind.UPDATE, self.updated_state), returned)
        self._saved_at = positions(self.saved, returned)

    def run(self, state: State, leaves: list[Any]) -> ForwardValues:
        """Run F. ``leaves``: flattened ``(args, kwargs)``; emptied."""
        pool = leaves.copy()
        leaves.clear()
        pool += [state[name] for name in self.read]
        results = self._call(pool)
        return ForwardValues(
            [results[at] for at in self._outputs_at],
            [results[at] for at in self._updates_at],
            [results[at] for at in self._saved_at],
        )


def _roles(kind: Kind, names: Iterable[str]) -> list[Role]:
    return [Role(kind, name) for name in names]
