"""Who refers to a gradient besides ``.grad``; the exchange of what two tensor objects are."""

from __future__ import annotations

from sys import getrefcount
from weakref import getweakrefcount

import torch
from torch import Tensor

from .accumulate_grad import tensor_users
from .storage import storage_users


def is_held(gradient: Tensor) -> bool:
    """Whether anything but ``.grad`` of one parameter and one variable of the caller refers to a
    gradient or its memory: a variable, a list, a view, an array of NumPy, a flat buffer.
    """
    if getrefcount(gradient) > _PYTHON or tensor_users(gradient) > _USERS:
        return True
    if type(gradient) is not Tensor or gradient.layout is not torch.strided:
        return False
    users, handles = storage_users(gradient.untyped_storage())
    base = gradient._base if users > _STORAGE[0] else None
    if base is not None and tensor_users(base) <= _USERS and getrefcount(base) < _PYTHON:
        users -= 1  # of a gradient that was made as a view nobody else has what it is a view of
    return users > _STORAGE[0] or handles > _STORAGE[1]


def exchanged(one: Tensor, other: Tensor) -> bool:
    """Let two Python objects exchange tensors and classes, attributes left out; False, and nothing
    done, where somebody would notice: refers to ``other``, besides ``.grad``, two variables of the
    callers' and this call.
    """
    if type(other) is not Tensor or _references(other) > _UNSEEN or getweakrefcount(other):
        return False
    try:
        torch._C._swap_tensor_impl(one, other)
    except RuntimeError:  # C++ has a weak reference
        return False
    one.__class__, other.__class__ = other.__class__, one.__class__
    return True


def _references(tensor: Tensor) -> int:
    """Python's references; C++ has one where it has any."""
    return getrefcount(tensor) - bool(tensor_users(tensor) > 1)


def _counts(gradient: Tensor) -> tuple[int, int, tuple[int, int]]:
    """The counts of ``is_held``, as it sees them."""
    return (
        getrefcount(gradient),
        tensor_users(gradient),
        storage_users(gradient.untyped_storage()),
    )


def _unheld() -> tuple[int, int, tuple[int, int]]:
    parameter = torch.zeros((), requires_grad=True)
    parameter.grad = torch.zeros(())
    gradient = parameter.grad
    return _counts(gradient)


def _unseen() -> int:
    tensor = torch.zeros(())
    return (lambda passed: (lambda other: _references(other))(passed))(tensor)


with torch.inference_mode(False):
    _PYTHON, _USERS, _STORAGE = _unheld()
    _UNSEEN = _unseen()
