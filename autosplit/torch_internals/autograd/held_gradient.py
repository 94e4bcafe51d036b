"""Who refers to a gradient besides ``.grad``; the exchange of what two tensor objects are."""

from __future__ import annotations

from sys import getrefcount
from weakref import getweakrefcount

import torch
from torch import Tensor

from .accumulate_grad import tensor_users


def is_held(gradient: Tensor) -> bool:
    """Whether anything but ``.grad`` of one parameter refers to a gradient or its memory from C++:
    another ``.grad``, a view, an array of NumPy, a flat buffer. Python's references the caller
    counts itself, ``getrefcount(gradient) > UNHELD``: where torch.compile looks at frames, Python
    counts the arguments of functions twice.
    """
    if tensor_users(gradient) > _USERS:
        return True
    if type(gradient) is not Tensor or gradient.layout is not torch.strided:
        return False
    storage = gradient.untyped_storage()
    users, handles = torch._C._storage_Use_Count(storage._cdata), getrefcount(storage)
    base = gradient._base if users > _STORAGE else None
    if base is not None and tensor_users(base) <= _USERS and getrefcount(base) <= UNHELD:
        users -= 1  # of a gradient that was made as a view nobody else has what it is a view of
    return users > _STORAGE or handles > _HANDLES


def exchanged(one: Tensor, other: Tensor) -> bool:
    """Let two Python objects exchange tensors and classes, attributes left out; False, and nothing
    done, where somebody would notice: refers to ``other``, besides ``.grad``, two variables of the
    callers' and this call.
    """
    if type(other) is not Tensor or _references(other) > _unseen() or getweakrefcount(other):
        return False
    try:
        torch._C._swap_tensor_impl(one, other)
    except RuntimeError:  # C++ has a weak reference
        return False
    one.__class__, other.__class__ = type(other), type(one)
    return True


def _references(tensor: Tensor) -> int:
    """Python's references; C++ has one where it has any."""
    return getrefcount(tensor) - bool(tensor_users(tensor) > 1)


def _unseen() -> int:
    """What ``_references`` gives for an object with one variable beyond its two callers'; asked
    again each time, as it is not the same while torch.compile looks at frames.
    """
    token = object()
    return (lambda passed: (lambda other: _count(other))(passed))(token)


def _count(token: object) -> int:
    return getrefcount(token)


def _unheld() -> tuple[int, int, int, int]:
    """What is counted of a gradient that only its parameter and one variable refer to."""
    parameter = torch.zeros((), requires_grad=True)
    parameter.grad = torch.zeros(())
    gradient = parameter.grad
    storage = gradient.untyped_storage()
    users = torch._C._storage_Use_Count(storage._cdata)
    return getrefcount(gradient), tensor_users(gradient), users, getrefcount(storage)


with torch.inference_mode(False):
    UNHELD, _USERS, _STORAGE, _HANDLES = _unheld()
