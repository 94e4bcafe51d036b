"""Operators that AOTAutograd traces otherwise than eager mode runs them.

``as_eager`` has the settings under which graphs are traced; what cannot be mended is refused.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor, _meta_registrations, fx, nn
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta
from torch._higher_order_ops import effects
from torch.fx.experimental import proxy_tensor
from torch.fx.node import _side_effectful_functions

from autosplit.errors import CaptureError, FailingCallError
from autosplit.passes.analysis.aliasing import overlaps_itself
from autosplit.passes.analysis.operators import OPERATORS
from autosplit.passes.graph import source_line
from autosplit.torch_internals import TORCH
from autosplit.torch_internals.dynamo import traced_value

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
    return [node for node in _nodes(module) if node.target in _CELLS]


# Keys of kernels that tracing does not run: those of devices, and of vmap, which torch registers in
# Python when it is first used; and many meta kernels are torch's own in Python.
_UNTRACED = {"CPU", "CUDA", "HPU", "MPS", "MTIA", "XPU", "PrivateUse1", "Meta", "FuncTorchBatched"}


def _overridden() -> set[str]:
    """Names of the operators that have kernels of users."""
    names = set(filter(None, map(_traced, torch.library._impls.copy())))
    # torch registers for autograd as a whole, but for some operators of its tests. Kernels for
    # one device are found where they come from C++, too.
    for device in ("CPU", "CUDA"):
        registrations = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autograd{device}")
        names |= {op for op in registrations if op.startswith("aten::") and "::_test_" not in op}
    return names


@functools.cache  # thousands of names, the same at each capture
def _traced(registered: str) -> str | None:
    """The operator of ``library/operator/key``, if it is torch's and tracing runs its kernel."""
    library, operator, key = registered.split("/")
    return f"aten::{operator}" if library == "aten" and key not in _UNTRACED else None


@contextlib.contextmanager
def trace_registered_kernels() -> Iterator[None]:
    """Trace through the kernels that users registered for torch's own operators: clear these
    operators' dispatch caches, which would keep tracing on the kernel that was registered before.
    """
    operators = [_overload(name) for name in _overridden()]
    for operator in operators:
        operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for operator in operators:
            operator._dispatch_cache.clear()


def _overload(name: str) -> Any:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


@contextlib.contextmanager
def allow_overlapping_outputs() -> Iterator[None]:
    """torch expects the gradient of an output to lie as the output does, and copies it there. Of
    an output whose elements share memory (``unfold``, ``as_strided``) elements of the gradient
    would then overwrite each other, so that is expected to be contiguous. (torch 2.13 does the
    same by itself for ``expand`` only.)
    """
    guess = MemoryFormatMeta.from_tensor

    def apart(tensor: Tensor, *args: Any, **kwargs: Any) -> MemoryFormatMeta | None:
        guessed = guess(tensor, *args, **kwargs)
        if guessed is None or guessed.memory_format is not None or not overlaps_itself(tensor):
            return guessed
        return MemoryFormatMeta(memory_format=torch.contiguous_format)

    with patch.object(MemoryFormatMeta, "from_tensor", staticmethod(apart)):
        yield


_KEPT: set[Any] = _side_effectful_functions


@contextlib.contextmanager
def without_tokens() -> Iterator[None]:
    """While a graph is traced, checks of linear algebra are operators without results that dead
    code elimination leaves alone.

    ``torch.linalg.inv`` and its like compute first and then look whether they could, and raise
    where they could not. Tracing threads a token through such checks, so that nothing reorders
    them, and a graph with tokens cannot be divided. A check needs none: it reads a result and
    writes nothing.
    """
    original = effects.has_effects

    def has_effects(op: Any, *args: Any, **options: Any) -> bool:
        return op not in OPERATORS["check"] and original(op, *args, **options)

    added = OPERATORS["check"] - _KEPT
    _KEPT.update(added)
    try:
        with patch.object(effects, "has_effects", has_effects):
            yield
    finally:
        _KEPT.difference_update(added)


