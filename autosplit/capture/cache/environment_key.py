"""Cache key of the environment: versions, sources, switches and machine that a split depends on."""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import platform
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autosplit.device import accelerator_kind

from .argument_text import NoFingerprintError, argument_text, is_torch_operator, target_name
from .kernel_overrides import overridden

SOURCES = pathlib.Path(__file__).resolve().parents[2]

_FLAGS: tuple[Callable[[], Any], ...] = (
    torch.get_num_threads,
    torch.get_default_dtype,
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
    torch.is_autocast_cache_enabled,
    torch.are_deterministic_algorithms_enabled,
    torch.is_deterministic_algorithms_warn_only_enabled,
    torch.get_float32_matmul_precision,
    torch.backends.cpu.get_cpu_capability,
    torch._C._get_mkldnn_enabled,
    torch.backends.mkldnn.is_available,
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
    torch._C._get_cudnn_enabled,
    torch._C._get_cudnn_benchmark,
    torch._C._get_cudnn_deterministic,
    torch._C._get_cudnn_allow_tf32,
    torch.is_anomaly_enabled,
)


def environment_lines(decompositions: Any) -> Iterator[str]:
    """The environment as text, line by line.

    Args:
        decompositions: operators to trace through, or None.

    Raises:
        NoFingerprintError: somebody else's code takes part in tracing.
    """
    if _get_current_dispatch_mode_stack() or _get_current_function_mode_stack():
        raise NoFingerprintError("a mode that sees every operator is on")
    if others := overridden():
        raise NoFingerprintError(f"somebody registered kernels of {', '.join(others)}")
    yield f"autosplit {sources(SOURCES)}"
    yield f"torch {torch.__version__} {torch.version.git_version}"
    yield f"networkx {version('networkx')}"
    yield f"python {sys.version} {platform.machine()}"
    yield from (f"{each.__name__} {each()}" for each in _FLAGS)
    for device in ("cpu", accelerator_kind()):
        yield f"{device} {torch.is_autocast_enabled(device)} {torch.get_autocast_dtype(device)}"
    yield from map(str, _cuda())
    yield f"functorch {_settings(torch._functorch.config)}"
    if decompositions is not None:
        yield f"inductor {_settings(torch._inductor.config)}"
        # Graphs with operators of other libraries have no fingerprint.
        torchs = [(op, how) for op, how in decompositions.items() if is_torch_operator(op)]
        yield from sorted(f"{target_name(op)} {_function(how)}" for op, how in torchs)


def sources(folder: pathlib.Path) -> str:
    """Digest of all sources below a folder, links followed. They are read again only where one
    was written since.
    """
    stamps = ((path, os.stat(path).st_mtime_ns) for path in source_files(folder))
    return _digest(str(folder), tuple(stamps))


def source_files(folder: pathlib.Path) -> list[str]:
    """Every source below a folder, links followed."""
    found = os.walk(folder, followlinks=True)
    return sorted(os.path.join(at, n) for at, _, names in found for n in names if n.endswith(".py"))


@functools.lru_cache(maxsize=1)
def _digest(folder: str, files: tuple[tuple[str, int], ...]) -> str:
    digest = hashlib.sha256()
    for path, _ in files:
        digest.update(f"{os.path.relpath(path, folder)}\n".encode())
        digest.update(pathlib.Path(path).read_bytes())
    return digest.hexdigest()


def _cuda() -> list[Any]:
    if not torch.cuda.is_available():
        return ["no cuda"]
    count = torch.cuda.device_count()
    names = [torch.cuda.get_device_name(at) for at in range(count)]
    return [torch.version.cuda, torch.version.hip, names, torch.cuda.get_device_capability()]


def _settings(config: Any) -> str:
    """Functions among the settings have their address in this: no other process has the same."""
    return str(config.get_hash().hex())


def _function(how: Any) -> str:
    if isinstance(how, functools.partial):
        return f"{_function(how.func)} {argument_text(how.args)} {argument_text(how.keywords)}"
    module = str(getattr(how, "__module__", ""))
    if module.split(".")[0] != "torch":
        raise NoFingerprintError(f"{how!r} decomposes an operator")
    return f"{module}.{getattr(how, '__qualname__', '')}"
