"""Hooks on parameters, as a report names them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from autosplit.text.figures import few
from autosplit.torch_internals.autograd import Leaves


def hooks_text(named_parameters: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Report section on parameters with hooks; empty where none has one."""
    names = [name for name, parameter in named_parameters if Leaves([parameter]).has_hooks()]
    if not names:
        return []
    return [
        "backward() computes weight gradients too where a hook waits for one of them: "
        f"{few(names, 3)}. Without hooks on parameters they are deferred."
    ]
