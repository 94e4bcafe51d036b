"""The table of operators, and predicates for classes of operators: random, attention, effects,
accumulations, checkpointed, collectives.

A collective has two operators: one begins an exchange between ranks, the other waits for its end.

Every rank has the same graphs, and runs the same collectives in the same order. Collectives are
pure: if nothing reads a result, all ranks drop the collective. An unfinished result cannot cross
from one graph to another, because an unfinished result has no value.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.operator_schemas import normalize_function

from ..graph import SUBGRAPH, calls, is_like, origin_of

OVERLOAD: Any = type(torch.ops.aten.mm.default)

EXCHANGE = "_c10d_functional"
"""Namespace of collectives."""

READ = "autosplit_read"
"""Namespace of reads of Python's state, which happen when I runs."""
_TAGGED = {"aten", "prims", "prim", EXCHANGE, "_c10d_functional_autograd", READ, "autosplit"}
"""Namespaces of operators whose tags say whether they draw random numbers."""

_TABLE = """
add.Tensor                                       hands_on overwrites commutes
add_.Tensor                                      accumulates
addmm                                            fresh
addmm_                                           accumulates
as_strided                                       addresses
as_strided_copy                                  addresses
as_strided_scatter                               addresses
baddbmm                                          fresh
baddbmm_                                         accumulates
bmm                                              fresh
cat                                              cheap fresh
clone                                            hands_on
constant_pad_nd                                  cheap
convolution                                      fresh
convolution_backward                             fresh_first
copy_                                            accumulates
div.Scalar                                       overwrites
div.Tensor                                       overwrites
_efficient_attention_forward                     attention
erf                                              slow
exp                                              slow overwrites
_flash_attention_forward                         attention
full                                             cheap
full_like                                        cheap
_fused_rms_norm                                  norm
gelu                                             slow
index_add_                                       accumulates
index_put_                                       accumulates
_linalg_check_errors                             check
_log_softmax                                     norm
mean                                             cheap
mean.dim                                         fresh
mm                                               fresh
mul.Scalar                                       overwrites
mul.Tensor                                       overwrites commutes
native_batch_norm_backward                       fresh_first
_native_batch_norm_legit_functional              fresh_first
native_group_norm                                norm
native_group_norm_backward                       fresh_first
native_layer_norm                                norm fresh_first
native_layer_norm_backward                       fresh_first
neg                                              overwrites
new_zeros                                        zeros
ones_like                                        cheap
permute                                          permutes
relu                                             overwrites
_reshape_alias                                   view
rsqrt                                            overwrites
_scaled_dot_product_cudnn_attention_backward     seeded
_scaled_dot_product_efficient_attention_backward seeded
select_backward                                  cheap fresh
sigmoid                                          slow overwrites
silu                                             slow
slice_backward                                   cheap fresh
_softmax                                         norm
_softmax_backward_data                           fresh
softplus                                         slow
stack                                            cheap
sub.Tensor                                       overwrites
sum                                              cheap reduces
sum.dim_IntList                                  cheap reduces fresh
sum_to_size                                      cheap
t                                                permutes
tanh                                             slow overwrites
_to_copy                                         cheap hands_on
transpose.int                                    permutes
_unsafe_view                                     view reshapes
var_mean.correction                              cheap
view                                             reshapes
zeros                                            zeros
zeros_like                                       cheap zeros
"""


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _traits() -> dict[str, frozenset[Any]]:
    table: dict[str, set[Any]] = {}
    for name, *traits in map(str.split, _TABLE.strip().splitlines()):
        for trait in traits:
            table.setdefault(trait, set()).add(_operator(name))
    return {trait: frozenset(operators) for trait, operators in table.items()}


