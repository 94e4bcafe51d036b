"""Key of a call: all that is known of it before it is traced.

In it are the module with everything that hangs on it (attributes, configurations, hooks, and the
code of all classes and functions among them), the metadata of tensors, the inputs, and the settings
of the process that tracing depends on. What the forward reads elsewhere its guards tell.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo.config
import torch.distributed
import torch.nn.modules.module
from torch import Tensor, nn
from torch._C._dynamo.guards import GlobalStateGuard
from torch._functorch._aot_autograd.utils import top_saved_tensors_hooks

from autosplit.capture.cache.argument_text import NoFingerprintError, argument_text
from autosplit.torch_internals.pytree import tree_flatten

from .object_text import ObjectTexts


def call_lines(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], texts: ObjectTexts
) -> Iterator[str]:
    """The key as text, line by line, without what ``environment_lines`` has.

    Args:
        module: that is called.
        args: positional inputs.
        kwargs: keyword inputs.
        texts: numbers the objects.

    Raises:
        NoFingerprintError: the call cannot be told from others before it is traced.
    """
    yield from _settings(texts)
    leaves, spec = tree_flatten((args, kwargs))
    yield f"structure {spec}"
    for leaf in leaves:
        yield texts.tensor(leaf) if isinstance(leaf, Tensor) else argument_text(leaf)
    yield from texts.everything(module)
    yield from _versions(module)


def _settings(texts: ObjectTexts) -> Iterator[str]:
    """Settings of the process, as tracing may take them for constants."""
    hooks = vars(torch.nn.modules.module)
    if any(value for name, value in hooks.items() if _is_hooks(name)):
        raise NoFingerprintError("hooks of all modules are installed")
    if top_saved_tensors_hooks() or torch._C._functorch.peek_interpreter_stack() is not None:
        raise NoFingerprintError("it is called under hooks of saved tensors, or in a transform")
    if torch.autograd.forward_ad._current_level != -1:
        raise NoFingerprintError("it is called under forward-mode differentiation")
    yield f"state {GlobalStateGuard().__getstate__()}"
    yield f"recursion {sys.getrecursionlimit()}"
    yield f"device {torch.get_default_device()} {_accelerator()}"
    flags = {name: each for name, each in vars(torch.__future__).items() if type(each) is bool}
    yield f"future {sorted(flags.items())}"
    for name, value in sorted(torch._dynamo.config.get_config_copy().items()):
        yield f"dynamo {name} {texts.loosely(value)}"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        group = torch.distributed
        yield f"rank {group.get_rank()} {group.get_world_size()} {group.get_backend()}"


def _accelerator() -> tuple[Any, ...]:
    if not torch.accelerator.is_available():
        return ()
    here = torch.accelerator.current_device_index()
    return torch.accelerator.current_accelerator(), here, torch.cuda.is_initialized()


def _is_hooks(name: str) -> bool:
    return name.startswith("_global_") and name.endswith(("_hooks", "_called", "_kwargs"))


def _versions(module: nn.Module) -> Iterator[str]:
    """Versions of the libraries that the modules are from."""
    roots = {type(part).__module__.partition(".")[0] for part in module.modules()}
    for root in sorted(roots):
        found = getattr(sys.modules.get(root), "__version__", None)
        if isinstance(found, str):
            yield f"version {root} {found}"