_NAME = "_build_proxy_for_sym_expr"


@contextlib.contextmanager
def multiply_sizes_pairwise() -> Iterator[None]:
    """While a graph is traced, a size that was computed out of its sight, as DTensor computes
    those of local tensors, is a product of two others, not a call of ``operator.mul`` with as many
    arguments as the product has factors, which fails where it runs (seen with torch 2.13).
    """
    original = getattr(proxy_tensor, _NAME, None)
    if original is None:
        yield
        return

    def build(tracer: Any, expr: Any, out: Any = None) -> Any:
        many = getattr(expr, "is_Mul", False) and len(expr.args) > 2
        if many and expr not in tracer.sympy_expr_tracker:
            first, *factors = expr.args
            rest = expr.func(*factors, evaluate=False)
            expr = expr.func(first, rest, evaluate=False)
        return original(tracer, expr, out)

    with patch.object(proxy_tensor, _NAME, build):
        yield


@contextlib.contextmanager
def allow_grouped_products() -> Iterator[None]:
    """While something is traced, grouped products (``torch._grouped_mm``) are there for float32 and
    float16, too, as their kernels are; torch's meta function has bfloat16 only (to torch 2.13).
    """
    registered: Any = _meta_registrations
    original = registered._meta_grouped_mm_common

    def common(mat_a: Tensor, mat_b: Tensor, **options: Any) -> Any:
        other = options["scale_a"] is None and mat_a.dtype == mat_b.dtype != torch.bfloat16
        # Else the kernel pads its rows, but torch's function not in builds for CPUs.
        is_aligned = mat_b.shape[-1] * mat_b.element_size() % 16 == 0
        if not (other and is_aligned):
            return original(mat_a, mat_b, **options)
        # The kernel checks the rest where it runs.
        create_output = registered._create_grouped_mm_output_tensor
        return create_output(mat_a, mat_b, options["offs"], options["out_dtype"])

    with patch.object(registered, "_meta_grouped_mm_common", common):
        yield


@contextlib.contextmanager
def pad_sparse_gradients() -> Iterator[None]:
    """While a graph is traced, the sparse gradient of an embedding with ``padding_idx`` has rows of
    zeros for the padding. Eager mode leaves these rows out, and so asks how many there are.
    """
    operator: Any = torch.ops.aten.embedding_sparse_backward.default
    key = torch._C.DispatchKey.CompositeImplicitAutograd

    def backward(grad: Tensor, indices: Tensor, rows: int, padding: int, *_: Any) -> Tensor:
        if padding >= 0:
            grad = grad.masked_fill((indices == padding).unsqueeze(-1), 0)
        values = grad.reshape(indices.numel(), grad.shape[-1])
        return _sparse(indices.reshape(1, -1), values, (rows, grad.shape[-1]))

    try:
        with patch.dict(operator.py_kernels, {key: backward}):
            operator._dispatch_cache.clear()
            yield
    finally:
        operator._dispatch_cache.clear()


_sparse: Callable[..., Tensor] = torch.ops.aten._sparse_coo_tensor_unsafe.default


AS_IN_EAGER: dict[str, Any] = {
    # Recurrent layers are traced into.
    "allow_rnn": True,
    # A hook that is added later must be noticed.
    "skip_nnmodule_hook_guards": False,
    # numpy.random draws what it draws in eager; torch's generator would draw instead.
    "use_numpy_random_stream": True,
}
"""Settings of Dynamo."""

if TORCH < (2, 12):
    # A parameter that is frozen or thawed is noticed, though it stays where it was in its module.
    AS_IN_EAGER |= {
        "use_recursive_dict_tags_for_guards": False,
        "skip_tensor_guards_with_matching_dict_tags": False,
    }


