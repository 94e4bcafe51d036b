"""A link between replicas that takes the time it is told to."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autosplit.mesh.costs import Link


class Throttled:
    """Lets each asynchronous all-reduce of this rank take its time, one after another."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._reduce = dist.all_reduce
        self._lane = ThreadPoolExecutor(1)

    def __enter__(self) -> None:
        def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            work = self._reduce(tensor, *args, **kwargs)
            if not kwargs.get("async_op") or tensor.dtype != torch.float32:
                return work
            seconds = self._link.latency + tensor.nbytes / self._link.bandwidth
            return _Late(self._lane.submit(self._carry, work, seconds))

        dist.all_reduce = all_reduce

    def _carry(self, work: dist.Work, seconds: float) -> None:
        end = time.perf_counter() + seconds
        work.wait()
        time.sleep(max(0.0, end - time.perf_counter()))

    def __exit__(self, *_: object) -> None:
        dist.all_reduce = self._reduce
        self._lane.shutdown()


class _Late:
    """What is under way."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    def get_future(self) -> Future[None]:
        return self._future
