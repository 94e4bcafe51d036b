"""Models of layers that repeat themselves, and joint graphs of them in both ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autosplit.capture import joint_graph, joint_trace
from autosplit.capture.repeated_layers.node_forms import NotRepeatedError
from autosplit.passes.origin import Origin

WIDTH = 4
Layer = Callable[[int], nn.Module]


class Residual(nn.Module):
    """A layer of two products."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """Layers between an embedding and a head.

    Args:
        layer: makes the layer of an index.
        count: layers.
    """

    def __init__(self, layer: Layer = Residual, count: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(map(layer, range(count)))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Traces:
    """What was traced of the modules captured since: nodes of joint graphs, in the order of traces,
    and whether layers were left out.
    """

    def __init__(self) -> None:
        self.nodes: list[int] = []
        self.layers: list[bool] = []


@contextmanager
def watched(*, whole: bool = False) -> Iterator[Traces]:
    """Take down what is traced; ``whole`` leaves no layers out."""
    found = Traces()
    trace, layers = joint_trace._trace, joint_trace.trace_layers

    def traced(*args: Any) -> Any:
        joint = trace(*args)
        found.nodes.append(len(joint.graph_module.graph.nodes))
        return joint

    def left_out(*args: Any) -> fx.GraphModule:
        found.layers.append(False)
        if whole:
            raise NotRepeatedError("it is not asked for")
        graph = layers(*args)
        found.layers[-1] = True
        return graph

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint_trace, "_trace", traced)
        patch.setattr(joint_trace, "trace_layers", left_out)
        yield found


def captured(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:
    """The joint graph of a call."""
    torch._dynamo.reset()
    return joint_graph.capture(model, args, kwargs).joint


def lines(joint: fx.GraphModule) -> list[str]:
    """All that later passes read of a graph."""
    number: dict[fx.Node, int] = {}
    regions: dict[int | None, int] = {None: -1}  # the process counts those of all graphs
    found = []
    for node in joint.graph.nodes:
        number[node] = len(number)
        reads = fx.node.map_arg((node.args, node.kwargs), lambda each: f"%{number[each]}")
        named = node.op in {"placeholder", "get_attr"}
        parts = [node.op, "" if named else node.target, reads, _looks(node.meta.get("val"))]
        parts += [node.meta.get(note) for note in ("role", "roles", "stack_trace")]
        origin: Origin = node.meta.get("origin", Origin())
        region = regions.setdefault(origin.checkpoint, len(regions))
        parts.append(dataclasses.replace(origin, checkpoint=region))
        if node.op == "get_attr":
            parts.append(getattr(joint, str(node.target)))
        found.append(" ".join(map(str, parts)))
    return found


def _looks(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (
            [*value.shape],
            [*value.stride()],
            value.storage_offset(),
            value.dtype,
            value.requires_grad,
        )
    return value


@dataclasses.dataclass
class BothWays:
    """What was made of one graph of Dynamo's.

    Attributes:
        extended: the joint graph of a few layers, extended where that was possible.
        whole: the one that was traced whole.
        traces: of the former.
    """

    extended: fx.GraphModule
    whole: fx.GraphModule
    traces: Traces


def in_both_ways(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BothWays:
    """The joint graphs of a call."""
    trace, roles = joint_graph.trace_joint, joint_graph.with_roles
    traced, labelled, extending = [], [], []

    def traced_twice(module: nn.Module, exported: Any, *more: Any) -> Any:
        given = module, exported, *more
        codegen = exported.graph._codegen
        unflatten = codegen.dynamo_bytecode_unflatten
        with watched(whole=True):
            traced.append(trace(*given))
        codegen.dynamo_bytecode_unflatten = unflatten
        with watched() as traces:
            extending.append(traces)
            return trace(*given)

    def labelled_twice(graph: fx.GraphModule, names: Any) -> fx.GraphModule:
        labelled.append(roles(traced[0].graph, names))
        return roles(graph, names)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint_graph, "trace_joint", traced_twice)
        patch.setattr(joint_graph, "with_roles", labelled_twice)
        torch._dynamo.reset()
        found = joint_graph.capture(model, args, kwargs)
    assert found.outputs == traced[0].names
    assert found.output_spec == traced[0].spec
    return BothWays(found.joint, labelled[0], extending[0])


def assert_as_whole(model: nn.Module, *args: Any, **kwargs: Any) -> Traces:
    """The joint graph of a model whose layers were left out is the one that is traced whole."""
    found = in_both_ways(model, args, kwargs)
    assert found.traces.layers == [True]
    assert lines(found.extended) == lines(found.whole)
    return found.traces
