"""Capture of a module's forward graph, which the planner cuts into stages.

The capture names the graph's inputs as user inputs, state and constants, and records each node's
effects (writes, random numbers, cost) and settings.

No node reads the nodes that switch grad mode and autocast, so a part of the graph could lose its
switches and run under other settings. The capture therefore removes all switches, and each part
gets the switches that it needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx.experimental.symbolic_shapes import guard_or_true
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from autosplit.capture.attribute_values import AttributeValue, values_of
from autosplit.capture.diagnosis import user_errors
from autosplit.capture.export import export
from autosplit.capture.forward_blocks import ForwardRegion, export_around_blocks
from autosplit.capture.forward_sizes import ForwardSizes
from autosplit.capture.guards import unobserved
from autosplit.capture.input_sizes import Inputs, input_tensors, is_open
from autosplit.capture.region_session import capture_around_blocks
from autosplit.capture.roles import canonical_names
from autosplit.capture.workarounds.operators import (
    refuse_traced_otherwise,
    without_fused_recurrence,
)
from autosplit.errors import CaptureError
from autosplit.torch_internals.distributed import refuse_sharded
from autosplit.torch_internals.dynamo import traced_value
from autosplit.torch_internals.operators import written_arguments
from autosplit.torch_internals.pytree import TreeSpec, hold, tree_flatten

# In training these write the running statistics, which their schemas do not declare.
_BATCH_NORMS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
_STATISTICS = slice(3, 5)
_TRAINING = 5
_CHEAP = 64  # FLOPs for each element of the output


@dataclass
class Effect:
    """Result and effects of one node.

    Attributes:
        value: the result, as fake tensors.
        storages: storages of the tensors in the result.
        writes: storages written in place.
        random: whether the node draws random numbers.
        heavy: whether the node has a matrix product, a convolution or attention.
        costly: whether the node computes more than ``_CHEAP`` FLOPs for each element of its output.
    """

    value: Any = None
    storages: frozenset[int] = frozenset()
    writes: set[int] = field(default_factory=set)
    random: bool = False
    heavy: bool = False
    costly: bool = False


def examine(module: fx.GraphModule, sizes: ForwardSizes | None = None) -> dict[fx.Node, Effect]:
    """Run the graph on fake tensors and record the effect of every node.

    Args:
        module: the graph.
        sizes: its symbolic sizes; None: all sizes are numbers, or depend on data.

    Raises:
        Exception: an operator failed; the operator's error.
    """
    mode = module.meta["fake_mode"]
    run = _EffectInterpreter(module, sizes)
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    # Torch's reference implementations of operators need it for symbolic sizes.
    symbolic = enable_python_dispatcher() if sizes is not None else contextlib.nullcontext()
    with mode, symbolic, torch.enable_grad(), without_fused_recurrence(module):
        run.boxed_run(inputs)
    return run.effects


class _EffectInterpreter(fx.Interpreter):
    """Interpreter that keeps every value alive, so that no two storages get the same number."""

    def __init__(self, module: fx.GraphModule, sizes: ForwardSizes | None) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.effects: dict[fx.Node, Effect] = {}
        self._sizes = sizes
        self._kept: list[Any] = []

    def boxed_run(self, inputs: list[Any]) -> Any:
        """Run the graph on one value for each placeholder, instead of on the caller's ``(args,
        kwargs)``.
        """
        return self.run(*inputs, enable_io_processing=False)

    def run_node(self, n: fx.Node) -> Any:
        effect = self.effects[n] = Effect()
        with EffectRecorder(effect, self._kept, self._sizes):
            effect.value = super().run_node(n)
        effect.storages = frozenset(_storages(effect.value))
        return effect.value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(target, HigherOrderOperator):
            return super().call_function(target, args, kwargs)
        if target.name() == "tag_activation_checkpoint":
            return args[0](*args[1:])
        effect = self.effects[self._node(target, args)]
        effect.random = effect.heavy = effect.costly = True
        return self._node(target, args).meta["example_value"]

    def _node(self, target: Any, args: Any) -> fx.Node:
        return next(reversed(self.effects))


class EffectRecorder(TorchDispatchMode):
    """Dispatch mode that records the effects of operators.

    Args:
        effect: the record to write into.
        kept: keeps the written tensors alive, so that no other storage gets their number.
        sizes: the symbolic sizes of the graph; None: all sizes are numbers, or depend on data.
    """

    def __init__(self, effect: Effect, kept: list[Any], sizes: ForwardSizes | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._effect = effect
        self._kept = kept
        self._sizes = sizes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        effect = self._effect
        effect.random |= torch.Tag.nondeterministic_seeded in func.tags
        for tensor in _written(func, args, kwargs):
            effect.writes |= set(_storages(tensor))
            self._kept.append(tensor)
        effect.heavy |= "attention" in func._overloadpacket.__name__
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            effect.heavy = True
            effect.costly |= self._is_costly(count(*args, **kwargs, out_val=result), result)
        return result

    def _is_costly(self, count: Any, result: Any) -> bool:
        """Whether an operator with ``count`` FLOPs computes much for each element of its result."""
        size = sum(t.numel() for t in tree_flatten(result)[0] if isinstance(t, Tensor))
        if self._sizes is not None:  # a comparison of symbols would become a guard
            count, size = self._sizes.number(count), self._sizes.number(size)
            return None in (count, size) or count > _CHEAP * size
        # Sizes may depend on data, as the number of tokens of an expert does: then True.
        return bool(guard_or_true(count > _CHEAP * size))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    yield from written_arguments(func, args, kwargs)
    if func._overloadpacket.__name__ in _BATCH_NORMS and args[_TRAINING]:
        yield from args[_STATISTICS]


def _storages(tree: Any) -> Iterator[int]:
    for leaf in tree_flatten(tree)[0]:
        if isinstance(leaf, Tensor):
            with contextlib.suppress(NotImplementedError):  # sparse tensors have none
                yield leaf.untyped_storage()._cdata


_GRAD = torch._C._set_grad_enabled
_NOTHING = (torch._C._log_api_usage_once,)


@dataclass(frozen=True)
class Setting:
    """Grad mode and autocast regions around a node.

    Attributes:
        grad: False under ``no_grad``; None for the caller's grad mode.
        autocasts: the nodes that entered the surrounding regions of autocast, outermost first.
    """

    grad: bool | None = None
    autocasts: tuple[fx.Node, ...] = ()


def settings(graph: fx.Graph) -> dict[fx.Node, Setting | None]:
    """The grad mode and autocast of every node; None for nodes that only switch grad mode or
    autocast, and for nodes without effect.
    """
    setting_of: dict[fx.Node, Setting | None] = {}
    now = Setting()
    for node in graph.nodes:
        setting_of[node] = None
        if node.target is _GRAD:
            # Graphs are captured with gradients on, so True is the caller's mode.
            now = Setting(None if node.args[0] else False, now.autocasts)
        elif node.target is _enter_autocast:
            now = Setting(now.grad, (*now.autocasts, node))
        elif node.target is _exit_autocast:
            kept = tuple(enter for enter in now.autocasts if enter is not node.args[0])
            now = Setting(now.grad, kept)
        elif node.target not in _NOTHING:
            setting_of[node] = now
    return setting_of


def enters_autocast(node: fx.Node) -> bool:
    """Whether the node enters a region of autocast. Its first argument is a device type."""
    return node.target is _enter_autocast


class Switches:
    """Writes into a new graph the nodes that switch grad mode and autocast."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._grad: bool | None = None
        self._callers: fx.Node | None = None
        self._entered: list[tuple[fx.Node, fx.Node]] = []

    def to(self, setting: Setting) -> None:
        """Write the nodes that switch to the grad mode and autocast of ``setting``."""
        wanted = setting.autocasts
        common = 0
        while common < min(len(wanted), len(self._entered)):
            if self._entered[common][0] is not wanted[common]:
                break
            common += 1
        while len(self._entered) > common:
            self._graph.call_function(_exit_autocast, (self._entered.pop()[1],))
        for enter in wanted[common:]:
            token = self._graph.call_function(_enter_autocast, enter.args, enter.kwargs)
            self._entered.append((enter, token))
        if setting.grad != self._grad:
            if self._callers is None:
                self._callers = self._graph.call_function(torch.is_grad_enabled)
            self._graph.call_function(_GRAD, (self._callers if setting.grad is None else False,))
            self._grad = setting.grad


