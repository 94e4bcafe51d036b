"""The backend that compiles graphs by Inductor, torch's compiler, into few fused kernels.

Inductor caches compiled graphs on disk by their text, so another layer, process or run with an
equal graph reuses the code. Graphs are compiled without the user's names, so that more graphs are
equal.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from autosplit.device import has_accelerator
from autosplit.errors import BackendError
from autosplit.passes.analysis.operators import OPERATORS, SUMS
from autosplit.passes.graph import (
    STATE,
    SUBGRAPH,
    Kind,
    Role,
    calls,
    inputs,
    outputs,
    placeholders,
    source_line,
)
from autosplit.passes.lowering import codegen
from autosplit.passes.lowering.forms import Strides, is_donated, with_strides
from autosplit.passes.subgraph import Subgraph, operands, outline, subgraphs
from autosplit.text.progress import working

from .backend import Backend, Boxed, Code, Eager, collecting_new_objects_only

if TYPE_CHECKING:
    from autosplit.torch_internals.inductor import LoweringError
    from autosplit.torch_internals.kernel_files import KernelFiles

aten = torch.ops.aten

# Only graphs that are compiled later read outputs of these kinds.
_CROSSING = frozenset({Kind.SAVED, Kind.DEFERRED})


class Inductor(Backend):
    """Compiles the graphs of one module.

    Inductor may choose other strides than were traced for tensors that only the next graph reads.
    The next graph is then compiled for the chosen strides.
    """

    compiles = True
    generated: dict[str, str]

    def __init__(self) -> None:
        from autosplit.torch_internals.kernel_templates import lazy_templates

        with lazy_templates():
            from autosplit.torch_internals import inductor, instruction_set

        if not has_accelerator():
            instruction_set.start_test()
        self.decompositions = inductor.decompositions()
        self.generated = {}
        self._called: dict[Subgraph, Code] = {}

    def rewrite(self, joint: fx.GraphModule) -> None:
        from autosplit.capture.roles import note_origins
        from autosplit.torch_internals import inductor

        inductor.rewrite_joint(joint, self.mode)
        note_origins(joint.graph)

    def compile(self, name: str, module: fx.GraphModule) -> Code:
        from autosplit.torch_internals.kernel_files import shared_files

        with collecting_new_objects_only(), shared_files() as kernels:
            if subgraphs(module.graph):
                return self._compile_around_calls(name, outline(module), kernels)
            return self._compile_whole(name, module, kernels)

    def _compile_around_calls(
        self, name: str, outlined: fx.GraphModule, kernels: KernelFiles
    ) -> Code:
        """Compile each subgraph once by Inductor, and the calls of the subgraphs as Python."""
        for node in [node for node in calls(outlined.graph) if SUBGRAPH in node.meta]:
            called: Subgraph = node.meta[SUBGRAPH]
            if called not in self._called:
                pairs = zip(placeholders(called.module.graph), operands(node), strict=True)
                for inner, operand in pairs:
                    strides = operand.meta["val"].stride()
                    inner.meta["val"] = with_strides(inner.meta["val"], strides)
                kind = f"{name}_{called.name}"
                self._called[called] = self._compile_whole(kind, called.module, kernels)
            elif not self.asserts_inputs:
                check_strides(node)
            chosen, results = self._called[called].strides, outputs(called.module.graph)
            for item in node.users:
                role, value = results[item.args[1]]  # type: ignore[index]
                item.meta["val"] = with_strides(value.meta["val"], chosen.get(role))
        subgraph_calls = {called: code.call for called, code in self._called.items()}
        call = Eager(subgraph_calls, self.gathering).compile(name, outlined).call
        return Code(call, _traced_crossing_strides(outlined))

    def _compile_whole(self, name: str, module: fx.GraphModule, kernels: KernelFiles) -> Code:
        from autosplit.torch_internals import inductor

        if not any(calls(module.graph)):
            return _compile_eagerly(name, module)
        returned = outputs(module.graph)
        copy, constants = _for_inductor(module, "" if self.asserts_inputs else "_guarded")
        computed = [at for at, (_, value) in enumerate(returned) if isinstance(value, fx.Node)]
        results = [returned[at] for at in computed]
        input_nodes = inputs(module.graph)
        roles = list(input_nodes)
        try:
            with working(f"compiling {name} by Inductor"):
                compiled = inductor.compile_module(
                    copy,
                    mode=self.mode,
                    is_backward=not name.startswith("forward"),
                    static=[at for at, role in enumerate(roles) if role.kind in STATE],
                    visible=[at for at, (r, _) in enumerate(results) if r.kind not in _CROSSING],
                    donated=[at for at, n in enumerate(input_nodes.values()) if is_donated(n)],
                    kernels=kernels,
                    asserts_inputs=self.asserts_inputs,
                )
        except inductor.LoweringError as error:
            if any(node.target in OPERATORS["addresses"] for node in module.graph.nodes):
                raise  # an earlier graph may have chosen other strides than these operators expect
            _warn_of_operator(name, module, error)
            code = _compile_eagerly(name, module)
            return code._replace(call=_with_strides(code.call, _traced_strides(returned)))
        self.generated[name] = compiled.source
        fixed_outputs = {
            at: value for at, (_, value) in enumerate(returned) if at not in set(computed)
        }
        call = _with_all_outputs(compiled.call, constants, fixed_outputs, len(returned))
        sums = [at for at, role in enumerate(roles) if role.kind is Kind.ACCUMULATOR]
        return Code(
            _with_contiguous_sums(call, sums) if sums else call,
            _chosen_strides(results, compiled.strides),
        )


def check_strides(node: fx.Node) -> None:
    """Check that a call passes the strides for which an earlier call's subgraph was compiled.
    Strides of dimensions with one element are irrelevant, and sizes that depend on data unknown.

    Raises:
        BackendError: an operand has other strides.
    """
    called: Subgraph = node.meta[SUBGRAPH]
    for inner, operand in zip(placeholders(called.module.graph), operands(node), strict=True):
        compiled, value = inner.meta["val"], operand.meta["val"]
        dimensions = zip(compiled.stride(), value.stride(), value.shape, strict=True)
        fixed = [d for d in dimensions if all(type(number) is int for number in d)]
        if any(expected != stride for expected, stride, size in fixed if size != 1):
            raise BackendError(
                f"{called.name} was compiled for strides {compiled.stride()} of {inner.name}, and "
                f"another call passes {value.stride()}; backend='eager' accepts all strides"
            )


def _compile_eagerly(name: str, module: fx.GraphModule) -> Code:
    """Compile a graph as Python; its results have the traced strides."""
    return Code(Eager().compile(name, module).call, _traced_crossing_strides(module))


def _traced_crossing_strides(module: fx.GraphModule) -> dict[Role, Strides]:
    returned = outputs(module.graph)
    return _chosen_strides(returned, _traced_strides(returned))


def _traced_strides(returned: Sequence[tuple[Role, Any]]) -> list[Strides | None]:
    values = [getattr(value, "meta", {}).get("val") for _, value in returned]
    return [value.stride() if isinstance(value, Tensor) else None for value in values]


def _with_strides(call: Boxed, strides: Sequence[Strides | None]) -> Boxed:
    """Wrap a call: copy results whose strides are not those that the next graph expects. They may
    differ, because operators pass on the strides of inputs. Symbolic strides are not compared.
    """
    fixed = [s if s and all(isinstance(n, int) for n in s) else None for s in strides]

    def run(args: list[Any]) -> list[Any]:
        results = call(args)
        for at, expected in enumerate(fixed):
            value = results[at]
            if expected is not None and value.stride() != expected:
                results[at] = value.new_empty_strided(value.shape, expected).copy_(value)
        return results

    return run


def _warn_of_operator(name: str, module: fx.GraphModule, error: LoweringError) -> None:
    """Warn that a graph runs operator by operator, and name the user's line of the operator."""
    lines = [source_line(n) for n in module.graph.nodes if str(n.target) == error.operator]
    line = f" of {lines[0]}" if any(lines) else ""
    warnings.warn(
        f"Inductor cannot compile {error.operator}{line} ({error.reason}). The {name} graph runs "
        "operator by operator; other graphs are compiled",
        stacklevel=2,
    )


