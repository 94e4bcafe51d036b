"""Operators that AOTAutograd traces differently than eager mode runs them.

``as_eager`` is the context in which graphs are traced. Operators that it cannot fix are refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor, _meta_registrations, fx, nn
from torch._functorch._aot_autograd import runtime_wrappers
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta
from torch._higher_order_ops import effects
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import _side_effectful_functions

from autosplit.errors import CaptureError, FailingCallError
from autosplit.passes.analysis.aliasing import overlaps_itself
from autosplit.passes.analysis.operators import OPERATORS
from autosplit.passes.graph import source_line
from autosplit.torch_internals import TORCH
from autosplit.torch_internals.dynamo import all_nodes, traced_value
from autosplit.torch_internals.patches import patched

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
# The fused kernels round only their results to these dtypes; traced products would round every
# step.
_COARSE = {torch.bfloat16, torch.float16}


@contextlib.contextmanager
def without_fused_recurrence(module: fx.GraphModule) -> Iterator[None]:
    """Trace recurrent layers without the fused kernel, which returns None where its fake kernel
    returns a tensor. They are traced as matrix products, whose weight gradients can be deferred.
    """
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(enabled and not _calls(module))
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _calls(module: fx.GraphModule) -> list[fx.Node]:
    """Calls of recurrent layers on padded sequences, including calls in checkpointed regions.
    Packed sequences read their lengths from data, which Dynamo leaves outside of graphs.
    """
    return [node for node in all_nodes(module) if node.target in _CELLS]


# Dispatch keys of kernels that tracing does not run: of devices, and of vmap, which torch registers
# in Python on first use. Many meta kernels are torch's own, in Python.
_UNTRACED = {"CPU", "CUDA", "HPU", "MPS", "MTIA", "XPU", "PrivateUse1", "Meta", "FuncTorchBatched"}


def _overridden() -> set[str]:
    """Names of torch's operators for which users have registered kernels."""
    names = set(filter(None, map(_traced, torch.library._impls.copy())))
    # torch itself registers autograd kernels for all devices at once, except for some operators of
    # its tests. So kernels for one device are users', including those from C++.
    for device in ("CPU", "CUDA"):
        registrations = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autograd{device}")
        names |= {op for op in registrations if op.startswith("aten::") and "::_test_" not in op}
    return names


@functools.cache  # thousands of names, the same at each capture
def _traced(registered: str) -> str | None:
    """The name of the operator that a kernel was registered for, as ``library/operator/key``. None
    if the operator is not torch's, or if tracing skips the kernel.
    """
    library, operator, key = registered.split("/")
    return f"aten::{operator}" if library == "aten" and key not in _UNTRACED else None


@contextlib.contextmanager
def trace_registered_kernels() -> Iterator[None]:
    """Trace through kernels that users registered for torch's own operators. The dispatch caches of
    these operators, which still refer to torch's kernels, are cleared.
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
    """Trace with contiguous gradients of outputs that overlap themselves.

    torch expects the gradient of an output to have the output's strides, and copies it to this
    layout. If elements of the output share memory (``unfold``, ``as_strided``), elements of the
    gradient would overwrite each other. torch 2.13 does the same by itself for ``expand`` only.
    """
    guess = MemoryFormatMeta.from_tensor

    def apart(tensor: Tensor, *args: Any, **kwargs: Any) -> MemoryFormatMeta | None:
        guessed = guess(tensor, *args, **kwargs)
        if guessed is None or guessed.memory_format is not None or not overlaps_itself(tensor):
            return guessed
        return MemoryFormatMeta(memory_format=torch.contiguous_format)

    with patched(MemoryFormatMeta, "from_tensor", staticmethod(apart)):
        yield


@contextlib.contextmanager
def keep_output_tangents() -> Iterator[None]:
    """Keep the tangents of all outputs in traces of models that register a module under two names.

    torch drops the second of two equal inputs, and with it the tangent of its new value, if the
    forward writes into it. It assumes that the first tangents belong to written inputs. A written
    buffer has no tangent, so the tangent of an output is dropped instead.
    """
    original: Any = runtime_wrappers.remove_dupe_metadata  # type: ignore[attr-defined]

    def remove_duplicates(metadata: Any, kept: list[bool], places: list[int]) -> Any:
        """torch's result, with the tangents of the inputs that are kept and of all outputs."""
        result = original(metadata, kept, places)
        written = [(at, metadata.input_info[at]) for at in metadata.mutated_inp_runtime_indices]
        of_inputs = [kept[at] for at, info in written if info.mutates_data and info.requires_grad]
        of_outputs = [True] * (len(metadata.traced_tangents) - len(of_inputs))
        fields = ("traced_tangents", "traced_tangents_descs", "subclass_tangent_meta")
        tangents: dict[str, Any] = {
            name: [*itertools.compress(getattr(metadata, name), of_inputs + of_outputs)]
            for name in fields
        }
        return dataclasses.replace(result, **tangents)

    with patched(runtime_wrappers, "remove_dupe_metadata", remove_duplicates):
        yield


