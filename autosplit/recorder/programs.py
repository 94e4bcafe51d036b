"""Write the graphs of a stage as programs that run without the model, with the user's lines and
roles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autosplit.capture.diagnosis import Wrapper
from autosplit.dump import program
from autosplit.passes.graph import Role, inputs, origin_of, outputs, source_line
from autosplit.passes.lowering import codegen
from autosplit.stage import Stage
from autosplit.torch_internals.dtensor import is_dtensor


class StagePrograms(NamedTuple):
    """The programs of a stage.

    Attributes:
        facts: names and roles as JSON; ``{"reason": text}`` if the stage cannot run alone.
        sources: F, I, W and B as Python, by name.
        constants: tensors that the programs read in addition to their arguments, by program and
            name.
    """

    facts: dict[str, Any]
    sources: dict[str, str]
    constants: dict[str, dict[str, Tensor]]


def programs_of(
    stage: object,
    state: dict[str, Tensor],
    functions_of_step: Sequence[object],
    come: Sequence[bool],
) -> StagePrograms:
    """The programs of a stage.

    Args:
        stage: the stage.
        state: the stage's parameters and buffers by name.
        functions_of_step: the graphs of each microbatch of the step.
        come: for each output, whether the stage gets a gradient for it; empty if no backward has
            started.
    """
    reason = _unplayable(stage, state)
    if len({*map(id, functions_of_step)}) > 1:
        reason = "its microbatches have different sizes"
    if reason or not isinstance(stage, Stage):
        return StagePrograms({"reason": reason}, {}, {})
    functions, prefix = stage.functions, _prefix(stage.module)
    calls = ["forward"]
    if functions.has_backward:
        calls += ["backward_input", "backward_weight", "backward"]
        gradients = [has_gradient or None for has_gradient in come]
        gradients += [None] * (len(functions.output_names) - len(come))
        functions = functions.for_gradients(gradients)[0] if come else functions
    modules = {call: functions.source(call, stage.grad_dtype) for call in calls}
    facts = {
        "inputs": functions.capture.inputs,
        "outputs": functions.output_names,
        "updates": functions.updated_state,
        "tangents": {name: spec.stride for name, spec in functions.tangent_specs.items()},
        "prefix": prefix,
        "grad_dtype": str(stage.grad_dtype or "").removeprefix("torch."),
        "exact": functions.exact,
        "programs": {call: _facts(module, prefix) for call, module in modules.items()},
    }
    sources = {call: program(call, module, repr(stage)) for call, module in modules.items()}
    constants = {call: codegen.constants(module) for call, module in modules.items()}
    return StagePrograms(facts, sources, constants)


def _unplayable(stage: object, state: dict[str, Tensor]) -> str:
    """The reason why a stage cannot run alone; empty if it can."""
    if not isinstance(stage, Stage):
        return (
            "it has no graph of its own: it runs as several graphs, or comes from a stage_factory"
        )
    if stage.sharding.groups or any(map(is_dtensor, state.values())):
        return "its parameters are sharded over ranks"
    if stage.functions.written:
        return "its backward writes into state"
    modules = (getattr(stage.functions.calling, name, None) for name in ("forward", "backward"))
    values = [v for m in modules if m is not None for v in codegen.constants(m).values()]
    if not all(isinstance(value, Tensor) for value in values):
        return "its graphs call functions that are no operators"
    return ""


def _prefix(module: torch.nn.Module) -> str:
    """The prefix that wrappers give to the names of the user's parameters."""
    return "module." + _prefix(module.module) if isinstance(module, Wrapper) else ""


def _facts(module: fx.GraphModule, prefix: str) -> dict[str, Any]:
    """Roles of arguments and results, and the user's module and line for each name."""
    lines = {}
    for node in module.graph.nodes:
        if node.op == "call_function":
            modules = origin_of(node).modules
            owner = f"{modules[-1]}.".removeprefix(prefix)[:-1] if modules else ""
            lines[codegen.node_name(node)] = [owner, source_line(node)]
    return {
        "inputs": [*map(_text, inputs(module.graph))],
        "outputs": [_text(role) for role, _ in outputs(module.graph)],
        "lines": lines,
    }


def _text(role: Role) -> list[str]:
    return [role.kind.value, role.name]
