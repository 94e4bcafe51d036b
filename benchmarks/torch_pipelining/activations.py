"""What a step holds at its most beyond parameters and gradients."""

from __future__ import annotations

import itertools
import json
import pathlib
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.profiler import ProfilerActivity, profile

from autosplit.torch_internals.allocations import quiet_stderr
from autosplit.torch_internals.dtensor import local_tensor


def activation_peak(step: Callable[[], Any], modules: Iterable[nn.Module]) -> int:
    """Bytes that a step from no gradients holds at its most, but for what is left as gradients.

    Args:
        step: forward and backward.
        modules: whose gradients; there are none before.
    """
    changes = _allocations(step)
    gradients = {
        local_tensor(parameter.grad).untyped_storage().data_ptr()
        for module in modules
        for parameter in module.parameters()
        if parameter.grad is not None
    }
    # The last that was allocated at such an address is the gradient.
    for at in range(len(changes) - 1, -1, -1):
        address, size = changes[at]
        if size > 0 and address in gradients:
            gradients.remove(address)
            changes[at] = (address, 0)
    return max(0, *itertools.accumulate((size for _, size in changes), initial=0))


def _allocations(call: Callable[[], Any]) -> list[tuple[int, int]]:
    """What ``call`` allocates and releases on the CPU, in order: address and bytes, negative where
    they are released. Only the profiler's trace file has addresses.
    """
    with tempfile.TemporaryDirectory() as folder, quiet_stderr():
        kinds = [ProfilerActivity.CPU]
        with profile(activities=kinds, profile_memory=True, acc_events=True) as recorded:
            call()
        file = pathlib.Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    changes.sort(key=lambda event: event["ts"])
    return [(int(event["args"]["Addr"]), event["args"]["Bytes"]) for event in changes]
