"""The device that tests run on, by pytest's ``--device``, in all processes that tests start.

Tests name no device: what they make lies on torch's default device, which this sets.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VARIABLE = "AUTOSPLIT_TEST_DEVICE"
KNOWN = ("cpu", "cuda", "fake")

_PROGRAMS = "programs and benchmarks choose a device themselves"
_NUMBERS = "no model runs there"
_GLOO = "is about Gloo and the memory of CPUs"
ABOUT_CPUS = {
    "benchmarks": _PROGRAMS,
    "cli": _PROGRAMS,
    "compare": _PROGRAMS,
    "docs": _PROGRAMS,
    "examples": _PROGRAMS,
    "report": _NUMBERS,
    "text": _NUMBERS,
    "pipeline/builders": _NUMBERS,
    "pipeline/schedule": _NUMBERS,
    "pipeline/search": _NUMBERS,
    "pipeline/simulation": _NUMBERS,
    "pipeline/validation": _NUMBERS,
    "planner/test_solve.py": _NUMBERS,
    "planner/test_plan.py": _NUMBERS,
    "planner/test_plan_search.py": _NUMBERS,
    "pipeline/engine": _GLOO,
    "ranks": _GLOO,
    "pipeline/ledger/test_kernel_workspace.py": _GLOO,
    "pipeline/ledger/test_moved_bands.py": _GLOO,
    "trainer/test_rank_model.py": _GLOO,
    "trainer/test_wired.py": _GLOO,
    "pipeline/ledger/test_step_memory.py": "a GPU's allocator rounds up what it gives",
    "pipelining/test_forward_errors.py": "a failed assertion on a GPU ends its process",
    "torch_internals/test_allocations.py": _GLOO,
    "semantics/calls/test_callers_memory.py": "inputs lie in NumPy's memory",
}
"""Folders and files of tests that run on the CPU only, and why."""

NOT_HERE = {
    "backends/test_inductor.py": "Inductor has no code for the stand-in",
}
"""The same for the stand-in alone."""


def chosen() -> str:
    """The name that ``--device`` gave."""
    return os.environ.get(VARIABLE, "cpu")


def refusal(name: str) -> str | None:
    """Why tests cannot run on a device of this name; None where they can."""
    if name not in KNOWN:
        return f"--device {name}: no such device; known: {', '.join(KNOWN)}"
    if name == "cuda":
        import torch

        if not torch.cuda.is_available():
            return (
                f"--device cuda: torch {torch.__version__} finds no CUDA device here; run it where "
                "nvidia-smi lists one, with a torch that is built for CUDA"
            )
    return None


def use(name: str) -> None:
    """Make ``name`` the device of this process and of those that it starts."""
    os.environ[VARIABLE] = name
    if name == "cpu":
        return
    if name == "fake":
        from tests import fake_accelerator

        fake_accelerator.register()
    import torch

    torch.set_default_device(name)


def need(ranks: int) -> None:
    """Skip a test whose ranks cannot have a device each; of CPUs there are enough."""
    if chosen() == "cpu":
        return
    import torch

    present = torch.accelerator.device_count()
    if ranks > present:
        pytest.skip(f"needs {ranks} devices, there is {present} {chosen()}")


def why_not(path: Path) -> str | None:
    """Why a test file, named from ``tests/``, is not for the chosen device; None where it is."""
    if chosen() == "cpu":
        return None
    results = {**ABOUT_CPUS, **(NOT_HERE if chosen() == "fake" else {})}
    return next((why for name, why in results.items() if path.is_relative_to(name)), None)