@dataclass(frozen=True)
class CapturedForward:
    """The forward of a module as one graph, without a backward.

    Attributes:
        module: Dynamo's graph: torch's own functions, as the user's code calls them.
        inputs: placeholder -> position among the tensors of ``(args, kwargs)``.
        state: node -> first name of the parameter or buffer that it reads.
        parameters: first names of all parameters.
        constants: node -> the tensor that it reads.
        effects: effect of every node.
        leaves: leaves of the result: nodes, or values that are not tensors.
        spec: structure of the result.
        sizes: the symbolic sizes of the graph; None if no size was left open.
        aux_losses: name of an attribute -> the nodes of the auxiliary losses that the forward
            leaves in this attribute of its modules.
    """

    module: fx.GraphModule
    inputs: dict[fx.Node, int]
    state: dict[fx.Node, str]
    parameters: frozenset[str]
    constants: dict[fx.Node, Tensor]
    effects: dict[fx.Node, Effect]
    leaves: tuple[Any, ...]
    spec: TreeSpec
    sizes: ForwardSizes | None = None
    aux_losses: Mapping[str, Sequence[fx.Node]] = field(default_factory=dict)

    @cached_property
    def size_nodes(self) -> frozenset[fx.Node]:
        """The nodes whose values are numbers that follow from the sizes of the inputs."""
        if self.sizes is None:
            return frozenset()
        return frozenset(
            n for n, effect in self.effects.items() if self.sizes.is_size(effect.value)
        )

    def concrete(self, value: Tensor) -> Tensor | None:
        """A tensor with the sizes and strides of a value, as numbers; None if they depend on data.
        Open sizes have the values of the capture's inputs.
        """
        if not any(isinstance(size, torch.SymInt) for size in value.shape):
            return value
        return None if self.sizes is None else self.sizes.concrete(value)


