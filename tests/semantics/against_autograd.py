"""A split module and its plain twin, driven through the same microbatches and compared."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autosplit

Loss = Callable[[Any], Tensor]


def leaves(*shape: int, count: int = 2, dtype: torch.dtype | None = None) -> list[tuple[Tensor]]:
    """Microbatches of one input."""
    return [(torch.randn(shape, dtype=dtype).requires_grad_(),) for _ in range(count)]


def mean_square(output: Any) -> Tensor:
    """A loss over every differentiable leaf of the output, each with another weight."""
    terms = []
    for index, leaf in enumerate(pytree.tree_leaves(output)):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            values = torch.view_as_real(leaf) if leaf.is_complex() else leaf
            terms.append((index + 1) * values.square().mean())
    return torch.stack([term.to(torch.float64) for term in terms]).sum()


def assert_equals_autograd(
    model: nn.Module,
    microbatches: Sequence[Any],
    loss: Loss = mean_square,
    *,
    orders: Iterable[Callable[..., Any]] | None = None,
    **options: Any,
) -> Any:
    """Every output, gradient, buffer and random state is that of plain autograd.

    Each microbatch is a tuple of positional inputs or a dict of keyword inputs; inputs with
    ``requires_grad`` are leaves. Driven twice over: forward and backward of one after the
    other, then all forwards before all backwards, each with every microbatch pending at once
    before ``backward_weight()``. Gradients add up over both. ``options`` are those of
    ``assert_alike``. Returns the split module.
    """
    drives = [
        lambda module, _, order=order: order(module, microbatches, loss)
        for order in orders or (one_by_one, forwards_first)
    ]
    return assert_alike(model, *drives, pending=(0, len(microbatches)), **options)


def assert_alike(
    model: nn.Module,
    *drives: Callable[[Any, Any], Any],
    compare: Callable[[str, Any, Any], None] | None = None,
    face: Callable[[nn.Module], Any] | None = None,
    pending: Sequence[int] | int | None = None,
    **options: Any,
) -> Any:
    """Assert that results, gradients and buffers of each of ``drives`` equal those of a plain twin.

    Args:
        drives: each called with what is called, split or plain, and the model that is in it.
        compare: how to; bit for bit unless given.
        face: splits the model; by ``split`` with ``options`` unless given.
        pending: how many microbatches wait after a drive.

    Returns:
        The split module.
    """
    compare = compare or assert_same
    model.zero_grad()
    plain = copy.deepcopy(model)
    split = face(model) if face else autosplit.split(model, **{"max_pending": math.inf, **options})
    for at, drive in enumerate(drives):
        seed(at)
        mine = pytree.tree_map_only(Tensor, Tensor.detach, drive(split, model)), random_state()
        if pending is not None and not face:
            assert split.pending in (pending if isinstance(pending, tuple) else (pending,))
        seed(at)
        theirs = pytree.tree_map_only(Tensor, Tensor.detach, drive(plain, plain)), random_state()
        compare(f"drive {at}", mine, theirs)
        split.backward_weight()
        assert_same_state(model, plain, compare)
    return split


def one_by_one(module: nn.Module, microbatches: Iterable[Any], loss: Loss) -> list[Any]:
    """(outputs, input gradients) of each microbatch."""
    results: list[Any] = []
    for microbatch in microbatches:
        inputs = fresh(microbatch)
        output = call(module, inputs)
        backward(loss, output)
        results.append((detached(output), gradients(inputs)))
    return results


def forwards_first(module: nn.Module, microbatches: Iterable[Any], loss: Loss) -> list[Any]:
    """As ``one_by_one``, with every forward before the first backward."""
    inputs = [fresh(microbatch) for microbatch in microbatches]
    outputs = [call(module, tensor) for tensor in inputs]
    for output in outputs:
        backward(loss, output)
    return [(detached(o), gradients(i)) for o, i in zip(outputs, inputs, strict=True)]


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def random_state() -> Tensor:
    """Of torch, Python and NumPy."""
    states = torch.get_rng_state().numpy(), random.getstate()[1], np.random.get_state()[1]
    return torch.from_numpy(np.concatenate(states))  # type: ignore[arg-type]


def backward(loss: Loss, output: Any) -> None:
    value = loss(output)
    if value.requires_grad:
        value.backward()


def call(module: nn.Module, inputs: Any) -> Any:
    return module(**inputs) if isinstance(inputs, dict) else module(*inputs)


def fresh(microbatch: Any) -> Any:
    """The same inputs again, tensors as new leaves; one that is given twice stays one."""
    leaves, spec = pytree.tree_flatten(microbatch)
    built = {id(leaf): _new(leaf) for leaf in leaves}
    return pytree.tree_unflatten([built[id(leaf)] for leaf in leaves], spec)


def _new(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def gradients(inputs: Any) -> Any:
    return [leaf.grad for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]


def detached(output: Any) -> Any:
    return pytree.tree_map_only(Tensor, Tensor.detach, output)


def assert_same_state(
    model: nn.Module, plain: nn.Module, compare: Callable[[str, Any, Any], None]
) -> None:
    """Parameters' gradients, and buffers."""
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        compare(f"gradient of {name}", mine.grad, theirs.grad)
    for (name, mine), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
        compare(f"buffer {name}", mine, theirs)


def assert_same(what: str, mine: Any, theirs: Any) -> None:
    """Same structure, types, dtypes and shapes; tensors equal bit for bit."""
    ours, spec = pytree.tree_flatten(mine)
    expected, other = pytree.tree_flatten(theirs)
    assert spec == other, f"{what}: {spec} against {other}"
    for a, b in zip(ours, expected, strict=True):
        assert type(a) is type(b) or isinstance(a, Tensor), f"{what}: {a!r} against {b!r}"
        if isinstance(a, Tensor):
            assert isinstance(b, Tensor), f"{what}: a tensor against {b!r}"
            assert (a.dtype, a.shape) == (b.dtype, b.shape), what
            assert torch.equal(a, b), f"{what}: off by {(a - b).abs().max()}"
        else:
            assert a == b, f"{what}: {a!r} against {b!r}"


def within(tolerance: float) -> Callable[[str, Any, Any], None]:
    """A comparison that allows rounding: ``tolerance`` relative to the largest entry."""

    def compare(what: str, mine: Any, theirs: Any) -> None:
        pairs = zip(pytree.tree_leaves(mine), pytree.tree_leaves(theirs), strict=True)
        for a, b in pairs:
            if isinstance(a, Tensor) and isinstance(b, Tensor) and a.is_floating_point():
                assert a.dtype == b.dtype, what
                scale = b.abs().max().item() + 1e-30
                error = (a - b).abs().max().item() / scale
                assert error <= tolerance, f"{what}: off by {error} of {scale}"
            else:
                assert_same(what, a, b)

    return compare
