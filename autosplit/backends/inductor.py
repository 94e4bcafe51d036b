"""Graphs compiled by Inductor, torch's compiler: few fused kernels in place of many operators.

Inductor keeps compiled graphs on disk, by what is in them: another layer, process or run that
has the same graph finds it there. So that as many as possible are the same, graphs are handed
over without the names that users gave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autosplit.passes.graph import (
    STATE,
    SUBGRAPH,
    Kind,
    Role,
    calls,
    inputs,
    outputs,
    placeholders,
)
from autosplit.passes.lowering import codegen
from autosplit.passes.lowering.buffers import is_donated
from autosplit.passes.subgraph import Subgraph, operands, outline, subgraphs
from autosplit.text.progress import working

from .backend import Backend, Boxed, Code, Eager, Strides, collecting_new_objects_only, with_strides

aten = torch.ops.aten

# What is returned so, only graphs take that are compiled later.
_CROSSING = frozenset({Kind.SAVED, Kind.DEFERRED})


class Inductor(Backend):
    """Compiles the graphs of one module.

    Inductor may give a tensor that only the next graph sees other strides than were traced;
    the next graph is then to be compiled for those.
    """

    compiles = True
    generated: dict[str, str]

    def __init__(self) -> None:
        from autosplit.torch_internals import inductor

        self.decompositions = inductor.decompositions()
        self.generated = {}
        self._called: dict[Subgraph, Code] = {}

    def rewrite(self, joint: fx.GraphModule) -> None:
        from autosplit.capture.roles import note_origins
        from autosplit.torch_internals import inductor

        inductor.rewrite_joint(joint)
        note_origins(joint.graph)

    def compile(self, name: str, module: fx.GraphModule) -> Code:
        if subgraphs(module.graph):
            return self._compile_around_calls(name, outline(module))
        return self._compile_whole(name, name != "forward", module)

    def _compile_around_calls(self, name: str, outlined: fx.GraphModule) -> Code:
        """A graph that calls graphs, each compiled once."""
        for node in [node for node in calls(outlined.graph) if SUBGRAPH in node.meta]:
            called: Subgraph = node.meta[SUBGRAPH]
            if called not in self._called:
                pairs = zip(placeholders(called.module.graph), operands(node), strict=True)
                for inner, operand in pairs:
                    strides = operand.meta["val"].stride()
                    inner.meta["val"] = with_strides(inner.meta["val"], strides)
                kind = f"{name}_{called.name}"
                self._called[called] = self._compile_whole(kind, name != "forward", called.module)
            chosen, results = self._called[called].strides, outputs(called.module.graph)
            for item in node.users:
                role, value = results[item.args[1]]  # type: ignore[index]
                item.meta["val"] = with_strides(value.meta["val"], chosen.get(role))
        subgraph_calls = {called: code.call for called, code in self._called.items()}
        call = Eager(subgraph_calls, self.gathering).compile(name, outlined).call
        left = outputs(outlined.graph, *_CROSSING)
        values = {role: getattr(value, "meta", {}).get("val") for role, value in left}
        return Code(call, {r: v.stride() for r, v in values.items() if isinstance(v, Tensor)})

    def _compile_whole(self, name: str, is_backward: bool, module: fx.GraphModule) -> Code:
        from autosplit.torch_internals import inductor

        returned = outputs(module.graph)
        if not any(calls(module.graph)):
            values = [(role, getattr(value, "meta", {}).get("val")) for role, value in returned]
            strides = [v.stride() if isinstance(v, Tensor) else None for _, v in values]
            return Code(Eager().compile(name, module).call, _chosen(returned, strides))
        copy, constants = _for_inductor(module)
        computed = [at for at, (_, value) in enumerate(returned) if isinstance(value, fx.Node)]
        results = [returned[at] for at in computed]
        input_nodes = inputs(module.graph)
        roles = list(input_nodes)
        with collecting_new_objects_only(), working(f"compiling {name} by Inductor"):
            compiled = inductor.compile_module(
                copy,
                is_backward=is_backward,
                static=[at for at, role in enumerate(roles) if role.kind in STATE],
                visible=[at for at, (role, _) in enumerate(results) if role.kind not in _CROSSING],
                donated=[at for at, node in enumerate(input_nodes.values()) if is_donated(node)],
            )
        self.generated[name] = compiled.source
        fixed_outputs = {
            at: value for at, (_, value) in enumerate(returned) if at not in set(computed)
        }
        call = _boxed(compiled.call, constants, fixed_outputs, len(returned))
        sums = [at for at, role in enumerate(roles) if role.kind is Kind.ACCUMULATOR]
        return Code(
            _conforming(call, sums) if sums else call,
            _chosen(results, compiled.strides),
        )


def _chosen(
    results: Sequence[tuple[Role, Any]], strides: Sequence[Strides | None]
) -> dict[Role, Strides]:
    pairs = zip(results, strides, strict=True)
    return {
        role: stride for (role, _), stride in pairs if role.kind in _CROSSING and stride is not None
    }


def _for_inductor(module: fx.GraphModule) -> tuple[fx.GraphModule, list[Tensor]]:
    """A copy without names for Inductor to change, and the constant tensors that it takes as last
    inputs: Inductor would compile the values of small ones in, and they may be written to later.
    """
    from autosplit.torch_internals.inductor import fake_like

    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for at, node in enumerate(inputs(module.graph).values()):
        # Inductor finds compiled graphs again by their text, which must say what is donated.
        kind = "donated" if is_donated(node) else "input"
        copies[node] = _placeholder(graph, f"{kind}_{at}", node.meta["val"])
    constants = codegen.constants(module)
    tensors = {name: value for name, value in constants.items() if isinstance(value, Tensor)}
    entered = {
        name: _placeholder(graph, f"constant_{at}", fake_like(value, module.graph))
        for at, (name, value) in enumerate(tensors.items())
    }
    for node in module.graph.nodes:
        if node.op == "get_attr" and node.target in entered:
            copies[node] = entered[node.target]
        elif node.target is aten.add_.Tensor:
            copies[node] = _accumulate(graph, copies[node.args[0]], copies[node.args[1]])
        elif node.op not in {"placeholder", "output"}:
            copies[node] = _copy_without_name(graph, node, copies)
    results = [value for _, value in outputs(module.graph) if isinstance(value, fx.Node)]
    graph.output([copies[value] for value in results])
    return fx.GraphModule(module, graph), list(tensors.values())


def _placeholder(graph: fx.Graph, name: str, value: Any) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["val"] = value
    return node


def _copy_without_name(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """A copy called after its operator: the node's own name tells of the user's modules."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
    copy = graph.create_node(node.op, node.target, args, kwargs)
    copy.meta = dict(node.meta)
    return copy


