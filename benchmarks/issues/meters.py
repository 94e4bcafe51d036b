"""What a piece of code computes and holds, seen where torch dispatches its operations."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


class Products(TorchDispatchMode):
    """Counts matrix products.

    Attributes:
        count: how many there were.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in _PRODUCTS
        return func(*args, **(kwargs or {}))


class LiveBytes(TorchDispatchMode):
    """Adds up the storages that come and go.

    Attributes:
        peak: the most bytes that lived at a time, of those made meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if _plain(t)}
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if _plain(tensor) and id(tensor.untyped_storage()) not in before:
                self._enter(tensor.untyped_storage())
        return found

    def _enter(self, storage: torch.UntypedStorage) -> None:
        if id(storage) not in self._live:
            self._live[id(storage)] = storage.nbytes()
            weakref.finalize(storage, self._live.pop, id(storage), None)
            self.peak = max(self.peak, sum(self._live.values()))


def _plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu"
