"""Run a module as a pipeline would, and write down everything that can be seen of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .subject import Call, Loss

Observed = dict[str, Any]
LEARNING_RATE = 1e-3


def observe(
    module: nn.Module,
    rounds: list[list[Call]],
    loss: Loss,
    *,
    backward_weight: Callable[[], None] = lambda: None,
    kept: Callable[[Any], Any] | None = None,
    seed: int = 1,
) -> Observed:
    """Every round: forward and backward of each microbatch, then ``backward_weight()``; a
    step of plain gradient descent, on parameters that both ways read, ends the round.

    Returns:
        Name -> what was there: outputs with their structure, input gradients, inputs
        after a call that may write into them, parameter gradients, buffers, and the state of
        the random generator.
    """
    seen: Observed = {}
    seed_everything(seed)
    for number, calls in enumerate(rounds):
        for index, call in enumerate(calls):
            _microbatch(module, call, loss, kept, f"[{number}.{index}]", seen)
        backward_weight()
        _state(module, f"[{number}]", seen)
        _step(module)
    return seen


def seed_everything(seed: int) -> None:
    """Some models draw from Python's and NumPy's generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _microbatch(
    module: nn.Module,
    call: Call,
    loss: Loss,
    kept: Callable[[Any], Any] | None,
    at: str,
    seen: Observed,
) -> None:
    leaves, spec = pytree.tree_flatten(call)
    # One tensor given twice stays one.
    owned = {id(leaf): _own(leaf) for leaf in leaves}
    # Not the leaves themselves: autograd forbids a module to write into a leaf.
    clones = {key: x.clone() if isinstance(x, Tensor) else x for key, x in owned.items()}
    originals = [owned[id(leaf)] for leaf in leaves]
    given = [clones[id(leaf)] for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(given, spec)
    output = module(*args, **kwargs)
    if kept is not None:
        output = output, kept(module)
    _output(output, at, seen)
    seen[f"random generator after forward {at}"] = torch.get_rng_state()
    value = loss(output, torch.Generator().manual_seed(2))
    value.backward()
    seen[f"random generator after backward {at}"] = torch.get_rng_state()
    for index, (original, leaf) in enumerate(zip(originals, given, strict=True)):
        if isinstance(leaf, Tensor):
            seen[f"input {index} after {at}"] = _copied(leaf)
            seen[f"gradient of input {index} {at}"] = _copied(original.grad)


def _own(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _output(output: Any, at: str, seen: Observed) -> None:
    leaves, spec = pytree.tree_flatten(output)
    seen[f"structure of the output {at}"] = str(spec)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            seen[f"output {index} {at}"] = _copied(leaf)
            seen[f"output {index} requires a gradient {at}"] = leaf.requires_grad
            seen[f"layout of output {index} {at}"] = str(leaf.layout)
        else:
            seen[f"output {index} {at}"] = leaf


def _state(module: nn.Module, at: str, seen: Observed) -> None:
    for name, parameter in module.named_parameters():
        seen[f"gradient of {name} {at}"] = _copied(parameter.grad)
    for name, buffer in module.named_buffers():
        seen[f"buffer {name} {at}"] = buffer.detach().clone()


def _step(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-LEARNING_RATE)


def _copied(tensor: Tensor | None) -> Tensor | None:
    """Its values, where it is sparse all of them."""
    if tensor is None or tensor.layout is torch.strided:
        return None if tensor is None else tensor.detach().clone()
    return tensor.detach().to_dense()
