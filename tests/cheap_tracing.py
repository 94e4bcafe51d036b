"""Skip work of tracing and seeding whose result no test reads.

Each patch is for the whole process, waits until torch's module is imported, and is left out where
torch has other names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

_EMPTY = torch.tensor(())


def seed_cheaply() -> None:
    """``torch.manual_seed`` keeps a stack trace for each kind of device that is not there."""
    if not torch.accelerator.is_available():
        for kind in (torch.cuda, torch.xpu, torch.mtia):
            vars(kind)["manual_seed_all"] = _nothing


def trace_cheaply() -> None:
    """A tenth of a small capture's time less, and more where many classes are imported."""
    if guards := _imported("torch._dynamo.guards", "profile_guard_manager"):
        # Times every guard behind a flush of the processor's caches, 20 ms a capture, for a log.
        guards.profile_guard_manager = lambda *args: 0.0
    if frames := _imported("torch._dynamo.symbolic_convert", "get_funcname"):
        # Parses every traced file once a process, for a log of each line.
        frames.get_funcname = lambda *args: None
    if utils := _imported("torch._dynamo.utils", "_get_dynamo_config_for_logging"):
        # All settings of Dynamo and Inductor as text, for a log of each compilation.
        utils._get_dynamo_config_for_logging = utils._scrubbed_inductor_config_for_logging = _none
    if generators := _imported("torch._decomp.decompositions_for_rng", "PhiloxState"):
        generators.PhiloxState.reset = _reset
    if tracing := _imported("torch.fx.experimental.proxy_tensor", "PythonKeyTracer"):
        patcher = torch.fx._symbolic_trace._Patcher
        if patcher.patch_method.__module__ != __name__:
            patcher.patch_method = _except_for(tracing.PythonKeyTracer, patcher.patch_method)


def _imported(module: str, name: str) -> Any:
    """The module, if it is imported and has such a name."""
    result = sys.modules.get(module)
    return result if hasattr(result, name) else None


def _nothing(seed: int) -> None:
    """Seeds no device."""


def _none() -> None:
    """No text."""


def _reset(self: Any) -> None:
    """As torch's, with one empty tensor instead of twelve, each made under the modes of tracing."""
    self.seed = self.base_offset = _EMPTY
    self.relative_offset = 0
    self.offset_advanced_at_least_once = False


def _except_for(tracer: type, patch: Callable[..., None]) -> Callable[..., None]:
    """Without replacing methods of ``nn.Module`` for such a tracer, whose replacements call the
    originals and do nothing else: Python would forget what it has looked up in any class of
    module, of which transformers has thousands.
    """

    def patched(self: Any, cls: type, name: str, new: Any, *args: Any, **kwargs: Any) -> None:
        kept = (cell.cell_contents for cell in new.__closure__ or ())
        if cls is not torch.nn.Module or not any(type(item) is tracer for item in kept):
            patch(self, cls, name, new, *args, **kwargs)

    return patched
