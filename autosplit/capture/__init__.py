"""nn.Module -> joint forward/backward graph with roles.

Dynamo's full-graph export turns the module's Python into one FX graph; AOTAutograd then
traces forward and backward together and labels every input and output with a descriptor.
This file translates descriptors into roles and keeps torch's private API in one place.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo
from torch import fx, nn
from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._functorch._aot_autograd import descriptors as d
from torch._functorch._aot_autograd.schemas import OutputType
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode

from .compat import TreeSpec, flatten_named, tree_flatten, tree_unflatten
from .errors import CaptureError
from .passes.graph import Kind, Role, placeholders

# Dynamo remembers shapes by code object: a second nn.Sequential would get symbolic sizes.
_DYNAMO = {
    "automatic_dynamic_shapes": False,
    "assume_static_by_default": True,
    "allow_rnn": True,
}
_OWN_STORAGE = {OutputType.non_alias, OutputType.unsafe_view_alias}
_SIDE_EFFECT = re.compile(r"\"(L\['[^\"]*)\"")


@dataclasses.dataclass(frozen=True)
class Capture:
    """A traced module.

    Attributes:
        joint: the joint graph; a forward-only graph where nothing needs a gradient.
        inputs: path of every leaf of ``(args, kwargs)``, tensors and others.
        outputs: path of every leaf of the result.
        output_spec: how the leaves make up the module's result.
    """

    joint: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    output_spec: TreeSpec


def capture(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Capture:
    """Trace ``module(*args, **kwargs)`` without running it on real data.

    Shapes, dtypes, devices, ``requires_grad`` of parameters and inputs, train/eval mode,
    grad mode and autocast are those in force now. Outputs that alias an input or each other
    become copies, so that every output has a gradient of its own.

    Raises:
        CaptureError: the module cannot be traced into one graph; names the user's line.
    """
    with _user_errors(module):
        exported = _export(module, args, kwargs)
        joint = _joint(exported, args, kwargs)
        aliased = [
            index
            for index, info in enumerate(joint._aot_state.fw_metadata.output_info)
            if info.output_type not in _OWN_STORAGE
        ]
        if aliased:
            _copy_outputs(exported, aliased)
            joint = _joint(exported, args, kwargs)
    inputs = tuple(name for name, _ in flatten_named("", (args, kwargs)))
    inputs = tuple(_input_name(name) for name in inputs)
    spec = joint.out_spec
    example = tree_unflatten(list(range(spec.num_leaves)), spec)
    outputs = tuple(name for name, _ in flatten_named("output", example))
    names = _Names(_canonical_names(module), inputs, outputs)
    return Capture(_with_roles(joint.graph_module, names), inputs, outputs, spec)


def _export(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:
    """Dynamo's full-graph export; what it says of side effects is passed on in our words."""
    with warnings.catch_warnings(record=True) as caught, torch._dynamo.config.patch(_DYNAMO):
        warnings.simplefilter("always")
        exported: fx.GraphModule = dynamo_graph_capture_for_export(module)(*args, **kwargs)
    for warning in caught:
        text = str(warning.message)
        if "side effects" not in text:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
            continue
        sources = _SIDE_EFFECT.findall(text)
        if any("._buffers" in source for source in sources):
            _refuse_replaced_buffers(module, args, kwargs)
        others = [source for source in sources if "._buffers" not in source]
        if others:
            warnings.warn(
                f"{type(module).__name__}.forward changes Python state ({', '.join(others)}); "
                "a captured graph does not repeat that when it runs",
                stacklevel=2,
            )
    return exported