OPERATORS: Mapping[str, frozenset[Any]] = _traits()
"""Trait -> ATen's operators that have it, beyond what their schemas and tags say.

======================  ==========================================================================
``accumulates``         only reads all arguments but the first, and writes that one
``addresses``           reads memory by strides, which must be those that tracing saw
``attention``           a kernel of attention's forward
``cheap``               a reduction or copy that has neither the pointwise nor the reduction tag
``check``               raises if its operand says that another operator failed, and has no other
                        effect; runs in each graph that runs that operator
``commutes``            its first two operands may change places
``fresh``               its result has memory of its own, although the operator is not tagged as
                        pointwise. Operators without this trait may return an operand, as
                        composite and custom operators do
``fresh_first``         the first of its results has memory of its own
``hands_on``            a sum or copy of gradients
``norm``                a reduction along rows whose result is as large as what it reduces
``overwrites``          has a form that writes into its first operand, see ``reusable_operands``
``permutes``            a view of all elements in another order of dimensions
``reduces``             a plain sum
``reshapes``            becomes a reshape in generated code
``seeded``              tagged as random, and draws nothing: it has the seed that its forward drew
``slow``                takes several passes over its operands (exponentials and the like)
``view``                a view although its schema does not say so: functionalisation and the
                        autograd formulas emit it where the result shares the input's storage
``zeros``               makes zeros
======================  ==========================================================================
"""

OUTPUT_MASK = 10
"""Position of ``output_mask`` in the schema of ``convolution_backward``."""

WRITE: Any = torch.ops.aten.copy_.default

SUMS: Mapping[Any, Any] = {
    getattr(getattr(torch.ops.aten, op._schema.name[6:-1]), op._overloadname): op
    for op in OPERATORS["accumulates"]
    if op is not WRITE
}
"""Operator that returns the sum of its first argument and others -> the one that adds in place.
``is_sum`` says which of its calls are sums.
"""

IN_PLACE: Mapping[Any, Any] = {
    op: _operator("_.".join(str(op).removeprefix("aten.").split(".")))
    for op in OPERATORS["overwrites"]
}
"""Operator -> the one that writes into its first operand."""


def overload(node: fx.Node) -> Any | None:
    """The ``torch.ops`` overload that a node calls, or None for anything else."""
    return node.target if isinstance(node.target, OVERLOAD) else None


def is_random(node: fx.Node) -> bool:
    """Whether the node draws from a random number generator.

    torch tags all attention operators as random. Attention without dropout draws nothing. The
    backward of attention draws nothing either: it recomputes dropout's mask from the seed that the
    forward returned.
    """
    # A custom operator that writes into its arguments is the argument of one that does not.
    ops = [target for target in (node.target, *node.args[:1]) if isinstance(target, OVERLOAD)]
    if not any(torch.Tag.nondeterministic_seeded in op.tags for op in ops):
        return False
    if node.target in OPERATORS["seeded"]:
        return False
    return not is_attention(node) or _argument(node, "dropout_p") != 0.0


def may_draw(node: fx.Node) -> bool:
    """Whether the node draws random numbers, or may draw some, as any custom or higher-order
    operator may.
    """
    op = node.target
    if not isinstance(op, OVERLOAD):
        return getattr(op, "namespace", "") == "higher_order"
    return op.namespace not in _TAGGED or is_random(node)


def is_attention(node: fx.Node) -> bool:
    """Whether the node is the forward of a fused attention operator."""
    name = str(overload(node) or "")
    return ("scaled_dot_product" in name and "backward" not in name) or node.target in OPERATORS[
        "attention"
    ]


def is_recomputed(node: fx.Node) -> bool:
    """Whether the user asked for the node to be recomputed (``torch.utils.checkpoint``).

    False for random operators: a second draw would differ and advance the generator.
    """
    if not origin_of(node).recomputed:
        return False
    maker = node.args[0] if node.target is operator.getitem else node
    return not (isinstance(maker, fx.Node) and is_random(maker))


def checkpoint_region(node: fx.Node) -> int | None:
    """The number of the call of ``torch.utils.checkpoint`` that recomputes the node; None if no
    call does.
    """
    return origin_of(node).checkpoint if is_recomputed(node) else None