def _chosen_strides(
    results: Sequence[tuple[Role, Any]], strides: Sequence[Strides | None]
) -> dict[Role, Strides]:
    pairs = zip(results, strides, strict=True)
    return {
        role: stride for (role, _), stride in pairs if role.kind in _CROSSING and stride is not None
    }


def _for_inductor(module: fx.GraphModule, suffix: str) -> tuple[fx.GraphModule, list[Tensor]]:
    """Copy a graph without its names, for Inductor to change.

    Args:
        module: the graph.
        suffix: appended to the names of inputs, because Inductor's cache compares graphs by text.

    Returns:
        (the copy, constant tensors that are the copy's last inputs). Inductor would compile the
        values of small constants into the code, although they may be written to later.
    """
    from autosplit.torch_internals.inductor import fake_like

    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for at, node in enumerate(inputs(module.graph).values()):
        # Inductor's cache compares graphs by text, which must therefore name donated inputs.
        kind = "donated" if is_donated(node) else "input"
        copies[node] = _placeholder(graph, f"{kind}_{at}{suffix}", node.meta["val"])
    constants = codegen.constants(module)
    tensors = {name: value for name, value in constants.items() if isinstance(value, Tensor)}
    entered = {
        name: _placeholder(graph, f"constant_{at}", fake_like(value, module.graph))
        for at, (name, value) in enumerate(tensors.items())
    }
    for node in module.graph.nodes:
        if node.op == "get_attr" and node.target in entered:
            copies[node] = entered[node.target]
        elif node.target in _RETURNS_SUM:
            copies[node] = _accumulate(graph, node, copies)
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
    """Copy a node, and name the copy after its operator. The original name may contain the name of
    a user's module.
    """
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
    copy = graph.create_node(node.op, node.target, args, kwargs)
    copy.meta = dict(node.meta)
    return copy