def _refuse_replaced_buffers(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse ``self.buffer = self.buffer + 1``: the new tensor would be lost after each call.

    Dynamo reports in-place updates, which the graph does carry, in the same words; so the
    forward runs once on a copy without data, and the tensors that are there before and after
    are compared.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        state = [*module.parameters(), *module.buffers()]
        memo: dict[int, Any] = {id(tensor): mode.from_tensor(tensor) for tensor in state}
        twin = copy.deepcopy(module, memo)
        before = dict(twin.named_buffers())
        leaves, spec = tree_flatten((args, kwargs))
        fakes = [mode.from_tensor(leaf) if torch.is_tensor(leaf) else leaf for leaf in leaves]
        fake_args, fake_kwargs = tree_unflatten(fakes, spec)
        twin(*fake_args, **fake_kwargs)
    replaced = [name for name, tensor in twin.named_buffers() if before.get(name) is not tensor]
    if replaced:
        raise CaptureError(
            f"{type(module).__name__}.forward replaces buffer {replaced[0]!r} by a new tensor "
            f"(at {_definition(module)}); write into it instead, as in "
            "self.buffer.copy_(new) or self.buffer += 1"
        )


def _joint(exported: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    context = exported.meta.get("tracing_context")
    if context is None:
        context = TracingContext(exported.meta["fake_mode"])
    # The stack closes before anything real runs, or the fake mode would still be on.
    with contextlib.ExitStack() as stack, tracing(context):
        return aot_export_joint_with_descriptors(stack, exported, args, kwargs)


def _copy_outputs(exported: Any, indices: list[int]) -> None:
    """Make the exported module return copies of the outputs at these leaf positions."""
    codegen = exported.graph._codegen  # AOTAutograd interprets the graph and asks this one
    original = codegen.dynamo_bytecode_unflatten

    def unflatten(leaves: Any, inputs: Any) -> Any:
        values, spec = tree_flatten(original(leaves, inputs))
        for index in indices:
            values[index] = values[index].clone()
        return tree_unflatten(values, spec)

    codegen.dynamo_bytecode_unflatten = unflatten


def _input_name(path: str) -> str:
    """``[0][1]`` -> ``args[1]``; ``[1]['mask']`` -> ``mask``."""
    if path.startswith("[0]"):
        return "args" + path.removeprefix("[0]")
    key, _, rest = path.removeprefix("[1]['").partition("']")
    return key + rest


def _canonical_names(module: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> the name it has in ``named_parameters()``."""
    first: dict[int, str] = {}
    named = [*module.named_parameters(remove_duplicate=False)]
    named += [*module.named_buffers(remove_duplicate=False)]  # type: ignore[list-item]
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


@dataclasses.dataclass(frozen=True)
class _Names:
    """Descriptor -> role."""

    state: dict[str, str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def input(self, desc: Any) -> Role:
        match desc:
            case d.ParamAOTInput():
                return Role(Kind.PARAMETER, self.state[desc.target])
            case d.BufferAOTInput():
                return Role(Kind.BUFFER, self.state[desc.target])
            case d.PlainAOTInput():
                return Role(Kind.INPUT, self.inputs[desc.idx])
            case d.TangentAOTInput():
                return Role(Kind.TANGENT, self.output(desc.output).name)
        raise CaptureError(
            f"the traced graph takes {desc!r}, which autosplit does not know how to split "
            "(tensor subclasses and effect tokens are such inputs)"
        )

    def output(self, desc: Any) -> Role:
        match desc:
            case d.PlainAOTOutput():
                return Role(Kind.OUTPUT, self.outputs[desc.idx])
            case d.InputMutationAOTOutput():
                source = self.input(desc.mutated_input)
                if source.kind is Kind.PARAMETER:
                    raise CaptureError(
                        f"forward writes into parameter {source.name!r} in place; "
                        "make it a buffer, or update it outside forward"
                    )
                return Role(Kind.UPDATE, source.name)
            case d.GradAOTOutput():
                source = self.input(desc.grad_of)
                if source.kind is Kind.BUFFER:
                    raise CaptureError(
                        f"buffer {source.name!r} requires a gradient; make it a parameter"
                    )
                kind = Kind.PARAMETER_GRAD if source.kind is Kind.PARAMETER else Kind.INPUT_GRAD
                return Role(kind, source.name)
        raise CaptureError(f"the traced graph returns {desc!r}, which autosplit cannot split")


def _with_roles(module: fx.GraphModule, names: _Names) -> fx.GraphModule:
    """Label the graph; drop what nobody reads and gradients that do not exist; give a tied
    parameter one input and one gradient.
    """
    graph = module.graph
    seen: dict[Role, fx.Node] = {}
    for node in placeholders(graph):
        if not node.users:
            graph.erase_node(node)
            continue
        role = names.input(node.meta["desc"])
        if role in seen:
            node.replace_all_uses_with(seen[role])
            graph.erase_node(node)
            continue
        seen[role] = node
        node.meta["role"] = role
        _rename(node, role)
    _label_outputs(graph, names)
    module.recompile()
    return module


def _rename(node: fx.Node, role: Role) -> None:
    """Call the placeholder what the user calls it: ``primals_3`` says nothing in a dump."""
    name = re.sub(r"\W+", "_", role.name).strip("_")
    prefix = "grad_" if role.kind is Kind.TANGENT else ""
    node.name = node.target = node.graph._graph_namespace.create_name(prefix + name, None)


def _label_outputs(graph: fx.Graph, names: _Names) -> None:
    output = graph.output_node()
    pairs: dict[Role, Any] = {}
    for desc, value in zip(output.meta["desc"], output.args[0], strict=True):  # type: ignore[arg-type]
        if desc is None or (value is None and isinstance(desc, d.GradAOTOutput)):
            continue
        role = names.output(desc)
        if role in pairs:  # a tied parameter: one accumulator, so one gradient
            with graph.inserting_before(output):
                total = graph.call_function(torch.ops.aten.add.Tensor, (pairs[role], value))
            total.meta = dict(value.meta)
            value = total
        pairs[role] = value
    output.args = (list(pairs.values()),)
    output.meta["roles"] = tuple(pairs)


@contextlib.contextmanager
def _user_errors(module: nn.Module) -> Iterator[None]:
    """Turn what tracing raises into a CaptureError that names the user's line."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        where = _user_line(error) or _definition(module)
        reason = _reason(error)
        raise CaptureError(
            f"{type(module).__name__} cannot be captured in one graph.\n"
            f"  at {where}\n  because {reason}\n  {_advice(error)}"
        ) from error


def _user_line(error: Exception) -> str:
    """``file:line`` of the innermost frame of the user's code, where Dynamo recorded it."""
    stack = getattr(error, "real_stack", None)
    return f"{stack[-1].filename}:{stack[-1].lineno}" if stack else ""


def _advice(error: Exception) -> str:
    if isinstance(error, TorchRuntimeError):
        return "Run the model on these inputs without autosplit: the same operator should fail."
    return (
        "Write that line so that a graph can hold it (without Python that depends on tensor "
        "values), or split the parts of the model around it separately."
    )


def _definition(module: nn.Module) -> str:
    forward = type(module).forward
    try:
        return f"{inspect.getsourcefile(forward)}:{inspect.getsourcelines(forward)[1]}"
    except (OSError, TypeError):
        return f"{type(module).__module__}.{type(module).__qualname__}.forward"


def _reason(error: Exception) -> str:
    text = str(error).partition("from user code:")[0].strip()
    kept = [
        line.strip()
        for line in text.splitlines()
        if line.strip() and not line.lstrip().startswith(("Hint:", "For more details", "Set TORCH"))
    ]
    prefix = "" if isinstance(error, TorchDynamoException) else f"{type(error).__name__}: "
    return prefix + "\n    ".join(kept[:6])
