"""Write the graphs of a stage as programs that run without the model, with the user's lines and
roles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autosplit.capture.diagnosis import Wrapper
from autosplit.dump import program
from autosplit.passes import SplitGraphs
from autosplit.passes.analysis.operators import is_exchange
from autosplit.passes.graph import Role, inputs, origin_of, outputs, source_line
from autosplit.passes.lowering import codegen
from autosplit.passes.subgraph import inner_calls
from autosplit.runtime.functions import SplitFunctions
from autosplit.stage import Stage
from autosplit.torch_internals.dtensor import is_dtensor, shard_of


class StagePrograms(NamedTuple):
    """The programs of a stage: F, I, W and B of each captured graph that the step used.

    Attributes:
        facts: names and roles as JSON; ``{"reason": text}`` if the stage cannot run alone.
        sources: Python source by ``capture-NUMBER/NAME``.
        constants: per capture, the tensors that its programs read in addition to their arguments,
            by program and name.
    """

    facts: dict[str, Any]
    sources: dict[str, str]
    constants: list[dict[str, dict[str, Tensor]]]


def programs_of(
    stage: object,
    state: dict[str, Tensor],
    functions_by_microbatch: Mapping[int, SplitFunctions],
    come: Sequence[bool],
) -> StagePrograms:
    """The programs of a stage. Microbatches of different sizes share the programs of a capture
    whose sizes are open.

    Args:
        stage: the stage.
        state: the stage's parameters and buffers by name.
        functions_by_microbatch: the graphs of each microbatch of the step.
        come: for each output, whether the stage gets a gradient for it; empty if no backward has
            started.
    """
    if not isinstance(stage, Stage):
        return _without_programs(
            "it has no graph of its own: it runs as several graphs, or comes from a stage_factory"
        )
    prefix = _prefix(stage.module)
    facts: dict[str, Any] = {
        "prefix": prefix,
        "grad_dtype": str(stage.grad_dtype or "").removeprefix("torch."),
        "exact": stage.functions.is_eager,
        "adds_exactly": stage.functions.adds_exactly,
        "shards": _shards(stage, state),
        "updates": sorted({n for f in functions_by_microbatch.values() for n in f.updated_state}),
        "captures": [],
        "microbatches": {},
    }
    programs = StagePrograms(facts, {}, [])
    numbers: dict[SplitGraphs, int] = {}
    for microbatch, functions in functions_by_microbatch.items():
        number = numbers.setdefault(functions.calling, len(numbers))
        tangents = {name: spec.stride for name, spec in functions.tangent_specs.items()}
        facts["microbatches"][microbatch] = {"capture": number, "tangents": tangents}
        if number < len(programs.constants):
            continue
        if reason := _unplayable(stage, state, functions):
            return _without_programs(reason)
        modules = _modules(stage, functions, come)
        facts["captures"].append(
            {
                "inputs": functions.capture.inputs,
                "outputs": functions.output_names,
                "programs": {call: _facts(module, prefix) for call, module in modules.items()},
            }
        )
        programs.constants.append({c: codegen.constants(module) for c, module in modules.items()})
        for call, module in modules.items():
            programs.sources[f"capture-{number}/{call}"] = program(call, module, repr(stage))
    return programs


def _without_programs(reason: str) -> StagePrograms:
    return StagePrograms({"reason": reason}, {}, [])


def _gathered(stage: Stage) -> dict[int, Tensor]:
    """The gathered parameter of ``fully_shard`` by the ``id`` of the sharded one."""
    pairs = (pair for group in stage.sharding.groups for pair in group.pairs)
    return {id(sharded): gathered for sharded, gathered in pairs}


def _shards(stage: Stage, state: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
    """By name, the place of this rank's shard, and the dtype in which graphs read the whole
    parameter.
    """
    gathered = _gathered(stage)
    return {
        name: shard_of(t) | {"dtype": str(gathered[id(t)].dtype).removeprefix("torch.")}
        for name, t in state.items()
        if id(t) in gathered and not is_dtensor(gathered[id(t)])
    }


def _unplayable(stage: Stage, state: dict[str, Tensor], functions: SplitFunctions) -> str:
    """The reason why a stage cannot run alone; empty if it can."""
    gathered = _gathered(stage)
    if any(is_dtensor(gathered.get(id(tensor), tensor)) for tensor in state.values()):
        return "its parameters are DTensors, as of parallelize_module"
    if functions.written:
        return "its backward writes into state"
    modules = (getattr(functions.calling, name, None) for name in ("forward", "backward"))
    graphs = [module for module in modules if module is not None]
    if any(is_exchange(node) for module in graphs for node in inner_calls(module.graph)):
        return "its graphs exchange tensors with the graphs of other ranks"
    values = [value for module in graphs for value in codegen.constants(module).values()]
    if not all(isinstance(value, Tensor) for value in values):
        return "its graphs call functions that are no operators"
    return ""


def _modules(
    stage: Stage, functions: SplitFunctions, come: Sequence[bool]
) -> dict[str, fx.GraphModule]:
    """The graphs of F, and of I, W and B for the gradients that come."""
    calls = ["forward"]
    if functions.has_backward:
        calls += ["backward_input", "backward_weight", "backward"]
        gradients = [has_gradient or None for has_gradient in come]
        gradients += [None] * (len(functions.output_names) - len(come))
        functions = functions.for_gradients(gradients)[0] if come else functions
    return {call: functions.source(call, stage.grad_dtype) for call in calls}


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
