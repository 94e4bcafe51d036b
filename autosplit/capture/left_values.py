"""Values that a forward leaves on its module, as further results of its graph.

A mixture of experts keeps its auxiliary loss for the training loop to read, a quantizer the scale
that it has found. Dynamo knows what a forward sets on which object; tensors among that are returned
behind the forward's own result, and set again after each call, with their history.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._dynamo.convert_frame import get_traced_fn
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables import (
    ConstDictVariable,
    ListVariable,
    TupleVariable,
    UnspecializedNNModuleVariable,
)

from autosplit.errors import SplitError
from autosplit.torch_internals.pytree import TreeSpec, tree_unflatten

from .compiled_model import source_name
from .side_effects import Place


@contextlib.contextmanager
def returned(module: nn.Module) -> Iterator[list[Place]]:
    """While Dynamo captures a module, tensors that its forward leaves on it are returned, too, in
    a tuple with the result. Gives where they belong, once it has captured.
    """
    found: list[Place] = []
    # A block may be captured inside of a capture: what it leaves is its own.
    original: Any = OutputGraph.compile_subgraph
    original = getattr(original, "around", original)

    def compile_subgraph(graph: Any, tx: Any, *args: Any, **options: Any) -> Any:
        left = [*_left(graph, module)]
        if left and tx.stack:
            found.extend(place for place, _ in left)
            behind = TupleVariable([value for _, value in left])
            tx.stack[-1] = TupleVariable([tx.stack[-1], behind])
        return original(graph, tx, *args, **options)

    compile_subgraph.around = original  # type: ignore[attr-defined]
    with patch.object(OutputGraph, "compile_subgraph", compile_subgraph):
        yield found


def _left(graph: Any, module: nn.Module) -> Iterator[tuple[Place, Any]]:
    """Where a traced forward has left tensors, and what of Dynamo's they are. Not where it asked
    what was there before: then it fills a cache, or goes on from its last call.
    """
    effects, asked = graph.side_effects, tuple(guard.name for guard in graph.guards)
    function, root = get_traced_fn(module)
    me = next(iter(inspect.signature(function, follow_wrapped=False).parameters), "")
    for variable in effects.id_to_variable.values() if root is module else ():
        of_module = isinstance(variable, UnspecializedNNModuleVariable)
        if not of_module and type(variable) is not ListVariable:
            continue
        source = source_name(variable.source)
        if not (source.startswith(f"L['{me}']") and effects.is_modified(variable)):
            continue
        target = eval(source, {"L": {me: module}})
        if not of_module:
            if _holds_tensors(variable):
                yield Place(source, target, ""), ListVariable([*variable.items])
            continue
        own = {*target._parameters, *target._buffers, *target._modules}
        for name, value in effects.store_attr_mutations.get(variable, {}).items():
            before = f"{source}.{name}"
            if name not in own and before not in asked and _holds_tensors(value):
                yield Place(source, target, name), value


def _holds_tensors(value: Any) -> bool:
    """Whether a graph can return it, and is to: a tensor, or a list, tuple or dictionary that has
    tensors, and constants at most besides.
    """
    leaves = [*_leaves(value)]
    known = all(each.is_tensor() or each.is_python_constant() for each in leaves)
    return known and any(each.is_tensor() for each in leaves)


def _leaves(value: Any) -> Iterator[Any]:
    value = value.realize()
    if isinstance(value, (ListVariable, TupleVariable)):
        for each in value.items:
            yield from _leaves(each)
    elif isinstance(value, ConstDictVariable):
        for each in value.items.values():
            yield from _leaves(each)
    else:
        yield value


class LeftValues(NamedTuple):
    """What a graph returns behind the results of its module.

    Attributes:
        places: where it belongs.
        names: paths of the leaves.
        spec: how they make up a list of values, one for each place.
    """

    places: Sequence[Place]
    names: Sequence[str]
    spec: TreeSpec

    def put(self, leaves: Sequence[Any]) -> None:
        """Leave the values on the module."""
        for place, value in zip(self.places, tree_unflatten(leaves, self.spec), strict=True):
            place.put(value)

    def put_apart(self, leaves: Sequence[Any], trained: Sequence[bool]) -> None:
        """As ``put``, where no backward comes from here: what asks for a gradient is told so."""
        anchor = torch.zeros((), requires_grad=True)
        pairs = zip(leaves, self.names, trained, strict=True)
        with torch.enable_grad():
            self.put([_Apart.apply(anchor, *each) if has else each[0] for *each, has in pairs])  # type: ignore[no-untyped-call]


class _Apart(torch.autograd.Function):
    """What a pipeline's stage has left on its module."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, value: Tensor, name: str) -> Tensor:
        ctx.name = name
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise SplitError(
            f"a loss asks for the gradient of {ctx.name}, which a pipeline's stage has left on its "
            "module: no backward of a stage takes that. Return it as an output of the stage"
        )