def _accumulate(graph: fx.Graph, total: fx.Node, gradient: fx.Node) -> fx.Node:
    """An addition in place as Inductor wants it: as a new value that is written back, which it
    makes one kernel of.
    """
    new = graph.call_function(aten.add.Tensor, (total, gradient))
    written = graph.call_function(aten.copy_.default, (total, new))
    for node in (new, written):
        node.meta["val"] = total.meta["val"]
    return written


def _conforming(call: Boxed, sums: Sequence[int]) -> Boxed:
    """Accumulators were traced as contiguous; one that is not is added to by way of a copy."""

    def run(args: list[Any]) -> list[Any]:
        odd = [(args[at], at) for at in sums if not args[at].is_contiguous()]
        copies = [total.contiguous() for total, _ in odd]
        for (_, at), copy in zip(odd, copies, strict=True):
            args[at] = copy
        results = call(args)
        for (total, _), copy in zip(odd, copies, strict=True):
            total.copy_(copy)
        return results

    return run


def _boxed(
    call: Callable[[list[Any]], Any],
    constants: list[Tensor],
    fixed_outputs: dict[int, Any],
    count: int,
) -> Boxed:
    """``given``: outputs that are no computed values, by position among ``count``."""

    def run(args: list[Any]) -> list[Any]:
        args += constants
        computed = list(call(args))
        if not fixed_outputs:
            return computed
        rest = iter(computed)
        return [fixed_outputs[at] if at in fixed_outputs else next(rest) for at in range(count)]

    return run
