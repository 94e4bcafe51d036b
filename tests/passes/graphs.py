"""Joint graphs of small modules, for tests of single passes."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, fx, nn

from autosplit.capture.joint_graph import capture
from autosplit.passes import Role, SplitGraphs, run
from autosplit.passes.graph import Kind, calls, inputs, outputs


def joint_of(module: nn.Module, *args: Tensor) -> fx.GraphModule:
    return capture(module, args, {}).joint


def copied(joint: fx.GraphModule) -> fx.GraphModule:
    """A joint graph that passes may rewrite."""
    graph = fx.Graph()
    values, output = graph.graph_copy(joint.graph, {}, return_output_node=True)
    graph.output(values).meta = dict(output.meta)
    return fx.GraphModule(joint, graph)


def program_of(module: nn.Module, *args: Tensor) -> SplitGraphs:
    return SplitGraphs(joint_of(module, *args))


def split(module: nn.Module, *args: Tensor) -> SplitGraphs:
    return run(joint_of(module, *args))


def computed(joint: fx.GraphModule) -> list[Tensor]:
    """Run a joint graph on fixed random inputs; return its outputs."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    nodes = [node for node in joint.graph.nodes if node.op == "placeholder"]
    args = [torch.randn(node.meta["val"].shape, generator=generator) for node in nodes]
    output: list[Tensor] = fx.Interpreter(joint).run(*args, enable_io_processing=False)
    return output


def ops(module: fx.GraphModule | None) -> Counter[str]:
    """Operators of a graph without views and ``getitem``, ``aten.`` and overloads cut off."""
    if module is None:
        return Counter()
    views = {"view", "t", "transpose", "permute", "expand", "detach", "_unsafe_view", "unbind"}
    names = [str(node.target).split(".")[1] for node in calls(module.graph) if _is_aten(node)]
    return Counter(name for name in names if name not in views)


def names_in(module: fx.GraphModule | None, kind: Kind) -> list[str]:
    return [] if module is None else [role.name for role in inputs(module.graph, kind)]


def names_out(module: fx.GraphModule | None, kind: Kind) -> list[str]:
    return [] if module is None else [role.name for role, _ in outputs(module.graph, kind)]


def hand_made() -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    """``y = x * 2`` with gradient ``2 g``, written down node by node."""
    graph = fx.Graph()
    x, g = graph.placeholder("x"), graph.placeholder("g")
    y = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
    dx = graph.call_function(torch.ops.aten.mul.Tensor, (g, 2))
    nodes = {"x": x, "g": g, "y": y, "dx": dx}
    for node in nodes.values():
        node.meta["val"] = torch.empty(3, device="meta")
    x.meta["role"] = Role(Kind.INPUT, "x")
    g.meta["role"] = Role(Kind.TANGENT, "output")
    out = graph.output([y, dx])
    out.meta["roles"] = (Role(Kind.OUTPUT, "output"), Role(Kind.INPUT_GRAD, "x"))
    return fx.GraphModule(nn.Module(), graph), nodes


def _is_aten(node: fx.Node) -> bool:
    return str(node.target).startswith("aten.")
