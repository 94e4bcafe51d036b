"""Fast entry points of torch's operators for generated code. They call the same kernels in less
host time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

# Overloads that are the same as a function of torch, which parses its arguments in a third of the
# time of the operator. Functions of losses are not: their default reduction is another.
_UNIQUE = """
_log_softmax _safe_softmax _scaled_dot_product_flash_attention_for_cpu _softmax
_softmax_backward_data addmm baddbmm bmm cat clone convolution cos detach embedding exp gather mm
native_dropout native_layer_norm neg permute relu reshape rsqrt sigmoid sin sqrt t tanh unsqueeze
"""
_IN_PLACE = """
add_.Tensor addmm_.default baddbmm_.default copy_.default div_.Tensor exp_.default mul_.Tensor
neg_.default relu_.default rsqrt_.default sigmoid_.default sub_.Tensor tanh_.default
"""
_FUNCTIONS = {
    **{f"{name}.default": getattr(torch, name) for name in _UNIQUE.split()},
    **{f"{name}.Tensor": getattr(torch, name) for name in ("add", "div", "mul", "sub")},
    **{key: getattr(torch.Tensor, key.partition(".")[0]) for key in _IN_PLACE.split()},
    "expand.default": torch.Tensor.expand,
    "gelu.default": torch._C._nn.gelu,
    "linear.default": torch._C._nn.linear,
    "max_pool2d_with_indices.default": torch._C._nn.max_pool2d_with_indices,
    "mean.dim": torch.mean,
    "pow.Tensor_Scalar": torch.pow,
    "select.int": torch.select,
    "silu.default": torch._C._nn.silu,
    "sum.dim_IntList": torch.sum,
    "transpose.int": torch.transpose,
    "where.self": torch.where,
}


def register_fake(library: torch.library.Library, name: str, kernel: Callable[..., Any]) -> None:
    """Register the fake kernel of a library's operator.

    torch notes the line that registers a kernel, and for a file that it does not know yet, it looks
    at all imported modules. At this stack level it notes a line of its own file.
    """
    torch.library.register_fake(f"{library.ns}::{name}", kernel, lib=library, _stacklevel=0)


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the arguments that a call of an operator writes into, by its schema."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            yield args[place] if place < len(args) else kwargs.get(argument.name)


# Strings and comments, which may quote the user's code, or a call of an operator.
_CALL = re.compile(r"""'[^']*'|"[^"]*"|#.*|\baten\.(\w+)\.(\w+)(?=\()""")


def bind_operators(source: str) -> tuple[str, dict[str, Callable[..., Any]]]:
    """Let generated code find ATen's operators in one step: by a global name for each, instead of
    attributes of ``aten``.

    Returns:
        (the source, whose lines and columns are the same; the operators by name, each as its
        fastest entry point, which calls the same kernel).
    """
    operators: dict[str, Callable[..., Any]] = {}

    def bind(match: re.Match[str]) -> str:
        name, overload = match.groups()
        if name is None:
            return match[0]
        bound = f"aten_{name}_{overload}"
        operators[bound] = direct(name, overload)
        return bound

    return _CALL.sub(bind, source), operators


def direct(name: str, overload: str) -> Any:
    """The fastest entry point of an operator of ATen."""
    operator = getattr(getattr(torch.ops.aten, name), overload)
    if name.endswith("_backward"):
        # Autograd's engine does not look for ``__torch_function__`` either.
        return partial(torch._C._dispatch_call_boxed, operator._handle)
    return _FUNCTIONS.get(f"{name}.{overload}") or getattr(operator, "_op", operator)