_KEPT: set[Any] = _side_effectful_functions


@contextlib.contextmanager
def without_tokens() -> Iterator[None]:
    """Trace checks of linear algebra as operators without results, which dead code elimination
    keeps.

    ``torch.linalg.inv`` and similar functions compute first, then check for success, and raise on
    failure. Tracing threads a token through such checks, so that nothing reorders them, and a graph
    with tokens cannot be split. A check needs no token: it reads a result and writes nothing.
    """
    original = effects.has_effects

    def has_effects(op: Any, *args: Any, **options: Any) -> bool:
        return op not in OPERATORS["check"] and original(op, *args, **options)

    added = OPERATORS["check"] - _KEPT
    _KEPT.update(added)
    try:
        with patched(effects, "has_effects", has_effects):
            yield
    finally:
        _KEPT.difference_update(added)


@contextlib.contextmanager
def multiply_sizes_pairwise() -> Iterator[None]:
    """Trace products of sizes as products of two factors.

    Some sizes are computed outside of the trace, such as a DTensor's local sizes. A product of
    three such sizes is traced as one ``operator.mul`` with three arguments. This call fails when
    the graph runs (seen with torch 2.13).
    """
    original = getattr(proxy_tensor, "_build_proxy_for_sym_expr", None)
    if original is None:
        yield
        return

    def build_pairwise(tracer: Any, expr: Any, out: Any = None) -> Any:
        many = getattr(expr, "is_Mul", False) and len(expr.args) > 2
        if many and expr not in tracer.sympy_expr_tracker:
            first, *factors = expr.args
            rest = expr.func(*factors, evaluate=False)
            expr = expr.func(first, rest, evaluate=False)
        return original(tracer, expr, out)

    with patched(proxy_tensor, "_build_proxy_for_sym_expr", build_pairwise):
        yield


@contextlib.contextmanager
def allow_grouped_products() -> Iterator[None]:
    """Trace grouped products (``torch._grouped_mm``) of float32 and float16, for which kernels
    exist. torch's meta function accepts bfloat16 only (up to torch 2.13).
    """
    registered: Any = _meta_registrations
    original = registered._meta_grouped_mm_common

    def common(mat_a: Tensor, mat_b: Tensor, **options: Any) -> Any:
        other = options["scale_a"] is None and mat_a.dtype == mat_b.dtype != torch.bfloat16
        # Otherwise the kernel pads its rows, which torch's meta function does not do in CPU builds.
        is_aligned = mat_b.shape[-1] * mat_b.element_size() % 16 == 0
        if not (other and is_aligned):
            return original(mat_a, mat_b, **options)
        # The kernel checks the other conditions when it runs.
        create_output = registered._create_grouped_mm_output_tensor
        return create_output(mat_a, mat_b, options["offs"], options["out_dtype"])

    with patched(_meta_registrations, "_meta_grouped_mm_common", common):
        yield


@contextlib.contextmanager
def pad_sparse_gradients() -> Iterator[None]:
    """Trace sparse gradients of embeddings so that they have rows of zeros for ``padding_idx``.
    Eager mode omits these rows, so that the size of its gradient depends on data.
    """
    operator: Any = torch.ops.aten.embedding_sparse_backward.default
    key = torch._C.DispatchKey.CompositeImplicitAutograd

    def backward(grad: Tensor, indices: Tensor, rows: int, padding: int, *_: Any) -> Tensor:
        if padding >= 0:
            grad = grad.masked_fill((indices == padding).unsqueeze(-1), 0)
        size = indices.numel(), grad.shape[-1]
        # A bag that sums maps indices to bags in its kernel only: fake tensors map none.
        is_empty = statically_known_true(grad.numel() == 0)
        values = grad.new_zeros(size) if is_empty else grad.reshape(size)
        return _sparse(indices.reshape(1, -1), values, (rows, grad.shape[-1]))

    try:
        with patched(operator.py_kernels, key, backward):
            operator._dispatch_cache.clear()
            yield
    finally:
        operator._dispatch_cache.clear()


