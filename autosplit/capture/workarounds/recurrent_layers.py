"""Recurrent layers of a Dynamo graph, as AOTAutograd can trace them."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from autosplit.torch_internals.version import TORCH

_CELLS = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
_ARGUMENTS = (
    "input",
    "hx",
    "params",
    "has_biases",
    "num_layers",
    "dropout",
    "train",
    "bidirectional",
    "batch_first",
)
# The fused kernels round to these only what they return; products would round every step.
_COARSE = {torch.bfloat16, torch.float16}
# torch 2.11's decomposition returns the last states of an LSTM with a dimension too many
# ([layers, 1, batch, feature]); 2.13's does not.
_STATES_ARE_SHAPED = TORCH >= (2, 13)


def divide_layers(module: fx.GraphModule) -> None:
    """Make a call of several layers with dropout between them one call a layer, have an LSTM
    return states of the shape that they go in with, and compute coarse layers in float32.

    torch's decomposition of such a call leaves the dropout out, without a word.
    """
    for node in _calls(module):
        value = node.args[0].meta.get("example_value", node.args[0].meta.get("val"))  # type: ignore[union-attr]
        if isinstance(value, torch.Tensor) and value.dtype in _COARSE:
            _widen(node, value.dtype)
            node.graph.owning_module.recompile()  # type: ignore[union-attr]
    for node in _calls(module):
        given: dict[str, Any] = dict(zip(_ARGUMENTS, node.args, strict=False)) | node.kwargs
        if given["train"] and given["dropout"] != 0 and given["num_layers"] > 1:
            _divide(node, given)
            node.graph.owning_module.recompile()  # type: ignore[union-attr]
    for node in () if _STATES_ARE_SHAPED else _calls(module):
        if node.target is torch.lstm:
            _shape_states(node)
            node.graph.owning_module.recompile()  # type: ignore[union-attr]


@contextlib.contextmanager
def without_fused_recurrence(module: fx.GraphModule) -> Iterator[None]:
    """Trace without the fused kernel, which returns None where its fake returns a tensor.

    A recurrent layer is then traced as matrix products, whose weight gradients can wait.
    """
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(enabled and not _calls(module))
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _calls(module: fx.GraphModule) -> list[fx.Node]:
    """Of recurrent layers on padded sequences, bodies of checkpoints included. Packed ones read
    their lengths from data, which Dynamo leaves outside of graphs.
    """
    graphs = [each.graph for each in module.modules() if isinstance(each, fx.GraphModule)]
    return [node for graph in graphs for node in graph.nodes if node.target in _CELLS]


def _widen(node: fx.Node, dtype: torch.dtype) -> None:
    graph = node.graph
    given: dict[str, Any] = dict(zip(_ARGUMENTS, node.args, strict=False)) | node.kwargs

    def cast(value: fx.Node, to: torch.dtype) -> fx.Node:
        made = graph.call_function(torch.Tensor.to, (value, to))
        made.stack_trace = node.stack_trace
        return made

    with graph.inserting_before(node):
        for name in ("input", "hx", "params"):
            given[name] = fx.node.map_arg(given[name], lambda each: cast(each, torch.float32))
    node.args, node.kwargs = tuple(given[name] for name in _ARGUMENTS), {}
    with graph.inserting_before(node.next):
        count = 3 if node.target is torch.lstm else 2
        found = [graph.call_function(operator.getitem, (node, at)) for at in range(count)]
        results = graph.call_function(tuple, ([cast(each, dtype) for each in found],))
    node.replace_all_uses_with(results, delete_user_cb=lambda user: user not in found)


def _divide(node: fx.Node, given: dict[str, Any]) -> None:
    graph, sequence, batch_first = node.graph, given["input"], given["batch_first"]
    directions = 2 if given["bidirectional"] else 1
    share = len(given["params"]) // given["num_layers"]
    last: list[fx.Node] = []

    def call(target: Any, *args: Any) -> fx.Node:
        made = graph.call_function(target, args)
        made.stack_trace = node.stack_trace
        return made

    def of_layer(layer: int) -> Any:
        own = slice(layer * directions, (layer + 1) * directions)
        return fx.node.map_arg(given["hx"], lambda state: call(operator.getitem, state, own))

    with graph.inserting_before(node):
        # As in the fused call: masks are drawn for [time, batch, feature].
        sequence = call(torch.transpose, sequence, 0, 1) if batch_first else sequence
        for layer in range(given["num_layers"]):
            if layer:
                sequence = call(torch.dropout, sequence, given["dropout"], True)
            weights = list(given["params"])[layer * share : (layer + 1) * share]
            options = (given["has_biases"], 1, 0.0, True, given["bidirectional"], False)
            last.append(call(node.target, sequence, of_layer(layer), weights, *options))
            sequence = call(operator.getitem, last[-1], 0)
        sequence = call(torch.transpose, sequence, 0, 1) if batch_first else sequence
        states = 2 if node.target is torch.lstm else 1
        finals = [[call(operator.getitem, one, 1 + i) for one in last] for i in range(states)]
        results = [sequence, *(call(torch.cat, each) for each in finals)]
        node.replace_all_uses_with(call(tuple, results))
    graph.erase_node(node)


def _shape_states(node: fx.Node) -> None:
    graph = node.graph
    given: dict[str, Any] = dict(zip(_ARGUMENTS, node.args, strict=False)) | node.kwargs
    with graph.inserting_before(node.next):
        found = [graph.call_function(operator.getitem, (node, at)) for at in range(3)]
        states = [
            graph.call_function(torch.Tensor.reshape_as, (state, like))
            for state, like in zip(found[1:], given["hx"], strict=True)
        ]
        results = graph.call_function(tuple, ([found[0], *states],))
    node.replace_all_uses_with(results, delete_user_cb=lambda user: user not in found)
