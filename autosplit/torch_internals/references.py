"""Reference counts of gradients: whether anybody besides ``.grad`` refers to one."""

from __future__ import annotations

from collections.abc import Iterable
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

tensor_users = Tensor._use_count  # type: ignore[attr-defined]
"""C++ reference count of a tensor, its Python object included."""


def any_referenced(gradients: Iterable[Tensor]) -> bool:
    """Whether a gradient is referenced by anything but the ``.grad`` of one parameter and the list
    ``gradients``.

    References to a gradient's memory count too: views, NumPy arrays, flat buffers.
    """
    for gradient in gradients:
        if getrefcount(gradient) > _REFERENCES or tensor_users(gradient) > _USERS:
            return True
        if type(gradient) is not Tensor or gradient.layout is not torch.strided:
            continue
        storage = gradient.untyped_storage()
        users = torch._C._storage_Use_Count(storage._cdata)
        if users > _STORAGE and gradient._base is not None and not _is_held_base(gradient):
            users -= 1  # the base of the view, which nothing else refers to
        if users > _STORAGE or getrefcount(storage) > _HANDLES:
            return True
    return False


def _is_held_base(view: Tensor) -> bool:
    base: Any = view._base
    return tensor_users(base) > _USERS or getrefcount(base) >= _REFERENCES


def _unreferenced_counts() -> tuple[int, int, int, int]:
    """The four reference counts that ``any_referenced`` reads, for a gradient without other
    references.
    """
    parameter = torch.zeros((), requires_grad=True)
    parameter.grad = torch.zeros(())
    gradients = [parameter.grad]
    for gradient in gradients:
        storage = gradient.untyped_storage()
        users = torch._C._storage_Use_Count(storage._cdata)
    return getrefcount(gradient), tensor_users(gradient), users, getrefcount(storage)


with torch.inference_mode(False):
    _REFERENCES, _USERS, _STORAGE, _HANDLES = _unreferenced_counts()
