"""Run a stage's module under autocast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autosplit.capture.diagnosis import Wrapper


class WithAutocast(Wrapper):
    """Runs a module under autocast, including its loss if the module computes one."""

    def __init__(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(module)
        self._device_type = device.type
        self._dtype = dtype

    def forward(self, *args: Tensor) -> Any:
        with torch.autocast(self._device_type, dtype=self._dtype):
            return self.module(*args)
