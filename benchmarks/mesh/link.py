"""Stand-ins for kernels: collectives over a link that takes time, matrix products that take known
seconds.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class SlowLink:
    """Collectives of a process that end ``seconds`` after they begin, one after another.

    Their kernels for the CPU are replaced: Gloo does the work, and the wait sleeps until the moment
    that was known when the collective began.

    Attributes:
        seconds: how long one takes.
        exposed: seconds between waits and those moments, where the wait was first. What Gloo takes
            longer, or the other rank comes later, is not in it.
    """

    def __init__(self) -> None:
        self.seconds = self.exposed = self._free = 0.0
        self._under_way: dict[int, tuple[Any, float]] = {}
        self._library = torch.library.Library("_c10d_functional", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are replaced
            self._library.impl("all_reduce", self._all_reduce, "CPU")
            self._library.impl("all_reduce_", self._all_reduce_, "CPU")
            self._library.impl("all_to_all_single", self._all_to_all, "CPU")
            self._library.impl("wait_tensor", self._wait, "CPU")

    def _all_reduce(self, tensor: Tensor, reduction: str, group: str) -> Tensor:
        return self._all_reduce_(tensor.clone(), reduction, group)

    def _all_reduce_(self, tensor: Tensor, reduction: str, group: str) -> Tensor:
        return self._begun(tensor, dist.all_reduce(tensor, async_op=True))

    def _all_to_all(self, x: Tensor, out: list[int], given: list[int], group: str) -> Tensor:
        made = x.new_empty(sum(out), *x.shape[1:])
        return self._begun(made, dist.all_to_all_single(made, x, out, given, async_op=True))

    def _begun(self, tensor: Tensor, work: Any) -> Tensor:
        self._free = max(time.perf_counter(), self._free) + self.seconds
        self._under_way[tensor.untyped_storage().data_ptr()] = work, self._free
        return tensor

    def _wait(self, tensor: Tensor) -> Tensor:
        work, end = self._under_way.pop(tensor.untyped_storage().data_ptr(), (None, 0.0))
        if work is not None:
            self.exposed += max(0.0, end - time.perf_counter())
            work.wait()
            time.sleep(max(0.0, end - time.perf_counter()))
        return tensor


class KnownProducts:
    """Matrix products that take ``seconds`` for each floating-point operation, and give zeros."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are replaced
            self._library.impl("mm", self._mm, "CPU")
            self._library.impl("mm.out", self._mm_out, "CPU")
            self._library.impl("bmm", self._mm, "CPU")
            self._library.impl("bmm.out", self._mm_out, "CPU")
            self._library.impl("addmm", self._addmm, "CPU")
            self._library.impl("addmm.out", self._addmm_out, "CPU")

    def _mm(self, a: Tensor, b: Tensor) -> Tensor:
        return self._product(a, b, a.new_empty(*a.shape[:-1], b.shape[-1]))

    def _mm_out(self, a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        return self._product(a, b, out)

    def _addmm(self, _bias: Tensor, a: Tensor, b: Tensor, **_: Any) -> Tensor:
        return self._product(a, b, a.new_empty(*a.shape[:-1], b.shape[-1]))

    def _addmm_out(self, _bias: Tensor, a: Tensor, b: Tensor, *, out: Tensor, **_: Any) -> Tensor:
        return self._product(a, b, out)

    def _product(self, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        end = time.perf_counter() + self._seconds * 2 * a.numel() * b.shape[-1]
        out.zero_()
        time.sleep(max(0.0, end - time.perf_counter()))
        return out
