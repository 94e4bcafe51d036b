"""Attention masks as guards: whether a mask is the causal one, decided when tracing.

torch's Transformer layers ask that of every mask they are given, and choose a kernel by the
answer. No graph holds such a question. It is put when the forward is traced, the graph is for the
answer, and before each call it is put again.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Iterator
from types import CodeType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._dynamo.variables import ConstantVariable, UserFunctionVariable
from torch.nn.modules.transformer import _detect_is_causal_mask

from autosplit.capture.operator_effects import effect_of
from autosplit.device import generators_kept
from autosplit.passes.graph import ancestors, descendants

_SIGNATURE = inspect.signature(_detect_is_causal_mask)
_NONE = ConstantVariable.create(None)
_IN_PLACE = {name for name in dir(operator) if name.startswith("__i")} - {"__inv__", "__invert__"}


class MaskDecision(NamedTuple):
    """Whether a mask is causal, as the graph was traced for.

    Attributes:
        sources: where the forward finds what the mask is made of.
        mask: makes it.
        size: of a causal mask, None for that of the mask itself.
        answer: what the graph was traced for.
    """

    sources: tuple[CodeType, ...]
    mask: fx.GraphModule
    size: int | None
    answer: bool

    def holds(self, scope: dict[str, Any]) -> bool:
        """Whether the answer is still the same; ``scope`` has the variables of the forward."""
        with torch.no_grad():
            mask = self.mask(*[eval(code, scope) for code in self.sources])
            return _detect_is_causal_mask(mask, None, self.size) is self.answer


@contextlib.contextmanager
def masks_decided(wanted: bool) -> Iterator[list[MaskDecision]]:
    """Have Dynamo trace the answers for its example tensors as constants, where that is wanted.

    Yields:
        the answers that depend on what the forward is given or reads, when the tracing is over.
    """
    found: list[MaskDecision] = []
    original: Any = UserFunctionVariable.call_function

    def call_function(function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        given = _given(function, args, kwargs)
        answer = _answer(*given) if wanted and given else None
        if answer is None:
            return original(function, tx, args, kwargs)
        if answer.sources:
            found.append(answer)
        return ConstantVariable.create(answer.answer)

    with patch.object(UserFunctionVariable, "call_function", call_function):
        yield found


def _given(function: Any, args: Any, kwargs: Any) -> tuple[Any, int | None] | None:
    """The mask and the size of a question for Dynamo; None for any other call."""
    if getattr(function, "fn", None) is not _detect_is_causal_mask:
        return None
    bound = _SIGNATURE.bind(*args, **kwargs).arguments
    hint, size = (bound.get(name, _NONE) for name in ("is_causal", "size"))
    if not hint.is_python_constant() or not size.is_python_constant():
        return None
    if hint.as_python_constant() is not None or not hasattr(bound["mask"], "get_real_value"):
        return None
    return bound["mask"], size.as_python_constant()


def _answer(mask: Any, size: int | None) -> MaskDecision | None:
    """The decision for the example; None where the mask cannot be computed again from its
    sources.
    """
    node: fx.Node = mask.as_proxy().node
    made = ancestors([node])
    taken = [each for each in node.graph.nodes if each.op == "placeholder" and each in made]
    sources = [_source(each) for each in taken]
    known = all(each.op in {"placeholder", "call_function", "call_method"} for each in made)
    writes = set(filter(_writes, descendants([*made])))
    if not known or "" in sources or not writes <= made:
        return None
    maker = _extract(node, made, taken, cloned=bool(writes))
    examples = [each.meta["grapharg"].example for each in taken]
    with torch.no_grad(), generators_kept():
        effect = effect_of(lambda: maker(*examples))
    if effect.random or effect.heavy or not isinstance(effect.value, Tensor):
        return None
    answer = _detect_is_causal_mask(effect.value, None, size)
    codes = tuple(compile(source, source, "eval") for source in sources)
    return MaskDecision(codes, maker, size, answer)


def _extract(
    node: fx.Node, made: set[fx.Node], taken: list[fx.Node], *, cloned: bool
) -> fx.GraphModule:
    """The subgraph that computes a node from the placeholders in ``taken``, which are ``cloned``
    where it writes in place.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {each: graph.placeholder(each.name) for each in taken}
    if cloned:
        copies = {k: graph.call_method("clone", (copy,)) for k, copy in copies.items()}
    for each in node.graph.nodes:
        if each in made and each not in copies:
            copies[each] = graph.node_copy(each, copies.__getitem__)
    graph.output(copies[node])
    return fx.GraphModule(torch.nn.Module(), graph)


def _source(placeholder: fx.Node) -> str:
    """Python expression of the placeholder's value; empty for one of Dynamo's own."""
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)


def _writes(node: fx.Node) -> bool:
    """Whether the node may write in place."""
    if node.op == "placeholder":
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if getattr(node.target, "__module__", "") == "_operator":
        return name == "setitem" or f"__{name}__" in _IN_PLACE
    return "out" in node.kwargs or (name.endswith("_") and not name.startswith("__"))