def _argument(node: fx.Node, name: str) -> Any:
    op: Any = node.target
    normalized = normalize_function(op, node.args, node.kwargs, normalize_to_only_use_kwargs=True)
    return None if normalized is None else normalized.kwargs.get(name)


def is_check(node: fx.Node) -> bool:
    """Whether the node only checks the result of another operator, and raises if that failed."""
    return node.target in OPERATORS["check"]


def is_effect(node: fx.Node) -> bool:
    """Whether the node does more than return a value. Random draws and collectives do not count,
    although torch treats the wait for a collective as an effect.
    """
    if node.op != "call_function" or node.target is operator.getitem or is_exchange(node):
        return False
    return is_check(node) or is_report(node) or node.is_impure(impure_random=False)


def is_report(node: fx.Node) -> bool:
    """Whether the node calls the function with which a graph reports that accumulators are
    complete. The function is an argument of the graph.
    """
    return node.target is operator.call


def writes_in_backward(node: fx.Node) -> bool:
    """Whether the node is a write of the backward into an input of a joint graph, as AOTAutograd
    marks it. No other node reads the result.
    """
    op = overload(node)
    marked = node.meta.get("partitioner_tag") == "must_be_in_backward"
    return marked and op is not None and op._schema.is_mutable


def is_read(node: fx.Node) -> bool:
    """Whether the node, or the subgraph that it calls, reads a Python attribute at run time."""
    if SUBGRAPH in node.meta:
        return any(map(is_read, calls(node.meta[SUBGRAPH].module.graph)))
    op = overload(node)
    return op is not None and op.namespace == READ


def is_plain_sum(node: fx.Node) -> bool:
    """Whether the node is an unscaled sum of two tensors of the node's shape and dtype."""
    is_addition = node.target is torch.ops.aten.add.Tensor and not node.kwargs
    return is_addition and all(is_like(operand, node) for operand in node.args)


def is_accumulation(node: fx.Node) -> bool:
    """Whether the node adds into its first argument, or overwrites it."""
    return node.target in OPERATORS["accumulates"]


def is_sum(node: fx.Node) -> bool:
    """Whether the node adds to its first argument, neither scaling nor partly overwriting it."""
    if node.target not in SUMS:
        return False
    return _argument(node, "beta") in {None, 1} and _argument(node, "accumulate") in {None, True}


_WAIT = "wait_tensor"

# These collectives copy their operand when they start. Others read it until the wait returns.
_COPYING = ("all_reduce", "broadcast")


def is_wait(node: fx.Node) -> bool:
    """Whether the node waits for a collective and returns the finished result."""
    return is_exchange(node) and _name(node) == _WAIT


def is_start(node: fx.Node) -> bool:
    """Whether the node begins a collective."""
    return is_exchange(node) and _name(node) != _WAIT


def is_exchange(node: fx.Node) -> bool:
    """Whether the node begins a collective or waits for one."""
    op = overload(node)
    return op is not None and op.namespace == EXCHANGE


def is_under_way(node: fx.Node) -> bool:
    """Whether the node's value is an unfinished result of a collective."""
    if node.target is operator.getitem:
        maker = node.args[0]
        return isinstance(maker, fx.Node) and is_start(maker)
    return is_start(node)


def start_of(wait: fx.Node) -> fx.Node:
    """The node that began the collective for which ``wait`` waits; ``wait`` itself if another graph
    began it.
    """
    node = wait
    while not is_start(node):
        operands = node.all_input_nodes
        if not operands:
            return wait
        node = operands[0]
    return node


def read_until(wait: fx.Node) -> list[fx.Node]:
    """The tensors that a collective may still read until ``wait`` returns."""
    begun = start_of(wait)
    if begun is wait or _name(begun).startswith(_COPYING):
        return []
    return begun.all_input_nodes


def _name(node: fx.Node) -> str:
    op = overload(node)
    return "" if op is None else str(op._schema.name).partition("::")[2]
