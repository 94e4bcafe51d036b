"""Observers of operators and modules, disabled during capture: dispatch modes, module trackers.

``torch.utils.flop_counter.FlopCounterMode`` is both. A graph is the same whoever watches; its
operators are seen when they run, not while they are traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules import module
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.module_tracker import ModuleTracker

# The other global hooks on modules may do anything; they are part of what is captured.
_HOOKS: tuple[dict[int, Any], ...] = (
    module._global_forward_pre_hooks,
    module._global_forward_hooks,
)
_TRACKERS = {ModuleTracker._fw_pre_hook, ModuleTracker._fw_post_hook}


def is_observed() -> bool:
    """Whether a dispatch mode or a module tracker is on."""
    if torch._C._len_torch_dispatch_stack():
        return True
    return any(_is_tracker(hook) for hooks in _HOOKS for hook in hooks.values())


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Context without dispatch modes and module trackers."""
    with _untracked(), _disable_current_modes():
        yield


@contextlib.contextmanager
def _untracked() -> Iterator[None]:
    """Remove trackers' hooks, and restore them in their order among the others."""
    before = [dict(hooks) for hooks in _HOOKS]
    for hooks, found in zip(_HOOKS, before, strict=True):
        for key in [key for key, hook in found.items() if _is_tracker(hook)]:
            del hooks[key]
    try:
        yield
    finally:
        # The dictionaries stay the same objects: handles of hooks know them by weak reference.
        for hooks, found in zip(_HOOKS, before, strict=True):
            added = {key: hook for key, hook in hooks.items() if key not in found}
            hooks.clear()
            hooks.update(found | added)


def _is_tracker(hook: Any) -> bool:
    return getattr(hook, "__func__", None) in _TRACKERS