_RETURNS_SUM = {adds: returns for returns, adds in SUMS.items()}


def _accumulate(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """Replace an in-place addition by an addition and a copy back, which Inductor compiles to one
    kernel.
    """
    arguments: Any = fx.node.map_arg(node.args, copies.__getitem__)
    total, *rest = arguments
    new = graph.call_function(_RETURNS_SUM[node.target], (total, *rest), dict(node.kwargs))
    written = graph.call_function(aten.copy_.default, (total, new))
    for node in (new, written):
        node.meta["val"] = total.meta["val"]
    return written


def _with_contiguous_sums(call: Boxed, sums: Sequence[int]) -> Boxed:
    """Wrap a call: accumulators that are not contiguous are passed as contiguous copies, and the
    sums are copied back.

    Accumulators were traced as contiguous.

    Args:
        call: the compiled graph.
        sums: positions of the accumulators among the arguments.
    """

    def run(args: list[Any]) -> list[Any]:
        pairs = [(args[at], at) for at in sums if not args[at].is_contiguous()]
        copies = [total.contiguous() for total, _ in pairs]
        for (_, at), copy in zip(pairs, copies, strict=True):
            args[at] = copy
        results = call(args)
        for (total, _), copy in zip(pairs, copies, strict=True):
            total.copy_(copy)
        return results

    return run


def _with_all_outputs(
    call: Boxed,
    constants: list[Tensor],
    fixed_outputs: dict[int, Any],
    count: int,
) -> Boxed:
    """Wrap a call that returns only computed outputs into one that returns all outputs.

    Args:
        call: a compiled function that returns the computed outputs.
        constants: tensors to append to the arguments.
        fixed_outputs: outputs that are not computed, by position.
        count: number of outputs.
    """
    if not constants and not fixed_outputs:
        return call

    def run(args: list[Any]) -> list[Any]:
        args += constants
        rest = iter(call(args))
        return [fixed_outputs[at] if at in fixed_outputs else next(rest) for at in range(count)]

    return run
