"""Classes of operators: random, attention, effects, accumulations, checkpointed.

Collectives: operators that begin an exchange between ranks, and those that wait for it.

Every rank has the same graphs, and runs the same collectives in the same order. They are pure: one
that nobody reads is dropped, by all ranks. What is under way cannot cross from one graph to
another, as it is the wait that makes it a value.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx.operator_schemas import normalize_function

from ..graph import origin_of

OVERLOAD: Any = type(torch.ops.aten.mm.default)

EXCHANGE = "_c10d_functional"
"""Namespace of collectives."""


def overload(node: fx.Node) -> Any | None:
    """The ``torch.ops`` overload that a node calls, or None for anything else."""
    return node.target if isinstance(node.target, OVERLOAD) else None


def is_random(node: fx.Node) -> bool:
    """Whether the node draws from a random number generator.

    Attention is tagged as drawing because it may; without dropout it does not. Its backward, which
    is tagged too, recomputes dropout's mask from the seed that the forward returned.
    """
    # A custom operator that writes into its arguments is the argument of one that does not.
    ops = [each for each in (node.target, *node.args[:1]) if isinstance(each, OVERLOAD)]
    if not any(torch.Tag.nondeterministic_seeded in op.tags for op in ops):
        return False
    if node.target in _SEEDED:
        return False
    return not is_attention(node) or _argument(node, "dropout_p") != 0.0


def is_attention(node: fx.Node) -> bool:
    """Whether the node is the forward of a fused attention operator."""
    name = str(overload(node) or "")
    return ("scaled_dot_product" in name and "backward" not in name) or node.target in _KERNELS


_SEEDED = frozenset(
    {
        torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default,
        torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
    }
)
_KERNELS = frozenset(
    {
        torch.ops.aten._efficient_attention_forward.default,
        torch.ops.aten._flash_attention_forward.default,
    }
)


def is_recomputed(node: fx.Node) -> bool:
    """Whether the user asked for the node to be recomputed (``torch.utils.checkpoint``).

    Random operators are not: drawn again they would differ and move the generator.
    """
    if not origin_of(node).recomputed:
        return False
    maker = node.args[0] if node.target is operator.getitem else node
    return not (isinstance(maker, fx.Node) and is_random(maker))


def checkpoint_region(node: fx.Node) -> int | None:
    """Which call of ``checkpoint`` the node belongs to; None outside of all."""
    return origin_of(node).checkpoint if is_recomputed(node) else None


def _argument(node: fx.Node, name: str) -> Any:
    op: Any = node.target
    given = normalize_function(op, node.args, node.kwargs, normalize_to_only_use_kwargs=True)
    return None if given is None else given.kwargs.get(name)


CHECKS = frozenset({torch.ops.aten._linalg_check_errors.default})
"""Operators that raise where what they are given says that another one failed, and do nothing
else: they run wherever that one runs.
"""


def is_effect(node: fx.Node) -> bool:
    """Whether the node does more than return a value; drawing random numbers is not meant, nor
    waiting for a collective, which torch takes for an effect.
    """
    if node.op != "call_function":
        return False
    op = overload(node)
    if op is not None and op.namespace == EXCHANGE:
        return False
    return node.target in CHECKS or node.is_impure(impure_random=False)


def writes_in_backward(node: fx.Node) -> bool:
    """Whether the node writes into an input of a joint graph on behalf of the backward, as
    AOTAutograd marks it. Nothing reads it.
    """
    op = overload(node)
    marked = node.meta.get("partitioner_tag") == "must_be_in_backward"
    return marked and op is not None and op._schema.is_mutable


# Operators that only read all arguments but the first, and write that one.
_ACCUMULATIONS = frozenset(
    {
        torch.ops.aten.add_.Tensor,
        torch.ops.aten.addmm_.default,
        torch.ops.aten.baddbmm_.default,
        torch.ops.aten.index_add_.default,
        torch.ops.aten.index_put_.default,
    }
)


def is_accumulation(node: fx.Node) -> bool:
    """Whether the node adds into its first argument."""
    return node.target in _ACCUMULATIONS


_WAIT = "wait_tensor"

# These begin on a copy of what they are given; others read it until they are waited for.
_COPYING = ("all_reduce", "broadcast")


def is_wait(node: fx.Node) -> bool:
    """Whether the node waits for a collective, and is then its result."""
    op = overload(node)
    return op is not None and op.namespace == EXCHANGE and _name(node) == _WAIT


def is_start(node: fx.Node) -> bool:
    """Whether the node begins a collective."""
    op = overload(node)
    return op is not None and op.namespace == EXCHANGE and _name(node) != _WAIT


def is_exchange(node: fx.Node) -> bool:
    """Whether the node begins a collective or waits for one."""
    op = overload(node)
    return op is not None and op.namespace == EXCHANGE


def is_under_way(node: fx.Node) -> bool:
    """Whether the node's value is the unfinished result of a collective, or one of several."""
    if node.target is operator.getitem:
        maker = node.args[0]
        return isinstance(maker, fx.Node) and is_start(maker)
    return is_start(node)


def start_of(wait: fx.Node) -> fx.Node:
    """The collective that a node waits for; the node itself where another graph began it."""
    node = wait
    while not is_start(node):
        operands = node.all_input_nodes
        if not operands:
            return wait
        node = operands[0]
    return node


def read_until(wait: fx.Node) -> list[fx.Node]:
    """What a collective may read until this node has waited for it."""
    begun = start_of(wait)
    if begun is wait or _name(begun).startswith(_COPYING):
        return []
    return begun.all_input_nodes


def _name(node: fx.Node) -> str:
    op = overload(node)
    return "" if op is None else str(op._schema.name).partition("::")[2]