def capture_forward(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    aux_losses: Collection[str] = (),
) -> CapturedForward:
    """Trace ``module(*args, **kwargs)`` without running it on real data. All inputs must be
    different tensors. Sizes that ``leave_open`` has marked may become symbols. The forward may set
    computed tensors as attributes of its modules only if their names are in ``aux_losses``.

    Raises:
        CaptureError: the module cannot be traced into one graph; names the user's line. Or an
            auxiliary loss is no scalar.
        ShardedError: FSDP manages the module or a part of it.
    """
    refuse_sharded(module)
    with user_errors(module), unobserved(), torch.enable_grad():
        exported, tensors = _exported(module, args, kwargs, aux_losses)
        refuse_traced_otherwise(exported)
        codegen: Any = exported.graph._codegen
        values = (*args, *kwargs.values())
        sizes = _open_sizes(exported, (args, kwargs), tensors) if is_open(args, kwargs) else None
        effects = examine(exported, sizes)
        for node in exported.graph.find_nodes(op="get_attr"):
            if isinstance(effects[node].value, Tensor):
                tensors[node] = effects[node].value
        outputs: Any = exported.graph.output_node().args[0]
        results = [effects[n].value if isinstance(n, fx.Node) else n for n in outputs]
        tree = codegen.dynamo_bytecode_unflatten(results, values)
        labels = values_of(exported)
        tree, *losses = tree if labels else (tree,)
        leaves, spec = tree_flatten(hold(tree))
        result_nodes = {id(value): node for value, node in zip(results, outputs, strict=True)}
        _add_returned(
            module, exported, [x for x in leaves if id(x) not in result_nodes], tensors, effects
        )
    if sizes is not None and any(map(sizes.is_size, leaves)):
        raise CaptureError(
            f"{type(module).__name__} returns a number that depends on the sizes of its inputs, "
            "which vary: return tensors, and read sizes from them"
        )
    nodes = {id(tensor): node for node, tensor in tensors.items()} | result_nodes
    result_leaves = tuple(nodes[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    parameters = frozenset(name for name, _ in module.named_parameters())
    loss_nodes = _aux_losses(labels, losses, result_nodes)
    forward = CapturedForward(
        exported, {}, {}, parameters, {}, effects, result_leaves, spec, sizes, loss_nodes
    )
    _name(forward, module, (args, kwargs), tensors)
    return forward


def _aux_losses(
    labels: Sequence[AttributeValue], losses: Sequence[Tensor], nodes: Mapping[int, fx.Node]
) -> dict[str, list[fx.Node]]:
    """The nodes of auxiliary losses, by the name of the attribute.

    Raises:
        CaptureError: a loss is no scalar.
    """
    by_name: dict[str, list[fx.Node]] = {}
    for label, loss in zip(labels, losses, strict=True):
        if loss.dim():
            raise CaptureError(
                f"the auxiliary loss {label.name} has shape {list(loss.shape)}, and must be a "
                "scalar: reduce it, as by .mean(), before the forward sets it"
            )
        by_name.setdefault(label.attribute, []).append(nodes[id(loss)])
    return by_name


def _exported(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    aux_losses: Collection[str],
) -> tuple[fx.GraphModule, Inputs]:
    """Dynamo's graph of a module, and its inputs."""
    around_blocks = None
    if not (aux_losses or is_open(args, kwargs)):
        capture = partial(export_around_blocks, module, args, kwargs)
        around_blocks = capture_around_blocks(module, ForwardRegion.of_block, capture)
    if around_blocks is not None:
        return around_blocks
    exported, _ = export(module, args, kwargs, values=aux_losses)
    return exported, input_tensors(exported, args, kwargs)


def _open_sizes(exported: fx.GraphModule, inputs: Any, tensors: dict[fx.Node, Any]) -> ForwardSizes:
    """The symbolic sizes of a graph that was exported with these inputs."""
    examples = [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]
    positions = {id(leaf): position for position, leaf in enumerate(examples)}
    traced = {
        positions[id(tensor)]: traced_value(node)
        for node, tensor in tensors.items()
        if id(tensor) in positions
    }
    return ForwardSizes(exported.meta["fake_mode"].shape_env, traced, examples)


def _add_returned(
    module: nn.Module,
    exported: fx.GraphModule,
    leaves: list[Any],
    tensors: dict[fx.Node, Any],
    effects: dict[fx.Node, Effect],
) -> None:
    """Add graph inputs for parameters and buffers that the model returns without reading them."""
    input_ids = {id(tensor) for tensor in tensors.values()}
    state = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or id(leaf) in input_ids:
            continue
        if id(leaf) not in state:
            raise CaptureError(
                f"{type(module).__name__} returns a tensor of shape {list(leaf.shape)} that is "
                "neither computed nor an input, a parameter or a buffer; register it as a buffer"
            )
        with exported.graph.inserting_before(next(iter(exported.graph.nodes))):
            node = exported.graph.placeholder(f"returned_{len(tensors)}")
        input_ids.add(id(leaf))
        tensors[node] = leaf
        effects[node] = Effect(exported.meta["fake_mode"].from_tensor(leaf))


def _name(
    forward: CapturedForward, module: nn.Module, inputs: Any, tensors: dict[fx.Node, Any]
) -> None:
    names = canonical_names(module)
    named = [*module.named_parameters(remove_duplicate=False)]
    named += [*module.named_buffers(remove_duplicate=False)]  # type: ignore[list-item]
    state = {id(tensor): names[name] for name, tensor in named}
    leaves = [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]
    positions = {id(leaf): position for position, leaf in enumerate(leaves)}
    for node, tensor in tensors.items():
        if id(tensor) in state:
            forward.state[node] = state[id(tensor)]
        elif id(tensor) in positions:
            forward.inputs[node] = positions[id(tensor)]
        else:
            forward.constants[node] = tensor
