"""Direct entry points are the overloads that they stand for, with their defaults."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autosplit.torch_internals.operators import _FUNCTIONS, bind_operators, direct

X, W = torch.rand(4, 4), torch.rand(4, 4)
IMAGES = torch.rand(1, 4, 4, 4)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("_log_softmax.default", "_softmax.default"), (X, 1, False)),
    **dict.fromkeys(("_safe_softmax.default", "unsqueeze.default"), (X, 1)),
    **dict.fromkeys(("addmm.default", "addmm_.default"), (X, W, W)),
    **dict.fromkeys(("baddbmm.default", "baddbmm_.default"), (X[None], W[None], W[None])),
    **dict.fromkeys(("mean.dim", "sum.dim_IntList"), (X, [0])),
    **dict.fromkeys(("mm.default", "copy_.default", "gelu_backward.default"), (X, W)),
    "_scaled_dot_product_flash_attention_for_cpu.default": (IMAGES, IMAGES, IMAGES),
    "_softmax_backward_data.default": (X, W, 1, torch.float32),
    "bmm.default": (X[None], W[None]),
    "cat.default": ([X, W], 1),
    "convolution.default": (IMAGES, IMAGES, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "embedding.default": (W, torch.tensor([1])),
    "expand.default": (X, [2, 4, 4]),
    "gather.default": (X, 1, torch.tensor([[1]])),
    "linear.default": (X, W, W[0]),
    "max_pool2d_with_indices.default": (IMAGES, [2, 2]),
    "native_dropout.default": (X, 0.5, True),
    "native_layer_norm.default": (X, [4], W[0], W[0], 1e-5),
    "reshape.default": (X, [2, 8]),
    "permute.default": (X, [1, 0]),
    "pow.Tensor_Scalar": (X, 2),
    "select.int": (X, 0, 1),
    "transpose.int": (X, 0, 1),
    "where.self": (X > 0, X, W),
}


class Calls(TorchDispatchMode):
    """Records the operators that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [*_FUNCTIONS, "gelu_backward.default"])
def test_an_entry_point_is_its_overload(name: str) -> None:
    packet, overload = name.split(".")
    arguments = ARGUMENTS.get(name, (X, W) if overload == "Tensor" else (X,))
    operator = getattr(getattr(torch.ops.aten, packet), overload)
    results = []
    for entry in (operator, direct(packet, overload)):
        torch.manual_seed(0)
        with Calls() as calls:
            results.append((entry(*copy.deepcopy(arguments)), calls.operators))
    (expected, dispatched), (result, called) = results
    pairs = zip(tree_leaves(result), tree_leaves(expected), strict=True)
    assert all(one is two is None or torch.equal(one, two) for one, two in pairs)
    assert called == dispatched


def test_generated_code_finds_operators_in_one_step() -> None:
    source = "    t = aten.add.Tensor(aten.t.default(x), 'aten.no.such()')  # aten.no.such(x)"
    code, operators = bind_operators(source)
    assert code == (
        "    t = aten_add_Tensor(aten_t_default(x), 'aten.no.such()')  # aten.no.such(x)"
    )
    assert operators == {"aten_add_Tensor": torch.add, "aten_t_default": torch.t}