@contextlib.contextmanager
def as_eager(module: fx.GraphModule, decompositions: object = None) -> Iterator[None]:
    """While a graph of Dynamo is traced by AOTAutograd:

    - random operators stay though nobody reads them. They move the generator; without them all
      that is drawn later would differ from eager's for the same seed. Not so where operators are
      decomposed for a backend, which draws in a way of its own;
    - the backward runs outside of the autocast that its forward ran in;
    - checks of linear algebra are operators like others, without tokens;
    - recurrent layers are traced without the fused kernel, which its fake does not match;
    - gradients of outputs that overlap themselves do not;
    - sizes that are symbols are multiplied by twos;
    - grouped products are there for float32;
    - sparse gradients have rows for padding;
    - kernels that somebody registered for torch's operators are traced through.
    """
    drawing = {} if decompositions is not None else {"fallback_random": True}
    with (
        torch._inductor.config.patch(drawing),
        torch._functorch.config.patch(backward_pass_autocast="off"),
        without_fused_recurrence(module),
        without_tokens(),
        allow_overlapping_outputs(),
        multiply_sizes_pairwise(),
        allow_grouped_products(),
        pad_sparse_gradients(),
        trace_registered_kernels(),
    ):
        yield


Decompositions = dict[Any, Callable[..., Any]] | None
_MARGIN_LOSSES = {
    nn.functional.multi_margin_loss,
    torch._C._nn.multi_margin_loss,
    torch.ops.aten.multi_margin_loss.default,
    nn.functional.multilabel_margin_loss,
    torch._C._nn.multilabel_margin_loss,
    torch.ops.aten.multilabel_margin_loss.default,
}


def refuse_traced_otherwise(module: fx.GraphModule) -> None:
    """Refuse what torch traces as something else than it runs: it takes these apart by Python
    decompositions.

    Two losses: one gets other gradients and has shape [1] for an unbatched input where the kernel
    has []. Recurrent layers: the dropout between layers is left out; in coarse dtypes, every step
    is rounded; the last states of an LSTM have a dimension too many before torch 2.13.

    Raises:
        CaptureError: one of them is in Dynamo's graph, or in the body of a checkpoint.
    """
    for node in _nodes(module):
        if node.op == "call_function" and _is_traced_otherwise(node):
            name = getattr(node.target, "__name__", str(node.target))
            raise CaptureError(
                f"{name}, at {source_line(node) or 'a line'}: torch traces it as something else "
                "than it runs. Compute it outside of the split module; without fullgraph=True, "
                "such a model is split in parts around it" + _OTHERWISE * (node.target in _CELLS)
            )


# Where the first of two factors is.
_PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "convolution": 0}


def refuse_mixed_dtypes(graph: fx.Graph) -> None:
    """Refuse products of tensors of different dtypes, which fail when they run, not when traced.

    Raises:
        FailingCallError: one of them is in the graph.
    """
    for name, first in _PRODUCTS.items():
        target = getattr(torch.ops.aten, name).default
        for node in graph.find_nodes(op="call_function", target=target):
            one, other = (traced_value(factor).dtype for factor in node.args[first : first + 2])
            if one != other:
                line = source_line(node)
                raise FailingCallError(
                    f"{name} of a tensor in {one} by one in {other}{line and f', at {line}'}: "
                    "torch multiplies tensors of one dtype. Convert the inputs (arrays of NumPy "
                    "are float64 as a rule: x.float()), or the model"
                )


_OTHERWISE = (
    ". Recurrent layers are traced as they run in float32 or float64, with nn.Dropout between "
    "single layers in place of dropout= (an nn.LSTM with torch 2.13 or later)"
)


def _is_traced_otherwise(node: fx.Node) -> bool:
    if node.target not in _CELLS:
        return node.target in _MARGIN_LOSSES
    arguments: dict[str, Any] = dict(zip(_ARGUMENTS, node.args, strict=False)) | node.kwargs
    drops = arguments["train"] and arguments["dropout"] != 0 and arguments["num_layers"] > 1
    misshapen = node.target is torch.lstm and TORCH < (2, 13)
    return drops or misshapen or getattr(traced_value(arguments["input"]), "dtype", None) in _COARSE


def _nodes(module: fx.GraphModule) -> list[fx.Node]:
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    return [node for graph in graphs for node in graph.nodes]
