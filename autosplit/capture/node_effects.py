"""Effects of the nodes of a forward graph: writes, random numbers, cost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator
from torch.fx.experimental.symbolic_shapes import guard_or_true
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from autosplit.capture.forward_sizes import ForwardSizes
from autosplit.capture.workarounds.operators import without_fused_recurrence
from autosplit.torch_internals.operators import written_arguments
from autosplit.torch_internals.pytree import tree_flatten

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
