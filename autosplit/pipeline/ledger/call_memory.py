"""What calls of stages hold while they run: liveness of their graphs, kernel workspace included."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from autosplit.passes.lowering.live_bytes import LiveBytes
from autosplit.runtime.functions import SplitFunctions
from autosplit.stage import Stage

from .kernel_workspace import KernelWorkspace

_Call = tuple[str, int, bool]


class CallMemory:
    """Works out each call of a stage once.

    Args:
        device: where the stages run.
    """

    def __init__(self, device: torch.device) -> None:
        self._workspace = KernelWorkspace(device)
        self._known: WeakKeyDictionary[SplitFunctions, dict[_Call, LiveBytes]]
        self._known = WeakKeyDictionary()

    def of(
        self, stage: Stage, call: str, *, microbatches: int = 1, adds: bool = False
    ) -> LiveBytes:
        """What is alive while a call runs.

        Args:
            stage: whose.
            call: the name of one of its methods; W counts as run whole.
            microbatches: of how many microbatches, for W.
            adds: whether it adds to gradients that are there, rather than make them.
        """
        found = self._known.setdefault(stage.functions, {})
        key = call, microbatches, adds
        if key in found:
            return found[key]
        module = stage.source(call, microbatches=microbatches, adds=adds)
        made = LiveBytes(module, self._workspace.of(module.graph))
        if self._workspace.measurable:
            found[key] = made
        return made