_sparse: Callable[..., Tensor] = torch.ops.aten._sparse_coo_tensor_unsafe.default


AS_IN_EAGER: dict[str, Any] = {
    # Trace into recurrent layers.
    "allow_rnn": True,
    # Guard against hooks that are added later.
    "skip_nnmodule_hook_guards": False,
    # numpy.random draws the same numbers as in eager mode; otherwise torch's generator draws.
    "use_numpy_random_stream": True,
}
"""Settings of Dynamo for graphs that behave as eager mode does."""

if TORCH < (2, 12):
    # Guard against parameters that are frozen or thawed in place.
    AS_IN_EAGER |= {
        "use_recursive_dict_tags_for_guards": False,
        "skip_tensor_guards_with_matching_dict_tags": False,
    }


@contextlib.contextmanager
def as_eager(module: fx.GraphModule, decompositions: object = None) -> Iterator[None]:
    """Context in which AOTAutograd traces a graph of Dynamo as eager mode runs it.

    - Unused random operators stay. They advance the generator; without them, later numbers would
      differ from eager mode's for the same seed. If operators are decomposed for a backend, they
      may go, because such a backend draws other numbers.
    - The backward runs outside of the forward's autocast.
    - Checks of linear algebra are operators without tokens.
    - Recurrent layers are traced without the fused kernel, whose fake kernel does not match it.
    - Gradients of outputs that overlap themselves are contiguous.
    - Outputs keep their tangents in models that register a module under two names.
    - A product of symbolic sizes has two factors at a time.
    - Grouped products accept float32 and float16.
    - Sparse gradients have rows for padding.
    - Kernels that users registered for torch's operators are traced through.
    """
    drawing = {} if decompositions is not None else {"fallback_random": True}
    with (
        torch._inductor.config.patch(drawing),
        torch._functorch.config.patch(backward_pass_autocast="off"),
        without_fused_recurrence(module),
        without_tokens(),
        allow_overlapping_outputs(),
        keep_output_tangents(),
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
    """Refuse operators for which torch traces a Python decomposition that differs from the kernel.

    - Margin losses: a traced loss has other gradients and, for an unbatched input, shape [1],
      not [].
    - Recurrent layers: dropout between layers is omitted; in bfloat16 and float16 every step is
      rounded; before torch 2.13 the last states of an LSTM have an extra dimension.

    Raises:
        CaptureError: such an operator is in Dynamo's graph or in a checkpointed region.
    """
    for node in all_nodes(module):
        if node.op == "call_function" and _is_traced_otherwise(node):
            name = getattr(node.target, "__name__", str(node.target))
            raise CaptureError(
                f"{name}, at {source_line(node) or 'a line'}: torch traces a different operator "
                "than eager mode runs. Compute it outside of the split module; without "
                "fullgraph=True, the model is split with a graph break there"
                + _RECURRENT_ADVICE
                * (node.target in _CELLS)
            )


# Product -> position of the first of its two factors.
_PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "convolution": 0}


def refuse_mixed_dtypes(graph: fx.Graph) -> None:
    """Refuse products of tensors of different dtypes: they can be traced, but fail when they run.

    Raises:
        FailingCallError: the graph has such a product.
    """
    for name, first in _PRODUCTS.items():
        target = getattr(torch.ops.aten, name).default
        for node in graph.find_nodes(op="call_function", target=target):
            one, other = (traced_value(factor).dtype for factor in node.args[first : first + 2])
            if one != other:
                line = source_line(node)
                raise FailingCallError(
                    f"{name} of a {one} tensor and a {other} tensor{line and f', at {line}'}: "
                    "torch multiplies tensors of one dtype. Convert the inputs (NumPy arrays are "
                    "usually float64: x.float()) or the model"
                )


_RECURRENT_ADVICE = (
    ". Recurrent layers are supported in float32 and float64, with nn.Dropout between "
    "single layers in place of dropout= (an nn.LSTM with torch 2.13 or later)"
)


def _is_traced_otherwise(node: fx.Node) -> bool:
    if node.target not in _CELLS:
        return node.target in _MARGIN_LOSSES
    arguments: dict[str, Any] = dict(zip(_ARGUMENTS, node.args, strict=False)) | node.kwargs
    drops = arguments["train"] and arguments["dropout"] != 0 and arguments["num_layers"] > 1
    misshapen = node.target is torch.lstm and TORCH < (2, 13)
    return drops or misshapen or getattr(traced_value(arguments["input"]), "dtype", None) in _COARSE
