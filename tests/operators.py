"""Counts the operators that some code runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Counts what is run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not any(issubclass(kind, FakeTensor) for kind in types):  # not while tracing
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))
